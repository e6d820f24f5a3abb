"""Logits to tokens. Every row is drawn from its own request's numbers: batch-mates do not matter.

Order, as vLLM: log-probabilities are reported of the raw logits; then bias, penalties and the
minimum length; then temperature; then top-k, top-p and min-p on the tempered distribution.

Draws are stateless: the noise of a token is seeded by (request seed, output position), so that a
preempted request continues exactly as it would have, and a seeded request repeats exactly. It also
makes verification of drafts exact: each row is drawn as if its drafts were certain, and a draft is
accepted if it is what the row before it drew.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minuet.engine.types import NOT_FINITE, Request, Sampled, SamplingParams, TokenLogprobs

# R rows, V vocabulary

_NEVER = float("-inf")
NO_TOKEN_LEFT = "no token of the vocabulary continues this answer within its grammar"


@dataclass(frozen=True, slots=True)
class Row:
    """Whose logits a row has, and which drafts it takes for granted.

    Attributes:
        request: whose.
        num_drafts: the row follows this many of the request's drafts.
    """

    request: Request
    num_drafts: int = 0

    @property
    def params(self) -> SamplingParams:
        """How the request wants its tokens drawn."""
        return self.request.params

    @property
    def num_output(self) -> int:
        """Output tokens before the one this row draws."""
        return len(self.request.output_token_ids) + self.num_drafts

    @property
    def output_token_ids(self) -> list[int]:
        """Those tokens."""
        return self.request.output_token_ids + self.request.draft_token_ids[: self.num_drafts]


def rows_of(request: Request) -> list[Row]:
    """The rows a step computes for a request that samples: its last token, then its drafts."""
    return [Row(request, ahead) for ahead in range(1 + len(request.draft_token_ids))]


def verify(request: Request, drawn: Sequence[Sampled]) -> Sampled:
    """The answer for one request from the draws of its rows.

    Args:
        request: whose drafts are judged.
        drawn: one per row of :func:`rows_of`.

    Returns:
        accepted drafts and the token after them; an error only if a row that counts has one.
    """
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


def sample(logits: Tensor, rows: Sequence[Row], engine_seed: int) -> list[Sampled]:
    """Draw one token per row.

    Args:
        logits: [R, V] float32; not written.
        rows: what each row is.
        engine_seed: used with the request's arrival number where a request brings no seed.

    Returns:
        one :class:`Sampled` per row; a row with a non-finite logit gets an error and no token.
    """
    finite = torch.isfinite(logits).all(-1)
    safe = logits if bool(finite.all()) else torch.where(finite[:, None], logits, 0.0)
    shaped = _penalise(safe, rows)
    tokens = shaped.argmax(-1)
    errors = [
        NOT_FINITE if not good else NO_TOKEN_LEFT if _is_stuck(row, shaped[index]) else ""
        for index, (row, good) in enumerate(zip(rows, finite.tolist(), strict=True))
    ]
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        picked = torch.tensor(drawn, device=logits.device)
        tokens[picked] = _draw(shaped[picked], [rows[index] for index in drawn], engine_seed)
    logprobs = _logprobs_of(safe, tokens, [row.params.logprobs for row in rows])
    return [
        Sampled(token_id=None, error=error) if error else Sampled(token_id=token, logprobs=report)
        for token, report, error in zip(tokens.tolist(), logprobs, errors, strict=True)
    ]


def _is_stuck(row: Row, logits: Tensor) -> bool:
    return row.request.grammar is not None and bool((logits == _NEVER).all())


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Log-probability of each prompt token given those before it.

    Args:
        logits: [R, V] float32 at prompt positions.
        next_ids: R token ids; the one that follows each position.
        top: alternatives to report.
    """
    reports = _logprobs_of(logits, _on(logits, next_ids), [top] * len(next_ids))
    return tuple(r for r in reports if r is not None)


# --- shaping -------------------------------------------------------------------------------------


