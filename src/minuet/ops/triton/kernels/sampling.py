"""Largest logits and draws: each row in parts, then the parts of each row.

Definitions are in ``minuet.ops.sampling.reference``. A candidate is an int64 that sorts like
(larger score, lower token), so a maximum never depends on the division into parts.
"""

import triton
import triton.language as tl

from minuet.ops.sampling import columns
from minuet.ops.triton.kernels.common import let_next_start, wait_for_previous

NEVER = tl.constexpr(float("-inf"))
NOTHING = tl.constexpr(-0x8000000000000000)
_IDS = tl.constexpr(0x3FFFFFFF)
# below every number; what a number that is not one sorts as
_NOT_A_NUMBER = tl.constexpr(-0x7FFFFFFF)
_ORDER_OF_NEVER = tl.constexpr(-0x7F800001)
_SERIES_BELOW = tl.constexpr(2.0**-6)

WIDTH = tl.constexpr(columns.WIDTH)
MODE = tl.constexpr(columns.MODE)
INVERSE_TEMPERATURE = tl.constexpr(columns.INVERSE_TEMPERATURE)
KEY_LOW = tl.constexpr(columns.KEY_LOW)
KEY_HIGH = tl.constexpr(columns.KEY_HIGH)
POSITION = tl.constexpr(columns.POSITION)
STREAM = tl.constexpr(columns.STREAM)
DOMAIN = tl.constexpr(columns.DOMAIN)
LARGEST = tl.constexpr(columns.LARGEST)
DRAW = tl.constexpr(columns.DRAW)


@triton.jit
def order_of(x):
    """int32 that sort like the float32 ``x``; NaN below everything, -0.0 as 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, order, _NOT_A_NUMBER)


@triton.jit
def number_of(order):
    """The float32 that :func:`order_of` made ``order`` of."""
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def candidate(x, token, flag):
    """The int64 of a score and its token; ``flag`` (0 or 1) rides in the lowest bit."""
    low = ((token ^ _IDS) << 1) | flag
    return (order_of(x).to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def token_of(key):
    """The token of a candidate."""
    return ((key >> 1) & _IDS).to(tl.int32) ^ _IDS


@triton.jit
def parameter(params_ptr, row, column: tl.constexpr):
    """A float of a row's parameters."""
    return tl.load(params_ptr + row * WIDTH + column).to(tl.float32, bitcast=True)


@triton.jit
def random_words(params_ptr, row, quad):
    """Philox words of the tokens ``4 quad .. 4 quad + 3`` of a row: four uint32 tensors."""
    at = params_ptr + row * WIDTH
    low = tl.load(at + KEY_LOW).to(tl.uint32, bitcast=True)
    high = tl.load(at + KEY_HIGH).to(tl.uint32, bitcast=True)
    seed = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    zero = quad * 0
    return tl.philox(
        seed,
        quad,
        zero + tl.load(at + POSITION),
        zero + tl.load(at + STREAM),
        zero + tl.load(at + DOMAIN),
    )


@triton.jit
def log_of(x, NATIVE: tl.constexpr):
    """Natural logarithm of a positive normal number; NATIVE: by the instruction of NVIDIA's chips.

    The instruction is off by 2 ** -22 of a unit at most near 1 and relatively less elsewhere (PTX
    ISA, ``lg2.approx``), which is what rounding a score costs too; the library takes thirty.
    """
    if NATIVE:
        return 0.6931471805599453 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log(x)


@triton.jit
def gumbel(words, NATIVE: tl.constexpr):
    """Gumbel noise of uint32 words."""
    u = words.to(tl.float32) * 2.0**-32 + 2.0**-33
    u = tl.minimum(u, 1 - 2.0**-24)
    small = u * (1 + u * (0.5 + u * (1.0 / 3)))
    exponential = tl.where(u < _SERIES_BELOW, small, -log_of(1 - u, NATIVE))
    return -log_of(exponential, NATIVE)


