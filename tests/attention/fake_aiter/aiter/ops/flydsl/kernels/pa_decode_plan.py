"""Work plans: contract after aiter's form of 2026-09, written anew."""

from dataclasses import dataclass

import torch

COMPUTE_UNITS = 8
PLANS = []  # what was asked for: (rows, KV heads, query length)


@dataclass(frozen=True)
class PADecodePlan:
    """Division of a step.

    Attributes:
        work_info: [capacity, 4] int32: sequence, first tile, end tile, length.
        reduce_info: [rows, 2] int32: first record, records.
        num_kv_heads: of the cache.
        max_partitions: records of a sequence at most.
        sliding_window: 0 for none.
        query_length: query tokens per sequence.
    """

    work_info: torch.Tensor
    reduce_info: torch.Tensor
    num_kv_heads: int
    max_partitions: int
    sliding_window: int = 0
    query_length: int = 1

    @property
    def capacity(self):
        return self.work_info.shape[0]


def plan_pa_decode(
    context_lengths,
    num_kv_heads,
    *,
    max_partitions=None,
    workgroup_budget=None,
    sliding_window=0,
    query_length=1,
    plan=None,
):
    """Divide a step; the real one does it on the GPU, by the same integers."""
    if context_lengths.dtype != torch.int32 or context_lengths.ndim != 1:
        raise ValueError("context_lengths must be a vector of int32")
    if not context_lengths.is_contiguous():
        raise ValueError("context_lengths must be contiguous")
    rows = len(context_lengths)
    if not 1 <= rows <= 4096:
        raise ValueError("plan supports batches in [1, 4096]")
    assert plan is None
    assert sliding_window == 0
    parts = max_partitions or COMPUTE_UNITS
    budget = workgroup_budget or 2 * COMPUTE_UNITS
    capacity = min(rows * parts, max(rows, -(-budget // num_kv_heads)))
    PLANS.append((rows, num_kv_heads, query_length))
    work = torch.zeros(capacity, 4, dtype=torch.int32)
    reduce = torch.zeros(rows, 2, dtype=torch.int32)
    lengths = context_lengths.tolist()
    tiles = [-(-n // 256) for n in lengths]
    left, total = capacity - sum(n > 0 for n in lengths), max(1, sum(tiles))
    before = record = 0
    for row, mine in enumerate(tiles):
        share = (before + mine) * left // total - before * left // total
        count = min((mine > 0) + share, mine, parts)
        reduce[row] = torch.tensor([record, count])
        for part in range(count):
            ends = part * mine // count, (part + 1) * mine // count
            work[record] = torch.tensor([row, *ends, lengths[row]])
            record += 1
        before += mine
    return PADecodePlan(work, reduce, num_kv_heads, parts, sliding_window, query_length)
