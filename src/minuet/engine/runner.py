"""One device carries out steps: lay out, run the model, draw."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.engine import sampler
from minuet.engine.batch import StepBatch, build
from minuet.engine.sampler import PromptPiece
from minuet.engine.types import Answered, Sampled, ScheduledRequest, Step
from minuet.kv.cache import KVCache
from minuet.ops.embedding import Follows

# T query tokens of the step, R rows that sample, W hidden width, V vocabulary

_MOST_ROWS = 1024  # of prompts whose logits exist at once: 0.8 GB at M3's vocabulary


class Model(Protocol):
    """What every model offers; see ``models/m3/model.py``."""

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        plan: Any = None,
        follows: Follows | None = None,
    ) -> Tensor:
        """[T, W] last hidden states, after the final norm."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, V] float32, in ``out`` if that is given."""
        ...


class Runner:
    """Runs steps of one model over one cache.

    Args:
        model: weights and kernels; looked into by measurements.
        cache: the pool; written.
        seed: of requests that bring none.

    Attributes:
        depth: steps it takes beyond the one that runs.
    """

    depth = 0

    def __init__(self, model: Model, cache: KVCache, seed: int = 0):
        self.model, self.cache, self._seed = model, cache, seed
        self._page_size = cache.layers[0].layout.page_size
        self._device = cache.layers[0].k.device

    def submit(self, step: Step) -> Answered:
        """Run a step; its results are there on return."""
        return Answered(self.execute(step))

    @torch.inference_mode()
    def execute(self, step: Step) -> list[Sampled]:
        """Run a step.

        Returns:
            one entry per scheduled request; a request that does not sample in this step has neither
            token nor error.
        """
        batch = build(step, self._page_size, self._device)
        hidden = self.model.forward(batch.token_ids, batch.attention, self.cache)
        rows = [row for s in step.scheduled if s.samples for row in sampler.rows_of(s)]
        drawn = []
        if rows:
            drawn = sampler.sample(self.model.logits(hidden[batch.sample_rows]), rows, self._seed)
        results = []
        first = first_row = 0
        for share in step.scheduled:
            result = Sampled(token_id=None)
            if share.samples:
                last_row = first_row + 1 + len(share.request.draft_token_ids)
                result = sampler.verify(share.request, drawn[first_row:last_row])
                first_row = last_row
            computed = hidden[first : first + share.num_tokens]
            if pieces := prompt_pieces(share, computed, _MOST_ROWS, self.model.logits):
                reports = sampler.prompt_logprobs(pieces, self._device).results()
                result = result._replace(prompt_logprobs=tuple(reports))
            results.append(result)
            first += share.num_tokens
        return results

    def launcher(self, step: Step) -> Callable[[], None]:
        """What runs a step, over and over; for measurements."""

        def again() -> None:
            self.execute(step)

        return again

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Run a step and return the logits of every query token: [T, V] float32.

        Verification of drafted tokens reads all rows; so do the tests.
        """
        batch: StepBatch = build(step, self._page_size, self._device)
        return self.model.logits(self.model.forward(batch.token_ids, batch.attention, self.cache))


def reported_ids(share: ScheduledRequest) -> tuple[int, ...]:
    """Tokens of the prompt whose log-probabilities a share makes known: those after its own.

    Empty if the request asks for none; the token after the prompt is drawn, not reported.
    """
    request = share.request
    if request.params.prompt_logprobs is None:
        return ()
    stop = share.start + share.num_tokens
    return request.prompt_token_ids[share.start + 1 : stop + 1]


def prompt_pieces(
    share: ScheduledRequest, hidden: Tensor, most_rows: int, logits: Callable[[Tensor], Tensor]
) -> list[PromptPiece]:
    """What to report of a share's prompt, in pieces; empty if the request asks for nothing.

    Args:
        share: what was computed of which request.
        hidden: [share.num_tokens, W], after the final norm.
        most_rows: positions of a piece at most; all of their logits exist at once.
        logits: computes those of some rows of ``hidden``.
    """
    next_ids, top = reported_ids(share), share.request.params.prompt_logprobs
    if not next_ids or top is None:
        return []
    cuts = range(0, len(next_ids), most_rows)
    pieces = hidden[: len(next_ids)].split(most_rows)
    return [
        PromptPiece(partial(logits, rows), next_ids[cut : cut + most_rows], top)
        for cut, rows in zip(cuts, pieces, strict=True)
    ]
