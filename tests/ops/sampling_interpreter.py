"""Sampling and the invariant product through Triton's interpreter; started as a process.

TRITON_INTERPRET=1 python -m tests.ops.sampling_interpreter
"""

import warnings

import torch
import triton
import triton.language as tl

from minuet.ops.linear import invariant_linear
from minuet.ops.sampling import columns, philox
from minuet.ops.triton import sampling as form
from minuet.ops.triton.kernels.sampling import random_words
from tests.ops import sampling_cases as cases
from tests.ops.sampling_cases import Wish

# rows of 100 tokens in two tiles, and few enough candidates that some rows need the search
SMALL = form.Tuning(
    scan_tile=64, draw_tile=64, report_tile=64, candidates=16, group_size=8, columns=8, searchers=1
)
VOCAB = 100
WISHES = (
    ("normal", Wish(columns.LARGEST)),
    ("half masked", Wish(columns.DRAW, 0.3)),
    ("equal", Wish(columns.DRAW)),
    ("ties", Wish(top_k=4)),
    ("signed zeros", Wish(top_k=1)),
    ("one possible", Wish(top_p=0.9)),
    ("peaked", Wish(top_p=0.5)),
    ("peaked", Wish(min_p=0.05)),
    ("half masked", Wish(temperature=0.5, top_k=9, top_p=0.9, min_p=0.01)),
    # the end of the kept set is not among the candidates
    ("normal", Wish(top_k=VOCAB - 1)),
    ("equal", Wish(top_p=0.5)),
    ("ties", Wish(temperature=3.0, top_k=80, top_p=0.9)),
)


@triton.jit
def _words(params_ptr, out_ptr, QUADS: tl.constexpr):
    quad = tl.arange(0, QUADS)
    a, b, c, d = random_words(params_ptr, 0, quad)
    tl.store(out_ptr + quad * 4, a)
    tl.store(out_ptr + quad * 4 + 1, b)
    tl.store(out_ptr + quad * 4 + 2, c)
    tl.store(out_ptr + quad * 4 + 3, d)


def check_words(device) -> None:
    """The generator's words, to the bit, with every parameter beyond 31 bits."""
    params = cases.lines([Wish()], seed=0x89ABCDEF)
    params[0, columns.POSITION], params[0, columns.STREAM] = -1, -2
    out = torch.zeros(1024, dtype=torch.uint32, device=device)
    _words[(1,)](params.to(device), out, QUADS=256)
    picked = [
        columns.KEY_LOW, columns.KEY_HIGH, columns.POSITION, columns.STREAM, columns.DOMAIN,
    ]  # fmt: skip
    want = philox.words_of_tokens(params[:, picked].long(), 1024)[0]
    assert torch.equal(out.cpu().long(), want)


def main() -> None:
    # the interpreter warns of NaN that a mask then discards
    warnings.simplefilter("ignore", RuntimeWarning)
    check_words("cpu")
    print("ok words")
    cases.check_greedy(form, "cpu", VOCAB, tuning=SMALL)
    print("ok greedy")
    kinds = cases.kinds(VOCAB)
    pairs = [(kinds[name], wish) for name, wish in WISHES]
    cases.check_draws(form, "cpu", pairs, [name for name, _ in WISHES], tuning=SMALL)
    print("ok draws")
    cases.check_shaping(form, "cpu", VOCAB)
    print("ok shaping")
    cases.check_report(form, "cpu", VOCAB, tuning=SMALL)
    print("ok report")
    cases.check_linear(invariant_linear, "cpu", 40, 104, bits=False)
    cases.check_linear(invariant_linear, "cpu", 33, 50, torch.float16, bits=False)
    print("ok linear")


if __name__ == "__main__":
    main()
