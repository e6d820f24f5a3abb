"""The order of blocks by score, and the choice of the best of a row; ties: the lowest block."""

import triton
import triton.language as tl

from minuet.attention.backends.triton.kernels.common import (
    load_keys,
    load_queries,
    row_of,
)
from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous

_FORCED = tl.constexpr(0x7FFFFFFF)
_MINUS_INFINITY = tl.constexpr(-0x7F800001)  # what order_of makes of it
_NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def order_of(scores, forced):
    """int32 that sort as blocks are chosen: rising scores, NaN as minus infinity; then forced."""
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0.0 ties with 0.0
    bits = scores.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(scores == scores, order, _MINUS_INFINITY)  # NaN
    return tl.where(forced, _FORCED, order)


@triton.jit
def load_keys_of_blocks(orders_ptr, block, num_blocks):
    """int64, all different: the order first, then the lower block first.

    A block that is not there is below every other.
    """
    there = (block >= 0) & (block < num_blocks)
    order = tl.load(orders_ptr + block, mask=there, other=0)
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)
    return tl.where(there, keys, _NOTHING)


@triton.jit
def block_of_key(key):
    """The block that a key of :func:`load_keys_of_blocks` is of."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def rank_all(orders_ptr, num_blocks, MOST: tl.constexpr, STEP: tl.constexpr):
    """How many blocks come before each of at most MOST: [MOST].

    A loop of STEP at a time: in a step of the whole model the code of a kernel is cold, and what is
    passed once costs more to fetch than to execute.
    """
    keys = load_keys_of_blocks(orders_ptr, tl.arange(0, MOST), num_blocks)
    before = tl.zeros([STEP, MOST], tl.int32)
    for begin in tl.range(0, num_blocks, STEP, num_stages=1):
        others = load_keys_of_blocks(orders_ptr, begin + tl.arange(0, STEP), num_blocks)
        before += (others[:, None] > keys[None, :]).to(tl.int32)
    return tl.sum(before, 0)


@triton.jit
def no_best(TOP: tl.constexpr, TOP_PAD: tl.constexpr):
    """Keys below every block's, all different; entries beyond TOP are never the worst."""
    entry = tl.arange(0, TOP_PAD)
    nothing = tl.full([TOP_PAD], _NOTHING, tl.int64) + entry
    return tl.where(entry < TOP, nothing, 0x7FFFFFFFFFFFFFFF)


@triton.jit
def replace_worst(best, keys):
    """Let the best of ``keys`` take the place of the worst of ``best`` until none is better."""
    worst = tl.min(best, 0)
    candidate = tl.max(keys, 0)
    while candidate > worst:
        best = tl.where(best == worst, candidate, best)
        keys = tl.where(keys == candidate, _NOTHING, keys)
        worst = tl.min(best, 0)
        candidate = tl.max(keys, 0)
    return best


