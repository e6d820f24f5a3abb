"""The rows of logits a step draws from, and what each wants, as arrays of int32 for the device.

What follows from a request's parameters alone is worked out once and found again by identity: a
step with many rows has little time on the host.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from minuet.engine.types import Request, SamplingParams, ScheduledRequest
from minuet.ops.sampling import columns

# R rows, V vocabulary, N entries

_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1
_SMALLEST_TEMPERATURE = 1e-30  # its inverse is finite, and it is greedy in FP32

Thing = TypeVar("Thing")
Made = TypeVar("Made")


class Row(NamedTuple):
    """Whose logits a row has, and which tokens it takes for granted.

    Attributes:
        request: whose.
        num_drafts: the row follows this many of the request's drafts.
        num_pending: output tokens that the step before has still to draw: none or one.
    """

    request: Request
    num_drafts: int = 0
    num_pending: int = 0

    @property
    def params(self) -> SamplingParams:
        """How the request wants its tokens drawn."""
        return self.request.params

    @property
    def num_output(self) -> int:
        """Output tokens before the one this row draws."""
        return len(self.request.output_token_ids) + self.num_pending + self.num_drafts

    @property
    def output_token_ids(self) -> list[int]:
        """Those of them that are known."""
        return self.request.output_token_ids + self.drafts

    @property
    def drafts(self) -> list[int]:
        """Drafts taken for granted."""
        return self.request.draft_token_ids[: self.num_drafts]

    @property
    def is_shaped(self) -> bool:
        """Whether its logits are changed before anything is drawn."""
        wants = wants_of(self.request.params)
        return (
            wants.shaped
            or self.request.grammar is not None
            or (wants.min_tokens > 0 and self.num_output < wants.min_tokens)
        )

    @property
    def mode(self) -> int:
        """How its token is found: one of the modes of :mod:`minuet.ops.sampling.columns`."""
        mode = wants_of(self.request.params).mode
        return columns.LARGEST if mode == columns.KEEP and self.is_shaped else mode


class Wants(NamedTuple):
    """What follows from sampling parameters alone.

    Attributes:
        plain: greedy and nothing else: no shaping of any kind, no log-probabilities.
        mode: how a token is found if nothing is shaped.
        shaped: penalties or a bias change the logits of every step.
        min_tokens: output tokens before which the ends of an answer are forbidden.
        logprobs: alternatives to report; -1: nothing.
        seeded: the request brought a seed.
        line: WIDTH int32 as bytes; what depends on the step is 0.
    """

    plain: bool
    mode: int
    shaped: bool
    min_tokens: int
    logprobs: int
    seeded: bool
    line: bytes


class _Memo(Generic[Thing, Made]):
    """What was made of things that never change, found again by their identity.

    The things are kept with it, so an identity is never another's. The oldest go first.
    """

    def __init__(self, make: Callable[[Thing], Made], most: int):
        self._make, self._most = make, most
        self._held: dict[int, tuple[Thing, Made]] = {}

    def __call__(self, thing: Thing) -> Made:
        found = self._held.get(id(thing))
        if found is None:
            if len(self._held) >= self._most:
                del self._held[next(iter(self._held))]
            found = self._held[id(thing)] = thing, self._make(thing)
        return found[1]


def _wants_of(params: SamplingParams) -> Wants:
    mode = columns.KEEP
    if not params.greedy:
        filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        mode = columns.FILTERED if filtered else columns.DRAW
    line = np.zeros(columns.WIDTH, np.uint32)
    floats = line.view(np.float32)
    key = (params.seed or 0) & _LONG
    line[columns.MODE] = mode
    line[columns.KEY_LOW], line[columns.KEY_HIGH] = key & _WORD, key >> 32
    line[columns.DOMAIN] = columns.DOMAIN_REQUEST
    line[columns.TOP_K] = min(params.top_k, (1 << 31) - 1)
    line[columns.TOP_P] = columns.top_p_units(params.top_p)
    floats[columns.INVERSE_TEMPERATURE] = 1.0 / max(params.temperature, _SMALLEST_TEMPERATURE)
    floats[columns.MIN_P] = params.min_p
    floats[columns.REPETITION] = params.repetition_penalty
    floats[columns.PRESENCE] = params.presence_penalty
    floats[columns.FREQUENCY] = params.frequency_penalty
    shaped = params.penalised or bool(params.logit_bias)
    logprobs = -1 if params.logprobs is None else params.logprobs
    plain = params.greedy and not shaped and params.min_tokens == 0 and logprobs < 0
    seeded = params.seed is not None
    return Wants(plain, mode, shaped, params.min_tokens, logprobs, seeded, line.tobytes())


def _seen_in(token_ids: tuple[int, ...]) -> np.ndarray:
    return np.unique(np.array(token_ids, np.int64))


wants_of = _Memo(_wants_of, 4096)
"""What a request's parameters want; the same parameters are found again."""
_prompt_tokens = _Memo(_seen_in, 256)  # only of requests with a repetition penalty


