"""Top-k, top-p and min-p with a draw from what they leave, without sorting the row.

The kept tokens are the first of one order, so they are usually among few candidates: those at least
as large as a pivot. The pivot is one of the larger maxima of groups of tokens, of which many lie
above it. If the candidates hold the end of the kept set, all is decided among them, sorted.
Otherwise the end is searched for in the row, bit by bit: slower, as exact.
"""

import triton
import triton.language as tl

from minuet.ops.sampling import columns
from minuet.ops.triton.kernels.sampling import (
    INVERSE_TEMPERATURE,
    MODE,
    NEVER,
    NOTHING,
    WIDTH,
    candidate,
    noise_of_tile,
    noise_of_tokens,
    number_of,
    order_of,
    parameter,
    token_of,
)

FILTERED = tl.constexpr(columns.FILTERED)
TOP_K = tl.constexpr(columns.TOP_K)
TOP_P = tl.constexpr(columns.TOP_P)
MIN_P = tl.constexpr(columns.MIN_P)
TOP_P_BITS = tl.constexpr(columns.TOP_P_BITS)
TOP_P_OFF = tl.constexpr(columns.TOP_P_OFF)
UNIT = tl.constexpr(2.0**columns.WEIGHT_BITS)
_LOWEST = tl.constexpr(-0x7F800001)  # what -inf sorts as
_MANY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
# int64 of a row's state
COUNT, TOTAL, ALIVE, EDGES, STATE = (tl.constexpr(i) for i in (0, 1, 2, 3, 4))


@triton.jit
def share_of(x, top, inverse):
    """exp((x - top) / temperature); 0 for -inf, and for NaN."""
    return tl.where(x > NEVER, tl.exp((x - top) * inverse), 0.0)


@triton.jit
def group_maxima(
    logits_ptr,  # [R, V] FP32
    stride,
    vocab,
    groups,
    depth,  # tokens of the largest group
    params_ptr,
    maxima_ptr,  # [R, groups] FP32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The largest logit of each group; token ``t`` is in group ``t mod groups``."""
    row = tl.program_id(0)
    if tl.load(params_ptr + row * WIDTH + MODE) == FILTERED:
        base = logits_ptr + row.to(tl.int64) * stride
        group = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        best = tl.full([ROWS, COLUMNS], NEVER, tl.float32)
        for first in range(0, depth, ROWS):
            token = (first + tl.arange(0, ROWS))[:, None] * groups + group[None, :]
            x = tl.load(base + token, mask=token < vocab, other=NEVER)
            best = tl.maximum(best, x)
        tl.store(maxima_ptr + row * groups + group, tl.max(best, 0))


@triton.jit(do_not_specialize=["wanted"])
def choose_pivot(
    maxima_ptr,  # [R, groups] FP32
    groups,
    wanted,  # groups whose maximum is to be at least the pivot; 0: every token is a candidate
    params_ptr,
    state_ptr,  # [R, STATE] int64; zero
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
):
    """The row's largest logit, and a pivot close below the ``wanted``-th largest maximum."""
    row = tl.program_id(0)
    if tl.load(params_ptr + row * WIDTH + MODE) == FILTERED:
        group = tl.arange(0, GROUPS)
        inside = group < groups
        x = tl.load(maxima_ptr + row * groups + group, mask=inside, other=NEVER)
        order = tl.where(inside, order_of(x), _LOWEST)
        top = tl.max(order, 0).to(tl.int64)
        low = tl.full([], _LOWEST, tl.int64)
        if wanted > 0:
            high = top
            for _ in range(BITS):
                middle = low + (high - low + 1) // 2
                enough = tl.sum((order >= middle.to(tl.int32)).to(tl.int32), 0) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, tl.maximum(middle - 1, low))
        tl.store(state_ptr + row * STATE + EDGES, (top << 32) | (low & 0xFFFFFFFF))


@triton.jit
def edges(state_ptr, row):
    """(largest logit, pivot's order) of a row."""
    both = tl.load(state_ptr + row * STATE + EDGES)
    return number_of((both >> 32).to(tl.int32)), both.to(tl.int32)


