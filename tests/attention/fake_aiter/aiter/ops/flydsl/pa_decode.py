"""Paged decode: contract after aiter's form of 2026-09, written anew; values by the reference."""

import torch

from minuet.attention import reference
from minuet.attention.batch import AttentionBatch
from minuet.dtypes import DType
from minuet.kv.cache import LayerCache
from minuet.kv.layout import Form, KVLayout, LaneName

# relative and renamed to itself, as aiter does it: the probe has to follow
from .kernels.pa_decode_plan import PADecodePlan  # noqa: TID252
from .kernels.pa_decode_plan import plan_pa_decode as plan_pa_decode  # noqa: TID252

ARCH = "gfx950"
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
NAMES = {
    torch.bfloat16: DType.BF16,
    torch.float8_e4m3fn: DType.FP8_E4M3FN,
    torch.float8_e4m3fnuz: DType.FP8_E4M3FNUZ,
}
CALLS = []  # rows and table width of each call


def require(holds, what):
    if not holds:
        raise ValueError(what)


def pa_decode(
    output,
    query,
    key_cache,
    value_cache,
    context_lengths,
    block_tables,
    softmax_scale,
    query_length,
    *,
    context_partition_size=256,
    compute_type=torch.bfloat16,
    query_scale=None,
    key_scale=None,
    value_scale=None,
    exp_sums=None,
    max_logits=None,
    temporary_output=None,
    alibi_slopes=None,
    sinks=None,
    sliding_window=0,
    work_plan,
    max_context_length=None,
):
    """Check everything that the real one checks or leaves undefined, then compute."""
    require(isinstance(work_plan, PADecodePlan), "work_plan must be a PADecodePlan")
    require(context_partition_size == 256, "context_partition_size")
    require(query_scale is None, "query_scale")
    require(alibi_slopes is None, "alibi_slopes")
    require(sinks is None and sliding_window == 0, "not asked of the adapter")
    _check_rows(output, query, context_lengths, block_tables, query_length)
    _check_caches(query, key_cache, value_cache, compute_type)
    _check_scales(key_cache, key_scale, value_scale)
    _check_plan(work_plan, key_cache, context_lengths, query_length)
    heads, group = key_cache.shape[1], query.shape[1] // key_cache.shape[1]
    sums = (heads, work_plan.capacity, query_length * group)
    for scratch, shape, dtype in (
        (exp_sums, sums, torch.float32),
        (max_logits, sums, torch.float32),
        (temporary_output, (*sums, query.shape[2]), output.dtype),
    ):
        require(scratch.shape == shape and scratch.dtype == dtype, "workspace")
        require(scratch.is_contiguous(), "workspace must be contiguous")
    _check_contents(context_lengths, block_tables, key_cache, max_context_length)
    CALLS.append((len(context_lengths), block_tables.shape[1], query_length))
    output.copy_(
        _values(
            query,
            (key_cache, value_cache, key_scale, value_scale),
            context_lengths,
            block_tables,
            softmax_scale,
            query_length,
        )
    )


def _check_rows(output, query, lengths, tables, query_length):
    require(query.dim() == 3 and lengths.dim() == 1 and tables.dim() == 2, "ranks")
    require(query.shape[0] == len(lengths) * query_length, "query rows")
    require(output.shape == query.shape and output.dtype == query.dtype, "output")
    require(output.data_ptr() != query.data_ptr(), "output is not the query")
    require(tables.shape[0] == len(lengths), "block_tables rows")
    require(tables.dtype == lengths.dtype == torch.int32, "tables and lengths are int32")
    require(tables.is_contiguous() and lengths.is_contiguous(), "contiguous tables and lengths")
    require(query.stride(2) == output.stride(2) == 1, "contiguous channels")
    require(isinstance(query_length, int) and query_length >= 1, "query_length")


def _check_caches(query, k, v, compute_type):
    require(k.dim() == v.dim() == 5, "5-D caches")
    bf16 = k.dtype == torch.bfloat16
    x, dim, page = (8 if bf16 else 16), query.shape[2], k.shape[3]
    require(compute_type == k.dtype == v.dtype, "compute_type is the type of the cache")
    require(k.dtype == (torch.bfloat16 if bf16 else FP8[ARCH]), f"cache type on {ARCH}")
    require(query.dtype == torch.bfloat16 or not bf16, "BF16 queries")
    require(dim % 64 == 0 and page in (16, 64, 128), "head dim and page")
    require(k.shape[2:] == (dim // x, page, x), "key_cache")
    require(v.shape == (*k.shape[:2], page // x, dim, x), "value_cache")
    require(k.is_contiguous() and v.is_contiguous(), "contiguous caches")
    require(query.shape[1] % k.shape[1] == 0, "query heads")


def _check_scales(k, key_scale, value_scale):
    if k.dtype == torch.bfloat16:
        require(key_scale is None and value_scale is None, "BF16 is unscaled")
        return
    for scale in (key_scale, value_scale):
        require(scale.shape == (k.shape[0], k.shape[1], k.shape[3], 1), "scale shape")
        require(scale.dtype == torch.float32 and scale.stride(2) == 1, "scale type and stride")
    require(key_scale.stride() == value_scale.stride(), "strides of scales")


def _check_plan(plan, k, lengths, query_length):
    require(plan.num_kv_heads == k.shape[1], "plan KV heads")
    require(plan.reduce_info.shape == (len(lengths), 2), "reduce_info")
    require(plan.query_length == query_length, "plan query length")
    covered = torch.zeros(len(lengths), dtype=torch.int32)
    for row, first, end, length in plan.work_info.tolist():
        require(end == 0 or length == int(lengths[row]), "a plan of other lengths")
        covered[row] += end - first
    require(torch.equal(covered, -(-lengths // 256)), "a plan of other lengths")


def _check_contents(lengths, tables, k, max_context_length):
    """What the real one does not check on the GPU."""
    page = k.shape[3]
    require(int(lengths.min()) >= 0, "length below 0")
    require(int(lengths.max()) <= tables.shape[1] * page, "length beyond the table")
    require(max_context_length is None or int(lengths.max()) <= max_context_length, "bound")
    # its loads run ahead of the length: every entry must be a page
    require(int(tables.min()) >= 0 and int(tables.max()) < k.shape[0], "page ids")


def _values(query, cache, lengths, tables, scale, query_length):
    k, v, key_scale, value_scale = cache
    _, heads, _, page, _ = k.shape
    layout = KVLayout(page, heads, query.shape[2], NAMES[k.dtype], form=Form.SHUFFLE)
    lanes = {LaneName.K: k, LaneName.V: v}
    if key_scale is not None:
        lanes |= {LaneName.K_SCALE: key_scale[..., 0], LaneName.V_SCALE: value_scale[..., 0]}
    held = lengths.tolist()
    positions = [max(p, -1) for n in held for p in range(n - query_length, n)]
    batch = AttentionBatch(
        (query_length,) * len(held),
        tuple(held),
        torch.tensor(positions),
        torch.full((len(positions),), -1),
        tables,
    )
    return reference.attend(query, LayerCache(layout, lanes), batch, None, scale)
