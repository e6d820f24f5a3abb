"""Top-k, top-p and min-p with a draw from what they leave, without sorting the row.

The kept tokens are the first of one order, so they are usually among few candidates: those at least
as large as a pivot. The pivot is one of the larger maxima of groups of tokens, of which many lie
above it. If the candidates hold the end of the kept set, all is decided among them, sorted.
Otherwise the end is searched for in the row, by halving: slower, as exact.
"""

import triton
import triton.language as tl

from minuet.ops.sampling import columns, sizes
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
# int64 of a row's state: of the row, of the search, and two for each of its rounds
COUNT, TOTAL, ALIVE, EDGES = (tl.constexpr(i) for i in range(4))
ARRIVED, LEAST, BEST, SLOTS = (tl.constexpr(i) for i in range(4, 8))
STATE = tl.constexpr(sizes.STATE)
BY_VALUE = tl.constexpr(sizes.VALUE_ROUNDS)
_HALF = tl.constexpr(1 << 62)


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


@triton.jit(do_not_specialize=["tiles_per_part"])
def collect_candidates(
    logits_ptr,  # [R, V] FP32
    stride,
    vocab,
    tiles_per_part,
    params_ptr,
    state_ptr,  # [R, STATE] int64
    list_ptr,  # [R, LIST] int64
    TILE: tl.constexpr,
    LIST: tl.constexpr,
):
    """List the candidates in any order, and sum the weights of the row."""
    row = tl.program_id(0)
    if tl.load(params_ptr + row * WIDTH + MODE) == FILTERED:
        at = state_ptr + row * STATE
        base = logits_ptr + row.to(tl.int64) * stride
        top, pivot = edges(state_ptr, row)
        inverse = parameter(params_ptr, row, INVERSE_TEMPERATURE)
        lane = tl.arange(0, TILE)
        counters = at + COUNT + lane * 0
        total = tl.zeros([TILE], tl.int64)
        alive = tl.zeros([TILE], tl.int32)
        for i in range(tiles_per_part):
            token = (tl.program_id(1) * tiles_per_part + i) * TILE + lane
            x = tl.load(base + token, mask=token < vocab, other=NEVER)
            total += (share_of(x, top, inverse) * UNIT).to(tl.int64)
            alive += (x > NEVER).to(tl.int32)
            chosen = (x > NEVER) & (order_of(x) >= pivot)
            # few are: each asks for its place, which needs no sum over the tile
            place = tl.atomic_add(counters, 1, mask=chosen, sem="relaxed")
            here = list_ptr + row.to(tl.int64) * LIST + place
            tl.store(here, candidate(x, token, 0), mask=chosen & (place < LIST))
        tl.atomic_add(at + TOTAL, tl.sum(total, 0), sem="relaxed")
        tl.atomic_add(at + ALIVE, tl.sum(alive, 0).to(tl.int64), sem="relaxed")


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
    NATIVE: tl.constexpr,
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
                score = x * inverse + noise_of_tokens(params_ptr, row, token, NATIVE)
                best = tl.max(candidate(tl.where(keep, score, NEVER), token, 0), 0)
                tl.store(tokens_ptr + row, tl.where(alive > 0, token_of(best), 0).to(tl.int64))
                tl.store(at + COUNT, DECIDED)
        tl.store(stuck_ptr + row, (alive == 0).to(tl.uint8))


# --- the search ----------------------------------------------------------------------------------
#
# The programs of a row search together: each sums its part of the row, they add up their sums in a
# slot of the row's state, one slot per round, and meet. Sums are whole numbers, so all see the same
# and take the same turns. They wait for each other: the launch must have them all resident.


@triton.jit
def _meet(at, meeting, splits):
    """Wait until every program of the row has come here; what they wrote before can be read."""
    tl.debug_barrier()
    if splits > 1:
        goal = splits.to(tl.int64) * (meeting + 1)
        tl.atomic_add(at + ARRIVED, 1, sem="release")
        seen = tl.atomic_add(at + ARRIVED, 0, sem="acquire")
        while seen < goal:
            seen = tl.atomic_add(at + ARRIVED, 0, sem="acquire")
        tl.debug_barrier()
    return meeting + 1