def _penalise(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits after bias, penalties and the minimum length; the input where nobody asks for any."""
    shaped = logits
    for index, row in enumerate(rows):
        if _is_plain(row):
            continue
        if shaped is logits:
            shaped = logits.clone()
        _penalise_row(shaped[index], row)
    return shaped


def _is_plain(row: Row) -> bool:
    params = row.params
    return (
        not params.logit_bias
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and row.num_output >= params.min_tokens
        and row.request.grammar is None
    )


def _penalise_row(logits: Tensor, row: Row) -> None:
    params, output = row.params, row.output_token_ids
    if params.repetition_penalty != 1.0:
        seen = _on(logits, sorted({*row.request.prompt_token_ids, *output}))
        score, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(score > 0, score / penalty, score * penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = _on(logits, output).unique(return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    if params.logit_bias:
        logits[_on(logits, list(params.logit_bias))] += _on(
            logits, list(params.logit_bias.values())
        )
    if row.num_output < params.min_tokens and row.request.stop_ids:
        logits[_on(logits, sorted(row.request.stop_ids))] = _NEVER
    if row.request.grammar is not None:
        row.request.grammar.mask(logits, row.request.draft_token_ids[: row.num_drafts])


def _on(other: Tensor, values: Sequence[float]) -> Tensor:
    """A tensor of these values on the device of another."""
    return torch.tensor(values, device=other.device)


# --- drawing -------------------------------------------------------------------------------------


def _draw(logits: Tensor, rows: Sequence[Row], engine_seed: int) -> Tensor:
    """[R] int64 from the tempered and filtered distributions."""
    temperature = _on(logits, [row.params.temperature for row in rows])
    scaled = _filter(logits / temperature[:, None], [row.params for row in rows])
    probabilities = scaled.softmax(-1)
    # drawn on the host, so that a seed means the same on every device
    noise = torch.stack([_noise(row, engine_seed, logits.shape[1]) for row in rows])
    # argmax of p / Exp(1) is a draw from p (Gumbel-max in the linear domain)
    return (probabilities / noise.to(logits.device)).argmax(-1)


def _noise(row: Row, engine_seed: int, vocab: int) -> Tensor:
    seed = row.params.seed
    source = ("request", seed) if seed is not None else ("engine", engine_seed, row.request.arrival)
    key = repr((*source, row.num_output)).encode()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big"))
    return torch.empty(vocab).exponential_(generator=generator).clamp_(min=1e-20)


def _filter(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Top-k, then top-p of what is left, then min-p; removed tokens get -inf."""
    if not any(p.top_k or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        return logits
    vocab = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True)
    keep = _on(logits, [min(p.top_k, vocab) or vocab for p in params])
    removed = torch.arange(vocab, device=logits.device) >= keep[:, None]
    probabilities = ordered.masked_fill(removed, _NEVER).softmax(-1)
    # a token stays while the mass of the more likely ones is below top_p: the first always
    before = probabilities.cumsum(-1) - probabilities
    removed |= before >= _on(logits, [p.top_p for p in params])[:, None]
    floor = _on(logits, [p.min_p for p in params])[:, None] * probabilities[:, :1]
    removed |= probabilities < floor
    removed[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(removed, _NEVER))


# --- reporting -----------------------------------------------------------------------------------


def _logprobs_of(
    logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    rows = [row for row, top in enumerate(wanted) if top is not None]
    reports: list[TokenLogprobs | None] = [None] * len(wanted)
    if not rows:
        return reports
    picked = torch.tensor(rows, device=logits.device)
    logprobs = logits[picked].log_softmax(-1)
    mine = logprobs.gather(1, tokens[picked][:, None])
    ranks = ((logprobs > mine).sum(-1) + 1).tolist()
    most = max(top for top in wanted if top is not None)
    values, ids = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    for i, row in enumerate(rows):
        top = wanted[row] or 0
        reports[row] = TokenLogprobs(
            token_id=int(tokens[row]),
            logprob=float(mine[i]),
            rank=ranks[i],
            top=tuple(zip(ids[i, :top].tolist(), values[i, :top].tolist(), strict=True)),
        )
    return reports
