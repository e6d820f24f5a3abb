"""Logits to tokens. Every row is drawn from its own request's numbers: batch-mates do not matter.

Order, as vLLM: log-probabilities are reported of the raw logits; then penalties, bias and the
minimum length, then the grammar; then temperature; then top-k, top-p and min-p on the tempered
distribution.

Draws are stateless: the noise of a token is a function of (request seed, output position, token),
so that a preempted request continues exactly as it would have, and a seeded request repeats
exactly. It also makes verification of drafts exact: each row is drawn as if its drafts were
certain, and a draft is accepted if it is what the row before it drew.

:func:`draw` queues all of it on the device and returns; nothing in it waits. The tokens stay there
for the next step, and a copy of them comes back meanwhile.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minuet.engine import rows as row_data
from minuet.engine.rows import Row, rows_of, wants_of
from minuet.engine.types import NOT_FINITE, Request, Sampled, SamplingParams, TokenLogprobs
from minuet.errors import ContractError
from minuet.ops.sampling import columns
from minuet.ops.sampling.reference import Report
from minuet.ops.sampling.sizes import ENTRIES, PIECE
from minuet.platform.arch import ARCHS
from minuet.platform.device import Facility, facility
from minuet.platform.triton import arch_name

__all__ = [
    "NO_TOKEN_LEFT", "Drawn", "PromptPiece", "PromptReports", "Row", "draw", "greedy",
    "prompt_logprobs", "rehearse", "rows_of", "sample", "verify",
]  # fmt: skip

# R rows, V vocabulary

NO_TOKEN_LEFT = "no token of the vocabulary continues this answer within its grammar"
_FORMS = {
    "reference": "minuet.ops.sampling.reference",
    "triton": "minuet.ops.triton.sampling",
}
_ALIGNED = 4  # int32; kernels are compiled for pointers to 16 bytes
_PIECES = 4


@functools.cache
def _form(device: torch.device) -> Any:
    """The functions of :mod:`minuet.ops.sampling.reference` in the form for a device."""
    return importlib.import_module(_FORMS[ARCHS[arch_name(device)].ops])


@functools.cache
def _desk(device: torch.device) -> "_Desk":
    return _Desk(facility(device))


class _Desk:
    """Pinned memory for what goes to a device: one piece is filled while others are on their way.

    Args:
        device: where to.
    """

    def __init__(self, device: Facility):
        self.device = device
        self._pieces = [
            (device.staging(PIECE, torch.int32), device.event()) for _ in range(_PIECES)
        ]
        self._turn = 0

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        """Arrays of int32 on the device, by one copy that nobody waits for.

        Raises:
            ContractError: more than a piece holds.
        """
        sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
        total = sum(sizes)
        if total > PIECE:
            raise ContractError("parameters of a draw", got=total, expected=f"<= {PIECE} int32")
        self._turn = (self._turn + 1) % _PIECES
        host, event = self._pieces[self._turn]
        if not event.query():  # it was sent several copies ago
            event.synchronize()
        memory, firsts, first = host.numpy(), [], 0
        for array, size in zip(arrays, sizes, strict=True):
            memory[first : first + array.size] = array.reshape(-1)
            firsts.append(first)
            first += size
        there = torch.empty(total, dtype=torch.int32, device=self.device.device)
        there.copy_(host[:total], non_blocking=True)
        event.record()
        return [
            there[at : at + array.size].view(array.shape)
            for at, array in zip(firsts, arrays, strict=True)
        ]


class _Fetched:
    """Tensors on their way to the host: small ones, to one piece of its memory."""

    def __init__(self, device: Facility, tensors: dict[str, Tensor]):
        sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()]
        memory = device.staging(sum(sizes), torch.uint8)
        self._host: dict[str, Tensor] = {}
        first = 0
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            host = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._host[name] = host.copy_(tensor, non_blocking=True)
            first += size
        self._event = device.event()
        self._event.record()

    @property
    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> dict[str, Tensor]:
        self._event.synchronize()
        return self._host


class Drawn:
    """What a step draws: tokens on the device at once, results on the host when they have come.

    Attributes:
        tokens: [R] int64 on the device, for what is queued before the next draw; some token where
            a row has an error.
    """

    def __init__(self, rows: Sequence[Row], tokens: Tensor, fetched: _Fetched):
        self.tokens = tokens
        self._rows, self._fetched = rows, fetched

    @property
    def done(self) -> bool:
        """Whether :meth:`results` would not wait."""
        return self._fetched.done

    def results(self) -> list[Sampled]:
        """One per row, when the device has drawn them; a row with an error has no token."""
        host = self._fetched.wait()
        tokens, finite = host["tokens"].tolist(), host["finite"].tolist()
        if len(host) == 2 and all(finite):
            return [Sampled(token) for token in tokens]
        stuck = host["stuck"].tolist() if "stuck" in host else [False] * len(tokens)
        reports = _reports(host, tokens, [row.params.logprobs for row in self._rows])
        results = []
        for index, row in enumerate(self._rows):
            error = "" if finite[index] else NOT_FINITE
            if not error and stuck[index] and row.request.grammar is not None:
                error = NO_TOKEN_LEFT
            if error:
                results.append(Sampled(None, error=error))
            else:
                results.append(Sampled(tokens[index], reports[index]))
        return results


def sample(logits: Tensor, rows: Sequence[Row], engine_seed: int) -> list[Sampled]:
    """Draw one token per row and wait for it: :func:`draw` and its results."""
    return draw(logits, rows, engine_seed).results()


def greedy(logits: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The most likely tokens, in the form for the device; a graph can capture it.

    Args:
        logits: [R, V] float32.
        out: where to write what is returned; None: new tensors.

    Returns:
        tokens [R] int64, the lowest id of equal ones, and finite [R] bool: whether every logit of
        the row is a finite number.
    """
    found: tuple[Tensor, Tensor] = _form(logits.device).greedy(logits, out)
    return found


