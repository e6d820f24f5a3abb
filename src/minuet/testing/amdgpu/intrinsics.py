"""``call`` instructions: LLVM's generic and AMDGPU's intrinsics, each with the source of its model.

:data:`MODELS` is the closed set. A name that is not in it is an error when the kernel is loaded,
not when it is reached. tests/testing holds a test per entry and compares the two lists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minuet.testing.amdgpu import lanes, matrix
from minuet.testing.amdgpu.floats import f32_to_bf16, f32_to_fp8, fp8_to_f32
from minuet.testing.amdgpu.ir import Instruction
from minuet.testing.amdgpu.ops import from_bytes, narrow, widen
from minuet.testing.amdgpu.state import Executor, Front, SimulationError, Value
from minuet.testing.amdgpu.types import Int, Type, Vec, signed_of, size_of

Handler = Callable[["Call"], Value]


@dataclass(slots=True)
class Call:
    """One execution of a call.

    Attributes:
        machine: the launch.
        front: active lanes.
        instruction: types and text.
        args: operand values.
    """

    machine: Executor
    front: Front
    instruction: Instruction
    args: list[Value]

    @property
    def type(self) -> Type:
        """Of the result."""
        return self.instruction.type

    def constant(self, index: int) -> int:
        """An immediate operand."""
        return int(self.args[index].reshape(-1)[0])

    def signed(self, index: int) -> Value:
        """An integer operand as signed."""
        return self.args[index].view(signed_of(self.instruction.types[index]))


@dataclass(frozen=True, slots=True)
class Model:
    """How a call is carried out, and after what."""

    handler: Handler
    source: str


MODELS: dict[str, Model] = {}
LANGREF = "LLVM language reference"
USAGE = "LLVM, User Guide for the AMDGPU backend, intrinsics"
CDNA = "AMD Instinct MI300 and MI350 ISA"
RDNA = "RDNA4 ISA; LLVM IntrinsicsAMDGPU.td for gfx1250"


def model(source: str, *names: str) -> Callable[[Handler], Handler]:
    """Register a handler under names (without the type suffix)."""

    def register(handler: Handler) -> Handler:
        for name in names:
            MODELS[name] = Model(handler, source)
        return handler

    return register


def find(callee: str) -> Model:
    """The model of a callee, whatever type suffix it carries.

    Raises:
        SimulationError: there is none.
    """
    name = "asm" if callee.startswith("asm ") else callee
    while name:
        if name in MODELS:
            return MODELS[name]
        name = name.rpartition(".")[0]
    raise SimulationError(f"call of {callee} is not modelled")


# --- no effect here ------------------------------------------------------------------------------


@model(
    f"{USAGE}: scheduling and waiting; memory here completes at once",
    *["llvm.amdgcn.sched.barrier", "llvm.amdgcn.sched.group.barrier", "llvm.amdgcn.s.setprio"],
    *["llvm.amdgcn.s.waitcnt", "llvm.amdgcn.s.wait.dscnt", "llvm.amdgcn.s.wait.loadcnt"],
    *["llvm.amdgcn.iglp.opt", "llvm.amdgcn.s.barrier.signal", "llvm.assume"],
    *["llvm.amdgcn.wave.barrier", "llvm.lifetime.start", "llvm.lifetime.end"],
    "llvm.experimental.noalias.scope.decl",
    "asm",
)
def _nothing(call: Call) -> Value:
    if call.instruction.extra.startswith("asm ") and call.instruction.result:
        raise SimulationError(f"inline assembly: {call.instruction.text}")
    if call.instruction.extra.startswith("asm ") and "wait" not in call.instruction.extra:
        raise SimulationError(f"inline assembly: {call.instruction.text}")
    return None


_FP16_OVFL = (1, 23, 1)  # register MODE, offset and width of the field


@model(
    f"{CDNA}; {RDNA}: S_SETREG, MODE.FP16_OVFL: FP8 conversions saturate", "llvm.amdgcn.s.setreg"
)
def _setreg(call: Call) -> Value:
    word = call.constant(0)  # register, offset, width less one, as the instruction encodes them
    field = (word & 63, word >> 6 & 31, (word >> 11 & 31) + 1)
    if field != _FP16_OVFL or (call.args[1] != 1).any():
        raise SimulationError(f"a mode that is not modelled: {call.instruction.text}")
    return None  # conversions saturate here in any case: floats.f32_to_fp8


# --- identity ------------------------------------------------------------------------------------


@model(f"{USAGE}: workitem and workgroup ids", *(f"llvm.amdgcn.workgroup.id.{a}" for a in "xyz"))
def _workgroup_id(call: Call) -> Value:
    axis = "xyz".index(call.instruction.extra[-1])
    return call.machine.workgroup_ids[axis][call.machine.workgroup[call.front.lanes]]


@model(f"{USAGE}: workitem and workgroup ids", *(f"llvm.amdgcn.workitem.id.{a}" for a in "xyz"))
def _workitem_id(call: Call) -> Value:
    axis = "xyz".index(call.instruction.extra[-1])
    return call.machine.workitem_ids[axis][call.front.lanes]


@model(f"{CDNA}: V_MBCNT_LO/HI_U32_B32", "llvm.amdgcn.mbcnt.lo", "llvm.amdgcn.mbcnt.hi")
def _mbcnt(call: Call) -> Value:
    low = ".lo" in call.instruction.extra
    if not (call.args[0] == np.uint32(0xFFFFFFFF)).all():
        raise SimulationError(f"mbcnt of a mask other than all ones: {call.instruction.text}")
    lane = call.front.lane
    below = np.minimum(lane, 32) if low else np.maximum(lane - 32, 0)
    return (below + call.args[1].astype(np.int64)).astype(np.uint32)


@model(
    f"{USAGE}: code object V5 hidden kernel arguments, from hidden_block_count_x on",
    "llvm.amdgcn.implicitarg.ptr",
)
def _implicit_arguments(call: Call) -> Value:
    return np.array([call.machine.hidden_arguments], np.uint64)


@model(f"{USAGE}: wave.id", "llvm.amdgcn.wave.id")
def _wave_id(call: Call) -> Value:
    return call.machine.wave_in_group[call.front.lanes].astype(np.uint32)


# --- between lanes -------------------------------------------------------------------------------


@model(f"{USAGE}: readfirstlane", "llvm.amdgcn.readfirstlane")
def _first(call: Call) -> Value:
    return lanes.first_lane(call.front, call.args[0])


@model(f"{USAGE}: readlane", "llvm.amdgcn.readlane")
def _readlane(call: Call) -> Value:
    return lanes.read_lane(call.front, call.args[0], call.args[1])


@model(f"{USAGE}: ballot", "llvm.amdgcn.ballot")
def _ballot(call: Call) -> Value:
    return lanes.ballot(call.front, call.args[0], 8 * size_of(call.type))


@model(f"{CDNA}: DS_BPERMUTE_B32", "llvm.amdgcn.ds.bpermute")
def _bpermute(call: Call) -> Value:
    return lanes.bpermute(call.front, call.args[0], call.args[1])


@model(f"{CDNA}: DS_SWIZZLE_B32", "llvm.amdgcn.ds.swizzle")
def _swizzle(call: Call) -> Value:
    return lanes.swizzle(call.front, call.args[0], call.constant(1))


@model(f"{CDNA}; {RDNA}: DPP", "llvm.amdgcn.update.dpp")
def _update_dpp(call: Call) -> Value:
    masks = np.array([call.constant(i) for i in (3, 4, 5)])
    return lanes.update_dpp(call.front, call.args[0], call.args[1], call.constant(2), masks)


@model(
    f"{RDNA}: V_PERMLANE16_B32, V_PERMLANEX16_B32",
    "llvm.amdgcn.permlane16",
    "llvm.amdgcn.permlanex16",
)
def _permlane16(call: Call) -> Value:
    cross = "permlanex16" in call.instruction.extra
    return lanes.permlane16(call.front, call.args[1], call.args[2], call.args[3], cross)


@model(
    f"{CDNA}: V_PERMLANE16_SWAP_B32, V_PERMLANE32_SWAP_B32",
    "llvm.amdgcn.permlane16.swap",
    "llvm.amdgcn.permlane32.swap",
)
def _permlane_swap(call: Call) -> Value:
    width = 16 if "permlane16" in call.instruction.extra else 32
    return lanes.permlane_swap(call.front, call.args[0], call.args[1], width)


# --- matrices ------------------------------------------------------------------------------------


def _matrix(name: str, size: int, kind: str) -> None:
    def handler(call: Call) -> Value:
        # A, B and C are the operands that are values; the rest are immediates (negation, reuse
        # hints, C modifier, broadcast controls), whose number changes between LLVM versions
        a, b, c, *immediates = _sorted_operands(call)
        if any((x != 0).any() for x in immediates):
            raise SimulationError(f"modifier other than 0: {call.instruction.text}")
        return matrix.multiply(call.front, a, b, c, size=size, kinds=(kind, kind), what=name)

    MODELS[name] = Model(handler, f"{matrix.__name__}: {CDNA if 'mfma' in name else RDNA}")


def _sorted_operands(call: Call) -> list[Value]:
    def is_value(t: Type) -> bool:
        return isinstance(t, Vec) or t == Int(64)  # 64 bits hold eight FP8

    pairs = list(zip(call.args, call.instruction.types, strict=True))
    return [a for a, t in pairs if is_value(t)] + [a for a, t in pairs if not is_value(t)]


for _size in (16, 32):
    _shape = f"llvm.amdgcn.mfma.f32.{_size}x{_size}x"
    _narrow, _wide = (16, 32) if _size == 16 else (8, 16)
    _matrix(f"{_shape}{_narrow}f16", _size, "f16")
    _matrix(f"{_shape}{_narrow}bf16.1k", _size, "bf16")
    _matrix(f"{_shape}{_wide}.f16", _size, "f16")
    _matrix(f"{_shape}{_wide}.bf16", _size, "bf16")
    _matrix(f"{_shape}{_wide}.fp8.fp8", _size, "fp8")
for _kind in ("bf16", "f16"):
    _matrix(f"llvm.amdgcn.wmma.f32.16x16x32.{_kind}", 16, _kind)
for _depth in (64, 128):
    _matrix(f"llvm.amdgcn.wmma.f32.16x16x{_depth}.fp8.fp8", 16, "fp8")


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


# --- memory --------------------------------------------------------------------------------------


@model(f"{USAGE}: make.buffer.rsrc", "llvm.amdgcn.make.buffer.rsrc")
def _make_rsrc(call: Call) -> Value:
    base, stride, records, _ = call.args
    if (stride != 0).any():
        raise SimulationError(f"buffer with a stride: {call.instruction.text}")
    return (base, records)


@model(f"{CDNA}: buffer loads; out of range reads zero", "llvm.amdgcn.raw.ptr.buffer.load")
def _buffer_load(call: Call) -> Value:
    rsrc, offset, scalar = call.args[:3]
    where = call.instruction.text
    return call.machine.buffer_load(call.front, rsrc, offset + scalar, call.type, where)


@model(f"{CDNA}: buffer stores; out of range is dropped", "llvm.amdgcn.raw.ptr.buffer.store")
def _buffer_store(call: Call) -> Value:
    value, rsrc, offset, scalar = call.args[:4]
    where = call.instruction.text
    call.machine.buffer_store(call.front, rsrc, offset + scalar, value, where)
    return None


@model(f"{lanes.__name__}.TRANSPOSED", *lanes.TRANSPOSED)
def _transposed_load(call: Call) -> Value:
    name = next(n for n in lanes.TRANSPOSED if call.instruction.extra.startswith(n))
    size = size_of(call.type)
    read = Vec(size, Int(8))
    where = call.instruction.text
    data = call.machine.load(call.front, call.args[0], read, 3, size, where)
    return from_bytes(lanes.transpose(call.front, data, name), call.type)


@model(
    f"{RDNA}: GLOBAL_LOAD_ASYNC_TO_LDS, ordered by ASYNCcnt",
    *(f"llvm.amdgcn.global.load.async.to.lds.b{bits}" for bits in (8, 32, 64, 128)),
)
def _async_load(call: Call) -> Value:
    size = int(call.instruction.extra.rpartition(".b")[2]) // 8
    source, target, offset = call.args[0], call.args[1], call.signed(2).astype(np.int64)
    call.machine.async_to_lds(
        call.front,
        (source.astype(np.int64) + offset).astype(np.uint64),
        (target.astype(np.int64) + offset).astype(np.uint64),
        size,
    )
    return None


@model(f"{RDNA}: S_WAIT_ASYNCCNT", "llvm.amdgcn.s.wait.asynccnt")
def _wait_async(call: Call) -> Value:
    call.machine.wait_async(call.front, call.constant(0))
    return None
