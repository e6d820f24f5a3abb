"""Top-k, top-p and min-p with a draw from what they leave, without sorting the row.

The kept tokens are the first of one order, so they are usually among few candidates: those at least
as large as a pivot. The pivot is one of the larger maxima of groups of tokens, of which many lie
above it. If the candidates hold the end of the kept set, all is decided among them, sorted.
Otherwise the end is searched for in the row, by halving: slower, as exact.
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
DECIDED = tl.constexpr(-1)
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
def kept_at_most(params_ptr, row, alive):
    """Tokens that top-k keeps of those that are possible."""
    k = tl.load(params_ptr + row * WIDTH + TOP_K).to(tl.int64)
    return tl.where((k == 0) | (k > alive), alive, k)


@triton.jit
def draw_listed(
    params_ptr,
    state_ptr,  # [R, STATE] int64
    list_ptr,  # [R, LIST] int64
    tokens_ptr,  # [R] int64
    stuck_ptr,  # [R] uint8
    LIST: tl.constexpr,
):
    """Draw from the kept set of a row if it ends among the candidates; COUNT tells that it did."""
    row = tl.program_id(0)
    if tl.load(params_ptr + row * WIDTH + MODE) == FILTERED:
        at = state_ptr + row * STATE
        count, total, alive = tl.load(at + COUNT), tl.load(at + TOTAL), tl.load(at + ALIVE)
        k = kept_at_most(params_ptr, row, alive)
        if count <= LIST:
            top, _ = edges(state_ptr, row)
            inverse = parameter(params_ptr, row, INVERSE_TEMPERATURE)
            slot = tl.arange(0, LIST)
            listed = list_ptr + row.to(tl.int64) * LIST + slot
            key = tl.sort(tl.load(listed, mask=slot < count, other=NOTHING), descending=True)
            x = number_of((key >> 32).to(tl.int32))
            share = tl.where(slot < count, share_of(x, top, inverse), 0.0)
            weight = (share * UNIT).to(tl.int64)
            if k < alive:
                total = tl.sum(tl.where(slot < k, weight, 0), 0)
            units = tl.load(params_ptr + row * WIDTH + TOP_P).to(tl.int64)
            before = tl.cumsum(weight, 0) - weight
            keep = (slot < tl.minimum(k, count)) & (before < limit_of(total, units))
            keep = keep & (share >= parameter(params_ptr, row, MIN_P))
            kept = tl.sum(keep.to(tl.int64), 0)
            # the weight that top-p divides is known, and the first token that is not kept is seen
            known = (k <= count) | (k == alive)
            if (count == alive) | (known & ((kept < count) | (kept == k))):
                token = token_of(key)
                score = x * inverse + noise_of_tokens(params_ptr, row, token)
                best = tl.max(candidate(tl.where(keep, score, NEVER), token, 0), 0)
                tl.store(tokens_ptr + row, tl.where(alive > 0, token_of(best), 0).to(tl.int64))
                tl.store(at + COUNT, DECIDED)
        tl.store(stuck_ptr + row, (alive == 0).to(tl.uint8))


@triton.jit
def draw_searched(
    logits_ptr,  # [R, V] FP32
    stride,
    vocab,
    params_ptr,
    state_ptr,  # [R, STATE] int64
    list_ptr,  # [R, LIST] int64; written
    tokens_ptr,  # [R] int64
    TILE: tl.constexpr,
    LIST: tl.constexpr,
):
    """Find the end of the kept set in a row, where :func:`draw_listed` did not, and draw."""
    row = tl.program_id(0)
    at = state_ptr + row * STATE
    mode = tl.load(params_ptr + row * WIDTH + MODE)
    if (mode == FILTERED) & (tl.load(at + COUNT) != DECIDED):
        total, alive = tl.load(at + TOTAL), tl.load(at + ALIVE)
        base = logits_ptr + row.to(tl.int64) * stride
        room = list_ptr + row.to(tl.int64) * LIST
        top, _ = edges(state_ptr, row)
        inverse = parameter(params_ptr, row, INVERSE_TEMPERATURE)
        k = kept_at_most(params_ptr, row, alive)
        units = tl.load(params_ptr + row * WIDTH + TOP_P).to(tl.int64)
        k_class = tl.full([], _LOWEST, tl.int32)
        k_id = tl.full([], 0x7FFFFFFF, tl.int32)
        if k < alive:
            k_class, k_id, total = _end_of(
                base, vocab, top, inverse, alive, k, room, False, TILE, LIST
            )
        p_class = tl.full([], _LOWEST, tl.int32)
        p_id = tl.full([], 0x7FFFFFFF, tl.int32)
        if units != TOP_P_OFF:
            limit = limit_of(total, units)
            p_class, p_id, total = _end_of(
                base, vocab, top, inverse, alive, limit, room, True, TILE, LIST
            )
        least = parameter(params_ptr, row, MIN_P)
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
        tl.store(tokens_ptr + row, token_of(tl.max(best, 0)).to(tl.int64))


@triton.jit
def _end_of(
    base, vocab, top, inverse, alive, limit, list_ptr,
    BY_WEIGHT: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Where a kept set ends: the logit and the id of the last token kept, and the weight kept.

    A token is kept while what comes before it, tokens or their weight, is below ``limit``. Logits
    above which that much lies are told from others by halving what is between, until the tokens
    between fit into the list, or are all equal.
    """
    low = order_of(_least(base, vocab, TILE)).to(tl.int64) - 1  # too much lies above it
    high = order_of(top).to(tl.int64)  # and not above this
    above_low, above_high = alive, alive * 0
    while (high - low > 1) & (above_low - above_high > LIST):
        half = number_of(low.to(tl.int32)) * 0.5 + number_of(high.to(tl.int32)) * 0.5
        middle = order_of(half).to(tl.int64)
        between = (middle > low) & (middle < high)
        middle = tl.where(between, middle, low + (high - low) // 2)
        above, weight = _sums(base, vocab, top, inverse, middle.to(tl.int32), BY_WEIGHT, TILE)
        before = above
        if BY_WEIGHT:
            before = weight
        fits = before < limit
        high = tl.where(fits, middle, high)
        above_high = tl.where(fits, above, above_high)
        low = tl.where(fits, low, middle)
        above_low = tl.where(fits, above_low, above)
    above_high, weight_high = _sums(base, vocab, top, inverse, high.to(tl.int32), True, TILE)
    before = above_high
    if BY_WEIGHT:
        before = weight_high
    if above_low - above_high <= LIST:
        tl.debug_barrier()  # whoever still reads the list
        key = _between(base, vocab, low.to(tl.int32), high.to(tl.int32), list_ptr, TILE, LIST)
        share = share_of(number_of((key >> 32).to(tl.int32)), top, inverse)
        weight = tl.where(key == NOTHING, 0, (share * UNIT).to(tl.int64))
        last = _last_kept(key, weight, low, high, limit - before, BY_WEIGHT)
        total = weight_high + tl.sum(tl.where(key >= last, weight, 0), 0)
        return (last >> 32).to(tl.int32), token_of(last), total
    else:
        equal = high.to(tl.int32)
        each = (share_of(number_of(equal), top, inverse) * UNIT).to(tl.int64)
        step = tl.full([], 1, tl.int64)
        if BY_WEIGHT:
            step = each
        low_id = tl.full([], 0, tl.int32)
        high_id = low_id + vocab
        while low_id < high_id:
            middle_id = (low_id + high_id) // 2
            short = _members(base, vocab, equal, middle_id, TILE) * step < limit - before
            low_id = tl.where(short, middle_id + 1, low_id)
            high_id = tl.where(short, high_id, middle_id)
        members = _members(base, vocab, equal, low_id, TILE)
        return equal, low_id, weight_high + members * each


@triton.jit
def _last_kept(key, weight, low, high, left, BY_WEIGHT: tl.constexpr):
    """The smallest of the keys above which less than ``left`` lies; orders are in (low, high]."""
    too_low = low << 32
    enough = (high + 1) << 32
    size = tl.where(key == NOTHING, 0, 1).to(tl.int64)
    if BY_WEIGHT:
        size = weight
    while enough - too_low > 1:
        middle = too_low + (enough - too_low) // 2
        fits = tl.sum(tl.where(key > middle, size, 0), 0) < left
        enough = tl.where(fits, middle, enough)
        too_low = tl.where(fits, too_low, middle)
    return enough


@triton.jit
def _between(base, vocab, low, high, list_ptr, TILE: tl.constexpr, LIST: tl.constexpr):
    """Candidates of the tokens with orders in (low, high], which fit into the list."""
    found = tl.full([], 0, tl.int32)
    for first in range(0, vocab, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < vocab, other=NEVER)
        order = order_of(x)
        chosen = (order > low) & (order <= high) & (x > NEVER)
        flags = chosen.to(tl.int32)
        place = found + tl.cumsum(flags, 0) - 1
        tl.store(list_ptr + place, candidate(x, token, 0), mask=chosen & (place < LIST))
        found += tl.sum(flags, 0)
    tl.debug_barrier()  # other threads wrote what is read now
    slot = tl.arange(0, LIST)
    return tl.load(list_ptr + slot, mask=slot < found, other=NOTHING)


@triton.jit
def _least(base, vocab, TILE: tl.constexpr):
    """The smallest possible logit of a row."""
    least = tl.full([TILE], float("inf"), tl.float32)
    for first in range(0, vocab, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < vocab, other=NEVER)
        least = tl.minimum(least, tl.where(x > NEVER, x, float("inf")))
    return tl.min(least, 0)


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