@triton.jit(do_not_specialize=["splits", "tiles_per_split"])
def draw_searched(
    logits_ptr,  # [R, V] FP32
    stride,
    vocab,
    params_ptr,
    state_ptr,  # [R, STATE] int64
    list_ptr,  # [R, LIST] int64; written
    tokens_ptr,  # [R] int64
    splits,  # programs of a row
    tiles_per_split,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Find the end of the kept set in a row, where :func:`draw_listed` did not, and draw."""
    row, split = tl.program_id(0), tl.program_id(1)
    at = state_ptr + row * STATE
    mode = tl.load(params_ptr + row * WIDTH + MODE)
    if (mode == FILTERED) & (tl.load(at + COUNT) != DECIDED):
        total, alive = tl.load(at + TOTAL), tl.load(at + ALIVE)
        base = logits_ptr + row.to(tl.int64) * stride
        begin = split * tiles_per_split * TILE
        end = tl.minimum(begin + tiles_per_split * TILE, vocab)
        room = list_ptr + row.to(tl.int64) * LIST
        top, _ = edges(state_ptr, row)
        inverse = parameter(params_ptr, row, INVERSE_TEMPERATURE)
        k = kept_at_most(params_ptr, row, alive)
        units = tl.load(params_ptr + row * WIDTH + TOP_P).to(tl.int64)
        # zero is where the state starts, so the lowest order is kept upside down
        lowest = order_of(_least(base, begin, end, TILE)).to(tl.int64)
        tl.atomic_max(at + LEAST, 0x7FFFFFFF - lowest, sem="relaxed")
        meeting = _meet(at, split * 0, splits)
        lowest = 0x7FFFFFFF - tl.load(at + LEAST, volatile=True)
        k_class = tl.full([], _LOWEST, tl.int32)
        k_id = tl.full([], 0x7FFFFFFF, tl.int32)
        if k < alive:
            k_class, k_id, total, meeting = _end_of(
                base, begin, end, vocab, at, meeting, splits, top, inverse, lowest, alive, k, room,
                False, TILE, LIST,
            )  # fmt: skip
        p_class = tl.full([], _LOWEST, tl.int32)
        p_id = tl.full([], 0x7FFFFFFF, tl.int32)
        if units != TOP_P_OFF:
            limit = limit_of(total, units)
            p_class, p_id, total, meeting = _end_of(
                base, begin, end, vocab, at, meeting, splits, top, inverse, lowest, alive, limit,
                room, True, TILE, LIST,
            )  # fmt: skip
        least = parameter(params_ptr, row, MIN_P)
        best = tl.full([TILE], NOTHING, tl.int64)
        for first in range(begin, end, TILE):
            token = first + tl.arange(0, TILE)
            x = tl.load(base + token, mask=token < vocab, other=NEVER)
            order = order_of(x)
            keep = (order > k_class) | (order == k_class) & (token <= k_id)
            keep = keep & ((order > p_class) | (order == p_class) & (token <= p_id))
            keep = keep & (share_of(x, top, inverse) >= least) & (x > NEVER)
            score = x * inverse + noise_of_tile(params_ptr, row, first, TILE, NATIVE)
            best = tl.maximum(best, candidate(tl.where(keep, score, NEVER), token, 0))
        # the lowest bit is not used; made positive, as the state starts at zero
        tl.atomic_max(at + BEST, (tl.max(best, 0) >> 1) + _HALF, sem="relaxed")
        meeting = _meet(at, meeting, splits)
        if split == 0:
            found = (tl.load(at + BEST, volatile=True) - _HALF) << 1
            tl.store(tokens_ptr + row, token_of(found).to(tl.int64))


@triton.jit
def _end_of(
    base, begin, end, vocab, at, meeting, splits, top, inverse, lowest, alive, limit, list_ptr,
    BY_WEIGHT: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Where a kept set ends: the logit and the id of the last token kept, and the weight kept.

    A token is kept while what comes before it, tokens or their weight, is below ``limit``. Logits
    above which that much lies are told from others by halving what is between, until the tokens
    between fit into the list, or are all equal. Values are halved first, then their order, which
    bounds the rounds whatever the values are.
    """
    low = lowest - 1  # too much lies above it
    high = order_of(top).to(tl.int64)  # and not above this
    above_low, above_high = alive, alive * 0
    turn = meeting * 0
    while (high - low > 1) & (above_low - above_high > LIST):
        half = number_of(low.to(tl.int32)) * 0.5 + number_of(high.to(tl.int32)) * 0.5
        middle = order_of(half).to(tl.int64)
        use = (middle > low) & (middle < high) & (turn < BY_VALUE)
        middle = tl.where(use, middle, low + (high - low) // 2)
        above, weight, meeting = _sums(
            base, begin, end, at, meeting, splits, top, inverse, middle.to(tl.int32), BY_WEIGHT,
            TILE,
        )  # fmt: skip
        before = above
        if BY_WEIGHT:
            before = weight
        fits = before < limit
        high = tl.where(fits, middle, high)
        above_high = tl.where(fits, above, above_high)
        low = tl.where(fits, low, middle)
        above_low = tl.where(fits, above_low, above)
        turn += 1
    above_high, weight_high, meeting = _sums(
        base, begin, end, at, meeting, splits, top, inverse, high.to(tl.int32), True, TILE
    )
    before = above_high
    if BY_WEIGHT:
        before = weight_high
    if above_low - above_high <= LIST:
        counter = at + SLOTS + 2 * meeting
        _list_between(base, begin, end, low, high, list_ptr, counter, TILE, LIST)
        meeting = _meet(at, meeting, splits)
        found = tl.load(counter, volatile=True)
        slot = tl.arange(0, LIST)
        key = tl.load(list_ptr + slot, mask=slot < found, other=NOTHING, volatile=True)
        share = share_of(number_of((key >> 32).to(tl.int32)), top, inverse)
        weight = tl.where(key == NOTHING, 0, (share * UNIT).to(tl.int64))
        last = _last_kept(key, weight, low, high, limit - before, BY_WEIGHT)
        total = weight_high + tl.sum(tl.where(key >= last, weight, 0), 0)
        last_class, last_id = (last >> 32).to(tl.int32), token_of(last)
        meeting = _meet(at, meeting, splits)  # the list may be used again
    else:
        last_class = high.to(tl.int32)
        each = (share_of(number_of(last_class), top, inverse) * UNIT).to(tl.int64)
        step = tl.full([], 1, tl.int64)
        if BY_WEIGHT:
            step = each
        last_id = tl.full([], 0, tl.int32)
        high_id = last_id + vocab
        while last_id < high_id:
            middle_id = (last_id + high_id) // 2
            members, meeting = _members(
                base, begin, end, at, meeting, splits, last_class, middle_id, TILE
            )
            short = members * step < limit - before
            last_id = tl.where(short, middle_id + 1, last_id)
            high_id = tl.where(short, high_id, middle_id)
        members, meeting = _members(
            base, begin, end, at, meeting, splits, last_class, last_id, TILE
        )
        total = weight_high + members * each
    return last_class, last_id, total, meeting


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
def _list_between(
    base, begin, end, low, high, list_ptr, counter, TILE: tl.constexpr, LIST: tl.constexpr
):  # fmt: skip
    """List the tokens with orders in (low, high], in any order; they fit."""
    lane = tl.arange(0, TILE)
    for first in range(begin, end, TILE):
        token = first + lane
        x = tl.load(base + token, mask=token < end, other=NEVER)
        order = order_of(x).to(tl.int64)
        chosen = (order > low) & (order <= high) & (x > NEVER)
        place = tl.atomic_add(counter + lane * 0, 1, mask=chosen, sem="relaxed")
        tl.store(list_ptr + place, candidate(x, token, 0), mask=chosen & (place < LIST))


@triton.jit
def _least(base, begin, end, TILE: tl.constexpr):
    """The smallest possible logit of a part."""
    least = tl.full([TILE], float("inf"), tl.float32)
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < end, other=NEVER)
        least = tl.minimum(least, tl.where(x > NEVER, x, float("inf")))
    return tl.min(least, 0)


@triton.jit
def _sums(
    base, begin, end, at, meeting, splits, top, inverse, order, WEIGHTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Tokens of an order above ``order``, and their weight, of the whole row."""
    above = tl.zeros([TILE], tl.int32)
    weight = tl.zeros([TILE], tl.int64)
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < end, other=NEVER)
        higher = (order_of(x) > order) & (x > NEVER)
        above += higher.to(tl.int32)
        if WEIGHTS:
            weight += tl.where(higher, (share_of(x, top, inverse) * UNIT).to(tl.int64), 0)
    slot = at + SLOTS + 2 * meeting
    tl.atomic_add(slot, tl.sum(above, 0).to(tl.int64), sem="relaxed")
    if WEIGHTS:
        tl.atomic_add(slot + 1, tl.sum(weight, 0), sem="relaxed")
    meeting = _meet(at, meeting, splits)
    return tl.load(slot, volatile=True), tl.load(slot + 1, volatile=True), meeting


@triton.jit
def _members(
    base, begin, end, at, meeting, splits, order, last_id, TILE: tl.constexpr
):  # fmt: skip
    """Tokens of exactly this order with an id of at most ``last_id``, of the whole row."""
    found = tl.zeros([TILE], tl.int32)
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < end, other=NEVER)
        here = (token < end) & (order_of(x) == order) & (token <= last_id)
        found += here.to(tl.int32)
    slot = at + SLOTS + 2 * meeting
    tl.atomic_add(slot, tl.sum(found, 0).to(tl.int64), sem="relaxed")
    meeting = _meet(at, meeting, splits)
    return tl.load(slot, volatile=True), meeting
