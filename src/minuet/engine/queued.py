"""Steps on a device with a queue: submitted now, drawn later, one step ahead of the results.

:meth:`QueuedRunner.submit` queues copies, graphs, kernels and the read-back of what they draw, and
returns; nothing in it waits for the device. The tokens a step draws stay on the device, where the
next step finds its inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.engine import sampler
from minuet.engine.prepared import Part, Prepared, parts
from minuet.engine.runner import Model, prompt_logprobs
from minuet.engine.sampler import Drawn
from minuet.engine.seal import Seal
from minuet.engine.types import Sampled, ScheduledRequest, Step, TokenLogprobs
from minuet.errors import ContractError
from minuet.kv.cache import KVCache


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one part of a step draws; None where no request of it samples."""

    part: Part
    drawn: Drawn | None
    reports: tuple[tuple[TokenLogprobs | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Queued:
    """A step on its way.

    Attributes:
        num_shares: requests of the step.
        answers: of its parts.
    """

    num_shares: int
    answers: tuple[_Answer, ...]

    @property
    def done(self) -> bool:
        """Whether the device has drawn everything."""
        return all(answer.drawn is None or answer.drawn.done for answer in self.answers)

    def results(self) -> Sequence[Sampled]:
        """One entry per scheduled request; waits for the device."""
        results = [Sampled(token_id=None)] * self.num_shares
        for answer in self.answers:
            rows = answer.drawn.results() if answer.drawn is not None else []
            first = 0
            for index, share, reports in zip(
                answer.part.indices, answer.part.shares, answer.reports, strict=True
            ):
                if share.samples:
                    end = first + 1 + len(share.request.draft_token_ids)
                    results[index] = sampler.verify(share.request, rows[first:end])
                    first = end
                if reports:
                    results[index] = results[index]._replace(prompt_logprobs=reports)
        return results


class QueuedRunner:
    """Runs steps of one model over one cache, in prepared shapes.

    Args:
        model: weights and kernels.
        cache: the pool; written.
        prepared: every shape.
        seal: asked after each step's launches.
        depth: steps it takes beyond the one that runs.
        seed: of requests that bring none.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        prepared: Prepared,
        seal: Seal,
        *,
        depth: int,
        seed: int = 0,
    ):
        self.cache, self.prepared, self.seal, self.depth = cache, prepared, seal, depth
        self.model, self._seed = model, seed
        self._places: dict[int, int] = {}  # share of the last step -> its token's place

    @torch.inference_mode()
    def submit(self, step: Step) -> Queued:
        """Queue a step.

        Raises:
            SealError: something compiled or grew, and the seal is strict.
        """
        places: dict[int, int] = {}
        answers = []
        for part in parts(step, self.prepared.shapes):
            drawn_at = [self._drawn_at(share) for share in part.shares]
            answers.append(self._run(part, drawn_at, places))
        self._places = places
        self.seal.check(decode=step.num_decodes == len(step.scheduled))
        return Queued(len(step.scheduled), tuple(answers))

    def execute(self, step: Step) -> Sequence[Sampled]:
        """Run a step and wait for it."""
        return self.submit(step).results()

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Run a step and return the logits of every query token: [T, V] float32."""
        rows = []
        for part in parts(step, self.prepared.shapes):
            computed = self.prepared.run(part, [-1] * len(part.shares))
            count = sum(share.num_tokens for share in part.shares)
            if computed.hidden is None:
                rows.append(computed.logits.clone())
            else:
                rows.append(torch.cat([*self._all_logits(computed.hidden[:count])]))
        return torch.cat(rows)

    @torch.inference_mode()
    def launcher(self, step: Step) -> Callable[[], None]:
        """What queues one run of a step, over and over; for measurements.

        Args:
            step: requests of one part; their tokens are known.

        Returns:
            queues what :meth:`submit` does between inputs and read-back.

        Raises:
            ContractError: a step of several parts.
        """
        found = list(parts(step, self.prepared.shapes))
        if len(found) != 1:
            raise ContractError("parts of a step to repeat", got=len(found), expected="1")
        again = self.prepared.again(found[0])
        return torch.inference_mode()(again)

    # --- one part --------------------------------------------------------------------------------

    def _drawn_at(self, share: ScheduledRequest) -> int:
        return -1 if share.follows is None else self._places[share.follows]

    def _run(self, part: Part, drawn_at: Sequence[int], places: dict[int, int]) -> _Answer:
        computed = self.prepared.run(part, drawn_at)
        rows = [row for share in part.shares if share.samples for row in sampler.rows_of(share)]
        drawn = None
        if rows:
            drawn = sampler.draw(computed.logits, rows, self._seed, greedy=computed.greedy)
            self._place(part, drawn.tokens, places)
        reports = tuple(self._prompt_logprobs(part, computed.hidden))
        return _Answer(part, drawn, reports)

    def _place(self, part: Part, tokens: Tensor, places: dict[int, int]) -> None:
        """Leave the tokens where the next step's inputs look; drafts have no followers."""
        first = len(places)
        sampling = [
            index for index, share in zip(part.indices, part.shares, strict=True) if share.samples
        ]
        if len(sampling) != tokens.shape[0]:
            return
        self.prepared.drawn[first : first + len(sampling)].copy_(tokens)
        places.update((index, first + at) for at, index in enumerate(sampling))

    def _prompt_logprobs(
        self, part: Part, hidden: Tensor | None
    ) -> list[tuple[TokenLogprobs | None, ...]]:
        reports: list[tuple[TokenLogprobs | None, ...]] = []
        first = 0
        for share in part.shares:
            rows = None if hidden is None else hidden[first : first + share.num_tokens]
            reports.append(() if rows is None else prompt_logprobs(share, rows, self._all_logits))
            first += share.num_tokens
        return reports

    def _all_logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Logits of any number of rows, in pieces of sizes that start-up has met."""
        rungs = self.prepared.shapes.rungs
        for rows in hidden.split(rungs[-1]):
            count = rows.shape[0]
            padding = next(rung for rung in rungs if rung >= count) - count
            yield self.model.logits(F.pad(rows, (0, 0, 0, padding)))[:count]
