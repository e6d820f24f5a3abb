"""A kernel that reads and does next to nothing else."""

import triton
import triton.language as tl

ROWS, BLOCK = 8, 4096  # what reached the highest rate on an H200 in benchmarks/decode_kernels.py


@triton.jit
def read_words(words, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Read ``ROWS * BLOCK`` int32 words per program; ``out`` gets one word of each."""
    program = tl.program_id(0).to(tl.int64)
    seen = tl.zeros((BLOCK,), tl.int32)
    for row in tl.static_range(ROWS):
        seen ^= tl.load(words + (program * ROWS + row) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.max(seen, 0))  # or nothing would have to be read
