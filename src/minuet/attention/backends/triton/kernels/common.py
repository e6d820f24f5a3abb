"""Pieces that several kernels share: FP8 conversion, one tile of attention."""

import triton
import triton.language as tl

# A running maximum starts here and not at -inf: -inf minus -inf is NaN, this minus this is 0.
LOWEST = tl.constexpr(-1.0e30)
# Softmax weights are scaled by 2 ** 12, so that fp16 weights keep 12 more bits of small ones.
SHIFT = tl.constexpr(12.0)
# Smallest value scale that is told apart; its logarithm and its inverse are finite in FP32.
SMALLEST_SCALE = tl.constexpr(1.0e-30)


@triton.jit
def row_of(
    token, query_len, lengths_ptr, token_sequence_ptr, positions_ptr, RAGGED: tl.constexpr
):  # fmt: skip
    """Sequence of a query token, and how much of the context it sees; 0 or less: nothing."""
    if RAGGED:
        sequence = tl.load(token_sequence_ptr + token).to(tl.int64)
        padding = sequence < 0
        sequence = tl.maximum(sequence, 0)
        visible = tl.minimum(
            tl.load(positions_ptr + token).to(tl.int32) + 1, tl.load(lengths_ptr + sequence)
        )
        visible = tl.where(padding, 0, visible)
    else:
        short = token.to(tl.int32)  # 64-bit division is a hundred instructions
        sequence = short // query_len
        visible = tl.load(lengths_ptr + sequence) - query_len + 1 + short - sequence * query_len
        sequence = sequence.to(tl.int64)
    return sequence, visible