@triton.jit
def rank_groups(
    orders_ptr, num_blocks, TOP: tl.constexpr, TOP_PAD: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """The best of at most MANY blocks, in two steps: [TOP_PAD], in no order.

    The best blocks lie in the TOP_PAD groups with the best maxima, and are at least the smallest of
    those. Few other blocks are: they are moved together and ranked all against all. A row with more
    (equal or nearly sorted scores) takes its best one by one.
    """
    GROUPS: tl.constexpr = 64
    SIZE: tl.constexpr = MANY // GROUPS
    SLOTS: tl.constexpr = 2 * TOP_PAD
    entry = tl.arange(0, TOP_PAD)
    keys = load_keys_of_blocks(orders_ptr, tl.arange(0, MANY), num_blocks)
    group = tl.arange(0, GROUPS)
    # empty groups differ too, or they would share a rank
    empty = tl.full([GROUPS], _NOTHING, tl.int64) + group
    highest = tl.maximum(tl.max(tl.reshape(keys, [GROUPS, SIZE]), 1), empty)
    rank = tl.sum((highest[None, :] > highest[:, None]).to(tl.int32), 1)
    chosen = tl.sum(tl.where(rank[:, None] == entry[None, :], group[:, None], 0), 0)
    least = tl.min(tl.where(rank < TOP, highest, 0x7FFFFFFFFFFFFFFF), 0)

    near = tl.reshape(chosen[:, None] * SIZE + tl.arange(0, SIZE)[None, :], [TOP_PAD * SIZE])
    keys_near = load_keys_of_blocks(orders_ptr, near, num_blocks)
    good = (keys_near >= least).to(tl.int32)
    if tl.sum(good, 0) <= SLOTS:
        slot = tl.arange(0, SLOTS)
        place = tl.where(good > 0, tl.cumsum(good, 0) - 1, -1)
        moved = tl.where(place[:, None] == slot[None, :], near[:, None] + 1, 0)
        left = tl.sum(moved, 0) - 1
        keys_left = load_keys_of_blocks(orders_ptr, left, num_blocks)
        rank_left = tl.sum((keys_left[None, :] > keys_left[:, None]).to(tl.int32), 1)
        mine = (rank_left[:, None] == entry[None, :]) & (left[:, None] >= 0)
        blocks = tl.sum(tl.where(mine, left[:, None] + 1, 0), 0) - 1
    else:
        blocks = block_of_key(replace_worst(no_best(TOP, TOP_PAD), keys_near))
    return tl.where(entry < TOP, blocks, -1)


@triton.jit
def rank_long(
    orders_ptr, num_blocks,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, MOST: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The best of any number of blocks up to MOST: [TOP_PAD], in no order.

    Up to MANY by :func:`rank_groups`. Beyond, MANY at a time replace the worst of the best found so
    far, one by one.
    """
    if MOST <= MANY or num_blocks <= MANY:
        blocks = rank_groups(orders_ptr, num_blocks, TOP, TOP_PAD, MANY)
    else:
        best = no_best(TOP, TOP_PAD)
        for begin in range(0, num_blocks, MANY):
            keys = load_keys_of_blocks(orders_ptr, begin + tl.arange(0, MANY), num_blocks)
            best = replace_worst(best, keys)
        blocks = tl.where(tl.arange(0, TOP_PAD) < TOP, block_of_key(best), -1)
    return blocks


@triton.jit
def choose_blocks(
    orders_ptr,  # [num_blocks] int32, of score_blocks
    table_ptr,  # [pages] int32
    near_pages,  # [FEW] the first of them
    num_blocks,
    first,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    MINE: tl.constexpr,
    MOST: tl.constexpr,  # blocks that a row can have
    FEW: tl.constexpr,  # up to which all are ranked
    STEP: tl.constexpr,
    MANY: tl.constexpr,
):
    """Entries ``first .. first + MINE - 1`` of the ``min(TOP, num_blocks)`` best blocks of a row.

    The order of entries is the same for every caller of a row.

    Returns:
        blocks and their pages, [MINE] int32; -1 and 0 beyond the last.
    """
    mine = first + tl.arange(0, MINE)
    if MOST <= FEW or num_blocks <= FEW:
        block = tl.arange(0, FEW)
        rank = rank_all(orders_ptr, num_blocks, FEW, STEP)
        is_mine = (rank[None, :] == mine[:, None]) & (block < num_blocks)[None, :]
        blocks = tl.sum(tl.where(is_mine, block[None, :] + 1, 0), 1) - 1
        pages = tl.sum(tl.where(is_mine, near_pages[None, :], 0), 1)
    else:
        best = rank_long(orders_ptr, num_blocks, TOP, TOP_PAD, MOST, MANY)
        listed = tl.arange(0, TOP_PAD)[None, :] == mine[:, None]
        blocks = tl.sum(tl.where(listed, best[None, :] + 1, 0), 1) - 1
        pages = tl.load(table_ptr + blocks, mask=blocks >= 0, other=0)
    blocks = tl.where(mine < TOP, blocks, -1)
    return blocks, pages


@triton.jit
def load_list(list_ptr, table_ptr, TOP: tl.constexpr, TOP_PAD: tl.constexpr):
    """Blocks and pages [TOP_PAD] of a list of TOP entries, and how many there are."""
    entry = tl.arange(0, TOP_PAD)
    blocks = tl.load(list_ptr + entry, mask=entry < TOP, other=-1)
    pages = tl.load(table_ptr + blocks, mask=blocks >= 0, other=0)
    return blocks, pages, tl.sum((blocks >= 0).to(tl.int32), 0)


@triton.jit(
    do_not_specialize=[
        "stride_table", "stride_scores_head", "stride_scores_token", "query_len", "first_token",
        "first_score", "init_blocks", "local_blocks",
    ],
    do_not_specialize_on_alignment=["items_ptr", "lengths_ptr", "table_ptr", "orders_ptr"],
)  # fmt: skip
def score_blocks(
    index_q_ptr,  # [T, K, I]
    index_k_ptr,  # [N, P, I], PAIRS: int16 view, half as wide
    orders_ptr,  # [K, chunk, blocks] int32: see order_of
    items_ptr,  # RAGGED: [tiles, 4] sequence, first token, tokens, first position
    #             else [capacity, 4] sequence, first block, end block, -
    lengths_ptr,  # [sequences] int32
    table_ptr,  # [sequences, pages] int32
    stride_q_token, stride_q_head,
    stride_k_page,
    stride_table, stride_scores_head, stride_scores_token,
    query_len,
    first_score,  # token that the score buffer begins with
    init_blocks,  # forced, as local_blocks
    local_blocks,
    STRIDE_K_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, M: tl.constexpr, I: tl.constexpr,
    C: tl.constexpr, PAGE: tl.constexpr, OPERAND: tl.constexpr, PAIRS: tl.constexpr,
    RAGGED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Largest ``iq . ik`` over the visible tokens of each block, for all heads of a few tokens.

    It is stored as blocks are chosen by it, so that whoever chooses does not work that out again.
    The keys are read once for all heads and query tokens of the item.
    """
    item = tl.program_id(0)
    sequence = tl.load(items_ptr + item * 4).to(tl.int64)
    if RAGGED:
        first_token = tl.load(items_ptr + item * 4 + 1).to(tl.int64)
        count = tl.load(items_ptr + item * 4 + 2)
        position = tl.load(items_ptr + item * 4 + 3)
        length = position + count
        num_blocks = tl.cdiv(length, PAGE)
        first = tl.program_id(1) * num_blocks // tl.num_programs(1)
        end = (tl.program_id(1) + 1) * num_blocks // tl.num_programs(1)
    else:
        first = tl.load(items_ptr + item * 4 + 1)
        end = tl.load(items_ptr + item * 4 + 2)
        length = tl.load(lengths_ptr + sequence)
        first_token = sequence * query_len
        count = query_len
        position = length - query_len
    table_ptr += sequence * stride_table
    page = tl.load(table_ptr + first, mask=first < end, other=0)
    wait_for_previous(PDL)
    if not RAGGED:  # every program has a place by now: the next kernel's take none of theirs
        let_next_start(PDL)
    if first < end:
        column = tl.arange(0, M)
        query, head = column // HEADS_PAD, column % HEADS_PAD
        real = (query < count) & (head < HEADS)
        q_low, q_high = load_queries(
            index_q_ptr,
            (first_token + query) * stride_q_token + head * stride_q_head,
            real, C, OPERAND, PAIRS,
        )  # fmt: skip
        row_end = position + 1 + query
        first_local = tl.cdiv(row_end, PAGE) - local_blocks
        score_at = orders_ptr + head.to(tl.int64) * stride_scores_head
        score_at += (first_token + query - first_score) * stride_scores_token
        within = tl.arange(0, PAGE)
        channel = tl.arange(0, C)
        for block in tl.range(first, end, num_stages=STAGES):
            ahead = tl.load(table_ptr + tl.minimum(block + 1, end - 1))
            token = block * PAGE + within
            valid = token < length
            k_low, k_high = load_keys(
                index_k_ptr
                + page.to(tl.int64) * stride_k_page
                + within[:, None] * STRIDE_K_TOKEN
                + channel[None, :],
                valid[:, None], OPERAND, PAIRS,
            )  # fmt: skip
            # the maximum is over tokens: with many queries they go along a thread's registers, with
            # few the keys fill the rows of a matrix instruction
            if RAGGED:
                products = tl.dot(q_low, tl.trans(k_low))
                if PAIRS:
                    products = tl.dot(q_high, tl.trans(k_high), products)
                products = tl.where(token[None, :] < row_end[:, None], products, float("-inf"))
                best = tl.max(products, 1)
            else:
                products = tl.dot(k_low, tl.trans(q_low))
                if PAIRS:
                    products = tl.dot(k_high, tl.trans(q_high), products)
                products = tl.where(token[:, None] < row_end[None, :], products, float("-inf"))
                best = tl.max(products, 0)
            forced = (block < init_blocks) | (block >= first_local)
            tl.store(score_at + block, order_of(best, forced), mask=real)
            page = ahead
    if RAGGED:
        let_next_start(PDL)


@triton.jit(
    do_not_specialize=["stride_table", "stride_scores_head", "stride_scores_token", "query_len",
                       "first_token"],
    do_not_specialize_on_alignment=["orders_ptr", "lists_ptr", "lengths_ptr", "token_sequence_ptr",
                                    "positions_ptr", "table_ptr"],
)  # fmt: skip
def list_blocks(
    orders_ptr,  # [K, chunk, blocks] int32
    lists_ptr,  # [chunk, K, TOP] int32
    lengths_ptr,  # [sequences] int32
    token_sequence_ptr,  # [T] int32; RAGGED only
    positions_ptr,  # [T] int64; RAGGED only
    table_ptr,  # [sequences, pages] int32
    stride_table, stride_scores_head, stride_scores_token,
    query_len, first_token,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, PAGE: tl.constexpr, MOST: tl.constexpr,
    FEW: tl.constexpr, STEP: tl.constexpr, MANY: tl.constexpr, RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The chosen blocks of one row as the contract wants them: ascending, -1 at the tail."""
    chunk_token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    token = chunk_token + first_token
    sequence, visible = row_of(
        token, query_len, lengths_ptr, token_sequence_ptr, positions_ptr, RAGGED
    )
    num_blocks = tl.maximum(tl.cdiv(visible, PAGE), 0)
    orders_ptr += head.to(tl.int64) * stride_scores_head + chunk_token * stride_scores_token
    wait_for_previous(PDL)
    blocks, _ = choose_blocks(
        orders_ptr, table_ptr + sequence * stride_table, tl.zeros([FEW], tl.int32), num_blocks, 0,
        TOP, TOP_PAD, TOP_PAD, MOST, FEW, STEP, MANY,
    )  # fmt: skip
    let_next_start(PDL)
    entry = tl.arange(0, TOP_PAD)
    chosen = tl.minimum(num_blocks, TOP)
    order = tl.where(blocks >= 0, blocks, 0x7FFFFFFF)
    at = tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1)
    at = tl.where(blocks >= 0, at, entry)
    # entries beyond the chosen ones keep their place: they hold -1 there
    lists_ptr += (chunk_token * heads + head) * TOP
    tl.store(lists_ptr + at, blocks, mask=blocks >= 0)
    tl.store(lists_ptr + entry, -1, mask=(entry >= chosen) & (entry < TOP))
