"""A kernel with more LDS than gfx942 has: ``python -m tests.attention.flydsl_big OUT SCRATCH``."""

import sys
from pathlib import Path

import flydsl.compiler as flyc
import flydsl.expr as fx

from minuet.attention.backends.flydsl import compile_worker
from minuet.attention.backends.flydsl.kernels import device as dev
from minuet.attention.backends.flydsl.signatures import Signature

BYTES = 70_000


def build(traits):
    """Launcher."""

    @flyc.kernel(name="big", known_block_size=(64, 1, 1))
    def kernel(out: fx.Pointer):
        lds = fx.SharedAllocator().allocate(BYTES).peek().ptr
        tid = fx.Int32(fx.thread_idx.x)
        dev.lds_store(lds, fx.Int32, tid, tid)
        fx.gpu.barrier()
        last = dev.lds_load(lds, fx.Int32, tid + (BYTES // 4 - 64))
        dev.store(out, fx.Int32, tid, last)

    @flyc.jit
    def launch(out: fx.Pointer, stream: fx.Stream):
        kernel(out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch


if __name__ == "__main__":
    name = "big"
    compile_worker.SIGNATURES = {name: Signature(name, (("out", "i32*"),), frozenset(), ())}
    sys.modules[f"minuet.attention.backends.flydsl.kernels.{name}"] = sys.modules["__main__"]
    compile_worker.compile_one(name, {}, Path(sys.argv[1]), Path(sys.argv[2]))
