"""Paged attention in Triton: what a model's layer calls. Kernels are in ``kernels/``.

:class:`~minuet.attention.backends.triton.step.Planner` is made once per prepared step shape (see
:func:`planner`); :func:`plan` makes one for a single step.

``select`` of a decode step returns block scores, from which every part of ``attend`` chooses for
itself: cheaper than a launch in between. Of a prefill step, and of a batch whose scores exceed
their scratch, it returns the order to select, which ``attend`` carries out chunk by chunk.
"""

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from minuet.attention.backends.triton.arguments import target_of
from minuet.attention.backends.triton.attending import attend, attend_launches
from minuet.attention.backends.triton.selecting import block_lists, select
from minuet.attention.backends.triton.spec import MAX_QUERY_LEN
from minuet.attention.backends.triton.step import Plan, Planner, StepShape
from minuet.attention.backends.triton.writing import write
from minuet.attention.batch import AttentionBatch, PreparedSizes
from minuet.platform.device import facility
from minuet.platform.triton import arch_name

__all__ = [
    "Plan",
    "Planner",
    "StepShape",
    "arch_name",
    "attend",
    "attend_launches",
    "block_lists",
    "plan",
    "planner",
    "prepare",
    "select",
    "target_of",
    "write",
]

_INTERPRETED_UNITS = 4  # a few parts per sequence, so that merging is exercised


def prepare(
    sizes: PreparedSizes, device: torch.device, scratch: Mapping[str, Tensor] | None = None
) -> Planner:
    """As :func:`planner`, for an engine, which knows no backend's own types."""
    return planner(StepShape(**asdict(sizes)), device, scratch)


def planner(
    shape: StepShape, device: torch.device, scratch: Mapping[str, Tensor] | None = None
) -> Planner:
    """The planner of one prepared step shape.

    Args:
        shape: sizes.
        device: where the kernels run.
        scratch: uint8 workspace slices ``partial_out``, ``partial_lse``, ``scores``, ``blocks``,
            ``pages``, as ``spec.py`` sizes them; a prefill step is selected for and attended in
            chunks that they hold. None allocates on first use.
    """
    return Planner(shape, device, target_of(device), scratch)


def plan(batch: AttentionBatch, page_size: int, *, num_kv_heads: int = 8, group: int = 16) -> Plan:
    """Plan a single step, sized by itself; it allocates. Serving uses :func:`planner`.

    Args:
        batch: the step.
        page_size: tokens per page.
        num_kv_heads: KV heads of the cache; a wrong one costs speed, nothing else.
        group: query heads per KV head; likewise.
    """
    device = batch.positions.device
    lens = set(batch.query_lens)
    query_len = lens.pop() if len(lens) == 1 else 0
    shape = StepShape(
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        group=group,
        max_seqs=max(1, batch.num_seqs),
        max_tokens=max(1, batch.num_tokens),
        max_length=max(1, *batch.seq_lens, 1),
        query_len=query_len if query_len <= MAX_QUERY_LEN else 0,
        compute_units=facility(device).compute_units or _INTERPRETED_UNITS,
    )
    return planner(shape, device).plan(batch, page_size)