@triton.jit
def fp8_pair_to_fp16(pairs):
    """Two e4m3fn values in an int16 -> (low byte, high byte) as fp16; NVIDIA sm_89 and later.

    Reading FP8 as 16-bit units lets the operands come from shared memory by ldmatrix; a cast of
    single bytes makes the compiler read V byte by byte.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def fp8_quad_to_fp16(pairs):
    """Pairs (2t, 2t + 1) of an int16 row -> (channels 4t and 4t + 1, channels 4t + 2 and 4t + 3).

    For the operand that is contracted over channels, whose order is free: one instruction less per
    register than :func:`fp8_pair_to_fp16`. It counts on two neighbours of a row sharing a register,
    which holds where the row is the fastest axis of the layout; the GPU conformance suite shows it.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def log2_of_positive(x, NATIVE: tl.constexpr):
    """log2 of a normal number; NATIVE: the instruction, not the library's thirty."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def load_keys(pointers, mask, OPERAND: tl.constexpr, PAIRS: tl.constexpr):
    """A masked tile of keys as two operands whose channels :func:`load_queries` matches.

    Without pairs both are the tile, and the second is not used.
    """
    raw = tl.load(pointers, mask=mask, other=0.0)
    if PAIRS:
        low, high = fp8_quad_to_fp16(raw)
    else:
        low = raw.to(OPERAND)
        high = low
    return low, high


@triton.jit
def load_values(pointers, mask, OPERAND: tl.constexpr, PAIRS: tl.constexpr):
    """A masked tile of values: (even channels, odd channels), or (all, all) without pairs."""
    raw = tl.load(pointers, mask=mask, other=0.0)
    if PAIRS:
        even, odd = fp8_pair_to_fp16(raw)
    else:
        even = raw.to(OPERAND)
        odd = even
    return even, odd


@triton.jit
def no_sums(M: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr):
    """[M, SUMS] zeros: sums that a thread can keep without asking another.

    A quarter of the tile, whichever way warps divide the scores. FEW saves registers where warps
    divide the rows alone: a thread's scores of a row then repeat every 8 columns. It spares FP8 a
    spill, and costs dense BF16 6 % on an H200.
    """
    if FEW and M >= 128:
        return tl.zeros([M, 8], tl.float32)
    else:
        return tl.zeros([M, TILE // 4], tl.float32)


@triton.jit
def attend_tile(
    q_low,  # [M, C] OPERAND
    q_high,  # [M, C] OPERAND; PAIRS only
    top,  # [M] running maximum, less SHIFT
    total,  # [M, SUMS] running sums, added up at the end
    out_even,  # [M, C] FP32
    out_odd,  # [M, C] FP32; PAIRS only
    k_ptr,  # first token of the tile, this KV head
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_offset,  # [TILE] offset of each token's vector
    v_offset,
    scale_offset,  # [TILE] offset of each token's scale
    valid,  # [TILE] bool: the slot holds a token that some row sees
    visible,  # [M] tokens of this tile that a row sees; ROW_MASK only
    score_scale,  # softmax scale in units of log2
    C: tl.constexpr,
    TILE: tl.constexpr,
    OPERAND: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
    ROW_MASK: tl.constexpr,
):
    """Take one tile of keys and values into (top, total, out).

    With scales, ``log2(v_scale)`` is added to the scores, so the weights that multiply V are
    ``softmax weight * v_scale`` normalised by their own maximum: no scale is too small or too large
    for 16-bit weights. ``total`` sums the weights without it.
    """
    channel = tl.arange(0, C)
    k_low, k_high = load_keys(
        k_ptr + k_offset[:, None] + channel[None, :], valid[:, None], OPERAND, PAIRS
    )
    v_even, v_odd = load_values(
        v_ptr + v_offset[:, None] + channel[None, :], valid[:, None], OPERAND, PAIRS
    )
    scores = tl.dot(q_low, tl.trans(k_low))
    if PAIRS:
        scores = tl.dot(q_high, tl.trans(k_high), scores)
    if SCALED:
        k_scale = tl.load(k_scale_ptr + scale_offset, mask=valid, other=0.0)
        v_scale = tl.load(v_scale_ptr + scale_offset, mask=valid, other=1.0)
        log_v_scale = log2_of_positive(tl.maximum(v_scale, SMALLEST_SCALE), NATIVE)
        bias = tl.where(valid, log_v_scale, float("-inf"))
        scores = scores * (k_scale * score_scale)[None, :] + bias[None, :]
    else:
        bias = tl.where(valid, 0.0, float("-inf"))
        scores = scores * score_scale + bias[None, :]
    if ROW_MASK:
        scores = tl.where(tl.arange(0, TILE)[None, :] < visible[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) - SHIFT)
    keep = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    if SCALED:
        shares = weights * tl.exp2(-log_v_scale)[None, :]
    else:
        shares = weights
    # sums within a thread only: the exchange between threads waits until the last tile
    SUMS: tl.constexpr = total.shape[1]
    shares = tl.sum(tl.reshape(shares, [shares.shape[0], TILE // SUMS, SUMS]), 1)
    total = total * keep[:, None] + shares
    operand = weights.to(OPERAND)
    out_even = tl.dot(operand, v_even, out_even * keep[:, None])
    if PAIRS:
        out_odd = tl.dot(operand, v_odd, out_odd * keep[:, None])
    return new_top, total, out_even, out_odd


@triton.jit
def load_queries(q_ptr, offsets, mask, C: tl.constexpr, OPERAND: tl.constexpr, PAIRS: tl.constexpr):
    """Query vectors at ``offsets`` [M]: (channels 4t, 4t + 1; 4t + 2, 4t + 3), or (all, all)."""
    if PAIRS:
        channel = tl.arange(0, 2 * C)
        both = tl.load(q_ptr + offsets[:, None] + channel[None, :], mask=mask[:, None], other=0.0)
        M: tl.constexpr = both.shape[0]
        quads = tl.reshape(both.to(OPERAND), [M, C // 2, 2, 2])
        low, high = tl.split(tl.permute(quads, [0, 1, 3, 2]))
        return tl.reshape(low, [M, C]), tl.reshape(high, [M, C])
    else:
        channel = tl.arange(0, C)
        both = tl.load(q_ptr + offsets[:, None] + channel[None, :], mask=mask[:, None], other=0.0)
        return both.to(OPERAND), both.to(OPERAND)


@triton.jit
def store_output(out_ptr, offsets, mask, even, odd, C: tl.constexpr, PAIRS: tl.constexpr):
    """Store [M, C] halves (or the whole) at ``offsets`` [M], channels in their own order."""
    channel = tl.arange(0, C)
    if PAIRS:
        at = out_ptr + offsets[:, None] + 2 * channel[None, :]
        tl.store(at, even.to(out_ptr.dtype.element_ty), mask=mask[:, None])
        tl.store(at + 1, odd.to(out_ptr.dtype.element_ty), mask=mask[:, None])
    else:
        at = out_ptr + offsets[:, None] + channel[None, :]
        tl.store(at, even.to(out_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def store_partial(
    out_ptr,
    lse_ptr,
    vectors,
    mask,
    top,
    total,
    even,
    odd,
    D: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store a part's normalised output and log2 of its softmax sum; PAIRS: even channels first."""
    channel = tl.arange(0, C)
    some = tl.where(total > 0, total, 1.0)
    inverse = 1.0 / some
    at = out_ptr + vectors[:, None] * D + channel[None, :]
    tl.store(at, even * inverse[:, None], mask=mask[:, None])
    if PAIRS:
        tl.store(at + C, odd * inverse[:, None], mask=mask[:, None])
    lse = tl.where(total > 0, log2_of_positive(some, NATIVE) + top, float("-inf"))
    tl.store(lse_ptr + vectors, lse, mask=mask)
