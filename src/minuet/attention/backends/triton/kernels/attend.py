"""Attention over pages: dense by a plan, over chosen blocks, prefill, and the merge of parts."""

import triton
import triton.language as tl

from minuet.attention.backends.triton.kernels.choose import choose_blocks, load_list
from minuet.attention.backends.triton.kernels.common import (
    LOWEST,
    attend_tile,
    load_queries,
    no_sums,
    row_of,
    store_output,
    store_partial,
)
from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous

# M query vectors of a work item (query tokens x group, padded), C channels per operand (half of D
# with PAIRS), TILE tokens. Offsets of pages are 64-bit: a pool can hold more than 2**31 elements.


@triton.jit
def stream(
    q_low, q_high, top, total, out_even, out_odd,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    table_ptr,  # int32, pages of this sequence
    page,  # of the first tile
    stride_k_page, stride_v_page, stride_scale_page,
    first, end,  # tiles
    length,  # tokens of the context that some row sees
    row_end,  # [M] tokens that a row sees
    score_scale,
    STRIDE_K_TOKEN: tl.constexpr, STRIDE_V_TOKEN: tl.constexpr,
    C: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, OPERAND: tl.constexpr,
    SCALED: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr, ROW_MASK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles ``first .. end - 1`` of one sequence and KV head."""
    within = tl.arange(0, TILE)
    # The page id is one tile ahead of its use: one dependent load less in the loop.
    for tile in tl.range(first, end, num_stages=STAGES):
        valid = within < length - tile * TILE
        if PAGE >= TILE:
            ahead = tl.load(table_ptr + tl.minimum(tile + 1, end - 1) * TILE // PAGE)
            slot = tile * TILE % PAGE
            k_base = k_ptr + page.to(tl.int64) * stride_k_page + slot * STRIDE_K_TOKEN
            v_base = v_ptr + page.to(tl.int64) * stride_v_page + slot * STRIDE_V_TOKEN
            k_scale_base, v_scale_base = k_scale_ptr, v_scale_ptr
            if SCALED:
                k_scale_base += page.to(tl.int64) * stride_scale_page + slot
                v_scale_base += page.to(tl.int64) * stride_scale_page + slot
            k_offset = within * STRIDE_K_TOKEN
            v_offset = within * STRIDE_V_TOKEN
            scale_offset = within
            page = ahead
        else:
            token = tile * TILE + within
            pages = tl.load(table_ptr + token // PAGE, mask=valid, other=0).to(tl.int64)
            slot = token % PAGE
            k_base, v_base = k_ptr, v_ptr
            k_scale_base, v_scale_base = k_scale_ptr, v_scale_ptr
            k_offset = pages * stride_k_page + slot * STRIDE_K_TOKEN
            v_offset = pages * stride_v_page + slot * STRIDE_V_TOKEN
            scale_offset = pages * stride_scale_page + slot
        top, total, out_even, out_odd = attend_tile(
            q_low, q_high, top, total, out_even, out_odd,
            k_base, v_base, k_scale_base, v_scale_base,
            k_offset, v_offset, scale_offset,
            valid, row_end - tile * TILE, score_scale,
            C, TILE, OPERAND, SCALED, PAIRS, NATIVE, ROW_MASK,
        )  # fmt: skip
    return top, total, out_even, out_odd


@triton.jit(
    do_not_specialize=["stride_table", "stride_slot", "query_len"],
    do_not_specialize_on_alignment=["work_ptr", "lengths_ptr", "table_ptr"],
)
def attend_dense(
    q_ptr,  # [T, H, D]
    out_ptr,  # [T, H, D]
    k_ptr,  # [N, K, P, D], PAIRS: int16 view, half as wide
    v_ptr,
    k_scale_ptr,  # [N, K, P] FP32; SCALED only
    v_scale_ptr,
    partial_ptr,  # [K, slots, vectors, D] FP32
    lse_ptr,  # [K, slots, vectors] FP32
    work_ptr,  # [capacity, 4] int32: sequence, first tile, end tile, slot
    lengths_ptr,  # [sequences] int32
    table_ptr,  # [sequences, pages] int32
    stride_q_token, stride_q_head,
    stride_k_page, stride_k_head,
    stride_v_page, stride_v_head,
    stride_scale_page, stride_scale_head,
    stride_table,
    stride_slot,  # slots: partial results per KV head
    query_len,
    score_scale,
    STRIDE_K_TOKEN: tl.constexpr, STRIDE_V_TOKEN: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    PLAN_TILE: tl.constexpr,  # tokens per tile of the plan; a multiple of TILE
    OPERAND: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
    ROW_MASK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one sequence and KV head; all query tokens of the sequence together."""
    item, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(work_ptr + item * 4).to(tl.int64)
    first = tl.load(work_ptr + item * 4 + 1)
    end = tl.load(work_ptr + item * 4 + 2)
    slot = tl.load(work_ptr + item * 4 + 3)
    length = tl.load(lengths_ptr + sequence)
    first *= PLAN_TILE // TILE
    end = tl.minimum(end * (PLAN_TILE // TILE), tl.cdiv(length, TILE))
    table_ptr += sequence * stride_table
    page = tl.load(table_ptr + first * TILE // PAGE, mask=first < end, other=0)
    wait_for_previous(PDL)
    if first < end:
        vector = tl.arange(0, M)
        query, member = vector // GROUP_PAD, vector % GROUP_PAD
        real = (query < query_len) & (member < GROUP)
        offsets = (sequence * query_len + query) * stride_q_token
        offsets += (head * GROUP + member) * stride_q_head
        q_low, q_high = load_queries(q_ptr, offsets, real, C, OPERAND, PAIRS)
        top = tl.full([M], LOWEST, tl.float32)
        total = no_sums(M, TILE, False)
        zero = tl.zeros([M, C], tl.float32)
        top, total, even, odd = stream(
            q_low, q_high, top, total, zero, zero,
            k_ptr + head * stride_k_head, v_ptr + head * stride_v_head,
            k_scale_ptr + head * stride_scale_head, v_scale_ptr + head * stride_scale_head,
            table_ptr, page, stride_k_page, stride_v_page, stride_scale_page,
            first, end, length, length - query_len + 1 + query, score_scale,
            STRIDE_K_TOKEN, STRIDE_V_TOKEN, C, TILE, PAGE,
            OPERAND, SCALED, PAIRS, NATIVE, ROW_MASK, STAGES,
        )  # fmt: skip
        let_next_start(PDL)
        total = tl.sum(total, 1)
        if slot < 0:
            inverse = 1.0 / tl.where(total > 0, total, 1.0)
            store_output(
                out_ptr, offsets, real, even * inverse[:, None], odd * inverse[:, None], C, PAIRS
            )
        else:
            vectors = query_len * GROUP
            at = (head * stride_slot + slot).to(tl.int64) * vectors + query * GROUP + member
            store_partial(
                partial_ptr, lse_ptr, at, real, top, total, even, odd, D, C, PAIRS, NATIVE
            )


@triton.jit
def stream_blocks(
    q_low, q_high,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,  # of this KV head
    blocks, pages,  # [ENTRIES] chosen blocks of a row and their pages
    stride_k_page, stride_v_page, stride_scale_page,
    first, end,  # entries
    visible,  # tokens of the context that the row sees
    score_scale,
    STRIDE_K_TOKEN: tl.constexpr, STRIDE_V_TOKEN: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    ENTRIES: tl.constexpr, OPERAND: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr,
    NATIVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Chosen blocks ``first .. end - 1`` of one row."""
    top = tl.full([M], LOWEST, tl.float32)
    total = no_sums(M, TILE, False)
    even = tl.zeros([M, C], tl.float32)
    odd = tl.zeros([M, C], tl.float32)
    within = tl.arange(0, TILE)
    entry = tl.arange(0, ENTRIES)
    TILES: tl.constexpr = PAGE // TILE  # per block
    for step in tl.range(first * TILES, end * TILES, num_stages=STAGES):
        is_this = entry == step // TILES
        page = tl.sum(tl.where(is_this, pages, 0), 0).to(tl.int64)
        block = tl.sum(tl.where(is_this, blocks, 0), 0)
        slot = step % TILES * TILE
        valid = within < visible - block * PAGE - slot
        k_scale_base, v_scale_base = k_scale_ptr, v_scale_ptr
        if SCALED:
            k_scale_base += page * stride_scale_page + slot
            v_scale_base += page * stride_scale_page + slot
        top, total, even, odd = attend_tile(
            q_low, q_high, top, total, even, odd,
            k_ptr + page * stride_k_page + slot * STRIDE_K_TOKEN,
            v_ptr + page * stride_v_page + slot * STRIDE_V_TOKEN,
            k_scale_base, v_scale_base,
            within * STRIDE_K_TOKEN, within * STRIDE_V_TOKEN, within,
            valid, tl.arange(0, M), score_scale,
            C, TILE, OPERAND, SCALED, PAIRS, NATIVE, False,
        )  # fmt: skip
    return top, total, even, odd


@triton.jit(
    do_not_specialize=[
        "stride_table", "stride_scores", "query_len", "first_token",
    ],
    do_not_specialize_on_alignment=["lengths_ptr", "table_ptr", "source_ptr"],
)  # fmt: skip
def attend_blocks(
    q_ptr,  # [T, H, D]
    out_ptr,  # [T, H, D]
    k_ptr,  # [N, K, P, D], PAIRS: int16 view, half as wide
    v_ptr,
    k_scale_ptr,  # [N, K, P] FP32; SCALED only
    v_scale_ptr,
    partial_ptr,  # [K, chunk * parts, GROUP, D] FP32
    lse_ptr,  # [K, chunk * parts, GROUP] FP32
    source_ptr,  # int32; FROM_SCORES: orders [K, chunk, blocks]; else lists [chunk, K, TOP]
    lengths_ptr,  # [sequences] int32
    table_ptr,  # [sequences, pages] int32
    stride_q_token, stride_q_head,
    stride_k_page, stride_k_head,
    stride_v_page, stride_v_head,
    stride_scale_page, stride_scale_head,
    stride_table,
    stride_scores,  # between tokens of the score buffer
    query_len,
    first_token,  # of the chunk
    score_scale,
    STRIDE_K_TOKEN: tl.constexpr, STRIDE_V_TOKEN: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    TOP: tl.constexpr, TOP_PAD: tl.constexpr, PARTS: tl.constexpr,
    MINE: tl.constexpr,  # blocks of a part, a power of 2
    OPERAND: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
    FROM_SCORES: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, STEP: tl.constexpr,
    MANY: tl.constexpr, EARLY: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one row (query token x KV head) of a decode step over its chosen blocks.

    With FROM_SCORES the row's blocks are chosen here, by every part for itself: that costs less
    than handing a list over from another launch.
    """
    chunk_token, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_tokens, heads = tl.num_programs(0), tl.num_programs(1)
    token = chunk_token + first_token
    sequence, visible = row_of(token, query_len, lengths_ptr, lengths_ptr, lengths_ptr, False)
    table_ptr += sequence * stride_table
    num_blocks = tl.maximum(tl.cdiv(visible, PAGE), 0)
    block = tl.arange(0, FEW)
    near_pages = tl.load(table_ptr + block, mask=block < num_blocks, other=0)
    wait_for_previous(PDL)
    if EARLY:
        let_next_start(PDL)
    vector = tl.arange(0, M)
    real = vector < GROUP
    offsets = token * stride_q_token + (head * GROUP + vector) * stride_q_head
    q_low, q_high = load_queries(q_ptr, offsets, real, C, OPERAND, PAIRS)
    if FROM_SCORES:
        orders_ptr = source_ptr + (head * num_tokens + chunk_token) * stride_scores
        chosen = tl.minimum(num_blocks, TOP)
        first = part * chosen // PARTS
        blocks, pages = choose_blocks(
            orders_ptr, table_ptr, near_pages, num_blocks, first,
            TOP, TOP_PAD, MINE, MOST, FEW, STEP, MANY,
        )  # fmt: skip
        end = (part + 1) * chosen // PARTS - first
        first = 0
    else:
        source_ptr += (chunk_token * heads + head) * TOP
        blocks, pages, chosen = load_list(source_ptr, table_ptr, TOP, TOP_PAD)
        first = part * chosen // PARTS
        end = (part + 1) * chosen // PARTS
    top, total, even, odd = stream_blocks(
        q_low, q_high,
        k_ptr + head * stride_k_head, v_ptr + head * stride_v_head,
        k_scale_ptr + head * stride_scale_head, v_scale_ptr + head * stride_scale_head,
        blocks, pages, stride_k_page, stride_v_page, stride_scale_page,
        first, end, visible, score_scale,
        STRIDE_K_TOKEN, STRIDE_V_TOKEN, M, C, TILE, PAGE, MINE if FROM_SCORES else TOP_PAD,
        OPERAND, SCALED, PAIRS, NATIVE, STAGES,
    )  # fmt: skip
    if not EARLY:
        let_next_start(PDL)
    total = tl.sum(total, 1)
    if PARTS == 1:
        inverse = 1.0 / tl.where(total > 0, total, 1.0)
        store_output(
            out_ptr, offsets, real, even * inverse[:, None], odd * inverse[:, None], C, PAIRS
        )
    else:
        at = ((head * num_tokens + chunk_token) * PARTS + part) * GROUP + vector
        store_partial(partial_ptr, lse_ptr, at, real, top, total, even, odd, D, C, PAIRS, NATIVE)


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"],
)
def attend_prefill(
    q_ptr,  # [T, H, D]
    out_ptr,  # [T, H, D]
    k_ptr,  # [N, K, P, D], PAIRS: int16 view, half as wide
    v_ptr,
    k_scale_ptr,  # [N, K, P] FP32; SCALED only
    v_scale_ptr,
    tiles_ptr,  # [tiles, 4] int32: sequence, first query token, query tokens, first position
    table_ptr,  # [sequences, pages] int32
    stride_q_token, stride_q_head,
    stride_k_page, stride_k_head,
    stride_v_page, stride_v_head,
    stride_scale_page, stride_scale_head,
    stride_table,
    score_scale,
    STRIDE_K_TOKEN: tl.constexpr, STRIDE_V_TOKEN: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    OPERAND: tl.constexpr, SCALED: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of query tokens of one sequence and KV head against all they see, cached or new."""
    item, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles_ptr + item * 4).to(tl.int64)
    first_token = tl.load(tiles_ptr + item * 4 + 1).to(tl.int64)
    count = tl.load(tiles_ptr + item * 4 + 2)
    position = tl.load(tiles_ptr + item * 4 + 3)
    table_ptr += sequence * stride_table
    page = tl.load(table_ptr)
    wait_for_previous(PDL)
    vector = tl.arange(0, M)
    query, member = vector // GROUP_PAD, vector % GROUP_PAD
    real = (query < count) & (member < GROUP)
    offsets = (first_token + query) * stride_q_token + (head * GROUP + member) * stride_q_head
    q_low, q_high = load_queries(q_ptr, offsets, real, C, OPERAND, PAIRS)
    top = tl.full([M], LOWEST, tl.float32)
    total = no_sums(M, TILE, SCALED)
    zero = tl.zeros([M, C], tl.float32)
    k_ptr += head * stride_k_head
    v_ptr += head * stride_v_head
    k_scale_ptr += head * stride_scale_head
    v_scale_ptr += head * stride_scale_head
    length = position + count
    # tiles that every row sees whole, then those on the diagonal
    whole = (
        tl.maximum(position + 1, 0) // TILE
    )  # a tile that pads its step is at a negative position
    even, odd = zero, zero
    if whole > 0:
        top, total, even, odd = stream(
            q_low, q_high, top, total, even, odd,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, page,
            stride_k_page, stride_v_page, stride_scale_page,
            0, whole, length, query, score_scale,
            STRIDE_K_TOKEN, STRIDE_V_TOKEN, C, TILE, PAGE,
            OPERAND, SCALED, PAIRS, NATIVE, False, STAGES,
        )  # fmt: skip
    top, total, even, odd = stream(
        q_low, q_high, top, total, even, odd,
        k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
        tl.load(table_ptr + whole * TILE // PAGE),
        stride_k_page, stride_v_page, stride_scale_page,
        whole, tl.cdiv(length, TILE), length, position + 1 + query, score_scale,
        STRIDE_K_TOKEN, STRIDE_V_TOKEN, C, TILE, PAGE,
        OPERAND, SCALED, PAIRS, NATIVE, True, 1,
    )  # fmt: skip
    let_next_start(PDL)
    total = tl.sum(total, 1)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    store_output(out_ptr, offsets, real, even * inverse[:, None], odd * inverse[:, None], C, PAIRS)


@triton.jit(
    do_not_specialize=["stride_slot", "query_len"],
    do_not_specialize_on_alignment=["rows_ptr"],
)
def merge_parts(
    out_ptr,  # [T, H, D]
    partial_ptr,  # [K, slots, vectors, D] FP32
    lse_ptr,  # [K, slots, vectors] FP32
    rows_ptr,  # [sequences, 2] int32: first slot, parts; unused if STATIC_PARTS
    stride_out_token, stride_out_head,
    stride_slot,
    query_len,  # query tokens per row of the plan
    GROUP: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    VECTORS: tl.constexpr,  # query vectors of a program
    WIDTH: tl.constexpr,  # channels of a program
    CHUNK: tl.constexpr, STATIC_PARTS: tl.constexpr, PAIRS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of VECTORS query vectors, WIDTH channels of them; zeros for an empty row.

    Rows of one part were written directly and are left alone.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    vectors = query_len * GROUP
    SLICES: tl.constexpr = D // WIDTH
    vector = tl.program_id(2) // SLICES * VECTORS + tl.arange(0, VECTORS)
    channel = tl.program_id(2) % SLICES * WIDTH + tl.arange(0, WIDTH)
    real = vector < vectors
    if STATIC_PARTS > 0:
        first, parts = row * STATIC_PARTS, STATIC_PARTS
    else:
        first = tl.load(rows_ptr + row * 2).to(tl.int64)
        parts = tl.load(rows_ptr + row * 2 + 1)
    if EARLY:
        let_next_start(PDL)
    wait_for_previous(PDL)
    if parts != 1:
        base = (head * stride_slot.to(tl.int64) + first) * vectors
        top = tl.full([VECTORS], LOWEST, tl.float32)
        total = tl.zeros([VECTORS], tl.float32)
        out = tl.zeros([VECTORS, WIDTH], tl.float32)
        for begin in range(0, parts, CHUNK):
            part = begin + tl.arange(0, CHUNK)
            there = (part < parts)[:, None] & real[None, :]
            at = base + part.to(tl.int64)[:, None] * vectors + vector[None, :]
            lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"))
            # not masked by lse, which would cost a second wait; a part without tokens stored zeros
            values = tl.load(
                partial_ptr + at[:, :, None] * D + channel[None, None, :],
                mask=there[:, :, None],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(lse, 0))
            weights = tl.exp2(lse - new_top[None, :])
            keep = tl.exp2(top - new_top)
            total = total * keep + tl.sum(weights, 0)
            out = out * keep[:, None] + tl.sum(values * weights[:, :, None], 0)
            top = new_top
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        if PAIRS:  # even channels first
            channel = tl.where(channel < C, 2 * channel, 2 * (channel - C) + 1)
        token = row * query_len + vector // GROUP
        at_out = token * stride_out_token + (head * GROUP + vector % GROUP) * stride_out_head
        tl.store(
            out_ptr + at_out[:, None] + channel[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=real[:, None],
        )
