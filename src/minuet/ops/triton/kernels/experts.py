"""The two products of a routed FFN over tiles of rows, each of one expert.

Bandwidth-bound decode and matrix-bound prefill are the same code with other tiles.
"""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous
from minuet.ops.triton.kernels.rows import swiglu

# M rows of a tile, N output channels, C input channels of a step of the loop. The weights are the
# first operand: their N channels fill a matrix instruction's 64 rows, and M may be as small as 16.


@triton.jit
def tile_of(
    tile, tiles_ptr, rows_ptr, num_tokens, shared_tiles,
    K: tl.constexpr, SLOTS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Expert of a tile (-1: unused) and its rows ``token * SLOTS + k`` [M] (-1: none).

    The first ``shared_tiles`` are the shared expert's, which every token visits in order.
    """
    within = tl.arange(0, M)
    is_routed = tile >= shared_tiles
    routed = tl.maximum(tile - shared_tiles, 0)
    expert = tl.load(tiles_ptr + routed, mask=is_routed, other=0)
    rows = tl.load(rows_ptr + routed * M + within, mask=is_routed & (within >= 0), other=-1)
    token = tile * M + within
    shared = tl.where(token < num_tokens, token * SLOTS + K, -1)
    return expert, tl.where(is_routed, rows, shared)


@triton.jit
def load_weights(
    at, channel, n, WIDTH: tl.constexpr, OUT: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """[N, C] weights; masked where the tile sizes do not divide the sizes."""
    if WIDTH % C == 0 and OUT % N == 0:
        return tl.load(at + channel[None, :])
    else:
        mask = (n < OUT)[:, None] & (channel < WIDTH)[None, :]
        return tl.load(at + channel[None, :], mask=mask, other=0.0)


@triton.jit
def load_rows(at, channel, valid, WIDTH: tl.constexpr, C: tl.constexpr):
    """[C, M] activations; rows without a token read nothing and are zero."""
    if WIDTH % C == 0:
        return tl.load(at + channel[:, None], mask=valid[None, :], other=0.0)
    else:
        mask = valid[None, :] & (channel < WIDTH)[:, None]
        return tl.load(at + channel[:, None], mask=mask, other=0.0)


@triton.jit
def give(gate, up, valid, slot, parts_ptr, flags_ptr, N: tl.constexpr, M: tl.constexpr):
    """Leave partial sums [N, M] of gate and up in a slot, and say so."""
    at = parts_ptr + slot * (2 * N * M) + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(at, gate, mask=valid[None, :])
    tl.store(at + N * M, up, mask=valid[None, :])
    tl.debug_barrier()  # the flag is one thread's, the sums are everyone's
    tl.atomic_xchg(flags_ptr + slot, 1, sem="release")


@triton.jit
def take(gate, up, valid, slot, parts_ptr, flags_ptr, N: tl.constexpr, M: tl.constexpr):
    """Add the partial sums of a slot once they are there. Past L1, which may hold older ones."""
    while tl.atomic_add(flags_ptr + slot, 0, sem="acquire") == 0:
        pass
    at = parts_ptr + slot * (2 * N * M) + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    gate += tl.load(at, mask=valid[None, :], other=0.0, cache_modifier=".cg")
    up += tl.load(at + N * M, mask=valid[None, :], other=0.0, cache_modifier=".cg")
    return gate, up


@triton.jit(
    do_not_specialize=["num_tokens", "shared_tiles"], do_not_specialize_on_alignment=["ready_ptr"]
)
def experts_up(
    x_ptr,  # [T, H]
    gate_up_ptr,  # [E, 2 * I, H]
    shared_ptr,  # [2 * I, H]
    out_ptr,  # [tiles, M, I]
    parts_ptr,  # [SHARED - 1, pieces of shared tiles, 2, N, M] FP32: sums of gate, of up
    flags_ptr,  # [...] int32 zeros, one per slot of parts_ptr
    ready_ptr,  # [tiles] int32 zeros; READY: finished pieces of a tile
    tiles_ptr,  # [routed tiles] int32
    rows_ptr,  # [routed tiles, M] int32
    num_tokens,
    shared_tiles,
    alpha,
    limit,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, OPERAND: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``act(gate, up)`` of N channels of a tile; an expert's weights are read once per tile.

    The shared expert does not wait for the routing: its tokens were there before that began. Its
    result waits, whose memory the routing may still read. SHARED programs divide the input channels
    of a piece of it, so that it takes all bandwidth while nothing else does; the last of them adds
    the others' sums, which started before it, in their order.
    """
    tiles_n: tl.constexpr = (I + N - 1) // N
    program = tl.program_id(0)
    pieces = shared_tiles * tiles_n
    piece, part = program - pieces * (SHARED - 1), SHARED - 1
    if SHARED > 1:
        part = tl.where(piece < 0, program // pieces, part)
        piece = tl.where(piece < 0, program % pieces, piece)
    tile = piece // tiles_n
    n = piece % tiles_n * N + tl.arange(0, N)
    first, last = 0, H
    if SHARED > 1:
        steps: tl.constexpr = (H + C - 1) // C
        first = tl.where(tile < shared_tiles, part * steps // SHARED * C, 0)
        last = tl.where(tile < shared_tiles, (part + 1) * steps // SHARED * C, H)
    if tile >= shared_tiles:
        wait_for_previous(PDL)
    if EARLY:
        let_next_start(PDL)
    expert, rows = tile_of(tile, tiles_ptr, rows_ptr, num_tokens, shared_tiles, K, SLOTS, M)
    if expert >= 0:
        routed_ptr = gate_up_ptr + expert.to(tl.int64) * (2 * I * H)
        weights = tl.where(tile < shared_tiles, shared_ptr, routed_ptr)
        gate_at = weights + n[:, None] * H
        up_at = gate_at + I * H
        valid = rows >= 0
        x_at = x_ptr + (tl.maximum(rows, 0) // SLOTS).to(tl.int64)[None, :] * H
        gate = tl.zeros((N, M), tl.float32)
        up = tl.zeros((N, M), tl.float32)
        for k in tl.range(first, last, C, num_stages=STAGES):
            channel = k + tl.arange(0, C)
            gate_weights = load_weights(gate_at, channel, n, H, I, N, C).to(OPERAND)
            up_weights = load_weights(up_at, channel, n, H, I, N, C).to(OPERAND)
            x = load_rows(x_at, channel, valid, H, C).to(OPERAND)
            gate = tl.dot(gate_weights, x, gate)
            up = tl.dot(up_weights, x, up)
        if tile < shared_tiles:
            wait_for_previous(PDL)
            if SHARED > 1:
                if part < SHARED - 1:
                    slot = part * pieces + piece
                    give(gate, up, valid, slot, parts_ptr, flags_ptr, N, M)
                else:
                    for other in range(SHARED - 1):
                        slot = other * pieces + piece
                        gate, up = take(gate, up, valid, slot, parts_ptr, flags_ptr, N, M)
        inner = swiglu(gate, up, alpha, limit)
        out = tile.to(tl.int64) * M + tl.arange(0, M)
        at = out_ptr + out[None, :] * I + n[:, None]
        mask = valid[None, :] & (n < I)[:, None] & (part == SHARED - 1)
        tl.store(at, inner.to(out_ptr.dtype.element_ty), mask=mask)
        if READY:
            tl.debug_barrier()  # the count is one thread's, the result is everyone's
            done = 1
            if SHARED > 1:
                done = (part == SHARED - 1).to(tl.int32)
            tl.atomic_add(ready_ptr + tile, done, sem="release")
    if not EARLY:
        let_next_start(PDL)


@triton.jit(
    do_not_specialize=["num_tokens", "shared_tiles"], do_not_specialize_on_alignment=["ready_ptr"]
)
def experts_down(
    x_ptr,  # [tiles, M, I]
    down_ptr,  # [E, H, I]
    shared_ptr,  # [H, I]
    out_ptr,  # [T, SLOTS, H]
    ready_ptr,  # [tiles] int32: READY: finished pieces of a tile of the first product
    tiles_ptr,
    rows_ptr,
    num_tokens,
    shared_tiles,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, OPERAND: tl.constexpr, STAGES: tl.constexpr,
    READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N channels of a tile's results, each row to its token and slot; summing them up is later.

    READY: a program waits for the READY pieces of its own tile, all of which run by the time that
    it starts, and at its end for the rest of the first product. The list of tiles is older than the
    first product, whose programs waited for it before they let this one start; until then it is
    read past L1.
    """
    tiles_n: tl.constexpr = (H + N - 1) // N
    tile = tl.program_id(0) // tiles_n
    n = tl.program_id(0) % tiles_n * N + tl.arange(0, N)
    if READY:
        at = tiles_ptr + tl.maximum(tile - shared_tiles, 0)
        if tl.load(at, mask=tile >= shared_tiles, other=0, cache_modifier=".cg") >= 0:
            while tl.load(ready_ptr + tile, volatile=True) < READY:
                pass
            tl.atomic_add(ready_ptr + tile, 0, sem="acquire")
        let_next_start(PDL)
    else:
        wait_for_previous(PDL)
    expert, rows = tile_of(tile, tiles_ptr, rows_ptr, num_tokens, shared_tiles, K, SLOTS, M)
    if expert >= 0:
        routed_ptr = down_ptr + expert.to(tl.int64) * (H * I)
        weights_at = tl.where(tile < shared_tiles, shared_ptr, routed_ptr) + n[:, None] * I
        valid = rows >= 0
        x_at = x_ptr + (tile.to(tl.int64) * M + tl.arange(0, M))[None, :] * I
        total = tl.zeros((N, M), tl.float32)
        for k in tl.range(0, I, C, num_stages=STAGES):
            channel = k + tl.arange(0, C)
            x = load_rows(x_at, channel, valid, I, C).to(OPERAND)
            weights = load_weights(weights_at, channel, n, I, H, N, C).to(OPERAND)
            total = tl.dot(weights, x, total)
        out_at = out_ptr + tl.maximum(rows, 0).to(tl.int64)[None, :] * H + n[:, None]
        mask = valid[None, :] & (n < H)[:, None]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=mask)
    if READY:
        wait_for_previous(PDL)
    else:
        let_next_start(PDL)
