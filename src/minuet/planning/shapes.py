"""The closed set of step shapes: everything the engine can ever be asked to run.

A decode step pads its requests up to a **rung** and runs with one of a few query lengths; a prefill
step, in which every token is a row of its own, pads its tokens up to a **bucket**. Nothing else
reaches a kernel, so everything can be prepared and nothing has to be compiled later.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from minuet.attention.contract import Phase
from minuet.errors import ContractError

_RUNG_STEP = 32  # above twice this, padding stays below a third of a batch and graphs stay few
_FIRST_BUCKET = 16  # tokens; shorter prompts are padded to it
MAX_BUCKETS = 16  # each is a shape to prepare, so their number must not follow the prompt lengths


@dataclass(frozen=True, slots=True)
class StepShape:
    """One padded step.

    Attributes:
        phase: prefill or decode.
        num_seqs: requests, padded: the rung of a decode step; 0 in prefill, where tokens count.
        query_len: query tokens per request in decode; 1 in prefill.
        num_tokens: query tokens of the whole step, padded.
    """

    phase: Phase
    num_seqs: int
    query_len: int
    num_tokens: int

    def __str__(self) -> str:
        """As tables show it: ``decode 64x1``, ``prefill 2048``."""
        if self.phase is Phase.PREFILL:
            return f"prefill {self.num_tokens}"
        return f"decode {self.num_seqs}x{self.query_len}"


@dataclass(frozen=True)
class ShapeSet:
    """Every shape, and the map from a reachable step to its one shape.

    Attributes:
        rungs: decode batch sizes, ascending; the last is the largest reachable one.
        query_lens: query tokens per request a decode step can have, ascending.
        buckets: prefill token counts, ascending; the last is the largest reachable one.
    """

    rungs: tuple[int, ...]
    query_lens: tuple[int, ...]
    buckets: tuple[int, ...]

    @cached_property
    def decode_shapes(self) -> tuple[StepShape, ...]:
        """Query lengths outermost, rungs ascending."""
        return tuple(
            StepShape(Phase.DECODE, rung, q, rung * q)
            for q in self.query_lens
            for rung in self.rungs
        )

    @cached_property
    def prefill_shapes(self) -> tuple[StepShape, ...]:
        """Buckets ascending."""
        return tuple(StepShape(Phase.PREFILL, 0, 1, bucket) for bucket in self.buckets)

    @property
    def all(self) -> tuple[StepShape, ...]:
        """Every shape."""
        return self.decode_shapes + self.prefill_shapes

    def decode(self, num_seqs: int, query_len: int) -> StepShape:
        """The shape of a decode step: the smallest rung that holds it.

        Raises:
            ContractError: a step that the scheduler must never build.
        """
        if query_len not in self.query_lens:
            raise ContractError(
                "decode query_len", got=query_len, expected=f"one of {self.query_lens}"
            )
        rung = _smallest(self.rungs, num_seqs, "decode requests")
        return StepShape(Phase.DECODE, rung, query_len, rung * query_len)

    def prefill(self, num_tokens: int) -> StepShape:
        """The shape of a prefill step: the smallest bucket that holds its tokens.

        Raises:
            ContractError: a step that the scheduler must never build.
        """
        return StepShape(Phase.PREFILL, 0, 1, _smallest(self.buckets, num_tokens, "prefill tokens"))


def default_rungs(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two to 64, then steps of 32, and always ``max_num_seqs`` itself."""
    rungs = {1 << i for i in range(7)} | set(range(2 * _RUNG_STEP, max_num_seqs, _RUNG_STEP))
    return tuple(sorted({r for r in rungs if r < max_num_seqs} | {max_num_seqs}))


def prefill_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Powers of two and always the maximum: at most :data:`MAX_BUCKETS`, whatever the maximum."""
    powers = []
    bucket = _FIRST_BUCKET
    while bucket < max_num_batched_tokens:
        powers.append(bucket)
        bucket *= 2
    return (*powers[-(MAX_BUCKETS - 1) :], max_num_batched_tokens)


def shape_set(
    rungs: Sequence[int],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_speculative_tokens: int,
) -> ShapeSet:
    """The shapes of a configuration.

    Args:
        rungs: decode batch sizes to prepare; ``max_num_seqs`` is added if missing, since a batch
            of that size can be scheduled.
        max_num_seqs: requests of one decode step at most.
        max_num_batched_tokens: tokens of one prefill step at most.
        num_speculative_tokens: drafts per request; 0 leaves one query length.
    """
    kept = {r for r in rungs if r <= max_num_seqs} | {max_num_seqs}
    return ShapeSet(
        rungs=tuple(sorted(kept)),
        query_lens=tuple(sorted({1, num_speculative_tokens + 1})),
        buckets=prefill_buckets(max_num_batched_tokens),
    )


def _smallest(sizes: tuple[int, ...], wanted: int, what: str) -> int:
    if not 1 <= wanted <= sizes[-1]:
        raise ContractError(what, got=wanted, expected=f"1..{sizes[-1]}")
    return sizes[bisect_left(sizes, wanted)]
