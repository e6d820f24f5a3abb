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
