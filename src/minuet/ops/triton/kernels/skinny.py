"""A projection of very few rows, on vector units: a read of the weights with some arithmetic."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["num_tokens", "stride_x"])
def project_few(
    x_ptr,  # [T, IN], rows stride_x apart
    weight_ptr,  # [OUT, IN]
    out_ptr,  # [T, OUT]
    num_tokens,
    stride_x,
    IN: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``x @ weight.T``: N output channels of all of at most M rows; sums over lanes come last."""
    row = tl.arange(0, M)[:, None, None, None]
    n = tl.program_id(0) * N + tl.arange(0, N)
    lane = tl.arange(0, LANES)[None, None, :, None] * 8 + tl.arange(0, 8)[None, None, None, :]
    x_at = x_ptr + row.to(tl.int64) * stride_x + lane
    weights_at = weight_ptr + n.to(tl.int64)[None, :, None, None] * IN + lane
    total = tl.zeros((M, N, LANES), tl.float32)
    wait_for_previous(PDL)
    for k in tl.range(0, IN, LANES * 8):
        inside = lane < IN - k
        x = tl.load(x_at + k, mask=(row < num_tokens) & inside, other=0.0)
        if IN % (LANES * 8) == 0 and OUT % N == 0:
            weights = tl.load(weights_at + k)
        else:
            mask = (n < OUT)[None, :, None, None] & inside
            weights = tl.load(weights_at + k, mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32) * weights.to(tl.float32), 3)
    out = tl.sum(total, 2)
    at = out_ptr + tl.arange(0, M).to(tl.int64)[:, None] * OUT + n[None, :]
    mask = (tl.arange(0, M) < num_tokens)[:, None] & (n < OUT)[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)
    let_next_start(PDL)
