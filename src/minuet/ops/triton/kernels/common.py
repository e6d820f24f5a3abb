"""What kernels of a step have in common: the order of launches, and reading a divided product."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the kernels before are done. Every program calls it: that makes order transitive."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel's prologue. Late: it takes the places of ours (docs/kernels.md)."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def loads_under_way(PDL: tl.constexpr):
    """Nothing written after this is done before every load written before it has been issued.

    Otherwise the compiler saves registers by issuing a few, waiting, issuing the next: a small
    kernel then waits for memory several times over. No instruction is made for that; the one of
    :func:`let_next_start` has this effect, and does nothing in a program that has called it.
    """
    let_next_start(PDL)


@triton.jit
def load_product(at, stride_part, mask, SUMS: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr):
    """FP32 of what :class:`minuet.ops.sums.Sums` stands for, or of a tensor where SUMS is 0."""
    if SUMS == 0:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)
    parts = ()
    for part in tl.static_range(SUMS):
        parts += (tl.load(at + part * stride_part, mask=mask, other=0.0),)
    loads_under_way(PDL)
    total = tl.zeros(at.shape, tl.float32)
    for part in tl.static_range(SUMS):
        total += parts[part]
    return total.to(KEPT).to(tl.float32)
