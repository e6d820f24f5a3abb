"""A matrix product whose rows do not know their batch: one tile, one order of summation."""

import triton
import triton.language as tl


@triton.jit
def _tile(
    x_ptr,  # first row of the tile
    w_ptr,  # first output of the tile
    x_stride,
    w_stride,
    row_inside,  # [M, 1]
    out_inside,  # [1, N]
    first,
    last,
    k_size,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EVEN_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """The partial product of the steps ``first .. last - 1`` of K columns each: [M, N] FP32."""
    row, out, column = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x_at = x_ptr + row[:, None].to(tl.int64) * x_stride + (first * K + column)[None, :]
    w_at = w_ptr + out[None, :].to(tl.int64) * w_stride + (first * K + column)[:, None]
    total = tl.zeros([M, N], tl.float32)
    for step in range(first, last):
        if EVEN_K:
            x = tl.load(x_at, mask=row_inside, other=0.0)
            w = tl.load(w_at, mask=out_inside, other=0.0)
        else:
            left = k_size - step * K
            x = tl.load(x_at, mask=row_inside & (column < left)[None, :], other=0.0)
            w = tl.load(w_at, mask=out_inside & (column < left)[:, None], other=0.0)
        total = tl.dot(x.to(OPERAND), w.to(OPERAND), total)
        x_at += K
        w_at += K
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_tiles(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]
    out_ptr,  # [T, N], or [splits, T, N] FP32 if SPLIT
    rows,
    n_size,
    k_size,
    x_stride,
    w_stride,
    splits,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One tile of the output: of one split, or of all splits one after another.

    Either way a split is summed by itself and the splits in their order, so the bits are the same.
    """
    row = tl.program_id(1) * M + tl.arange(0, M)
    out = tl.program_id(0) * N + tl.arange(0, N)
    row_inside, out_inside = (row < rows)[:, None], (out < n_size)[None, :]
    x_first = x_ptr + tl.program_id(1).to(tl.int64) * M * x_stride
    w_first = w_ptr + tl.program_id(0).to(tl.int64) * N * w_stride
    steps = tl.cdiv(k_size, K)
    each = tl.cdiv(steps, splits)
    at = out_ptr + row[:, None].to(tl.int64) * n_size + out[None, :]
    if SPLIT:
        split = tl.program_id(2)
        first = split * each
        total = _tile(
            x_first, w_first, x_stride, w_stride, row_inside, out_inside,
            first, tl.minimum(first + each, steps), k_size, M, N, K, EVEN_K, OPERAND,
        )  # fmt: skip
        at += split.to(tl.int64) * rows * n_size
    else:
        total = _tile(
            x_first, w_first, x_stride, w_stride, row_inside, out_inside,
            0, tl.minimum(each, steps), k_size, M, N, K, EVEN_K, OPERAND,
        )  # fmt: skip
        for split in range(1, splits):
            first = split * each
            total += _tile(
                x_first, w_first, x_stride, w_stride, row_inside, out_inside,
                first, tl.minimum(first + each, steps), k_size, M, N, K, EVEN_K, OPERAND,
            )  # fmt: skip
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=row_inside & out_inside)


@triton.jit(do_not_specialize=["size"])
def add_splits(
    parts_ptr,  # [splits, size] FP32
    out_ptr,  # [size]
    size,
    splits,
    BLOCK: tl.constexpr,
):
    """Sum the splits in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts_ptr + at, mask=inside, other=0.0)
    for _ in range(1, splits):
        parts_ptr += size
        total += tl.load(parts_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
