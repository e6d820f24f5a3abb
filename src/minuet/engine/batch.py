"""From a :class:`Step` (integers) to tensors: the one place that lays requests out as a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.engine.types import Step


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step on the device.

    Attributes:
        token_ids: [T] int64.
        attention: positions, slots and page tables.
        sample_rows: [R] int64 rows of T whose logits are drawn from: per request that samples, the
            row of its last known token and one per draft, in the order of the requests.
    """

    token_ids: Tensor
    attention: AttentionBatch
    sample_rows: Tensor


def build(step: Step, page_size: int, device: torch.device | str = "cpu") -> StepBatch:
    """Lay a step out.

    Args:
        step: what to run.
        page_size: tokens per page.
        device: where the tensors go.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    tables: list[list[int]] = []
    for share in step.scheduled:
        request, stop = share.request, share.start + share.num_tokens
        token_ids += request.tokens(share.start, stop)
        positions += range(share.start, stop)
        pages = request.page_ids
        slots += [
            pages[p // page_size] * page_size + p % page_size for p in range(share.start, stop)
        ]
        tables.append(pages[: -(-stop // page_size)])
        if share.samples:
            num_rows = 1 + len(request.draft_token_ids)
            sample_rows += range(len(token_ids) - num_rows, len(token_ids))
    width = max(map(len, tables))
    table = torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32)
    attention = AttentionBatch(
        query_lens=tuple(s.num_tokens for s in step.scheduled),
        seq_lens=tuple(s.start + s.num_tokens for s in step.scheduled),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        page_table=table.to(device),
    )
    return StepBatch(
        torch.tensor(token_ids, device=device), attention, torch.tensor(sample_rows, device=device)
    )
