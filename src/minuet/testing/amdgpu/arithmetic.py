"""Calls that stay within a lane: conversions of narrow floats, functions of floats and integers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minuet.testing.amdgpu.calls import CDNA, LANGREF, MODELS, RDNA, Call, Model, model
from minuet.testing.amdgpu.floats import f32_to_bf16, f32_to_fp8, fp8_to_f32
from minuet.testing.amdgpu.ops import narrow, widen
from minuet.testing.amdgpu.state import SimulationError, Value
from minuet.testing.amdgpu.types import Int

# --- narrow floats -------------------------------------------------------------------------------


def _bytes_of(word: Value) -> Value:
    return np.ascontiguousarray(word).view(np.uint8).reshape(word.shape[0], -1)


@model(f"{CDNA}; {RDNA}: V_CVT_PK_F32_FP8", "llvm.amdgcn.cvt.pk.f32.fp8")
def _pk_f32_fp8(call: Call) -> Value:
    first = 2 * call.constant(1)
    return fp8_to_f32(_bytes_of(call.args[0])[:, first : first + 2], call.front.target.fp8)


@model(f"{CDNA}; {RDNA}: V_CVT_F32_FP8", "llvm.amdgcn.cvt.f32.fp8")
def _f32_fp8(call: Call) -> Value:
    return fp8_to_f32(_bytes_of(call.args[0])[:, call.constant(1)], call.front.target.fp8)


@model(f"{CDNA}; {RDNA}: V_CVT_PK_FP8_F32", "llvm.amdgcn.cvt.pk.fp8.f32")
def _pk_fp8_f32(call: Call) -> Value:
    pair = [call.front.full(call.args[i]) for i in (0, 1)]
    codes = np.stack([f32_to_fp8(x, call.front.target.fp8) for x in pair], axis=1)
    out = np.array(_bytes_of(call.front.full(call.args[2])))
    first = 2 * call.constant(3)
    out[:, first : first + 2] = codes
    return out.view(np.uint32)[:, 0]


@model(f"{CDNA}: V_CVT_SCALEF32_PK_F32/BF16/F16_FP8", "llvm.amdgcn.cvt.scalef32.pk.bf16.fp8")
def _scalef32_pk_bf16_fp8(call: Call) -> Value:
    first = 2 * call.constant(2)
    values = fp8_to_f32(_bytes_of(call.args[0])[:, first : first + 2], call.front.target.fp8)
    return f32_to_bf16(values * _power_of_two(call.args[1])[:, None])


@model(
    f"{CDNA}: V_CVT_SCALEF32_PK_FP8_F32; MLIR's ROCDL dialect: divides by the scale's exponent",
    "llvm.amdgcn.cvt.scalef32.pk.fp8.f32",
)
def _scalef32_pk_fp8_f32(call: Call) -> Value:
    pair = np.stack([call.front.full(call.args[i]) for i in (1, 2)], axis=1)
    scale = _power_of_two(call.args[3])[:, None]
    codes = f32_to_fp8(pair / scale, call.front.target.fp8)
    out = np.array(call.front.full(call.args[0]))
    out[:, call.constant(4)] = np.ascontiguousarray(codes).view(np.uint16)[:, 0]
    return out


@model(
    f"{RDNA}: V_CVT_SCALEF32_PK8_FP8_F32; MLIR's ROCDL dialect: divides by the scale's exponent",
    "llvm.amdgcn.cvt.scalef32.pk8.fp8.f32",
)
def _scalef32_pk8_fp8_f32(call: Call) -> Value:
    scaled = call.args[0] / _power_of_two(call.args[1])[:, None]
    return np.ascontiguousarray(f32_to_fp8(scaled, call.front.target.fp8)).view(np.uint32)


def _power_of_two(scale: Value) -> Value:
    """Only the exponent of the scale operand counts."""
    return (scale.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)


@model(f"{RDNA}: V_CVT_SCALE_PK8_BF16_FP8", "llvm.amdgcn.cvt.scale.pk8.bf16.fp8")
def _scale_pk8_bf16_fp8(call: Call) -> Value:
    values = fp8_to_f32(_bytes_of(call.args[0]), call.front.target.fp8)
    if call.constant(2) != 0:
        raise SimulationError(f"scale select other than 0: {call.instruction.text}")
    exponent = (call.args[1] & np.uint32(0xFF)).astype(np.int32) - 127
    return f32_to_bf16(np.ldexp(values, exponent[:, None]).astype(np.float32))


@model(f"{CDNA}: V_PERM_B32", "llvm.amdgcn.perm")
def _perm(call: Call) -> Value:
    high, low, select = (call.front.full(a) for a in call.args)
    pool = np.concatenate([_bytes_of(low), _bytes_of(high)], axis=1)
    choice = _bytes_of(select).astype(np.int64)
    if ((choice > 7) & (choice != 12)).any():
        raise SimulationError(f"perm selector above 7: {call.instruction.text}")
    picked = np.take_along_axis(pool, np.minimum(choice, 7), axis=1)
    return np.where(choice == 12, 0, picked).astype(np.uint8).view(np.uint32)[:, 0]


# --- arithmetic ----------------------------------------------------------------------------------


def _float_call(name: str, source: str, function: Callable[..., Any]) -> None:
    def handler(call: Call) -> Value:
        kinds = call.instruction.types
        args = [
            widen(a, t) for a, t in zip(call.args, kinds, strict=True) if not isinstance(a, bool)
        ]
        return narrow(function(*args).astype(args[0].dtype), call.type)

    MODELS[name] = Model(handler, source)


def _fused(a: Value, b: Value, c: Value) -> Value:
    if a.dtype == np.float32:
        return (a.astype(np.float64) * b + c).astype(np.float32)
    return a * b + c


def _max_number(a: Value, b: Value) -> Value:
    return np.fmax(a, b)


_APPROXIMATE = f"{CDNA}: within 1 ulp on hardware, correctly rounded here"
for _name, _source, _function in (
    ("llvm.fabs", LANGREF, np.abs),
    ("llvm.sqrt", LANGREF, np.sqrt),
    ("llvm.exp2", LANGREF, np.exp2),
    ("llvm.log2", LANGREF, np.log2),
    ("llvm.rint", LANGREF, np.rint),
    ("llvm.roundeven", LANGREF, np.rint),
    ("llvm.floor", LANGREF, np.floor),
    ("llvm.ceil", LANGREF, np.ceil),
    ("llvm.fma", LANGREF, _fused),
    ("llvm.fmuladd", LANGREF, _fused),
    ("llvm.minnum", LANGREF, np.fmin),
    ("llvm.maxnum", LANGREF, _max_number),
    ("llvm.minimumnum", LANGREF, np.fmin),
    ("llvm.maximumnum", LANGREF, _max_number),
    ("llvm.minimum", LANGREF, np.minimum),
    ("llvm.maximum", LANGREF, np.maximum),
    ("llvm.copysign", LANGREF, np.copysign),
    ("llvm.amdgcn.exp2", _APPROXIMATE, np.exp2),
    ("llvm.amdgcn.log", _APPROXIMATE, np.log2),
    ("llvm.amdgcn.rcp", _APPROXIMATE, np.reciprocal),
    ("llvm.amdgcn.sqrt", _APPROXIMATE, np.sqrt),
    ("llvm.amdgcn.rsq", _APPROXIMATE, lambda x: np.float32(1.0) / np.sqrt(x)),
):
    _float_call(_name, _source, _function)


@model(LANGREF, "llvm.smax", "llvm.smin", "llvm.umax", "llvm.umin")
def _integer_extreme(call: Call) -> Value:
    name = call.instruction.extra.split(".")[1]
    function = np.maximum if name.endswith("max") else np.minimum
    if name[0] == "u":
        return function(call.args[0], call.args[1])
    return function(call.signed(0), call.signed(1)).view(call.args[0].dtype)


@model(LANGREF, "llvm.usub.sat")
def _usub_sat(call: Call) -> Value:
    a, b = call.args
    return np.where(a > b, a - b, a.dtype.type(0))


@model(LANGREF, "llvm.abs")
def _abs(call: Call) -> Value:
    return np.abs(call.signed(0)).view(call.args[0].dtype)


@model(LANGREF, "llvm.ctpop")
def _ctpop(call: Call) -> Value:
    return np.bitwise_count(call.args[0]).astype(call.args[0].dtype)


@model(LANGREF, "llvm.bitreverse")
def _bitreverse(call: Call) -> Value:
    assert isinstance(call.type, Int)
    x, one = call.args[0], call.args[0].dtype.type(1)
    bits = range(call.type.bits)
    return sum((x >> x.dtype.type(k) & one) << x.dtype.type(bits[-1 - k]) for k in bits)


@model(LANGREF, "llvm.ctlz")
def _ctlz(call: Call) -> Value:
    bits = 8 * call.args[0].dtype.itemsize
    # exact: integers below 2**53 are, and the top bit of larger ones is not moved by rounding down
    wide = call.args[0].astype(np.uint64)
    length = sum(((wide >> np.uint64(k)) > 0).astype(np.int64) for k in range(bits))
    return (bits - length).astype(call.args[0].dtype)


@model(LANGREF, "llvm.fshl", "llvm.fshr")
def _funnel(call: Call) -> Value:
    a, b, amount = call.args
    kind, bits = a.dtype.type, 8 * a.dtype.itemsize
    shift = amount % kind(bits)
    rest = kind(bits) - shift
    if "fshl" in call.instruction.extra:
        return np.where(shift == 0, a, (a << shift) | (b >> (rest % kind(bits))))
    return np.where(shift == 0, b, (a << (rest % kind(bits))) | (b >> shift))