def rows_of(share: ScheduledRequest) -> list[Row]:
    """The rows a step computes for a share that samples: its last token's, then its drafts'."""
    request = share.request
    pending = share.num_output - len(request.output_token_ids)
    if not request.draft_token_ids:
        return [Row(request, 0, pending)]
    return [Row(request, ahead, pending) for ahead in range(1 + len(request.draft_token_ids))]


def parameters(rows: Sequence[Row], modes: Sequence[int], engine_seed: int) -> np.ndarray:
    """What every row wants: [R, WIDTH] int32.

    The generator's key is the request's seed, or the engine's; its counter is the place of the
    token in the output and, of the engine's, the request's number. So batches and devices do not
    matter, and a preempted request continues as it would have.
    """
    wants = [wants_of(row.request.params) for row in rows]
    flat = np.frombuffer(b"".join(one.line for one in wants), np.uint32)
    lines = flat.reshape(len(rows), columns.WIDTH).copy()
    lines[:, columns.MODE] = modes
    lines[:, columns.POSITION] = [row.num_output for row in rows]
    ours = [index for index, one in enumerate(wants) if not one.seeded]
    key = engine_seed & _LONG
    lines[ours, columns.KEY_LOW], lines[ours, columns.KEY_HIGH] = key & _WORD, key >> 32
    lines[ours, columns.STREAM] = [rows[index].request.arrival & _WORD for index in ours]
    lines[ours, columns.DOMAIN] = columns.DOMAIN_ENGINE
    return lines.view(np.int32)


def entries(rows: Sequence[Row]) -> np.ndarray:
    """Single tokens whose logits change: [N, 4] int32, see :func:`~.reference.shape`."""
    found = [_entries_of(index, row) for index, row in enumerate(rows) if row.is_shaped]
    return np.concatenate(found) if found else np.zeros((0, 4), np.int32)


def _entries_of(index: int, row: Row) -> np.ndarray:
    params, output = row.params, np.array(row.output_token_ids, np.int64)
    drawn, counts = np.unique(output, return_counts=True)
    tokens = seen = drawn[:0]
    if params.repetition_penalty != 1.0:
        tokens = seen = _union(_prompt_tokens(row.request.prompt_token_ids), drawn)
    if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        drawn = counts = drawn[:0]
    biased = np.array(list(params.logit_bias), np.int64)
    stops = drawn[:0]
    if row.num_output < params.min_tokens:
        stops = np.array(list(row.request.stop_ids), np.int64)
    for more in (drawn, biased, stops):
        if len(more):
            tokens = _union(tokens, more)
    made = np.zeros((len(tokens), 4), np.int32)
    made[:, 0], made[:, 1] = index, tokens
    if len(drawn):
        made[np.searchsorted(tokens, drawn), 2] = 2 * counts
    if tokens is seen:
        made[:, 2] += 1
    elif len(seen):
        made[np.searchsorted(tokens, seen), 2] += 1
    bias = made[:, 3].view(np.float32)
    if len(biased):
        bias[np.searchsorted(tokens, biased)] = list(params.logit_bias.values())
    if len(stops):
        bias[np.searchsorted(tokens, stops)] = -np.inf
    return made


def _union(known: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Both, ascending and once each; ``known`` is that already, and often has all of ``more``."""
    if not len(known):
        return np.unique(more)
    at = np.minimum(np.searchsorted(known, more), len(known) - 1)
    new = more[known[at] != more]
    return np.unique(np.concatenate([known, new])) if len(new) else known


def masks(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that a grammar masks [M] int32, and what it allows [M, words] int32."""
    masked, allowed = [], []
    for index, row in enumerate(rows):
        words = row.request.grammar.allowed(row.drafts) if row.request.grammar else None
        if words is not None:
            masked.append(index)
            allowed.append(words)
    return np.array(masked, np.int32), np.array(allowed, np.int32)
