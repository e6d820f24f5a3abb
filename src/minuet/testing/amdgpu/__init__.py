"""Run AMDGPU kernels from their LLVM IR, in numpy, without a GPU. docs/simulator.md is the guide.

::

    from minuet.testing.amdgpu import Geometry, Memory, launch, parse

    module = parse(open("kernel.ll").read())
    memory = Memory()
    x = memory.place("x", array)                 # a copy with a guard behind it
    shape = Geometry(grid=(4, 1, 1), block=(256, 1, 1))
    launch(module, "kernel_0", (x, 16), memory, shape, arch="gfx950")
    result = memory.fetch(x)

What it checks beyond numbers: every access stays inside one placed array, is aligned as the
compiler promised and reads no byte that was never written; between two barriers no two waves touch
the same byte of LDS unless both read; matrix instructions and barriers are reached by whole waves.
An instruction it does not model raises :class:`SimulationError`.
"""

from minuet.testing.amdgpu.ir import Module
from minuet.testing.amdgpu.machine import Geometry, launch
from minuet.testing.amdgpu.memory import Memory, Pointer
from minuet.testing.amdgpu.parser import parse
from minuet.testing.amdgpu.state import SimulationError, Target

__all__ = [
    "Geometry",
    "Memory",
    "Module",
    "Pointer",
    "SimulationError",
    "Target",
    "launch",
    "parse",
]
