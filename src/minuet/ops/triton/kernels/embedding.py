"""The beginning of a step: which token, its row, its norm; cosine and sine of positions."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous


@triton.jit(
    do_not_specialize=["num_tokens", "num_drawn"],
    do_not_specialize_on_alignment=["token_ids_ptr", "at_ptr", "drawn_ptr", "positions_ptr"],
)
def embed(
    token_ids_ptr,  # [T] int64
    at_ptr,  # [T] int64; FOLLOWS only
    drawn_ptr,  # [num_drawn] int64; FOLLOWS only
    table_ptr,  # [vocab, H]
    weight_ptr,  # [H] FP32
    hidden_ptr,  # [T, H]
    normed_ptr,  # [T, H]
    positions_ptr,  # [T] int64
    frequencies_ptr,  # [HALF] FP32
    cos_ptr,  # [T, HALF] FP32
    sin_ptr,
    num_tokens,
    num_drawn,
    vocab,
    eps,
    H: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    ROWS: tl.constexpr, FOLLOWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of a token: its row, NaN if there is none, and the Gemma norm; of ROWS positions."""
    program = tl.program_id(0)
    if program < num_tokens:
        row, channel = program.to(tl.int64), tl.arange(0, BLOCK)
        inside = channel < H
        gain = 1.0 + tl.load(weight_ptr + channel, mask=inside, other=0.0)  # nobody writes weights
        wait_for_previous(PDL)
        let_next_start(PDL)  # it may load weights meanwhile
        token = input_token(token_ids_ptr, at_ptr, drawn_ptr, num_drawn, row, FOLLOWS)
        known = (token >= 0) & (token < vocab)
        x = tl.load(table_ptr + token * H + channel, mask=inside & known, other=float("nan"))
        tl.store(hidden_ptr + row * H + channel, x, mask=inside)
        x32 = tl.where(inside, x.to(tl.float32), 0.0)
        inverse = tl.rsqrt(tl.sum(x32 * x32, 0) / H + eps)
        tl.store(normed_ptr + row * H + channel, (x32 * inverse * gain).to(x.dtype), mask=inside)
    else:
        wait_for_previous(PDL)
        let_next_start(PDL)
        rows = (program - num_tokens) * ROWS + tl.arange(0, ROWS)
        cos_sin_of(
            rows, positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, num_tokens, HALF, HALF_PAD
        )


@triton.jit
def input_token(token_ids_ptr, at_ptr, drawn_ptr, num_drawn, row, FOLLOWS: tl.constexpr):
    """The token of a row: given, or drawn before; -1 where its place does not exist."""
    token = tl.load(token_ids_ptr + row)
    if FOLLOWS:
        at = tl.load(at_ptr + row)
        drawn = tl.load(drawn_ptr + at, mask=(at >= 0) & (at < num_drawn), other=-1)
        token = tl.where(at < 0, token, drawn)
    return token


@triton.jit
def cos_sin_of(
    rows, positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, num_tokens,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Of rows of positions; the product is FP32, as :func:`minuet.ops.rope.cos_sin` says."""
    pair = tl.arange(0, HALF_PAD)
    here = rows < num_tokens
    position = tl.load(positions_ptr + rows, mask=here, other=0).to(tl.float32)
    frequency = tl.load(frequencies_ptr + pair, mask=pair < HALF, other=0.0)
    angle = position[:, None] * frequency[None, :]
    at = rows.to(tl.int64)[:, None] * HALF + pair[None, :]
    inside = here[:, None] & (pair < HALF)[None, :]
    tl.store(cos_ptr + at, tl.cos(angle), mask=inside)
    tl.store(sin_ptr + at, tl.sin(angle), mask=inside)
