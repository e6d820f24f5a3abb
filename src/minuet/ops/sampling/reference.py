"""What sampling means, in plain torch. Rows are independent; nothing depends on sizes or devices.

A draw is an argmax: ``x / temperature + noise`` with Gumbel noise is largest at a token with the
probability that softmax gives it (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). The noise of
a token is a function of the row's seed, its position and the token (:mod:`.philox`).

Filters keep the first tokens of one order: larger logit first, of equal ones the lower id. Sums of
probabilities are sums of integer weights, so no result depends on the order of a summation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minuet.ops.sampling import columns
from minuet.ops.sampling.philox import words_of_tokens

# R rows, V vocabulary, N entries

_NEVER = float("-inf")
_SERIES_BELOW = 2.0**-6


@dataclass(frozen=True, slots=True)
class Report:
    """Log-probabilities of the rows that asked for them; other rows are undefined.

    Attributes:
        logprob: [R] float32, of the row's token.
        rank: [R] int32, 1 for the most likely token.
        top_ids: [R, most] int32, best first, of equal ones the lower id.
        top_logprobs: [R, most] float32.
    """

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def greedy(logits: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The most likely tokens.

    Args:
        logits: [R, V] float32.
        out: where to write what is returned; None: new tensors.

    Returns:
        tokens [R] int64, the lowest id of equal ones, and finite [R] bool: whether every logit of
        the row is a finite number. The token of a row that is not finite is some token.
    """
    finite = torch.isfinite(logits).all(-1)
    safe = torch.where(torch.isnan(logits), _NEVER, logits)
    # torch promises no order among equal ones: look for the first
    first = (safe == safe.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)
    return (first, finite) if out is None else (out[0].copy_(first), out[1].copy_(finite))


def mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """Set what a grammar does not allow to -inf.

    Args:
        logits: [R, V] float32; written.
        rows: [M] int32, different rows.
        allowed: [M, words] int32; bit ``t % 32`` of word ``t // 32`` allows token ``t``.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (allowed[:, :, None] >> shifts) & 1
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    chosen = rows.long()
    logits[chosen] = torch.where(banned, _NEVER, logits[chosen])


def shape(logits: Tensor, params: Tensor, entries: Tensor) -> None:
    """Repetition, frequency and presence penalty, then bias, of single tokens.

    Args:
        logits: [R, V] float32; written.
        params: [R, WIDTH] int32, see :mod:`.columns`.
        entries: [N, 4] int32, each (row, token) once: row, token, twice the occurrences in the
            output plus one if the token is in prompt or output, and the bits of the bias. Tokens
            beyond V are passed over: an end of sequence need not be in the vocabulary of a slice.
    """
    entries = entries[entries[:, 1] < logits.shape[1]]
    rows, tokens, counts = entries[:, 0].long(), entries[:, 1].long(), entries[:, 2]
    bias = entries[:, 3].contiguous().view(torch.float32)
    repetition, presence, frequency = (
        _floats(params, column)[rows]
        for column in (columns.REPETITION, columns.PRESENCE, columns.FREQUENCY)
    )
    score = logits[rows, tokens]
    repeated = torch.where(score > 0, score / repetition, score * repetition)
    score = torch.where((counts & 1) == 1, repeated, score)
    occurrences = counts >> 1
    penalty = frequency * occurrences + presence
    score = torch.where(occurrences > 0, score - penalty, score)
    logits[rows, tokens] = score + bias


def draw(
    logits: Tensor, params: Tensor, tokens: Tensor, stuck: Tensor, modes: frozenset[int]
) -> None:
    """One token per row, as its parameters say.

    Args:
        logits: [R, V] float32, shaped.
        params: [R, WIDTH] int32, see :mod:`.columns`.
        tokens: [R] int64; written where the mode is not KEEP.
        stuck: [R] bool; likewise: no token is possible.
        modes: those that occur; no others are looked for.
    """
    mode = params[:, columns.MODE]
    for one in sorted(modes - {columns.KEEP}):
        rows = (mode == one).nonzero()[:, 0]
        x, lines = logits[rows], params[rows]
        possible = x > _NEVER
        score = x
        if one != columns.LARGEST:
            keep = filtered(x, lines) if one == columns.FILTERED else possible
            inverse = _floats(lines, columns.INVERSE_TEMPERATURE)[:, None]
            score = torch.where(keep, x * inverse + noise(lines, x.shape[1]), _NEVER)
        tokens[rows] = greedy(score)[0]
        stuck[rows] = ~possible.any(-1)


def noise(params: Tensor, vocab: int) -> Tensor:
    """Gumbel noise of every token: [R, vocab] float32."""
    counters = [
        columns.KEY_LOW, columns.KEY_HIGH, columns.POSITION, columns.STREAM, columns.DOMAIN,
    ]  # fmt: skip
    words = words_of_tokens(params[:, counters].long(), vocab)
    u = words.float() * 2.0**-32 + 2.0**-33
    u = u.clamp(max=1 - 2.0**-24)
    # an exponential variate, -log(1 - u); the series where 1 - u would lose the digits of u
    small = u * (1 + u * (0.5 + u * (1 / 3)))
    return -torch.where(u < _SERIES_BELOW, small, -torch.log(1 - u)).log()


def weights(logits: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    """exp((x - max) / temperature): [R, V] float32, and as int64 in units of 2 ** -40."""
    top = logits.amax(-1, keepdim=True)
    inverse = _floats(params, columns.INVERSE_TEMPERATURE)[:, None]
    share = torch.where(logits > _NEVER, ((logits - top) * inverse).exp(), 0.0)
    return share, (share * 2.0**columns.WEIGHT_BITS).long()


def filtered(logits: Tensor, params: Tensor) -> Tensor:
    """Which tokens the filters keep: [R, V] bool. Top-k, top-p of what is left, min-p.

    In the order of the module: top-k keeps the first k; top-p a token while the weight of those
    before it is below p of what top-k kept; min-p those at least so likely, relative to the first.
    The first token is always kept. ``p`` counts in units of 2 ** -20, rounded down.
    """
    possible = logits > _NEVER
    share, weight = weights(logits, params)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    share, weight = share.gather(1, order), weight.gather(1, order)
    alive = possible.sum(-1, keepdim=True)
    k = params[:, columns.TOP_K, None].long()
    k = torch.where((k == 0) | (k > alive), alive, k)
    keep = torch.arange(logits.shape[1], device=logits.device) < k
    total = torch.where(keep, weight, 0).sum(-1, keepdim=True)
    units = params[:, columns.TOP_P, None].long()
    # total is below 2 ** 58: shifted first, the product fits
    limit = ((total >> 16) * units) >> (columns.TOP_P_BITS - 16)
    before = weight.cumsum(-1) - weight
    keep &= (units == columns.TOP_P_OFF) | (before < limit.clamp(min=1))
    keep &= share >= _floats(params, columns.MIN_P)[:, None]
    return torch.zeros_like(possible).scatter_(1, order, keep) & possible


def report(logits: Tensor, tokens: Tensor, wanted: Tensor, most: int) -> Report:
    """Log-probabilities of tokens and of the best ones.

    Args:
        logits: [R, V] float32, raw.
        tokens: [R] int64.
        wanted: [R] int32, alternatives of each row; -1: nothing.
        most: the largest of them.
    """
    logprobs = logits.log_softmax(-1)
    mine = tokens[:, None]
    rank = (logits > logits.gather(1, mine)).sum(-1) + 1
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :most]
    return Report(logprobs.gather(1, mine)[:, 0], rank.int(), ids.int(), logprobs.gather(1, ids))


def _floats(params: Tensor, column: int) -> Tensor:
    """[R] float32 of a column of bits."""
    return params[:, column].contiguous().view(torch.float32)
