"""Routing: scores, the choice of experts, and rows sorted by expert in tiles of one expert each."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous

# T tokens, E experts, K experts of a token, S partial sums of a score


@triton.jit
def bf16_terms(x):
    """FP32 as a sum of three BF16 numbers: 24 bits of mantissa in all."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit(do_not_specialize=["num_tokens"])
def router_logits(
    x_ptr,  # [T, H]
    router_ptr,  # [E, H] FP32
    logits_ptr,  # [S, T, E] FP32: partial sums
    num_tokens,
    H: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    BK: tl.constexpr, TERMS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One partial sum, over CHUNK channels, of BM tokens and BE experts.

    With TERMS (BF16 tokens) the FP32 router is three BF16 operands, whose products are exact: as
    good as FP32 arithmetic, on matrix units. The small terms are summed apart from the large ones.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    first = tl.program_id(2) * CHUNK
    wait_for_previous(PDL)
    x_at = x_ptr + row.to(tl.int64)[:, None] * H
    router_at = router_ptr + expert.to(tl.int64)[None, :] * H
    total = tl.zeros((BM, BE), tl.float32)
    small = tl.zeros((BM, BE), tl.float32)
    smaller = tl.zeros((BM, BE), tl.float32)
    for k in tl.range(first, min(first + CHUNK, H), BK, num_stages=STAGES):
        channel = k + tl.arange(0, BK)
        inside = channel < min(first + CHUNK, H)
        x = tl.load(
            x_at + channel[None, :], mask=(row < num_tokens)[:, None] & inside[None, :], other=0.0
        )
        router = tl.load(
            router_at + channel[:, None], mask=(expert < E)[None, :] & inside[:, None], other=0.0
        )
        if TERMS:
            high, middle, low = bf16_terms(router)
            smaller = tl.dot(x, low, smaller)
            small = tl.dot(x, middle, small)
            total = tl.dot(x, high, total)
        else:
            total = tl.dot(x.to(tl.float32), router, total, input_precision="ieee")
    at = tl.program_id(2).to(tl.int64) * num_tokens + row
    at = logits_ptr + at[:, None] * E + expert[None, :]
    total += small + smaller
    tl.store(at, total, mask=(row < num_tokens)[:, None] & (expert < E)[None, :])
    let_next_start(PDL)


@triton.jit(do_not_specialize=["num_tokens"])
def router_logits_few(
    x_ptr,  # [T, H]
    router_ptr,  # [E, H] FP32
    logits_ptr,  # [S, T, E] FP32: partial sums
    num_tokens,
    H: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As :func:`router_logits`, in FP32 on vector units: no loop, little latency for few tokens."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    channel = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    router = tl.load(  # nobody writes weights: no need to wait
        router_ptr + expert.to(tl.int64)[None, :, None] * H + channel[None, None, :],
        mask=(expert < E)[None, :, None] & (channel < H)[None, None, :], other=0.0,
    )  # fmt: skip
    wait_for_previous(PDL)
    let_next_start(PDL)  # a program that clears its lists, and the shared expert
    x = tl.load(
        x_ptr + row.to(tl.int64)[:, None, None] * H + channel[None, None, :],
        mask=(row < num_tokens)[:, None, None] & (channel < H)[None, None, :], other=0.0,
    )  # fmt: skip
    total = tl.sum(x.to(tl.float32) * router, 2)
    at = tl.program_id(2).to(tl.int64) * num_tokens + row
    at = logits_ptr + at[:, None] * E + expert[None, :]
    tl.store(at, total, mask=(row < num_tokens)[:, None] & (expert < E)[None, :])


@triton.jit
def ordered(x):
    """int32 that orders as FP32 does; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def load_bias(bias_ptr, E: tl.constexpr, E_PAD: tl.constexpr):
    """[1, E_PAD]. Nobody writes weights: before the wait."""
    expert = tl.arange(0, E_PAD)[None, :]
    return tl.load(bias_ptr + expert, mask=expert < E, other=0.0)


@triton.jit
def choose(
    logits_ptr, shares_ptr,
    bias,  # [1, E_PAD]
    row, num_tokens, routed_scale,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, S: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Experts [BM, K_PAD] of ``row`` (-1: none), best first, ties to the lowest; stores shares."""
    expert = tl.arange(0, E_PAD)[None, :]
    inside = (row < num_tokens)[:, None] & (expert < E)
    at = row.to(tl.int64)[:, None] * E + expert
    logits = tl.zeros((BM, E_PAD), tl.float32)
    for part in tl.static_range(S):
        stride = num_tokens.to(tl.int64) * E
        logits += tl.load(logits_ptr + part * stride + at, mask=inside, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logits))
    # whatever the scores are, NaN included, K different experts are found: no key is the lowest
    lowest: tl.constexpr = -(2**31)
    key = tl.maximum(ordered(score + bias), lowest + 1)
    key = tl.where(expert < E, key, lowest)
    # of the k-th best, in column k; a loop, because its code is cold in a step
    chosen = tl.full((BM, E_PAD), -1, tl.int32)
    weight = tl.zeros((BM, E_PAD), tl.float32)
    total = tl.zeros((BM,), tl.float32)  # best first: a sum across threads would depend on BM
    for k in range(K):
        best = tl.max(key, 1)
        index = tl.min(tl.where(key == best[:, None], expert, E_PAD), 1)
        picked = expert == index[:, None]
        bits = tl.where(picked, score.to(tl.int32, bitcast=True), 0)  # no score is negative
        value = tl.max(bits, 1).to(tl.float32, bitcast=True)
        total += value
        key = tl.where(picked, lowest, key)
        chosen = tl.where(expert == k, index[:, None], chosen)
        weight = tl.where(expert == k, value[:, None], weight)
    shares = weight / total[:, None] * routed_scale
    kept = (row < num_tokens)[:, None] & (expert < K)
    tl.store(shares_ptr + row.to(tl.int64)[:, None] * K + expert, shares, mask=kept)
    chosen = tl.where(kept, chosen, -1)
    return tl.max(tl.reshape(chosen, (BM, E_PAD // K_PAD, K_PAD)), 1)


@triton.jit
def chosen_by(chosen, K: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr):
    """[BM, E_PAD] int32: 1 where a token of ``chosen`` [BM, K_PAD] chose an expert."""
    expert, slot = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    picked = expert[None, :] < 0
    for k in tl.static_range(K):
        one = tl.max(tl.where(slot[None, :] == k, chosen, -1), 1)
        picked = picked | (expert[None, :] == one[:, None])
    return picked.to(tl.int32)


@triton.jit
def place(
    chosen,  # [BM, K_PAD] experts, -1: none
    picked,  # [BM, E_PAD] from :func:`chosen_by`
    first,  # [E_PAD] int32: where this tile's rows of an expert begin
    row,  # [BM] tokens
    rows_ptr,  # sorted rows, written
    K: tl.constexpr, K_PAD: tl.constexpr, SLOTS: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """Rows to the places of their experts, by token: stable, so nothing depends on timing.

    A token chooses an expert once, so its rank among an expert's rows counts earlier tokens.
    """
    expert, slot = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    at = first[None, :] + tl.cumsum(picked, 0) - picked
    for k in tl.static_range(K):
        one = tl.max(tl.where(slot[None, :] == k, chosen, -1), 1)
        mine = tl.sum(tl.where(expert[None, :] == one[:, None], at, 0), 1)
        tl.store(rows_ptr + mine, row * SLOTS + k, mask=one >= 0)


@triton.jit
def fill(out_ptr, size, value: tl.constexpr, BLOCK: tl.constexpr):
    """``size`` times ``value``."""
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + index, value, mask=index < size)


@triton.jit
def place_few(
    chosen,  # [BM, K_PAD] experts, -1: none
    tiles_ptr, rows_ptr,
    K_PAD: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As :func:`lay_out` and :func:`place`, for so few tokens that a tile holds any expert's rows.

    Every pair of token and expert is compared with all. The lists are full of -1 before.
    """
    tl.static_assert(BM <= TILE)
    PAIRS: tl.constexpr = BM * K_PAD
    pair = tl.arange(0, PAIRS)
    expert = tl.reshape(chosen, (PAIRS,))
    earlier = pair[None, :] < pair[:, None]
    same = expert[None, :] == expert[:, None]
    before = tl.sum((same & earlier).to(tl.int32), 1)
    leads = (before == 0) & (expert >= 0)
    later = tl.sum((same & (pair[:, None] < pair[None, :])).to(tl.int32), 0)
    first = ((later == 0) & (expert >= 0))[None, :]
    tile = tl.sum((first & (expert[None, :] < expert[:, None])).to(tl.int32), 1)
    at = rows_ptr + tile * TILE + before
    tl.store(at, pair // K_PAD * SLOTS + pair % K_PAD, mask=expert >= 0)
    tl.store(tiles_ptr + tile, expert, mask=leads)


@triton.jit
def lay_out(
    counts,  # [E_PAD] rows per expert
    tiles_ptr, rows_ptr,
    capacity,
    longest,
    E_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Give every expert its tiles, in order, none of more than ``longest``; return first rows.

    Writes the expert of each tile, -1 beyond the last, and -1 for the rows that fill up an expert's
    last tile.
    """
    expert = tl.arange(0, E_PAD)
    tiles = (counts + TILE - 1) // TILE
    first = tl.cumsum(tiles, 0) - tiles
    for one in range(longest):
        tl.store(tiles_ptr + first + one, expert, mask=one < tiles)
    used = tl.sum(tiles, 0)
    for start in range(0, capacity, E_PAD):
        index = start + expert
        tl.store(tiles_ptr + index, -1, mask=(index >= used) & (index < capacity))
    within = tl.arange(0, TILE)
    free = counts[:, None] + within[None, :]
    at = first[:, None] * TILE + free
    tl.store(rows_ptr + at, -1, mask=free < (tiles * TILE)[:, None])
    return first * TILE


@triton.jit(do_not_specialize=["num_tokens", "capacity", "num_flags"])
def route_step(
    logits_ptr,  # [S, T, E] FP32
    bias_ptr,  # [E] FP32
    shares_ptr,  # [T, K] FP32
    tiles_ptr,  # [capacity] int32: expert of each tile, -1: unused
    rows_ptr,  # [capacity, TILE] int32: token * SLOTS + k, -1: none
    flags_ptr,  # [num_flags] int32: zeros for the products
    num_tokens,
    capacity,
    num_flags,
    routed_scale,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    SLOTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All of a small step (at most BM tokens) in one program.

    The next kernel starts at once: all units but one are idle, and it has a prologue. What can be
    written before the wait is: no kernel that may still run uses this memory.
    """
    let_next_start(PDL)
    bias = load_bias(bias_ptr, E, E_PAD)
    fill(tiles_ptr, capacity, -1, E_PAD)
    fill(rows_ptr, capacity * TILE, -1, E_PAD)
    fill(flags_ptr, num_flags, 0, E_PAD)
    wait_for_previous(PDL)
    row = tl.arange(0, BM)
    chosen = choose(
        logits_ptr, shares_ptr, bias, row, num_tokens, routed_scale, E, E_PAD, K, K_PAD, S, BM
    )
    tl.debug_barrier()  # after the fill
    place_few(chosen, tiles_ptr, rows_ptr, K_PAD, SLOTS, BM, TILE)


@triton.jit(do_not_specialize=["num_tokens"])
def route_tokens(
    logits_ptr,  # [S, T, E] FP32
    bias_ptr,
    shares_ptr,  # [T, K] FP32
    chosen_ptr,  # [T, K] int32
    counts_ptr,  # [tiles of tokens, E_PAD] int32
    num_tokens,
    routed_scale,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, S: tl.constexpr,
    BM: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Experts of BM tokens of a step that takes several programs; COUNTS: how often each expert."""
    bias = load_bias(bias_ptr, E, E_PAD)
    wait_for_previous(PDL)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    chosen = choose(
        logits_ptr, shares_ptr, bias, row, num_tokens, routed_scale, E, E_PAD, K, K_PAD, S, BM
    )
    slot = tl.arange(0, K_PAD)
    at = chosen_ptr + row.to(tl.int64)[:, None] * K + slot[None, :]
    tl.store(at, chosen, mask=(row < num_tokens)[:, None] & (slot < K)[None, :])
    if COUNTS:
        counts = tl.sum(chosen_by(chosen, K, K_PAD, E_PAD), 0)
        tl.store(counts_ptr + tl.program_id(0) * E_PAD + tl.arange(0, E_PAD), counts)
    let_next_start(PDL)


@triton.jit(do_not_specialize=["num_tokens", "capacity", "num_flags"])
def route_place(
    chosen_ptr,  # [T, K] int32
    tiles_ptr,  # [capacity] int32
    rows_ptr,  # [capacity, TILE] int32
    flags_ptr,  # [num_flags] int32
    num_tokens,
    capacity,
    num_flags,
    K: tl.constexpr, K_PAD: tl.constexpr, SLOTS: tl.constexpr, E_PAD: tl.constexpr,
    BM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Second and last launch of a step of at most BM tokens: one program lays out and places."""
    let_next_start(PDL)
    fill(flags_ptr, num_flags, 0, E_PAD)
    wait_for_previous(PDL)
    row, slot = tl.arange(0, BM), tl.arange(0, K_PAD)
    kept = (row < num_tokens)[:, None] & (slot < K)[None, :]
    chosen = tl.load(chosen_ptr + row[:, None] * K + slot[None, :], mask=kept, other=-1)
    picked = chosen_by(chosen, K, K_PAD, E_PAD)
    longest: tl.constexpr = (BM + TILE - 1) // TILE
    first = lay_out(tl.sum(picked, 0), tiles_ptr, rows_ptr, capacity, longest, E_PAD, TILE)
    place(chosen, picked, first, row, rows_ptr, K, K_PAD, SLOTS, E_PAD)


@triton.jit(do_not_specialize=["num_tiles", "capacity", "longest", "num_flags"])
def route_layout(
    counts_ptr,  # [tiles of tokens, E_PAD] int32; becomes each tile's first row of each expert
    tiles_ptr,  # [capacity] int32
    rows_ptr,  # [capacity, TILE] int32
    flags_ptr,  # [num_flags] int32
    num_tiles,
    capacity,
    num_flags,
    longest,
    E_PAD: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Second of three, one program: where the rows of each expert, and of each tile in it, lie."""
    wait_for_previous(PDL)
    fill(flags_ptr, num_flags, 0, E_PAD)
    expert, within = tl.arange(0, E_PAD), tl.arange(0, AT_ONCE)
    totals = tl.zeros((E_PAD,), tl.int32)
    for start in range(0, num_tiles, AT_ONCE):
        at = counts_ptr + (start + within)[:, None] * E_PAD + expert[None, :]
        inside = (start + within < num_tiles)[:, None]
        totals += tl.sum(tl.load(at, mask=inside, other=0), 0)
    first = lay_out(totals, tiles_ptr, rows_ptr, capacity, longest, E_PAD, TILE)
    for start in range(0, num_tiles, AT_ONCE):
        at = counts_ptr + (start + within)[:, None] * E_PAD + expert[None, :]
        inside = (start + within < num_tiles)[:, None]
        counts = tl.load(at, mask=inside, other=0)
        ends = tl.cumsum(counts, 0)
        tl.store(at, first[None, :] + ends - counts, mask=inside)
        first += tl.sum(counts, 0)
    let_next_start(PDL)


@triton.jit(do_not_specialize=["num_tokens"])
def route_rows(
    chosen_ptr,  # [T, K] int32
    first_ptr,  # [tiles of tokens, E_PAD] int32
    rows_ptr,  # [capacity, TILE] int32
    num_tokens,
    K: tl.constexpr, K_PAD: tl.constexpr, SLOTS: tl.constexpr, E_PAD: tl.constexpr,
    BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Third of three: rows of BM tokens to their places."""
    wait_for_previous(PDL)
    row, slot = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, K_PAD)
    kept = (row < num_tokens)[:, None] & (slot < K)[None, :]
    chosen_at = chosen_ptr + row.to(tl.int64)[:, None] * K + slot[None, :]
    chosen = tl.load(chosen_at, mask=kept, other=-1)
    first = tl.load(first_ptr + tl.program_id(0) * E_PAD + tl.arange(0, E_PAD))
    picked = chosen_by(chosen, K, K_PAD, E_PAD)
    place(chosen, picked, first, row, rows_ptr, K, K_PAD, SLOTS, E_PAD)
    let_next_start(PDL)
