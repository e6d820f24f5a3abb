"""The per-arch layer and the small device functions that every kernel uses.

Only pointers, loads, stores and ``rocdl`` intrinsics: the part of FlyDSL that has kept its form.
Nothing here branches at run time, so these are plain Python functions of traced values.

A matrix tile is 16 x 16. ``groups`` is wave / 16, the number of lane groups; lane ``16 * g + n`` of
an accumulator holds column ``n`` and rows ``run * g .. run * g + run - 1`` with run = 16 / groups.
Operands hold ``k_lane`` elements of a row per lane. Which k these are is the instruction's business
and is the same for A and B, so an operand pair loaded alike contracts correctly in any order.
"""

from dataclasses import dataclass

import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.typing import T

from minuet.dtypes import DType

LOG2E = 1.4426950408889634
NEG_INF = float("-inf")
UNIT_SCALE = 127  # E8M0 for 1.0
WAVES = 4  # of every workgroup that splits tokens over waves


@dataclass(frozen=True)
class Traits:
    """What differs between architectures.

    Attributes:
        name: arch.
        wave: lanes per wave.
        k_lane: elements of a 16-bit operand per lane and matrix instruction.
        fp8: the flavour that convert instructions mean.
    """

    name: str
    wave: int
    k_lane: int
    fp8: DType

    @property
    def groups(self):
        """Lane groups of a wave."""
        return self.wave // 16

    @property
    def run(self):
        """Accumulator registers of a lane."""
        return 16 // self.groups

    @property
    def threads(self):
        """Work-items of a workgroup of :data:`WAVES` waves."""
        return WAVES * self.wave


TRAITS = {
    "gfx942": Traits("gfx942", 64, 4, DType.FP8_E4M3FNUZ),
    "gfx950": Traits("gfx950", 64, 8, DType.FP8_E4M3FN),
    "gfx1250": Traits("gfx1250", 32, 16, DType.FP8_E4M3FN),
}


# --- memory --------------------------------------------------------------------------------------


