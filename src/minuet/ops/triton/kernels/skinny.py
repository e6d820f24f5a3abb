"""A projection of few rows: bandwidth-bound, every weight read once by one program."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous
from minuet.ops.triton.kernels.experts import load_rows, load_weights


@triton.jit(do_not_specialize=["num_tokens", "stride_x"])
def project(
    x_ptr,  # [T, IN], rows stride_x apart
    weight_ptr,  # [OUT, IN]
    out_ptr,  # [T, OUT]
    num_tokens,
    stride_x,
    IN: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    HEAD: tl.constexpr, OPERAND: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``x @ weight.T``: N output channels of all of at most M rows.

    HEAD input channels of weights are read before the kernel before is done.
    """
    n = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.arange(0, M)
    valid = row < num_tokens
    weights_at = weight_ptr + n.to(tl.int64)[:, None] * IN
    x_at = x_ptr + row.to(tl.int64)[None, :] * stride_x
    total = tl.zeros((N, M), tl.float32)
    if HEAD > 0:
        ahead = tl.arange(0, HEAD)
        first = load_weights(weights_at, ahead, n, IN, OUT, N, HEAD).to(OPERAND)
        wait_for_previous(PDL)
        total = tl.dot(first, load_rows(x_at, ahead, valid, IN, HEAD).to(OPERAND), total)
    else:
        wait_for_previous(PDL)
    for k in tl.range(HEAD, IN, C, num_stages=STAGES):
        channel = k + tl.arange(0, C)
        x = load_rows(x_at, channel, valid, IN, C).to(OPERAND)
        weights = load_weights(weights_at, channel, n, IN, OUT, N, C).to(OPERAND)
        total = tl.dot(weights, x, total)
    at = out_ptr + row.to(tl.int64)[None, :] * OUT + n[:, None]
    mask = valid[None, :] & (n < OUT)[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)
    let_next_start(PDL)
