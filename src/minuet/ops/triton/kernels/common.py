"""Order of launches, the same for every kernel of a step."""

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
def prefetch_lines(from_ptr, start, step, lines, BLOCK: tl.constexpr):
    """Ask for lines ``start, start + step, ...`` (BLOCK at a time) of 128 bytes into L2; NVIDIA.

    It returns at once, and reads nothing that a kernel before may still write: weights only.
    """
    address = from_ptr.to(tl.int64)
    for first in range(start * BLOCK, lines, step * BLOCK):
        line = tl.minimum(first + tl.arange(0, BLOCK), lines - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address + line.to(tl.int64) * 128],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
