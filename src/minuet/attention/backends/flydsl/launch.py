"""Paged attention in FlyDSL: which kernel runs with which arguments. Kernels are in ``kernels/``.

A :class:`~minuet.attention.backends.flydsl.step.Planner` is made once per prepared step shape and
owns the plan's device memory and the scratch; :func:`plan` makes one for a single step. Nothing is
sized by a batch: a step of any size up to the shape's uses the same memory and the same kernels.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from minuet.attention.backends.flydsl.calls import Arguments, Call, RocmRunner, Runner
from minuet.attention.backends.flydsl.signatures import Key
from minuet.attention.backends.flydsl.spec import QUERY_LENS
from minuet.attention.backends.flydsl.step import Plan, Planner, StepShape
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.errors import ContractError
from minuet.kv.cache import LayerCache
from minuet.kv.layout import Form, KVLayout, LaneName
from minuet.kv.write import HeadNorms

# T query tokens, S sequences, H query heads, K KV heads, D head dim, I index dim

_LOG2_E = 1.4426950408889634
_BLOCKS_PER_GROUP = 4  # blocks that a workgroup of the score kernel takes, one to a wave
CACHE_DIR = Path.home() / ".cache" / "minuet" / "flydsl"


@cache
def device_runner() -> Runner:
    """The runner of this process's device.

    Raises:
        ConfigError: no ROCm here.
    """
    return RocmRunner(CACHE_DIR)


# --- planning ------------------------------------------------------------------------------------


def planner(
    shape: StepShape,
    device: torch.device,
    scratch: Mapping[str, Tensor] | None = None,
    runner: Runner | None = None,
) -> Planner:
    """The planner of one prepared step shape.

    Args:
        shape: sizes.
        device: where the memory is.
        scratch: uint8 workspace slices ``partial_out``, ``partial_lse``, ``scores``, ``blocks``;
            what is missing is allocated on first use.
        runner: who runs; the device's by default.

    Raises:
        ConfigError: no runner was given and there is no ROCm.
    """
    return Planner(shape, runner or device_runner(), device, dict(scratch or {}))


def plan(
    batch: AttentionBatch,
    page_size: int,
    *,
    num_kv_heads: int = 1,
    runner: Runner | None = None,
) -> Plan:
    """Plan a single step, sized by itself; it allocates. Serving makes a :class:`Planner`.

    Args:
        batch: the step.
        page_size: tokens per page; the kernels read it from the cache's layout.
        num_kv_heads: KV heads of the cache: how far a step is divided, nothing else.
        runner: who runs; the device's by default.

    Raises:
        ConfigError: no runner was given and there is no ROCm.
    """
    lens = set(batch.query_lens)
    uniform = len(lens) == 1 and max(lens) in QUERY_LENS
    shape = StepShape(
        num_kv_heads=num_kv_heads,
        max_seqs=max(1, batch.num_seqs),
        max_tokens=max(1, batch.num_tokens),
        max_length=max(1, *batch.seq_lens, 1),
        query_len=max(lens) if uniform else 0,
    )
    return planner(shape, batch.positions.device, runner=runner).plan(batch)


# --- write ---------------------------------------------------------------------------------------


def write(
    cache: LayerCache,
    packed: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms,
    runner: Runner | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Normalise, rotate, quantise and store a step in one launch; see :mod:`minuet.kv.write`.

    Args:
        cache: the layer's lanes; written.
        packed: [T, (H + 2K) * D + K * I + I] bfloat16.
        slots: [T] int64; -1 is skipped.
        cos: [T, half] float32.
        sin: [T, half] float32.
        norms: per-head norm weights.
        runner: who runs; the device's by default.

    Returns:
        q [T, H, D] and index_q [T, K, I] (None on a dense layer).

    Raises:
        ContractError: the packed width is not that of the layout, or a layout of another form.
    """
    runner, layout, tokens = runner or device_runner(), cache.layout, packed.shape[0]
    _require_shuffle(layout)
    heads, dim, index_dim = layout.num_kv_heads, layout.head_dim, layout.index_dim
    q_heads = layout.query_heads(packed.shape[1])
    q = packed.new_empty(tokens, q_heads, dim)
    index_q = packed.new_empty(tokens, heads, index_dim) if index_dim else None
    vectors = q_heads + 2 * heads + (heads + 1 if index_dim else 0)
    arguments = _write_arguments(cache, packed, norms) | {
        "q_out": q,
        "index_q_out": index_q,
        "slots": slots,
        "cosine": cos,
        "sine": sin,
        "q_heads": q_heads,
        "half": cos.shape[1],
    }
    if tokens:
        runner([Call(_write_key(layout, runner.arch), arguments, (tokens, vectors, 1))])
    return q, index_q