@triton.jit
def collect_candidates(
    logits_ptr,  # [R, V] FP32
    stride,
    vocab,
    params_ptr,
    state_ptr,  # [R, STATE] int64
    list_ptr,  # [R, LIST] int64
    TILE: tl.constexpr,
    LIST: tl.constexpr,
):
    """List the candidates in any order, and sum the weights of the row."""
    row = tl.program_id(0)
    if tl.load(params_ptr + row * WIDTH + MODE) == FILTERED:
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        base = logits_ptr + row.to(tl.int64) * stride
        x = tl.load(base + token, mask=token < vocab, other=NEVER)
        top, pivot = edges(state_ptr, row)
        inverse = parameter(params_ptr, row, INVERSE_TEMPERATURE)
        weight = (share_of(x, top, inverse) * UNIT).to(tl.int64)
        possible = x > NEVER
        at = state_ptr + row * STATE
        tl.atomic_add(at + TOTAL, tl.sum(weight, 0), sem="relaxed")
        tl.atomic_add(at + ALIVE, tl.sum(possible.to(tl.int64), 0), sem="relaxed")
        chosen = possible & (order_of(x) >= pivot)
        flags = chosen.to(tl.int32)
        many = tl.sum(flags, 0)
        if many > 0:
            first = tl.atomic_add(at + COUNT, many.to(tl.int64), sem="relaxed")
            place = first + tl.cumsum(flags, 0) - 1
            here = list_ptr + row.to(tl.int64) * LIST + place
            tl.store(here, candidate(x, token, 0), mask=chosen & (place < LIST))


@triton.jit
def limit_of(total, units):
    """The weight before which a token is kept by top-p."""
    limit = tl.maximum(((total >> 16) * units) >> (TOP_P_BITS - 16), 1)
    return tl.where(units == TOP_P_OFF, _MANY, limit)


@triton.jit
def draw_filtered(
    logits_ptr,  # [R, V] FP32
    stride,
    vocab,
    params_ptr,
    state_ptr,  # [R, STATE] int64
    list_ptr,  # [R, LIST] int64
    tokens_ptr,  # [R] int64
    stuck_ptr,  # [R] uint8
    TILE: tl.constexpr,
    LIST: tl.constexpr,
):
    """Find the kept set of a row and draw from it."""
    row = tl.program_id(0)
    if tl.load(params_ptr + row * WIDTH + MODE) == FILTERED:
        at = state_ptr + row * STATE
        count, total, alive = tl.load(at + COUNT), tl.load(at + TOTAL), tl.load(at + ALIVE)
        top, _ = edges(state_ptr, row)
        inverse = parameter(params_ptr, row, INVERSE_TEMPERATURE)
        least = parameter(params_ptr, row, MIN_P)
        units = tl.load(params_ptr + row * WIDTH + TOP_P).to(tl.int64)
        k = tl.load(params_ptr + row * WIDTH + TOP_K).to(tl.int64)
        k = tl.where((k == 0) | (k > alive), alive, k)
        # until shown otherwise: the candidates are too many, or too few
        decided = count < 0
        key = tl.full([LIST], NOTHING, tl.int64)
        slot = tl.arange(0, LIST)
        keep = slot < 0
        if count <= LIST:
            key = tl.load(
                list_ptr + row.to(tl.int64) * LIST + slot, mask=slot < count, other=NOTHING
            )
            key = tl.sort(key, descending=True)
            x = number_of((key >> 32).to(tl.int32))
            share = tl.where(slot < count, share_of(x, top, inverse), 0.0)
            weight = (share * UNIT).to(tl.int64)
            if k < alive:
                total = tl.sum(tl.where(slot < k, weight, 0), 0)
            before = tl.cumsum(weight, 0) - weight
            keep = (slot < tl.minimum(k, count)) & (before < limit_of(total, units))
            keep = keep & (share >= least)
            kept = tl.sum(keep.to(tl.int64), 0)
            everything = count == alive
            decided = everything | ((k <= count) | (k == alive)) & ((kept < count) | (k == kept))
        if decided:
            token = token_of(key)
            x = number_of((key >> 32).to(tl.int32))
            score = x * inverse + noise_of_tokens(params_ptr, row, token)
            best = tl.max(candidate(tl.where(keep, score, NEVER), token, 0), 0)
        else:
            best = _draw_from_row(
                logits_ptr + row.to(tl.int64) * stride, vocab, params_ptr, row, top, inverse,
                least, k, alive, units, tl.load(at + TOTAL), TILE,
            )  # fmt: skip
        tl.store(tokens_ptr + row, tl.where(alive > 0, token_of(best), 0).to(tl.int64))
        tl.store(stuck_ptr + row, (alive == 0).to(tl.uint8))


