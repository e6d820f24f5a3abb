"""Sparse prefill by tiles: neighbouring query tokens that share blocks read each of them once."""

import triton
import triton.language as tl

from minuet.attention.backends.triton.kernels.attend import stream_blocks
from minuet.attention.backends.triton.kernels.choose import load_list
from minuet.attention.backends.triton.kernels.common import (
    LOWEST,
    attend_tile,
    load_queries,
    no_sums,
    store_output,
)
from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous

# A union is written where the lists of its tile were: TOP places of each query token in turn. An
# entry holds a block and the query tokens that chose it as -1 - (block << 8 | tokens), which is
# below every entry of a list (a block or -1); NO_ENTRY fills the places that are left.
NO_ENTRY = tl.constexpr(-0x80000000)
_NO_BLOCK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def place_of(entry, head, heads, TOP: tl.constexpr):
    """Offset of the n-th place of a tile and KV head in [tokens, K, TOP]."""
    return ((entry // TOP) * heads + head) * TOP + entry % TOP


@triton.jit(
    do_not_specialize=["stride_table", "first_token", "row_blocks_per_step"],
    do_not_specialize_on_alignment=[
        "lists_ptr",
        "unions_ptr",
        "pages_ptr",
        "tiles_ptr",
        "table_ptr",
    ],
)
def unite_lists(
    lists_ptr,  # [chunk, K, TOP] int32
    unions_ptr,  # the same memory, or another like it
    pages_ptr,  # [chunk, K, TOP] int32: pages of a union's blocks
    tiles_ptr,  # [tiles, 4] int32: sequence, first query token, query tokens, first position
    table_ptr,  # [sequences, pages] int32
    stride_table,
    first_token,  # of the chunk
    row_blocks_per_step,
    TOKENS: tl.constexpr,  # of a tile at most
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The union of a tile's lists, where that is less work than its rows; else the lists."""
    item, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    table_ptr += tl.load(tiles_ptr + item * 4).to(tl.int64) * stride_table
    first = tl.load(tiles_ptr + item * 4 + 1) - first_token
    count = tl.load(tiles_ptr + item * 4 + 2)
    lists_ptr += first.to(tl.int64) * heads * TOP
    unions_ptr += first.to(tl.int64) * heads * TOP
    pages_ptr += first.to(tl.int64) * heads * TOP
    entry = tl.arange(0, TOKENS * TOP_PAD)
    token = entry // TOP_PAD
    there = (token < count) & (entry % TOP_PAD < TOP)
    at = place_of(token * TOP + entry % TOP_PAD, head, heads, TOP)
    wait_for_previous(PDL)
    block = tl.load(lists_ptr + at, mask=there, other=-1)
    some = block >= 0
    # all entries against all: who else has my block, and whether I am the first
    same = (block[:, None] == block[None, :]) & some[None, :]
    tokens = tl.sum(tl.where(same, 1 << token[None, :], 0), 1)
    leads = some & ((tokens & ((1 << token) - 1)) == 0)
    order = tl.where(leads, block, _NO_BLOCK)
    rank = tl.sum((order[None, :] < order[:, None]).to(tl.int32), 1)
    steps = tl.sum(leads.to(tl.int32), 0)
    row_steps = tl.sum(some.to(tl.int32), 0)
    let_next_start(PDL)
    tl.debug_barrier()  # every entry is read before one is written
    if steps * row_blocks_per_step <= row_steps:
        place = place_of(rank, head, heads, TOP)
        tl.store(unions_ptr + place, -1 - ((block << 8) | tokens), mask=leads)
        tl.store(pages_ptr + place, tl.load(table_ptr + block, mask=leads, other=0), mask=leads)
        left = (entry >= steps) & (entry < count * TOP)
        tl.store(unions_ptr + place_of(entry, head, heads, TOP), NO_ENTRY, mask=left)
    else:
        tl.store(unions_ptr + at, block, mask=there)


@triton.jit(
    do_not_specialize=["stride_table", "first_token"],
    do_not_specialize_on_alignment=["lists_ptr", "tiles_ptr", "table_ptr"],
)
def attend_rows(
    q_ptr,  # [T, H, D]
    out_ptr,  # [T, H, D]
    k_ptr,  # [N, K, P, D], PAIRS: int16 view, half as wide
    v_ptr,
    k_scale_ptr,  # [N, K, P] FP32; SCALED only
    v_scale_ptr,
    lists_ptr,  # [chunk, K, TOP] int32 of unite_lists
    tiles_ptr,  # [tiles, 4] int32: sequence, first query token, query tokens, first position
    table_ptr,  # [sequences, pages] int32
    stride_q_token, stride_q_head,
    stride_k_page, stride_k_head,
    stride_v_page, stride_v_head,
    stride_scale_page, stride_scale_head,
    stride_table,
    first_token,  # of the chunk
    score_scale,
    STRIDE_K_TOKEN: tl.constexpr, STRIDE_V_TOKEN: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr,
    OPERAND: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Query tokens of a tile one after another, each over its own list.

    A program takes every n-th of them, n being the last axis of the grid: few programs where most
    tiles have been united and have nothing to do here. United tiles are left to ``attend_tiles``.
    """
    item, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    table_ptr += tl.load(tiles_ptr + item * 4).to(tl.int64) * stride_table
    tile_token = tl.load(tiles_ptr + item * 4 + 1)
    count = tl.load(tiles_ptr + item * 4 + 2)
    position = tl.load(tiles_ptr + item * 4 + 3)
    lists_ptr += ((tile_token - first_token).to(tl.int64) * heads + head) * TOP
    wait_for_previous(PDL)
    if tl.load(lists_ptr) >= -1:
        vector = tl.arange(0, M)
        real = vector < GROUP
        for row in range(tl.program_id(2), count, tl.num_programs(2)):
            blocks, pages, chosen = load_list(
                lists_ptr + row * heads * TOP, table_ptr, TOP, TOP_PAD
            )
            offsets = (tile_token.to(tl.int64) + row) * stride_q_token
            offsets += (head * GROUP + vector) * stride_q_head
            q_low, q_high = load_queries(q_ptr, offsets, real, C, OPERAND, PAIRS)
            _, total, even, odd = stream_blocks(
                q_low, q_high,
                k_ptr + head * stride_k_head, v_ptr + head * stride_v_head,
                k_scale_ptr + head * stride_scale_head, v_scale_ptr + head * stride_scale_head,
                blocks, pages, stride_k_page, stride_v_page, stride_scale_page,
                0, chosen, position + 1 + row, score_scale,
                STRIDE_K_TOKEN, STRIDE_V_TOKEN, M, C, TILE, PAGE, TOP_PAD,
                OPERAND, SCALED, PAIRS, NATIVE, STAGES,
            )  # fmt: skip
            total = tl.sum(total, 1)
            inverse = 1.0 / tl.where(total > 0, total, 1.0)
            store_output(
                out_ptr, offsets, real, even * inverse[:, None], odd * inverse[:, None], C, PAIRS
            )
    let_next_start(PDL)


@triton.jit(
    do_not_specialize=["first_token"],
    do_not_specialize_on_alignment=["tiles_ptr", "unions_ptr", "pages_ptr"],
)
def attend_tiles(
    q_ptr,  # [T, H, D]
    out_ptr,  # [T, H, D]
    k_ptr,  # [N, K, P, D], PAIRS: int16 view, half as wide
    v_ptr,
    k_scale_ptr,  # [N, K, P] FP32; SCALED only
    v_scale_ptr,
    unions_ptr,  # [chunk, K, TOP] int32 of unite_lists
    pages_ptr,  # [chunk, K, TOP] int32
    tiles_ptr,  # [tiles, 4] int32: sequence, first query token, query tokens, first position
    stride_q_token, stride_q_head,
    stride_k_page, stride_k_head,
    stride_v_page, stride_v_head,
    stride_scale_page, stride_scale_head,
    first_token,  # of the chunk
    score_scale,
    STRIDE_K_TOKEN: tl.constexpr, STRIDE_V_TOKEN: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr,
    OPERAND: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of query tokens of one sequence and KV head over the union of their blocks.

    A query token that did not choose a block sees none of its tokens. Tiles whose lists were not
    united are left to ``attend_rows``.
    """
    item, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile_token = tl.load(tiles_ptr + item * 4 + 1)
    count = tl.load(tiles_ptr + item * 4 + 2)
    position = tl.load(tiles_ptr + item * 4 + 3)
    unions_ptr += (tile_token - first_token).to(tl.int64) * heads * TOP
    pages_ptr += (tile_token - first_token).to(tl.int64) * heads * TOP
    wait_for_previous(PDL)
    place = tl.arange(0, TOKENS * TOP_PAD)
    entries = tl.load(
        unions_ptr + place_of(place, head, heads, TOP), mask=place < count * TOP, other=NO_ENTRY
    )
    if tl.max(entries, 0) < -1:
        steps = tl.sum((entries > NO_ENTRY).to(tl.int32), 0)
        vector = tl.arange(0, M)
        query, member = vector // GROUP_PAD, vector % GROUP_PAD
        real = (query < count) & (member < GROUP)
        offsets = (tile_token.to(tl.int64) + query) * stride_q_token
        offsets += (head * GROUP + member) * stride_q_head
        q_low, q_high = load_queries(q_ptr, offsets, real, C, OPERAND, PAIRS)
        top = tl.full([M], LOWEST, tl.float32)
        total = no_sums(M, TILE, True)
        even = tl.zeros([M, C], tl.float32)
        odd = even
        k_ptr += head * stride_k_head
        v_ptr += head * stride_v_head
        k_scale_ptr += head * stride_scale_head
        v_scale_ptr += head * stride_scale_head
        length = position + count
        within = tl.arange(0, TILE)
        TILES: tl.constexpr = PAGE // TILE  # per block
        last = tl.maximum(steps - 1, 0)
        # The page is one tile ahead of its use: one dependent load less in the loop.
        page = tl.load(pages_ptr + place_of(0, head, heads, TOP), mask=steps > 0, other=0)
        for step in tl.range(0, steps * TILES, num_stages=STAGES):
            at = place_of(step // TILES, head, heads, TOP)
            at_ahead = place_of(tl.minimum((step + 1) // TILES, last), head, heads, TOP)
            entry = -1 - tl.load(unions_ptr + at)
            page_ahead = tl.load(pages_ptr + at_ahead)
            slot = step % TILES * TILE
            before = (entry >> 8) * PAGE + slot  # tokens of the context before the tile
            chose = ((entry >> query) & 1) > 0
            k_base = k_ptr + page.to(tl.int64) * stride_k_page + slot * STRIDE_K_TOKEN
            v_base = v_ptr + page.to(tl.int64) * stride_v_page + slot * STRIDE_V_TOKEN
            k_scale_base, v_scale_base = k_scale_ptr, v_scale_ptr
            if SCALED:
                k_scale_base += page.to(tl.int64) * stride_scale_page + slot
                v_scale_base += page.to(tl.int64) * stride_scale_page + slot
            page = page_ahead
            top, total, even, odd = attend_tile(
                q_low, q_high, top, total, even, odd,
                k_base, v_base, k_scale_base, v_scale_base,
                within * STRIDE_K_TOKEN, within * STRIDE_V_TOKEN, within,
                within < length - before, tl.where(chose, position + 1 + query - before, 0),
                score_scale, C, TILE, OPERAND, SCALED, PAIRS, NATIVE, True,
            )  # fmt: skip
        let_next_start(PDL)
        total = tl.sum(total, 1)
        inverse = 1.0 / tl.where(total > 0, total, 1.0)
        store_output(
            out_ptr, offsets, real, even * inverse[:, None], odd * inverse[:, None], C, PAIRS
        )
