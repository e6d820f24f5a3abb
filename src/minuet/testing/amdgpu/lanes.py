"""Operations between lanes of a wave: which lane each lane reads from.

Sources: "AMD Instinct MI300 ISA" and "RDNA4 ISA", sections on DPP, DS_SWIZZLE, DS_BPERMUTE and
V_PERMLANE; LLVM's AMDGPU usage document for the intrinsics' operands. Of transposed loads: at
:data:`TRANSPOSED`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from minuet.testing.amdgpu.state import Front, IntArray, SimulationError, Value

Flags = NDArray[np.bool_]


def dpp_source(lane: IntArray, control: int, wave: int) -> tuple[IntArray, Flags]:
    """Source lane of every lane under a DPP control, and where there is one (bool).

    Args:
        lane: [n] lane numbers.
        control: the 9-bit control word.
        wave: lanes per wave.
    """
    row: IntArray = lane & ~15
    inside: IntArray = lane & 15
    valid: Flags = np.ones(len(lane), bool)
    if control < 0x100:  # quad_perm
        chosen: IntArray = np.int64(control) >> (2 * (lane & 3)) & 3
        return (lane & ~3) | chosen, valid
    count = control & 15
    if 0x101 <= control <= 0x10F:  # row_shl
        return row | ((inside + count) & 15), inside + count < 16
    if 0x111 <= control <= 0x11F:  # row_shr
        return row | ((inside - count) & 15), inside >= count
    if 0x121 <= control <= 0x12F:  # row_ror
        return row | ((inside - count) & 15), valid
    if control == 0x140:  # row_mirror
        return row | (15 - inside), valid
    if control == 0x141:  # row_half_mirror
        return row | (inside ^ 7), valid
    if wave == 64 and control == 0x138:  # wave_shr by one, gfx9
        return np.maximum(lane - 1, 0), lane > 0
    if wave == 64 and control == 0x142:  # row_bcast15: lane 15 of each row to the next row, gfx9
        return np.maximum(row - 1, 0), row > 0
    if wave == 64 and control == 0x143:  # row_bcast31: lane 31 to rows 2 and 3, gfx9
        return np.full_like(lane, 31), lane >= 32
    if wave == 32 and 0x150 <= control <= 0x15F:  # row_share, gfx10 and later
        return row | count, valid
    if wave == 32 and 0x160 <= control <= 0x16F:  # row_xmask, gfx10 and later
        return row | (inside ^ count), valid
    raise SimulationError(f"DPP control {control:#x} is not modelled on wave{wave}")


def update_dpp(front: Front, old: Value, src: Value, control: int, masks: IntArray) -> Value:
    """``llvm.amdgcn.update.dpp``.

    Args:
        front: active lanes.
        old: result where a lane is masked off or has no source.
        src: what is moved.
        control: DPP control.
        masks: row mask, bank mask, bound_ctrl.
    """
    source, valid = dpp_source(front.lane, control, front.target.wave)
    rows = masks[0] >> (front.lane // 16) & 1
    banks = masks[1] >> (front.lane % 16 // 4) & 1
    moved = front.gather_lanes(src, np.where(valid, source, front.lane), "update.dpp")
    outside = np.zeros_like(moved) if masks[2] else front.full(old)
    return np.where((rows & banks).astype(bool), np.where(valid, moved, outside), front.full(old))


def swizzle(front: Front, src: Value, offset: int) -> Value:
    """``llvm.amdgcn.ds.swizzle``: quad mode, or and/or/xor masks within 32 lanes."""
    lane = front.lane
    if offset & 0x8000:
        quad: IntArray = np.int64(offset) >> (2 * (lane & 3)) & 3
        source = (lane & ~3) | quad
    else:
        inside = ((lane & 31 & offset) | (offset >> 5 & 31)) ^ (offset >> 10 & 31)
        source = (lane & ~31) | inside
    return front.gather_lanes(src, source, "ds.swizzle")


def bpermute(front: Front, address: Value, src: Value) -> Value:
    """``llvm.amdgcn.ds.bpermute``: lane number in bytes, modulo the wave."""
    source = front.full(address).astype(np.int64) // 4 % front.target.wave
    return front.gather_lanes(src, source, "ds.bpermute")


def permlane16(front: Front, src: Value, low: Value, high: Value, cross: bool) -> Value:
    """``permlane16`` and ``permlanex16``: a nibble of (low, high) names the lane of the row.

    ``permlanex16`` reads from the other row of the pair.
    """
    lane = front.lane
    chosen: Value = np.where(lane % 16 < 8, front.full(low), front.full(high))
    select: IntArray = chosen.astype(np.int64)
    row = (lane & ~15) ^ (16 if cross else 0)
    source = row | (select >> (lane % 8 * 4) & 15)
    return front.gather_lanes(src, source, "permlane16")


def permlane_swap(front: Front, old: Value, src: Value, width: int) -> tuple[Value, Value]:
    """``permlane16.swap`` and ``permlane32.swap`` (gfx950).

    Odd groups of ``width`` lanes of ``old`` change places with even groups of ``src``.
    """
    odd = (front.lane // width) % 2 == 1
    partner = front.lane ^ width
    first = np.where(odd, front.gather_lanes(src, partner, "permlane.swap"), front.full(old))
    second = np.where(odd, front.full(src), front.gather_lanes(old, partner, "permlane.swap"))
    return first, second


def first_lane(front: Front, src: Value) -> Value:
    """``llvm.amdgcn.readfirstlane``: the lowest active lane of each wave."""
    starts = np.flatnonzero(np.diff(front.wave, prepend=-1))
    lengths = np.diff(np.append(starts, front.count))
    return np.repeat(front.full(src)[starts], lengths, axis=0)


def read_lane(front: Front, src: Value, lane: Value) -> Value:
    """``llvm.amdgcn.readlane``: a named lane, the same for the wave."""
    source = front.full(lane).astype(np.int64) % front.target.wave
    return front.gather_lanes(src, source, "readlane")


def ballot(front: Front, predicate: Value, bits: int) -> Value:
    """``llvm.amdgcn.ballot``: a bit per active lane whose predicate holds."""
    starts = np.flatnonzero(np.diff(front.wave, prepend=-1))
    lengths = np.diff(np.append(starts, front.count))
    weight = front.full(predicate).astype(np.uint64) << front.lane.astype(np.uint64)
    sums = np.add.reduceat(weight, starts)
    return np.repeat(sums, lengths).astype(f"u{bits // 8}")


# --- transposed loads ----------------------------------------------------------------------------


def _read_tr16_b64(lane: IntArray, element: IntArray) -> tuple[IntArray, IntArray]:
    """gfx950: 16 lanes share 4 rows of 16 elements; lane i takes column i."""
    column = lane % 16
    return lane - column + 4 * element + column // 4, column % 4


def _load_tr16_b128(lane: IntArray, element: IntArray) -> tuple[IntArray, IntArray]:
    """gfx1250: each 8 lanes transpose 8 x 8 elements."""
    return lane - lane % 8 + element, lane % 8


def _load_tr8_b64(lane: IntArray, element: IntArray) -> tuple[IntArray, IntArray]:
    """gfx1250: as for 16 bits, but the 8 rows are two runs of four lanes, eight lanes apart."""
    half, column = lane - lane % 16, lane % 8
    return half + lane % 16 // 8 * 4 + element // 4 * 8 + element % 4, column


_Moves = Callable[[IntArray, IntArray], tuple[IntArray, IntArray]]

# Instruction: bits of an element, and from whose memory, and which of its elements, a lane's
# element comes. Every lane reads its own consecutive bytes, wherever its address points; what the
# lanes then exchange does not depend on the addresses.
#
# ds.read.tr16.b64 (gfx950): "AMD Instinct CDNA4 ISA", 11.4 "MFMA Transpose Load from LDS" (all
# lanes active, address aligned to the data); the mapping is spelt out in the lowering of Triton's
# AMD backend, MemoryOpToLLVM.cpp (lane 0 takes the first element of lanes 0, 4, 8, 12; lane 4 that
# of lanes 1, 5, 9, 13), and public gfx950 kernels in FlyDSL address it so: four lanes to a row.
# ds.load.tr16.b128, ds.load.tr8.b64 (gfx1250): AMD, "A Deep Dive into LDS Optimizations on AMD
# Instinct MI450 GPUs", rocm.blogs.amd.com, 2026-08-28, figures 1 and 4; the same in Triton's
# MemoryOpToLLVM.cpp.
TRANSPOSED: Mapping[str, tuple[int, _Moves]] = MappingProxyType(
    {
        "llvm.amdgcn.ds.read.tr16.b64": (16, _read_tr16_b64),
        "llvm.amdgcn.ds.load.tr16.b128": (16, _load_tr16_b128),
        "llvm.amdgcn.ds.load.tr8.b64": (8, _load_tr8_b64),
    }
)


def transpose(front: Front, data: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    """What lanes hold after a transposed load.

    Args:
        front: whole waves.
        data: [lanes, bytes] that each lane read.
        name: key of :data:`TRANSPOSED`.

    Raises:
        SimulationError: some lanes of a wave are masked off, which the instruction excludes.
    """
    bits, moves = TRANSPOSED[name]
    lanes = front.by_wave(data, name)
    elements = np.ascontiguousarray(lanes).view(f"u{bits // 8}")
    _, wave, count = elements.shape
    source, taken = moves(np.arange(wave)[:, None], np.arange(count)[None, :])
    moved = np.ascontiguousarray(elements[:, source, taken])
    return moved.view(np.uint8).reshape(data.shape)
