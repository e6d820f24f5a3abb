"""Steps on a device with a queue: submitted now, drawn later, one step ahead of the results.

:meth:`QueuedRunner.submit` queues copies, graphs, kernels and the read-back of what they draw, and
returns; nothing in it waits for the device. The tokens a step draws stay on the device, where the
next step finds its inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.engine import sampler
from minuet.engine.prepared import Part, Prepared, parts
from minuet.engine.runner import Model, prompt_pieces, reported_ids
from minuet.engine.sampler import Drawn, PromptPiece, PromptReports
from minuet.engine.seal import Seal
from minuet.engine.types import Sampled, ScheduledRequest, Step
from minuet.errors import ContractError
from minuet.kv.cache import KVCache


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one part of a step draws and reports; None where no request of it does."""

    part: Part
    drawn: Drawn | None
    reports: PromptReports | None

    @property
    def done(self) -> bool:
        """Whether the device has come so far."""
        return all(one is None or one.done for one in (self.drawn, self.reports))


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
        return all(answer.done for answer in self.answers)

    def results(self) -> Sequence[Sampled]:
        """One entry per scheduled request; waits for the device."""
        results = [Sampled(token_id=None)] * self.num_shares
        for answer in self.answers:
            rows = answer.drawn.results() if answer.drawn is not None else []
            reports = answer.reports.results() if answer.reports is not None else []
            first = first_report = 0
            for index, share in zip(answer.part.indices, answer.part.shares, strict=True):
                if share.samples:
                    end = first + 1 + len(share.request.draft_token_ids)
                    results[index] = sampler.verify(share.request, rows[first:end])
                    first = end
                if count := len(reported_ids(share)):
                    mine = tuple(reports[first_report : first_report + count])
                    results[index] = results[index]._replace(prompt_logprobs=mine)
                    first_report += count
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
                pieces = computed.hidden[:count].split(self._most_rows)
                rows += [self._padded_logits(piece) for piece in pieces]
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
        return _Answer(part, drawn, self._prompt_reports(part, computed.hidden))

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

    def _prompt_reports(self, part: Part, hidden: Tensor | None) -> PromptReports | None:
        """Log-probabilities of the prompts that a prefill computed; queued like everything else."""
        if hidden is None:  # decoding: nothing of a prompt is computed
            return None
        pieces: list[PromptPiece] = []
        first = 0
        for share in part.shares:
            computed = hidden[first : first + share.num_tokens]
            pieces += prompt_pieces(share, computed, self._most_rows, self._padded_logits)
            first += share.num_tokens
        return sampler.prompt_logprobs(pieces, hidden.device) if pieces else None

    @property
    def _most_rows(self) -> int:
        return self.prepared.shapes.rungs[-1]

    def _padded_logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows up to the largest rung, computed in a size that start-up has met."""
        count = hidden.shape[0]
        rung = next(rung for rung in self.prepared.shapes.rungs if rung >= count)
        return self.model.logits(F.pad(hidden, (0, 0, 0, rung - count)))[:count]
