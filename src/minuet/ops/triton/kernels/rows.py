"""Operations on rows: residual add and norm, the gated activation."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import (
    let_next_start,
    load_product,
    loads_under_way,
    wait_for_previous,
)


@triton.jit
def swiglu(gate, up, alpha, limit):
    """FP32 ``g * sigmoid(alpha * g) * (u + 1)``, clamped as :mod:`minuet.ops.activation` says.

    NaN stays NaN through the clamps.
    """
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm(
    residual_ptr,  # [T, H]
    delta_ptr,  # [T, H]; PARTS: [T, PARTS, H]; SUMS: [SUMS, T, H] FP32
    shares_ptr,  # [T, K] FP32; PARTS only
    weight_ptr,  # [H] FP32
    sum_ptr,  # [T, H]
    normed_ptr,  # [T, H]
    num_tokens,
    eps,
    H: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, SUMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: ``residual + delta`` in the type of residual, and the Gemma norm of that.

    With PARTS, delta is the sum of a token's experts: the first K weighed by their shares, then the
    shared expert, added in this order in FP32 and rounded once. With SUMS, likewise the parts of a
    divided projection.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < H
    gain = 1.0 + tl.load(weight_ptr + channel, mask=inside, other=0.0)  # nobody writes weights
    let_next_start(PDL)  # few programs, and weights that the next kernel may load meanwhile
    wait_for_previous(PDL)
    x = tl.load(residual_ptr + row * H + channel, mask=inside, other=0.0)
    kept = x.dtype
    if PARTS:
        values, shares = (), ()
        for part in tl.static_range(PARTS):
            at = delta_ptr + (row * PARTS + part) * H + channel
            values += (tl.load(at, mask=inside, other=0.0),)
        for part in tl.static_range(K):
            shares += (tl.load(shares_ptr + row * K + part),)
        loads_under_way(PDL)
        delta = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            if part < K:
                delta += shares[part] * values[part].to(tl.float32)
            else:
                delta += values[part].to(tl.float32)
        delta = delta.to(kept)
    else:
        at = delta_ptr + row * H + channel
        delta = load_product(at, num_tokens * H, inside, SUMS, kept, PDL)
    x = (x.to(tl.float32) + delta.to(tl.float32)).to(kept)
    tl.store(sum_ptr + row * H + channel, x, mask=inside)
    x32 = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x32 * x32, 0) / H + eps)
    tl.store(normed_ptr + row * H + channel, (x32 * inverse * gain).to(kept), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def gate(
    gate_up_ptr,  # [T, 2 * I]: gate, then up; SUMS: [SUMS, T, 2 * I] FP32
    out_ptr,  # [T, I]
    num_tokens,
    alpha,
    limit,
    I: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SwiGLU-OAI of BLOCK channels of a row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < I
    let_next_start(PDL)  # few programs, and weights that the next kernel may load meanwhile
    wait_for_previous(PDL)
    at, stride_part = gate_up_ptr + row * 2 * I + channel, num_tokens * 2 * I
    kept: tl.constexpr = out_ptr.dtype.element_ty
    gate = load_product(at, stride_part, inside, SUMS, kept, PDL)
    up = load_product(at + I, stride_part, inside, SUMS, kept, PDL)
    tl.store(out_ptr + row * I + channel, swiglu(gate, up, alpha, limit).to(kept), mask=inside)
