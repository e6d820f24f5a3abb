"""Matrix instructions: which lane holds which element, and a float32 product.

Layouts, l the lane, i the element within the lane's operand:

* MFMA 16x16xK (wave64): A row ``l % 16``, ``k = (l // 16) * (K / 4) + i``; B the same for columns;
  D column ``l % 16``, row ``4 * (l // 16) + r``.
  Source: "AMD Instinct MI300 ISA", matrix arithmetic instructions; the same in FlyDSL's
  ``lib/Dialect/FlyROCDL/CDNA3/MmaAtom.cpp``.
* MFMA 32x32xK (wave64): A row ``l % 32``, ``k = (l // 32) * (K / 2) + i``; D column ``l % 32``,
  row ``8 * (r // 4) + 4 * (l // 32) + r % 4``. Same sources.
* WMMA 16x16xK of gfx1250 (wave32), elements below 32 bits: A row ``l % 16``,
  ``k = 16 * (i // 8) + 8 * (l // 16) + i % 8``; B the same for columns; D column ``l % 16``, row
  ``8 * (l // 16) + r``. Source: FlyDSL's ``lib/Dialect/FlyROCDL/GFX1250/MmaAtom.cpp``.

Products are exact in float32 for BF16 and FP8 operands; the order of the sum is not specified by
the hardware and is numpy's here.
"""

import numpy as np
from numpy.typing import NDArray

from minuet.testing.amdgpu.floats import bf16_to_f32, fp8_to_f32
from minuet.testing.amdgpu.state import Front, Value

Float32Array = NDArray[np.float32]


def operand(value: Value, kind: str, front: Front, what: str) -> Float32Array:
    """``[waves, lanes, elements]`` float32 from registers.

    Args:
        value: a vector of bf16 or half, or integers that hold FP8 bytes.
        kind: ``bf16``, ``f16``, ``fp8`` (the arch's flavour).
        front: whole waves.
        what: the instruction, for messages.
    """
    lanes = front.by_wave(value, what)
    if kind == "bf16":
        return bf16_to_f32(np.ascontiguousarray(lanes).view(np.uint16))
    if kind == "f16":
        halves: Float32Array = lanes.astype(np.float32)
        return halves
    lanes = np.ascontiguousarray(lanes if lanes.ndim == 3 else lanes[:, :, None])
    return fp8_to_f32(lanes.view(np.uint8), front.target.fp8)


def mfma_rows(lanes: Float32Array, size: int) -> Float32Array:
    """``[waves, size, K]`` from ``[waves, 64, elements]``."""
    waves, count, elements = lanes.shape
    groups = count // size
    parts = lanes.reshape(waves, groups, size, elements).transpose(0, 2, 1, 3)
    return parts.reshape(waves, size, groups * elements)


def wmma_rows(lanes: Float32Array) -> Float32Array:
    """``[waves, 16, K]`` from ``[waves, 32, elements]`` (gfx1250, below 32 bits)."""
    waves, _, elements = lanes.shape
    parts = lanes.reshape(waves, 2, 16, elements // 8, 8).transpose(0, 2, 3, 1, 4)
    return parts.reshape(waves, 16, elements * 2)


def to_lanes(tile: Float32Array, groups: int) -> Float32Array:
    """``[waves * lanes, registers]`` from D ``[waves, rows, columns]``.

    Registers of a lane go through rows in runs (of 4 on MFMA, of 8 on WMMA), groups of lanes
    alternate by run.
    """
    waves, rows, columns = tile.shape
    run = 8 if groups == 2 and columns == 16 else 4
    parts = tile.reshape(waves, rows // (groups * run), groups, run, columns)
    lanes = parts.transpose(0, 2, 4, 1, 3)  # group, column, then registers
    return lanes.reshape(waves * groups * columns, rows // groups)


def from_lanes(value: Float32Array, size: int, groups: int) -> Float32Array:
    """The inverse of :func:`to_lanes` for an accumulator ``[waves, lanes, registers]``."""
    waves = value.shape[0]
    run = 8 if groups == 2 and size == 16 else 4
    parts = value.reshape(waves, groups, size, size // (groups * run), run)
    return parts.transpose(0, 3, 1, 4, 2).reshape(waves, size, size)


def multiply(
    front: Front, a: Value, b: Value, c: Value, *, size: int, kinds: tuple[str, str], what: str
) -> Value:
    """``A x B + C`` with the layout of the front's architecture.

    Args:
        front: whole waves.
        a: A operand per lane.
        b: B operand per lane.
        c: accumulator per lane.
        size: rows and columns of the tile, 16 or 32.
        kinds: element kinds of A and B.
        what: the instruction, for messages.
    """
    left, right = operand(a, kinds[0], front, what), operand(b, kinds[1], front, what)
    if front.target.wave == 32:
        rows, columns = wmma_rows(left), wmma_rows(right)
    else:
        rows, columns = mfma_rows(left, size), mfma_rows(right, size)
    groups = front.target.wave // size
    start = from_lanes(front.by_wave(c, what), size, groups)
    with np.errstate(all="ignore"):
        return to_lanes(np.matmul(rows, columns.transpose(0, 2, 1)) + start, groups)
