"""Block scores, and the choice of the best blocks of a row. Ties go to the lowest block."""

import triton
import triton.language as tl

from minuet.attention.backends.triton.kernels.common import (
    load_keys,
    load_queries,
    row_of,
)
from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous

_FORCED = tl.constexpr(0x7FFFFFFF)
_NOT_A_NUMBER = tl.constexpr(-0x7FFFFFFF)
_NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def rank_keys(scores, block, num_blocks, init_blocks, local_blocks):
    """int64 that sort like (forced first, larger score first, lower block first).

    The high half is the score's bits made to order as integers, the low half the block, inverted.
    NaN ranks below every number, a block that is not there below everything.
    """
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0.0 ties with 0.0
    bits = scores.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(scores == scores, order, _NOT_A_NUMBER)
    forced = (block < init_blocks) | (block >= num_blocks - local_blocks)
    order = tl.where(forced, _FORCED, order)
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)
    return tl.where(block < num_blocks, keys, _NOTHING)


@triton.jit
def block_of_key(key):
    """The block that a key of :func:`rank_keys` is of."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def rank_all(
    scores_ptr, table_ptr, num_blocks, init_blocks, local_blocks,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """:func:`choose_blocks` for at most MOST blocks: every block is compared with every other."""
    entry = tl.arange(0, TOP_PAD)
    block = tl.arange(0, MOST)
    here = block < num_blocks
    page = tl.load(table_ptr + block, mask=here, other=0)
    if num_blocks <= TOP:
        rank = block
    else:
        scores = tl.load(scores_ptr + block, mask=here, other=0.0)
        keys = rank_keys(scores, block, num_blocks, init_blocks, local_blocks)
        rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    mine = (rank[:, None] == entry[None, :]) & here[:, None]
    packed = (page.to(tl.int64) << 32) | (block + 1).to(tl.int64)
    found = tl.sum(tl.where(mine, packed[:, None], 0), 0)
    found = tl.where(entry < TOP, found, 0)
    return (found & 0xFFFFFFFF).to(tl.int32) - 1, (found >> 32).to(tl.int32)


@triton.jit
def rank_in_two_steps(
    scores_ptr, table_ptr, num_blocks, init_blocks, local_blocks,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """:func:`choose_blocks` for at most MOST blocks: by fours first, then the best fours' blocks.

    The best TOP_PAD blocks lie in the TOP_PAD groups with the best maxima. Comparing all groups,
    then all blocks of those, is a fraction of comparing all blocks.
    """
    SIZE: tl.constexpr = 4
    GROUPS: tl.constexpr = MOST // SIZE
    entry = tl.arange(0, TOP_PAD)
    block = tl.arange(0, MOST)
    scores = tl.load(scores_ptr + block, mask=block < num_blocks, other=0.0)
    keys = rank_keys(scores, block, num_blocks, init_blocks, local_blocks)
    group = tl.arange(0, GROUPS)
    # empty groups differ too, or they would share a rank
    empty = tl.full([GROUPS], _NOTHING, tl.int64) + group
    highest = tl.maximum(tl.max(tl.reshape(keys, [GROUPS, SIZE]), 1), empty)
    rank = tl.sum((highest[None, :] > highest[:, None]).to(tl.int32), 1)
    chosen = tl.sum(tl.where(rank[:, None] == entry[None, :], group[:, None], 0), 0)

    near = tl.reshape(chosen[:, None] * SIZE + tl.arange(0, SIZE)[None, :], [TOP_PAD * SIZE])
    here = near < num_blocks
    page = tl.load(table_ptr + near, mask=here, other=0)
    scores = tl.load(scores_ptr + near, mask=here, other=0.0)
    keys = rank_keys(scores, near, num_blocks, init_blocks, local_blocks)
    rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    mine = (rank[:, None] == entry[None, :]) & here[:, None]
    packed = (page.to(tl.int64) << 32) | (near + 1).to(tl.int64)
    found = tl.sum(tl.where(mine, packed[:, None], 0), 0)
    found = tl.where(entry < TOP, found, 0)
    return (found & 0xFFFFFFFF).to(tl.int32) - 1, (found >> 32).to(tl.int32)


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
    scores_ptr, num_blocks, init_blocks, local_blocks,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """:func:`choose_blocks` for at most MANY blocks, in two steps; blocks only.

    The best blocks lie in the TOP_PAD groups with the best maxima, and are at least the smallest of
    those. Few other blocks are: they are moved together and ranked all against all. A row with more
    (equal or nearly sorted scores) takes its best one by one.
    """
    GROUPS: tl.constexpr = 64
    SIZE: tl.constexpr = MANY // GROUPS
    SLOTS: tl.constexpr = 2 * TOP_PAD
    entry = tl.arange(0, TOP_PAD)
    block = tl.arange(0, MANY)
    scores = tl.load(scores_ptr + block, mask=block < num_blocks, other=0.0)
    keys = rank_keys(scores, block, num_blocks, init_blocks, local_blocks)
    group = tl.arange(0, GROUPS)
    # empty groups differ too, or they would share a rank
    empty = tl.full([GROUPS], _NOTHING, tl.int64) + group
    highest = tl.maximum(tl.max(tl.reshape(keys, [GROUPS, SIZE]), 1), empty)
    rank = tl.sum((highest[None, :] > highest[:, None]).to(tl.int32), 1)
    chosen = tl.sum(tl.where(rank[:, None] == entry[None, :], group[:, None], 0), 0)
    least = tl.min(tl.where(rank < TOP, highest, 0x7FFFFFFFFFFFFFFF), 0)

    near = tl.reshape(chosen[:, None] * SIZE + tl.arange(0, SIZE)[None, :], [TOP_PAD * SIZE])
    scores = tl.load(scores_ptr + near, mask=near < num_blocks, other=0.0)
    keys_near = rank_keys(scores, near, num_blocks, init_blocks, local_blocks)
    good = (keys_near >= least).to(tl.int32)
    if tl.sum(good, 0) <= SLOTS:
        slot = tl.arange(0, SLOTS)
        place = tl.where(good > 0, tl.cumsum(good, 0) - 1, -1)
        moved = tl.where(place[:, None] == slot[None, :], near[:, None] + 1, 0)
        left = tl.sum(moved, 0) - 1
        scores_left = tl.load(scores_ptr + left, mask=left >= 0, other=0.0)
        keys_left = rank_keys(scores_left, left, num_blocks, init_blocks, local_blocks)
        keys_left = tl.where(left >= 0, keys_left, _NOTHING)
        rank_left = tl.sum((keys_left[None, :] > keys_left[:, None]).to(tl.int32), 1)
        mine = (rank_left[:, None] == entry[None, :]) & (left[:, None] >= 0)
        blocks = tl.sum(tl.where(mine, left[:, None] + 1, 0), 0) - 1
    else:
        blocks = block_of_key(replace_worst(no_best(TOP, TOP_PAD), keys_near))
    return tl.where(entry < TOP, blocks, -1)


@triton.jit
def choose_blocks(
    scores_ptr,  # [num_blocks] FP32
    table_ptr,  # [pages] int32
    num_blocks,
    init_blocks,
    local_blocks,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
):
    """The ``min(TOP, num_blocks)`` best blocks of a row and their pages, in no order.

    Up to FEW / 2 blocks are ranked all against all, up to 2 FEW in two steps, up to MANY by
    :func:`rank_groups`. Beyond, MANY at a time replace the worst of the best found so far, one by
    one.

    Returns:
        blocks and pages, [TOP_PAD] int32; -1 and 0 at the tail.
    """
    entry = tl.arange(0, TOP_PAD)
    if num_blocks <= FEW // 2:
        blocks, pages = rank_all(
            scores_ptr, table_ptr, num_blocks, init_blocks, local_blocks, TOP, TOP_PAD, FEW // 2
        )
    elif num_blocks <= FEW:
        blocks, pages = rank_in_two_steps(
            scores_ptr, table_ptr, num_blocks, init_blocks, local_blocks, TOP, TOP_PAD, FEW
        )
    elif num_blocks <= 2 * FEW:
        blocks, pages = rank_in_two_steps(
            scores_ptr, table_ptr, num_blocks, init_blocks, local_blocks, TOP, TOP_PAD, 2 * FEW
        )
    elif num_blocks <= MANY:
        blocks = rank_groups(scores_ptr, num_blocks, init_blocks, local_blocks, TOP, TOP_PAD, MANY)
        pages = tl.load(table_ptr + blocks, mask=blocks >= 0, other=0)
    else:
        best = no_best(TOP, TOP_PAD)
        for begin in range(0, num_blocks, MANY):
            block = begin + tl.arange(0, MANY)
            scores = tl.load(scores_ptr + block, mask=block < num_blocks, other=0.0)
            best = replace_worst(
                best, rank_keys(scores, block, num_blocks, init_blocks, local_blocks)
            )
        blocks = tl.where(entry < TOP, block_of_key(best), -1)
        pages = tl.load(table_ptr + blocks, mask=blocks >= 0, other=0)
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
        "first_score",
    ],
    do_not_specialize_on_alignment=["items_ptr", "lengths_ptr", "table_ptr", "scores_ptr"],
)  # fmt: skip
def score_blocks(
    index_q_ptr,  # [T, K, I]
    index_k_ptr,  # [N, P, I], PAIRS: int16 view, half as wide
    scores_ptr,  # [K, chunk, blocks] FP32
    items_ptr,  # RAGGED: [tiles, 4] sequence, first token, tokens, first position
    #             else [capacity, 4] sequence, first block, end block, -
    lengths_ptr,  # [sequences] int32
    table_ptr,  # [sequences, pages] int32
    stride_q_token, stride_q_head,
    stride_k_page,
    stride_table, stride_scores_head, stride_scores_token,
    query_len,
    first_score,  # token that the score buffer begins with
    STRIDE_K_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, M: tl.constexpr, I: tl.constexpr,
    C: tl.constexpr, PAGE: tl.constexpr, OPERAND: tl.constexpr, PAIRS: tl.constexpr,
    RAGGED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Largest ``iq . ik`` over the visible tokens of each block, for all heads of a few tokens.

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
        score_at = scores_ptr + head.to(tl.int64) * stride_scores_head
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
            tl.store(score_at + block, best, mask=real)
            page = ahead
        let_next_start(PDL)


@triton.jit(
    do_not_specialize=["stride_table", "stride_scores_head", "stride_scores_token", "query_len",
                       "first_token", "init_blocks", "local_blocks"],
    do_not_specialize_on_alignment=["scores_ptr", "lists_ptr", "lengths_ptr", "token_sequence_ptr",
                                    "positions_ptr", "table_ptr"],
)  # fmt: skip
def list_blocks(
    scores_ptr,  # [K, chunk, blocks] FP32
    lists_ptr,  # [chunk, K, TOP] int32
    lengths_ptr,  # [sequences] int32
    token_sequence_ptr,  # [T] int32; RAGGED only
    positions_ptr,  # [T] int64; RAGGED only
    table_ptr,  # [sequences, pages] int32
    stride_table, stride_scores_head, stride_scores_token,
    query_len, first_token, init_blocks, local_blocks,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, PAGE: tl.constexpr, FEW: tl.constexpr,
    MANY: tl.constexpr, RAGGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The chosen blocks of one row as the contract wants them: ascending, -1 at the tail."""
    chunk_token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    token = chunk_token + first_token
    sequence, visible = row_of(
        token, query_len, lengths_ptr, token_sequence_ptr, positions_ptr, RAGGED
    )
    num_blocks = tl.maximum(tl.cdiv(visible, PAGE), 0)
    scores_ptr += head.to(tl.int64) * stride_scores_head + chunk_token * stride_scores_token
    wait_for_previous(PDL)
    blocks, _ = choose_blocks(
        scores_ptr, table_ptr + sequence * stride_table, num_blocks, init_blocks, local_blocks,
        TOP, TOP_PAD, FEW, MANY,
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
