"""A projection of few rows: bandwidth-bound, its columns divided over programs."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import let_next_start, load_product, wait_for_previous
from minuet.ops.triton.kernels.experts import load_rows, load_weights


@triton.jit(do_not_specialize=["num_tokens"])
def project_part(
    x_ptr,  # [T, IN]
    weight_ptr,  # [OUT, IN]
    out_ptr,  # [parts, T, OUT]: FP32 sums over a part of IN; one part: the result
    num_tokens,
    IN: tl.constexpr, OUT: tl.constexpr, PART: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr, AHEAD: tl.constexpr, OPERAND: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``x @ weight.T`` of N output channels, PART input channels and all of at most M rows.

    The weights of the first AHEAD input channels are in shared memory before the wait: nobody
    writes weights, and while small kernels run, memory is idle.
    """
    n = tl.program_id(0) * N + tl.arange(0, N)
    part, row = tl.program_id(1), tl.arange(0, M)
    valid = row < num_tokens
    weights_at = weight_ptr + n.to(tl.int64)[:, None] * IN
    x_at = x_ptr + row[None, :] * IN
    total = tl.zeros((N, M), tl.float32)
    if AHEAD:
        first = part * PART + tl.arange(0, AHEAD)
        first_weights = load_weights(weights_at, first, n, IN, OUT, N, C).to(OPERAND)
        let_next_start(PDL)
    wait_for_previous(PDL)
    if AHEAD:
        first_x = load_rows(x_at, first, valid, IN, C).to(OPERAND)
        total = tl.dot(first_weights, first_x, total)
    if PART > AHEAD:
        for k in tl.range(part * PART + AHEAD, (part + 1) * PART, C, num_stages=STAGES):
            channel = k + tl.arange(0, C)
            x = load_rows(x_at, channel, valid, IN, C).to(OPERAND)
            weights = load_weights(weights_at, channel, n, IN, OUT, N, C).to(OPERAND)
            total = tl.dot(weights, x, total)
    at = out_ptr + (part * num_tokens + row).to(tl.int64)[None, :] * OUT + n[:, None]
    mask = valid[None, :] & (n < OUT)[:, None]
    if PART == IN:
        total = total.to(x_ptr.dtype.element_ty)  # a result, whatever it is stored as
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)
    if not AHEAD:
        let_next_start(PDL)


@triton.jit(do_not_specialize=["size"])
def add_parts(
    parts_ptr,  # [PARTS, size] FP32
    out_ptr,  # [size]
    size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of the parts, in their order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_previous(PDL)
    kept: tl.constexpr = out_ptr.dtype.element_ty
    total = load_product(parts_ptr + at, size, at < size, PARTS, kept, PDL)
    tl.store(out_ptr + at, total.to(kept), mask=at < size)