def pointer(base, elem, offset, align, space=None):
    """``base`` as a pointer to ``elem``, moved by ``offset`` elements."""
    space = fx.AddressSpace.Global if space is None else space
    typed = fx.recast_iter(fx.PointerType.get(elem.ir_type, space, elem.width // 8), base)
    return fx.recast_iter(fx.PointerType.get(elem.ir_type, space, align), typed + offset)


def load(base, elem, offset, count=1, align=None):
    """``count`` elements at ``offset``: a scalar, or a vector aligned to its size."""
    align = align or elem.width // 8 * count
    at = pointer(base, elem, fx.Int64(offset), align)
    if count == 1:
        return fx.ptr_load(at)
    return fx.Vector(fx.ptr_load(at, result_type=fx.Vector.make_type(count, elem)))


def store(base, elem, offset, value, count=1, align=None):
    """The opposite of :func:`load`."""
    align = align or elem.width // 8 * count
    fx.ptr_store(value, pointer(base, elem, fx.Int64(offset), align))


def lds_load(base, elem, offset, count=1):
    """As :func:`load`, from LDS; offsets are 32 bits."""
    at = pointer(base, elem, offset, elem.width // 8 * count, fx.AddressSpace.Shared)
    if count == 1:
        return fx.ptr_load(at)
    return fx.Vector(fx.ptr_load(at, result_type=fx.Vector.make_type(count, elem)))


def lds_store(base, elem, offset, value, count=1):
    """As :func:`store`, into LDS."""
    fx.ptr_store(
        value, pointer(base, elem, offset, elem.width // 8 * count, fx.AddressSpace.Shared)
    )


def vector(elements, elem):
    """A vector of traced scalars."""
    return fx.Vector.from_elements(list(elements), dtype=elem)


# --- identity ------------------------------------------------------------------------------------


def lane_and_wave(traits):
    """Lane and wave of this work-item; the wave number is uniform to the compiler too."""
    tid = fx.Int32(fx.thread_idx.x)
    wave = fx.Int32(rocdl.readfirstlane(T.i32, tid >> (5 if traits.wave == 32 else 6)))
    return tid & (traits.wave - 1), wave


# --- arithmetic ----------------------------------------------------------------------------------


def exp2(x):
    """``v_exp_f32``: within 1 ulp."""
    return fx.Float32(rocdl.exp2(T.f32, fx.Float32(x).ir_value()))


def log2(x):
    """``v_log_f32``: within 1 ulp."""
    return fx.Float32(rocdl.log(T.f32, fx.Float32(x).ir_value()))


def at_most(a, b):
    """The smaller integer."""
    return (a < b).select(a, b)


def at_least(a, b):
    """The larger integer."""
    return (a > b).select(a, b)


def clamp(x, low, high):
    """``x`` within ``low .. high``."""
    return at_most(at_least(x, fx.Int32(low)), fx.Int32(high))


def over_groups(x, combine, traits):
    """Combine the lanes of one column: all lanes 16 * g + n of an n."""
    distance = 16
    while distance < traits.wave:
        x = combine(x, fx.shuffle_xor(x, distance, traits.wave))
        distance *= 2
    return x


def over_wave(x, combine, traits):
    """Combine all lanes; every lane gets the result."""
    distance = 1
    while distance < traits.wave:
        x = combine(x, fx.shuffle_xor(x, distance, traits.wave))
        distance *= 2
    return x


def maximum(a, b):
    """The larger float; a NaN loses."""
    return fx.maxnumf(a, b)


def add(a, b):
    """The sum."""
    return a + b


# --- narrow types --------------------------------------------------------------------------------


def fp8_word_to_bf16(word):
    """Four FP8 in 32 bits to two words of two BF16: exact, BF16 has more of everything."""
    words = []
    for half in (False, True):
        pair = fx.Vector(
            rocdl.cvt_pk_f32_fp8(fx.Vector.make_type(2, fx.Float32), word, half)
        ).bitcast(fx.Uint32)
        words.append((pair[0] >> 16) | (pair[1] & 0xFFFF0000))
    return words


def fp8_words_to_bf16(traits, raw):
    """An even number of words of FP8 to twice as many of BF16."""
    if traits.name != "gfx1250":
        return [half for word in raw for half in fp8_word_to_bf16(word)]
    # flydsl 0.5.0's assembler refuses v_cvt_pk_f32_fp8 there; this one converts eight at once
    words = []
    for start in range(0, len(raw), 2):
        pair = vector(raw[start : start + 2], fx.Uint32)
        eight = fx.Vector(
            rocdl.cvt_scale_pk8_bf16_fp8(
                fx.Vector.make_type(8, fx.BFloat16), pair, fx.Uint32(UNIT_SCALE).ir_value(), 0
            )
        ).bitcast(fx.Uint32)
        words += [eight[i] for i in range(4)]
    return words


def f32_pair_to_bf16(a, b):
    """Two floats to a word, rounded to nearest even."""
    return vector([a, b], fx.Float32).to(fx.BFloat16).bitcast(fx.Uint32)[0]


def f32_to_fp8(traits, value):
    """One float to an FP8 byte, rounded to nearest even, saturating."""
    top = traits.fp8.max_value
    low = fx.Float32(-top)
    value = fx.Float32((value > fx.Float32(top)).select(fx.Float32(top), value))
    value = fx.Float32((value < low).select(low, value))
    word = rocdl.cvt_pk_fp8_f32(T.i32, value, value, fx.Int32(0), False)
    return fx.Uint8(fx.Uint32(word) & 0xFF)


def words_to_bf16(traits, raw, fp8):
    """Loaded words as words of two BF16."""
    return fp8_words_to_bf16(traits, list(raw)) if fp8 else list(raw)


def token_masks(first, limit, count, fp8):
    """Word masks that keep the tokens of ``count`` consecutive ones from ``first`` below ``limit``.

    V of a token that was never written may be NaN, and 0 x NaN is NaN: it must become zero.
    """
    masks, each = [], 4 if fp8 else 2
    bits = 32 // each
    for word in range(count // each):
        kept = clamp(limit - (first + word * each), 0, each)
        some = (fx.Uint32(1) << fx.Uint32(at_most(kept, fx.Int32(each - 1)) * bits)) - 1
        masks.append((kept >= each).select(fx.Uint32(0xFFFFFFFF), some))
    return masks


# --- matrix --------------------------------------------------------------------------------------


def mma(traits, a_words, b_words, acc):
    """16 x 16 += A x B from BF16 words of one instruction's k; ``acc`` vector of ``run`` floats."""
    kind = fx.Int16 if traits.name == "gfx942" else fx.BFloat16
    a = vector(a_words, fx.Uint32).bitcast(kind)
    b = vector(b_words, fx.Uint32).bitcast(kind)
    result = fx.Vector.make_type(traits.run, fx.Float32)
    if traits.name == "gfx942":
        return fx.Vector(rocdl.mfma_f32_16x16x16bf16_1k(result, [a, b, acc, 0, 0, 0]))
    if traits.name == "gfx950":
        return fx.Vector(rocdl.mfma_f32_16x16x32_bf16(result, [a, b, acc, 0, 0, 0]))
    return fx.Vector(rocdl.wmma_f32_16x16x32_bf16(result, a, b, acc).result)


def zero_tile(traits):
    """An accumulator of zeros."""
    return vector([fx.Float32(0.0)] * traits.run, fx.Float32)


def contract(traits, a_words, b_words, acc):
    """As many matrix instructions as the operands are long; words are consumed in order."""
    step = traits.k_lane // 2
    for start in range(0, len(a_words), step):
        acc = mma(traits, a_words[start : start + step], b_words[start : start + step], acc)
    return acc
