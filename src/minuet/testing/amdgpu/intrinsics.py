"""LLVM's generic and AMDGPU's intrinsics: identity, between lanes, matrices, memory.

Those that stay within a lane are in ``arithmetic``; the registry of all is in ``calls``.
"""

import numpy as np

from minuet.testing.amdgpu import arithmetic, lanes, matrix
from minuet.testing.amdgpu.calls import CDNA, MODELS, RDNA, USAGE, Call, Model, find, model
from minuet.testing.amdgpu.ops import from_bytes
from minuet.testing.amdgpu.state import SimulationError, Value
from minuet.testing.amdgpu.types import Int, Type, Vec, size_of

__all__ = ["MODELS", "arithmetic", "find"]  # importing this module completes the registry

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
