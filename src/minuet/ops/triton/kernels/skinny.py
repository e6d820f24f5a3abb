"""A projection of very few rows, on vector units: a read of the weights with some arithmetic."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["num_tokens"])
def project_few(
    x_ptr,  # [T, IN]
    weight_ptr,  # [OUT, IN]
    out_ptr,  # [T, OUT]
    num_tokens,
    IN: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``x @ weight.T``: N output channels of all of at most M rows, C input channels at a time.

    The first weights are asked for before the kernel before is done: weights do not change.
    """
    row = tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    total = tl.zeros((N, M), tl.float32)
    for k in tl.static_range(0, IN, C):
        channel = k + tl.arange(0, C)
        at = weight_ptr + n.to(tl.int64)[:, None] * IN + channel[None, :]
        if IN % C == 0 and OUT % N == 0:
            weights = tl.load(at).to(tl.float32)
        else:
            inside = (n < OUT)[:, None] & (channel < IN)[None, :]
            weights = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if k == 0:
            wait_for_previous(PDL)
        for m in tl.static_range(M):
            inside = (channel < IN)[None, :] & (m < num_tokens)
            x = tl.load(x_ptr + m * IN + channel[None, :], mask=inside, other=0.0)
            product = tl.sum(weights * x.to(tl.float32), 1)
            total += tl.where(row[None, :] == m, product[:, None], 0.0)
    at = out_ptr + row[None, :] * OUT + n[:, None]
    mask = (row < num_tokens)[None, :] & (n < OUT)[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)
    let_next_start(PDL)
