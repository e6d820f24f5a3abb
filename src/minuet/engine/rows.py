"""The rows of logits a step draws from, and what each wants, as arrays of int32 for the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minuet.engine.types import Request, SamplingParams, ScheduledRequest
from minuet.ops.sampling import columns

# R rows, V vocabulary, N entries

_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1
_SMALLEST_TEMPERATURE = 1e-30  # its inverse is finite, and it is greedy in FP32


@dataclass(frozen=True, slots=True)
class Row:
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
        request, params = self.request, self.params
        return (
            request.grammar is not None
            or params.penalised
            or bool(params.logit_bias)
            or self.num_output < params.min_tokens
        )


def rows_of(share: ScheduledRequest) -> list[Row]:
    """The rows a step computes for a share that samples: its last token's, then its drafts'."""
    request = share.request
    pending = share.num_output - len(request.output_token_ids)
    return [Row(request, ahead, pending) for ahead in range(1 + len(request.draft_token_ids))]


def mode_of(row: Row, vocab: int) -> int:
    """How a row's token is found: one of the modes of :mod:`minuet.ops.sampling.columns`."""
    params = row.params
    if params.greedy:
        return columns.LARGEST if row.is_shaped else columns.KEEP
    if 0 < params.top_k < vocab or params.top_p < 1.0 or params.min_p > 0.0:
        return columns.FILTERED
    return columns.DRAW


def parameters(rows: Sequence[Row], modes: Sequence[int], engine_seed: int) -> np.ndarray:
    """What every row wants: [R, WIDTH] int32.

    The generator's key is the request's seed, or the engine's; its counter is the place of the
    token in the output and, of the engine's, the request's number. So batches and devices do not
    matter, and a preempted request continues as it would have.
    """
    lines = np.zeros((len(rows), columns.WIDTH), np.uint32)
    floats = lines.view(np.float32)
    for line, real, row, mode in zip(lines, floats, rows, modes, strict=True):
        line[columns.MODE] = mode
        if mode == columns.KEEP:
            continue
        params, own = row.params, row.params.seed is not None
        key = (engine_seed if params.seed is None else params.seed) & _LONG
        line[columns.KEY_LOW], line[columns.KEY_HIGH] = key & _WORD, key >> 32
        line[columns.POSITION] = row.num_output & _WORD
        line[columns.STREAM] = 0 if own else row.request.arrival & _WORD
        line[columns.DOMAIN] = columns.DOMAIN_REQUEST if own else columns.DOMAIN_ENGINE
        line[columns.TOP_K] = min(params.top_k, (1 << 31) - 1)
        line[columns.TOP_P] = columns.top_p_units(params.top_p)
        real[columns.INVERSE_TEMPERATURE] = 1.0 / max(params.temperature, _SMALLEST_TEMPERATURE)
        real[columns.MIN_P] = params.min_p
        real[columns.REPETITION] = params.repetition_penalty
        real[columns.PRESENCE] = params.presence_penalty
        real[columns.FREQUENCY] = params.frequency_penalty
    return lines.view(np.int32)


def entries(rows: Sequence[Row]) -> np.ndarray:
    """Single tokens whose logits change: [N, 4] int32, see :func:`~.reference.shape`."""
    found = [_entries_of(index, row) for index, row in enumerate(rows) if row.is_shaped]
    return np.concatenate(found) if found else np.zeros((0, 4), np.int32)


def _entries_of(index: int, row: Row) -> np.ndarray:
    params, output = row.params, np.array(row.output_token_ids, np.int64)
    seen = np.zeros(0, np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([np.array(row.request.prompt_token_ids), output]))
    if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        output = output[:0]
    drawn, counts = np.unique(output, return_counts=True)
    biased = np.array(list(params.logit_bias), np.int64)
    stops = np.zeros(0, np.int64)
    if row.num_output < params.min_tokens:
        stops = np.array(sorted(row.request.stop_ids), np.int64)
    tokens = np.unique(np.concatenate([seen, drawn, biased, stops]))
    made = np.zeros((len(tokens), 4), np.int32)
    made[:, 0], made[:, 1] = index, tokens
    made[np.searchsorted(tokens, drawn), 2] = 2 * counts
    made[np.searchsorted(tokens, seen), 2] += 1
    bias = made[:, 3].view(np.float32)
    bias[np.searchsorted(tokens, biased)] = list(params.logit_bias.values())
    bias[np.searchsorted(tokens, stops)] = -np.inf
    return made


def masks(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that a grammar masks [M] int32, and what it allows [M, words] int32."""
    masked, allowed = [], []
    for index, row in enumerate(rows):
        words = row.request.grammar.allowed(row.drafts) if row.request.grammar else None
        if words is not None:
            masked.append(index)
            allowed.append(words)
    return np.array(masked, np.int32), np.array(allowed, np.int32)
