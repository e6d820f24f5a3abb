"""FlashInfer as the peer of ``decode_kernels.py``. Importing fails where it is not installed.

Its FP8 dense decode takes one scale per tensor, so it reads 3 % fewer bytes than ours; its sparse
decode takes FP8 K and V without scales, and has no FP8 index lane in these cells.
"""

from collections.abc import Callable

import flashinfer
import torch
from flashinfer import msa_ops

VERSION = f"flashinfer {flashinfer.__version__}"
_POOL: dict[str, torch.Tensor] = {}
_WORKSPACE: list[torch.Tensor] = []


def describe(cell) -> str:
    """What the row's peer figure is of."""
    if cell.case.index is None:
        return f"{VERSION} fa2 batch decode, {'per tensor FP8' if cell.case.kv.is_fp8 else 'BF16'}"
    return f"{VERSION} MSA score + top-k + sparse decode, FP8 without scales"


def call(cell, pool) -> Callable[[int], object] | None:
    """The peer's call on a set of the cell's pages; None where it has no such kernel."""
    if cell.case.index is None:
        return _dense(cell)
    return _sparse(cell) if cell.case.name == "sparse-fp8" else None


def _dense(cell) -> Callable[[int], object]:
    batch, blocks = cell.tables.shape[1:]
    k, v = cell.cache.k, cell.cache.v
    ends = torch.arange(batch + 1, device=k.device, dtype=torch.int32) * blocks
    last = torch.full((batch,), k.shape[2], device=k.device, dtype=torch.int32)
    out = torch.empty_like(cell.q)
    wrappers = []
    for number, table in enumerate(cell.tables):
        pages = table.flatten().contiguous()
        if len(_WORKSPACE) <= number:
            _WORKSPACE.append(torch.empty(128 << 20, dtype=torch.uint8, device=k.device))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _WORKSPACE[number],
            "HND",
            use_tensor_cores=True,
            backend="fa2",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=ends.clone(),
            paged_kv_indices_buffer=pages.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        wrapper.plan(
            ends, pages, last, cell.heads, 1, k.shape[3], k.shape[2],
            q_data_type=torch.bfloat16, kv_data_type=k.dtype,
        )  # fmt: skip
        wrappers.append(wrapper)
    return lambda i: wrappers[i].run(cell.q, (k, v), out=out)


def _sparse(cell) -> Callable[[int], object]:
    tables, device = cell.tables, cell.q.device
    batch, blocks = tables.shape[1:]
    dim = cell.q.shape[2]
    if "kv" not in _POOL:  # it wants K and V side by side
        _POOL["kv"] = torch.cat((cell.cache.k, cell.cache.v), -1).contiguous()
    kv = _POOL["kv"]
    k, v = kv[..., :dim], kv[..., dim:]
    index_k = cell.cache.index_k[:, None]
    ends = torch.arange(batch + 1, device=device, dtype=torch.int32)
    lengths = torch.full((batch,), cell.context, device=device, dtype=torch.int32)
    scores = torch.empty(1, blocks, batch, device=device, dtype=torch.float32)
    chosen = torch.empty(batch, 1, 16, device=device, dtype=torch.int32)
    pages = torch.full((batch,), blocks, device=device, dtype=torch.int32)
    out = torch.empty_like(cell.q)

    def run(i: int) -> None:
        msa_ops.msa_proxy_score(
            cell.index_q, index_k, ends, page_table=tables[i], seqused_k=lengths, max_seqlen_q=1,
            max_k_tiles=blocks, output=scores,
        )  # fmt: skip
        msa_ops.msa_topk_select(
            scores, 16, num_valid_pages=pages, output=chosen, force_end_blocks=1
        )
        msa_ops.msa_sparse_decode_attention(
            cell.q,
            k,
            v,
            chosen.view(1, batch, 16),
            page_table=tables[i],
            seqused_k=lengths,
            out=out,
        )

    return run
