"""One device carries out steps: lay out, run the model, draw."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.engine import sampler
from minuet.engine.batch import StepBatch, build
from minuet.engine.types import Answered, Sampled, ScheduledRequest, Step, TokenLogprobs
from minuet.kv.cache import KVCache
from minuet.ops.embedding import Follows

# T query tokens of the step, R rows that sample, W hidden width, V vocabulary


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
            reports = prompt_logprobs(share, computed, lambda rows: [self.model.logits(rows)])
            results.append(result._replace(prompt_logprobs=reports) if reports else result)
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


def prompt_logprobs(
    share: ScheduledRequest, hidden: Tensor, logits_of: Callable[[Tensor], Iterable[Tensor]]
) -> tuple[TokenLogprobs | None, ...]:
    """Reports for the prompt positions ``start + 1 .. stop`` that a share made known.

    Args:
        share: what was computed of which request.
        hidden: [share.num_tokens, W].
        logits_of: the logits of rows of ``hidden``, in pieces if there are many.
    """
    request = share.request
    top = request.params.prompt_logprobs
    stop = min(share.start + share.num_tokens, len(request.prompt_token_ids) - 1)
    if top is None or stop <= share.start:
        return ()
    reports: list[TokenLogprobs] = []
    for logits in logits_of(hidden[: stop - share.start]):
        first = share.start + 1 + len(reports)
        following = request.prompt_token_ids[first : first + logits.shape[0]]
        reports += sampler.prompt_logprobs(logits, following, top)
    return tuple(reports)