def draw(
    logits: Tensor,
    rows: Sequence[Row],
    engine_seed: int,
    greedy: tuple[Tensor, Tensor] | None = None,
) -> Drawn:
    """Queue the draw of one token per row; nothing waits for the device.

    Args:
        logits: [R, V] float32; not written.
        rows: what each row is.
        engine_seed: used with the request's arrival number where a request brings no seed.
        greedy: what :func:`greedy` gave for these logits, if it is there already.

    Returns:
        the tokens, and results to come; a row with a non-finite logit gets an error and no token.
    """
    form, desk = _form(logits.device), _desk(logits.device)
    tokens, finite = greedy if greedy is not None else form.greedy(logits)
    wants = [wants_of(row.request.params) for row in rows]
    back = {"finite": finite}
    if not all(
        one.plain and row.request.grammar is None for one, row in zip(wants, rows, strict=True)
    ):
        modes = [row.mode for row in rows]
        used = frozenset(modes) - {columns.KEEP}
        if used:
            tokens = tokens.clone()  # the caller's may belong to a graph
            back["stuck"] = torch.zeros(len(rows), dtype=torch.bool, device=logits.device)
            (params,) = desk.send(row_data.parameters(rows, modes, engine_seed))
            shaped = _shaped(form, desk, logits, rows, params)
            form.draw(shaped, params, tokens, back["stuck"], used)
        most = max(one.logprobs for one in wants)
        if most >= 0:
            (tops,) = desk.send(np.array([one.logprobs for one in wants], np.int32))
            back |= _parts(form.report(logits, tokens, tops, min(most, logits.shape[1])))
    return Drawn(rows, tokens, _Fetched(desk.device, {"tokens": tokens, **back}))


def verify(request: Request, drawn: Sequence[Sampled]) -> Sampled:
    """The answer for one request from the draws of its rows.

    Args:
        request: whose drafts are judged.
        drawn: one per row of :func:`rows_of`.

    Returns:
        accepted drafts and the token after them; an error only if a row that counts has one.
    """
    if not request.draft_token_ids:
        (only,) = drawn
        return only
    for accepted, (result, draft) in enumerate(
        zip(drawn, [*request.draft_token_ids, None], strict=True)
    ):
        if result.error or result.token_id != draft:
            reports = tuple(r.logprobs for r in drawn[:accepted])
            return Sampled(
                result.token_id,
                result.logprobs,
                error=result.error,
                num_accepted=accepted,
                accepted_logprobs=reports,
            )
    raise AssertionError("the last row has no draft to equal")


class PromptPiece(NamedTuple):
    """Some positions of a prompt whose log-probabilities are wanted.

    Attributes:
        logits: computes [R, V] float32 at these positions; called once, in the order of the pieces.
        next_ids: R token ids; the one that follows each position.
        top: alternatives to report.
    """

    logits: Callable[[], Tensor]
    next_ids: Sequence[int]
    top: int


class PromptReports:
    """Log-probabilities of prompt tokens: queued on the device, on the host when they have come."""

    def __init__(self, pieces: Sequence[PromptPiece], fetched: _Fetched):
        # not the pieces: what they compute their logits from is as large as the step
        self._wanted = [(piece.next_ids, piece.top) for piece in pieces]
        self._fetched = fetched

    @property
    def done(self) -> bool:
        """Whether :meth:`results` would not wait."""
        return self._fetched.done

    def results(self) -> list[TokenLogprobs]:
        """Of every position of every piece, in order."""
        host, found = self._fetched.wait(), []
        for number, (next_ids, top) in enumerate(self._wanted):
            mine = {name: host[f"{name} {number}"] for name in _REPORTED}
            found += _reports(mine, next_ids, [top] * len(next_ids))
        return [report for report in found if report is not None]