@triton.jit
def noise_of_tile(params_ptr, row, first, TILE: tl.constexpr, NATIVE: tl.constexpr):
    """Noise of the tokens ``first .. first + TILE - 1``; ``first`` is a multiple of four."""
    quad = first // 4 + tl.arange(0, TILE // 4)
    a, b, c, d = random_words(params_ptr, row, quad)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return gumbel(tl.reshape(words, [TILE]), NATIVE)


@triton.jit
def noise_of_tokens(params_ptr, row, token, NATIVE: tl.constexpr):
    """Noise of any tokens."""
    a, b, c, d = random_words(params_ptr, row, token // 4)
    lane = token % 4
    words = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    return gumbel(words, NATIVE)


# --- the most likely token -----------------------------------------------------------------------


@triton.jit(do_not_specialize=["tiles_per_part"])
def greedy_parts(
    logits_ptr,  # [R, V] FP32
    stride,
    vocab,
    tiles_per_part,
    parts_ptr,  # [R, PARTS] int64
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest logit of a part; the flag says that one of the part is not finite."""
    row, part = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    let_next_start(PDL)  # a small kernel
    base = logits_ptr + row.to(tl.int64) * stride
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], NEVER, tl.float32)
    best_token = tl.zeros([TILE], tl.int32)
    wrong = tl.zeros([TILE], tl.int32)
    for i in range(tiles_per_part):
        token = (part * tiles_per_part + i) * TILE + lane
        x = tl.load(base + token, mask=token < vocab, other=NEVER)
        wrong |= ((token < vocab) & ~(tl.abs(x) < float("inf"))).to(tl.int32)
        better = x > best
        best = tl.where(better, x, best)
        best_token = tl.where(better, token, best_token)
    # flags count for the part, not for the lane that wins
    key = candidate(best, best_token, 0)
    found = tl.max(key, 0) | tl.max(wrong, 0).to(tl.int64)
    tl.store(parts_ptr + row * PARTS + part, found)


@triton.jit(do_not_specialize=["num_parts"])
def greedy_rows(
    parts_ptr,  # [R, PARTS] int64
    num_parts,
    tokens_ptr,  # [R] int64
    finite_ptr,  # [R] uint8
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The largest of a row's parts; finite where no part is flagged."""
    row = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    wait_for_previous(PDL)
    key = tl.load(parts_ptr + row * PARTS + lane, mask=lane < num_parts, other=NOTHING)
    wrong = tl.max((key & 1).to(tl.int32), 0)
    tl.store(tokens_ptr + row, token_of(tl.max(key, 0)).to(tl.int64))
    tl.store(finite_ptr + row, (1 - wrong).to(tl.uint8))
    let_next_start(PDL)


# --- draws ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tiles_per_part"])
def draw_parts(
    logits_ptr,  # [R, V] FP32, shaped
    stride,
    vocab,
    tiles_per_part,
    params_ptr,  # [R, WIDTH] int32
    parts_ptr,  # [R, PARTS] int64
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The largest score of a part, for rows of mode LARGEST or DRAW."""
    row, part = tl.program_id(0), tl.program_id(1)
    mode = tl.load(params_ptr + row * WIDTH + MODE)
    if (mode == LARGEST) | (mode == DRAW):
        base = logits_ptr + row.to(tl.int64) * stride
        lane = tl.arange(0, TILE)
        best = tl.full([TILE], NEVER, tl.float32)
        best_token = tl.zeros([TILE], tl.int32)
        if mode == DRAW:
            inverse = parameter(params_ptr, row, INVERSE_TEMPERATURE)
            for i in range(tiles_per_part):
                first = (part * tiles_per_part + i) * TILE
                token = first + lane
                x = tl.load(base + token, mask=token < vocab, other=NEVER)
                score = x * inverse + noise_of_tile(params_ptr, row, first, TILE, NATIVE)
                score = tl.where(x > NEVER, score, NEVER)
                better = score > best
                best = tl.where(better, score, best)
                best_token = tl.where(better, token, best_token)
        else:
            for i in range(tiles_per_part):
                token = (part * tiles_per_part + i) * TILE + lane
                x = tl.load(base + token, mask=token < vocab, other=NEVER)
                better = x > best
                best = tl.where(better, x, best)
                best_token = tl.where(better, token, best_token)
        found = tl.max(candidate(best, best_token, 0), 0)
        tl.store(parts_ptr + row * PARTS + part, found)


@triton.jit(do_not_specialize=["num_parts"])
def draw_rows(
    parts_ptr,  # [R, PARTS] int64
    num_parts,
    params_ptr,  # [R, WIDTH] int32
    tokens_ptr,  # [R] int64
    stuck_ptr,  # [R] uint8
    PARTS: tl.constexpr,
):
    """The largest of a row's parts, for rows of mode LARGEST or DRAW."""
    row = tl.program_id(0)
    mode = tl.load(params_ptr + row * WIDTH + MODE)
    if (mode == LARGEST) | (mode == DRAW):
        lane = tl.arange(0, PARTS)
        key = tl.load(parts_ptr + row * PARTS + lane, mask=lane < num_parts, other=NOTHING)
        best = tl.max(key, 0)
        tl.store(tokens_ptr + row, token_of(best).to(tl.int64))
        stuck = ((best >> 32).to(tl.int32) <= _ORDER_OF_NEVER).to(tl.uint8)
        tl.store(stuck_ptr + row, stuck)


# --- shaping -------------------------------------------------------------------------------------


@triton.jit
def mask_rows(
    logits_ptr,  # [R, V] FP32; written
    stride,
    vocab,
    rows_ptr,  # [M] int32
    allowed_ptr,  # [M, words] int32
    words,
    TILE: tl.constexpr,
):
    """Set what a grammar does not allow to -inf."""
    masked = tl.program_id(0)
    row = tl.load(rows_ptr + masked)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocab
    word = tl.load(allowed_ptr + masked * words + token // 32, mask=inside, other=-1)
    banned = inside & (((word >> (token % 32)) & 1) == 0)
    at = logits_ptr + row.to(tl.int64) * stride + token
    tl.store(at, tl.full([TILE], NEVER, tl.float32), mask=banned)


@triton.jit(do_not_specialize=["num_entries"])
def shape_entries(
    logits_ptr,  # [R, V] FP32; written
    stride,
    vocab,
    params_ptr,  # [R, WIDTH] int32
    entries_ptr,  # [N, 4] int32
    num_entries,
    BLOCK: tl.constexpr,
    REPETITION: tl.constexpr,
    PRESENCE: tl.constexpr,
    FREQUENCY: tl.constexpr,
):
    """Penalties and bias of single tokens."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = entry < num_entries
    row = tl.load(entries_ptr + entry * 4, mask=here, other=0)
    token = tl.load(entries_ptr + entry * 4 + 1, mask=here, other=0)
    here = here & (token < vocab)
    counts = tl.load(entries_ptr + entry * 4 + 2, mask=here, other=0)
    bias = tl.load(entries_ptr + entry * 4 + 3, mask=here, other=0).to(tl.float32, bitcast=True)
    line = params_ptr + row * WIDTH
    repetition = tl.load(line + REPETITION, mask=here, other=0).to(tl.float32, bitcast=True)
    presence = tl.load(line + PRESENCE, mask=here, other=0).to(tl.float32, bitcast=True)
    frequency = tl.load(line + FREQUENCY, mask=here, other=0).to(tl.float32, bitcast=True)
    at = logits_ptr + row.to(tl.int64) * stride + token
    score = tl.load(at, mask=here, other=0.0)
    repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
    score = tl.where((counts & 1) == 1, repeated, score)
    occurrences = counts >> 1
    penalty = frequency * occurrences.to(tl.float32) + presence
    score = tl.where(occurrences > 0, score - penalty, score)
    tl.store(at, score + bias, mask=here)
