"""A real engine on a small checkpoint, and ways to drive it that tests share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minuet.config import read_options
from minuet.engine.start import Engine, start
from minuet.engine.types import Request, SamplingParams, ScheduledRequest, Step

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def engine(folder: Path, **settings: Any) -> Engine:
    """Prepare an engine; the KV pool is filled with NaN, since nothing may read unwritten slots."""
    prepared = start(read_options({"model": str(folder), **settings}), announce=lambda line: None)
    for layer in prepared.core._executor.cache.layers:
        for lane in layer.lanes.values():
            lane.copy_(torch.full((), float("nan")).to(lane.dtype).expand(lane.shape))
    return prepared


def answer(prepared: Engine, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Greedy tokens of each prompt, all submitted at once; integrity checked after every step."""
    params = SamplingParams(**{"max_tokens": 8, **GREEDY, **sampling})
    outputs = [prepared.core.add(f"r{next(_names)}", prompt, params) for prompt in prompts]
    while prepared.core.has_work:
        prepared.core.step()
        prepared.core.scheduler.integrity()
    assert all(not output.error for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


def _count() -> Any:
    number = 0
    while True:
        yield number
        number += 1


_names = _count()


def token_ids(count: int, vocab: int, seed: int = 7) -> list[int]:
    """Random ids, none special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab - 20, (count,), generator=generator).tolist()


def row_logits(
    prepared: Engine, ids: Sequence[int], chunks: Sequence[int], first_page: int = 1
) -> Tensor:
    """[T, V] logits of every position, computed in steps of the given numbers of tokens."""
    page_size = prepared.plan.config.block_size
    pages = -(-len(ids) // page_size)
    request = Request(
        request_id="rows",
        prompt_token_ids=tuple(ids),
        params=SamplingParams(),
        arrival=0,
        # in reverse, so that a kernel that trusts pages to be in order cannot pass
        page_ids=list(range(first_page + pages - 1, first_page - 1, -1)),
    )
    rows, start_at = [], 0
    assert sum(chunks) == len(ids)
    for chunk in chunks:
        share = ScheduledRequest(request, start_at, chunk, samples=False)
        rows.append(prepared.core._executor.logits(Step((share,))))
        start_at += chunk
    return torch.cat(rows)