def _write_key(layout: KVLayout, arch: str) -> Key:
    return Key.of(
        "write",
        arch,
        **_options(layout),
        index_dim=layout.index_dim,
        index_fp8=layout.index_dtype.is_fp8 and layout.index_dim > 0,
    )


def _write_arguments(cache: LayerCache, packed: Tensor, norms: HeadNorms) -> Arguments:
    return {
        **{name.value: cache.lanes.get(name) for name in LaneName},
        "packed": packed.contiguous(),
        "q_norm": norms.q,
        "k_norm": norms.k,
        "index_q_norm": norms.index_q if cache.layout.index_dim else None,
        "index_k_norm": norms.index_k if cache.layout.index_dim else None,
        "eps": norms.eps,
        "kv_heads": cache.layout.num_kv_heads,
    }


# --- select --------------------------------------------------------------------------------------


def select(index_q: Tensor, cache: LayerCache, plan: Plan, selection: Selection) -> Tensor:
    """Blocks each row attends to; see :func:`minuet.attention.reference.select`.

    Args:
        index_q: [T, K, I] bfloat16, normalised and rotated.
        cache: the layer's lanes; this step's index keys already written.
        plan: of this step.
        selection: how blocks are chosen.

    Returns:
        [T, K, top_blocks] int32 logical block ids, ascending, -1 at the tail.
    """
    planner, layout = plan.planner, cache.layout
    tokens, heads, _ = index_q.shape
    max_blocks = plan.page_table.shape[1]
    blocks = planner.take("blocks", (tokens, heads, selection.top_blocks), torch.int32)
    if not tokens:
        return blocks
    held = planner.scratch.get("scores")
    row_bytes = heads * max_blocks * torch.float32.itemsize
    chunk = tokens if held is None else max(1, min(tokens, held.numel() // row_bytes))
    scores = planner.take("scores", (chunk, heads, max_blocks), torch.float32)
    first = Key.of(
        "scores",
        planner.runner.arch,
        fp8=cache.index_k.dtype.itemsize == 1,
        index_dim=layout.index_dim,
    )
    second = Key.of("choose", planner.runner.arch)
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        arguments: Arguments = {
            "scores": scores,
            "index_q": index_q[start:end],
            "index_k": cache.index_k,
            "page_table": plan.page_table,
            "positions": plan.positions[start:end],
            "sequences": plan.sequences[start:end],
            "heads": heads,
            "max_pages": max_blocks,
            "max_blocks": max_blocks,
            "blocks": blocks[start:end],
            "top": selection.top_blocks,
            "init_blocks": selection.init_blocks,
            "local_blocks": selection.local_blocks,
        }
        groups = -(-max_blocks // _BLOCKS_PER_GROUP)
        planner.runner(
            [
                Call(first, arguments, (end - start, groups, 1)),
                Call(second, arguments, ((end - start) * heads, 1, 1)),
            ]
        )
    return blocks


# --- attend --------------------------------------------------------------------------------------


def attend_dense(
    q: Tensor, cache: LayerCache, plan: Plan, blocks: Tensor | None, scale: float
) -> Tensor:
    """Attention over everything: by plan in a decode step, row by row otherwise.

    Args:
        q: [T, H, D] bfloat16, normalised and rotated.
        cache: the layer's lanes; this step's keys and values already written.
        plan: of this step.
        blocks: None.
        scale: multiplies the scores.

    Returns:
        [T, H, D] bfloat16; rows that see nothing are zero.
    """
    assert blocks is None
    if plan.planner.split is None:
        return _by_rows(q, cache, plan, None, scale)
    planner, split = plan.planner, plan.planner.split
    arguments = _attend_arguments(q, cache, plan, scale)
    query_len = planner.shape.query_len
    group = q.shape[1] // cache.layout.num_kv_heads
    work, rows, lengths = planner.tables()
    arguments |= _partials(planner, cache.layout, split.slots, group * query_len)
    arguments |= {"work": work, "lists": lengths, "rows": rows, "query_len": query_len}
    arguments |= {"parts": 1, "top": 0}
    options, heads = _options(cache.layout), cache.layout.num_kv_heads
    attend = Key.of("attend", planner.runner.arch, mode="plan", **options)
    merge = Key.of("merge", planner.runner.arch, head_dim=cache.layout.head_dim, planned=True)
    tiles = -(-group * query_len // 16)
    planner.runner(
        [
            Call(attend, arguments, (split.capacity, heads, tiles)),
            Call(merge, arguments, (plan.num_seqs, heads, 1)),
        ]
    )
    return _out(arguments)


def attend_sparse(
    q: Tensor, cache: LayerCache, plan: Plan, blocks: Tensor | None, scale: float
) -> Tensor:
    """Attention over chosen blocks; arguments as :func:`attend_dense`.

    Args:
        q: [T, H, D] bfloat16.
        cache: the layer's lanes.
        plan: of this step.
        blocks: [T, K, top_blocks] int32 from :func:`select`.
        scale: multiplies the scores.
    """
    assert blocks is not None
    return _by_rows(q, cache, plan, blocks, scale)


def _by_rows(
    q: Tensor, cache: LayerCache, plan: Plan, blocks: Tensor | None, scale: float
) -> Tensor:
    planner, layout, tokens = plan.planner, cache.layout, q.shape[0]
    arguments = _attend_arguments(q, cache, plan, scale)
    parts = planner.row_parts if blocks is not None else 1
    if blocks is not None:
        parts = min(parts, blocks.shape[2])
    slots = planner.shape.max_tokens * parts if parts > 1 else 0
    arguments |= _partials(planner, layout, slots, q.shape[1] // layout.num_kv_heads)
    arguments |= {"work": plan.sequences, "lists": blocks, "rows": None, "query_len": 1}
    arguments |= {"parts": parts, "top": 0 if blocks is None else blocks.shape[2]}
    mode, heads, arch = (
        "rows" if blocks is None else "sparse",
        layout.num_kv_heads,
        planner.runner.arch,
    )
    attend = Key.of("attend", arch, mode=mode, **_options(layout))
    calls = [Call(attend, arguments, (tokens * parts, heads, 1))]
    if parts > 1:
        merge = Key.of("merge", arch, head_dim=layout.head_dim, planned=False)
        calls.append(Call(merge, arguments, (tokens, heads, 1)))
    if tokens:
        planner.runner(calls)
    return _out(arguments)


def _out(arguments: Arguments) -> Tensor:
    out = arguments["out"]
    assert isinstance(out, Tensor)
    return out


def _options(layout: KVLayout) -> dict[str, object]:
    return {"fp8": layout.has_scales, "head_dim": layout.head_dim, "page": layout.page_size}


def _attend_arguments(q: Tensor, cache: LayerCache, plan: Plan, scale: float) -> Arguments:
    """What both forms pass."""
    _require_shuffle(cache.layout)
    if q.dtype is not torch.bfloat16 or not q.is_contiguous():
        raise ContractError("queries", got=f"{q.dtype}", expected="contiguous bfloat16")
    heads = cache.layout.num_kv_heads
    return {
        "out": torch.empty_like(q),
        "q": q,
        "k": cache.k,
        "v": cache.v,
        "k_scale": cache.lanes.get(LaneName.K_SCALE),
        "v_scale": cache.lanes.get(LaneName.V_SCALE),
        "page_table": plan.page_table,
        "positions": plan.positions,
        "scale_log2": scale * _LOG2_E,
        "kv_heads": heads,
        "group": q.shape[1] // heads,
        "max_pages": plan.page_table.shape[1],
    }


def _partials(planner: Planner, layout: KVLayout, slots: int, vectors: int) -> Arguments:
    """Partial results; null where every row is written directly."""
    if not slots:
        return {"partial_out": None, "partial_lse": None, "slots": 0}
    shape = (layout.num_kv_heads, slots, vectors)
    return {
        "partial_out": planner.take("partial_out", (*shape, layout.head_dim), torch.float32),
        "partial_lse": planner.take("partial_lse", shape, torch.float32),
        "slots": slots,
    }


def _require_shuffle(layout: KVLayout) -> None:
    if layout.form is not Form.SHUFFLE:
        raise ContractError("form of the cache", got=layout.form.value, expected="shuffle")