def prompt_logprobs(pieces: Sequence[PromptPiece], device: torch.device) -> PromptReports:
    """Queue the log-probability of each prompt token given those before it; nothing waits.

    Args:
        pieces: at least one.
        device: where their logits will be.
    """
    form, desk = _form(device), _desk(device)
    back: dict[str, Tensor] = {}
    for first, group in _sendable(pieces):
        arrays = [np.array(piece.next_ids, np.int64).view(np.int32) for piece in group]
        arrays += [np.full(len(piece.next_ids), piece.top, np.int32) for piece in group]
        sent = desk.send(*arrays)
        for place, piece in enumerate(group):
            ids, tops, logits = sent[place], sent[len(group) + place], piece.logits()
            report = form.report(
                logits, ids.view(torch.int64), tops, min(piece.top, logits.shape[1])
            )
            for name, tensor in _parts(report).items():
                back[f"{name} {first + place}"] = tensor
    return PromptReports(pieces, _Fetched(desk.device, back))


def _sendable(pieces: Sequence[PromptPiece]) -> Iterator[tuple[int, Sequence[PromptPiece]]]:
    """Pieces that one copy holds, and the number of the first."""
    first, size = 0, 0
    for number, piece in enumerate(pieces):
        more = 3 * len(piece.next_ids) + 2 * _ALIGNED
        if size + more > PIECE and number > first:
            yield first, pieces[first:number]
            first, size = number, 0
        size += more
    yield first, pieces[first:]


# --- on the way to the device --------------------------------------------------------------------


def _shaped(form: Any, desk: _Desk, logits: Tensor, rows: Sequence[Row], params: Tensor) -> Tensor:
    """Logits after penalties, bias, minimum length and grammar; the input where nobody asks."""
    if not any(row.is_shaped for row in rows):
        return logits
    shaped = logits.clone()
    changes = row_data.entries(rows)
    for first in range(0, len(changes), ENTRIES):
        (part,) = desk.send(changes[first : first + ENTRIES])
        form.shape(shaped, params, part)
    masked, allowed = row_data.masks(rows)
    many = PIECE // (allowed.shape[1] + 2 * _ALIGNED) if len(masked) else 1
    for first in range(0, len(masked), many):
        form.mask(shaped, *desk.send(masked[first : first + many], allowed[first : first + many]))
    return shaped


# --- on the way back -----------------------------------------------------------------------------


_REPORTED = tuple(field.name for field in fields(Report))


def _parts(report: Report) -> dict[str, Tensor]:
    return {name: getattr(report, name) for name in _REPORTED}


def _reports(
    host: dict[str, Tensor], tokens: Sequence[int], wanted: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """What came back of log-probabilities; None where a row wants none."""
    if "rank" not in host:
        return [None] * len(wanted)
    ranks, logprobs = host["rank"].tolist(), host["logprob"].tolist()
    ids, values = host["top_ids"].tolist(), host["top_logprobs"].tolist()
    return [
        None
        if top is None
        else TokenLogprobs(
            token_id=tokens[i],
            logprob=logprobs[i],
            rank=ranks[i],
            top=tuple(zip(ids[i][:top], values[i][:top], strict=True)),
        )
        for i, top in enumerate(wanted)
    ]


# --- before ready --------------------------------------------------------------------------------


class _AnythingGoes:
    """A grammar that allows every token."""

    def __init__(self, vocab: int):
        self._words = np.full(-(-vocab // 32), -1, np.int32)

    def allowed(self, ahead: Sequence[int] = ()) -> np.ndarray:
        return self._words

    def accept(self, token_id: int) -> bool:
        return True


def rehearse(max_rows: int, vocab: int, max_logprobs: int, device: torch.device) -> None:
    """Meet every kernel once, at the most rows: later draws compile nothing and take no memory.

    Args:
        max_rows: rows of the largest step.
        vocab: columns of the logits.
        max_logprobs: alternatives a request may ask for.
        device: where the logits will be.
    """
    logits = torch.zeros(max_rows, vocab, device=device)
    kinds = (
        SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=max_logprobs),
        SamplingParams(logprobs=max_logprobs),
        SamplingParams(top_p=0.5, logprobs=max_logprobs),
    )
    requests = [
        Request("", (0,), kind, 0, output_token_ids=[0], grammar=_AnythingGoes(vocab))
        for kind in kinds
    ]
    found = greedy(logits)
    # a whole piece is there too when long answers have penalties, and the draw of the step before
    held: list[Any] = _desk(device).send(np.zeros(PIECE, np.int32))
    for turn in range(len(kinds)):
        rows = [Row(requests[(turn + i) % len(kinds)]) for i in range(max_rows)]
        held.append(draw(logits, rows, 0, greedy=found))
        # a row alone is searched by many programs, many rows by one each: another kernel
        held.append(draw(logits[:1], rows[:1], 0))
    for drawn in held[1:]:
        drawn.results()
    whole = PromptPiece(lambda: logits, [0] * max_rows, max_logprobs)
    prompt_logprobs([whole], device).results()