@triton.jit
def _draw_from_row(
    base, vocab, params_ptr, row, top, inverse, least, k, alive, units, total, TILE: tl.constexpr
):  # fmt: skip
    """The best candidate of a row whose kept set ends outside the list."""
    k_class = tl.full([], _LOWEST, tl.int32)
    k_id = tl.full([], 0x7FFFFFFF, tl.int32)
    if k < alive:
        k_class, k_id, total = _end_of(base, vocab, top, inverse, k, False, TILE)
    p_class = tl.full([], _LOWEST, tl.int32)
    p_id = tl.full([], 0x7FFFFFFF, tl.int32)
    if units != TOP_P_OFF:
        limit = limit_of(total, units)
        p_class, p_id, total = _end_of(base, vocab, top, inverse, limit, True, TILE)
    best = tl.full([TILE], NOTHING, tl.int64)
    for first in range(0, vocab, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < vocab, other=NEVER)
        order = order_of(x)
        keep = (order > k_class) | (order == k_class) & (token <= k_id)
        keep = keep & ((order > p_class) | (order == p_class) & (token <= p_id))
        keep = keep & (share_of(x, top, inverse) >= least) & (x > NEVER)
        score = x * inverse + noise_of_tile(params_ptr, row, first, TILE)
        best = tl.maximum(best, candidate(tl.where(keep, score, NEVER), token, 0))
    return tl.max(best, 0)


@triton.jit
def _end_of(base, vocab, top, inverse, limit, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """Where a kept set ends: its last class of equal logits, and the last id kept of that class.

    A token is kept while what comes before it, tokens or their weight, is below ``limit``. So the
    last class is the lowest with less than ``limit`` above it.

    Returns:
        the class as an order, the last id kept, and the weight of all that is kept.
    """
    low = tl.full([], _LOWEST, tl.int64)
    high = order_of(top).to(tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        above, weight = _sums(base, vocab, top, inverse, middle.to(tl.int32), BY_WEIGHT, TILE)
        before = above
        if BY_WEIGHT:
            before = weight
        fits = before < limit
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    last = low.to(tl.int32)
    above, weight = _sums(base, vocab, top, inverse, last, True, TILE)
    each = (share_of(number_of(last), top, inverse) * UNIT).to(tl.int64)
    # the lowest ids of the class until the limit is reached, or all of them
    left = limit - above
    step = tl.full([], 1, tl.int64)
    if BY_WEIGHT:
        left = limit - weight
        step = each
    low_id = tl.full([], 0, tl.int32)
    high_id = tl.zeros([], tl.int32) + vocab
    while low_id < high_id:
        middle_id = (low_id + high_id) // 2
        short = _members(base, vocab, last, middle_id, TILE) * step < left
        low_id = tl.where(short, middle_id + 1, low_id)
        high_id = tl.where(short, high_id, middle_id)
    return last, low_id, weight + _members(base, vocab, last, low_id, TILE) * each


@triton.jit
def _sums(base, vocab, top, inverse, order, WEIGHTS: tl.constexpr, TILE: tl.constexpr):
    """Tokens of an order above ``order``, and their weight."""
    above = tl.zeros([TILE], tl.int32)
    weight = tl.zeros([TILE], tl.int64)
    for first in range(0, vocab, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < vocab, other=NEVER)
        higher = (order_of(x) > order) & (x > NEVER)
        above += higher.to(tl.int32)
        if WEIGHTS:
            weight += tl.where(higher, (share_of(x, top, inverse) * UNIT).to(tl.int64), 0)
    return tl.sum(above, 0).to(tl.int64), tl.sum(weight, 0)


@triton.jit
def _members(base, vocab, order, last_id, TILE: tl.constexpr):
    """Tokens of exactly this order with an id of at most ``last_id``."""
    found = tl.zeros([TILE], tl.int32)
    for first in range(0, vocab, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < vocab, other=NEVER)
        here = (token < vocab) & (order_of(x) == order) & (token <= last_id)
        found += here.to(tl.int32)
    return tl.sum(found, 0).to(tl.int64)
