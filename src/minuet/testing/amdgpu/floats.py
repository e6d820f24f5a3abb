"""Narrow floating types as bits: conversions that numpy does not have.

Sources: OCP 8-bit floating point specification 1.0 for e4m3fn and e5m2; "AMD Instinct MI300
instruction set architecture", section on FP8 formats, for the fnuz forms (bias one higher, no
negative zero: its code is the only NaN).
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]
UInt16Array = NDArray[np.uint16]


def bf16_to_f32(bits: UInt16Array) -> Float32Array:
    """Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Float32Array) -> UInt16Array:
    """Round to nearest even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


@cache
def fp8_table(flavour: str) -> Float32Array:
    """The 256 values of ``e4m3fn`` or ``e4m3fnuz``."""
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent, mantissa = (code >> 3) & 15, code & 7
    bias = 8 if flavour == "e4m3fnuz" else 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    value = sign * np.where(exponent == 0, mantissa / 8 * 2.0 ** (1 - bias), normal)
    if flavour == "e4m3fnuz":
        value[0x80] = np.nan
    elif flavour == "e4m3fn":
        value[[0x7F, 0xFF]] = np.nan
    else:
        raise KeyError(flavour)
    table = value.astype(np.float32)
    table.setflags(write=False)
    return table


def fp8_to_f32(codes: UInt8Array, flavour: str) -> Float32Array:
    """Exact."""
    return fp8_table(flavour)[codes]


def f32_to_fp8(x: Float32Array, flavour: str) -> UInt8Array:
    """Round to nearest even; magnitudes beyond the largest finite value saturate, NaN is NaN.

    The hardware saturates or overflows to NaN by a mode bit; our kernels clamp first, so the
    difference is not observable in them.
    """
    table = fp8_table(flavour)
    positive = table[:128].astype(np.float64)
    finite = positive[~np.isnan(positive)]
    magnitude = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(finite, magnitude), 1, len(finite) - 1)
    low, high = finite[above - 1], finite[above]
    middle = (low + high) / 2
    # codes of non-negative values are consecutive, so the even neighbour is the even code
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    code = np.where(up, above, above - 1).astype(np.uint8)
    negative = np.signbit(x)
    if flavour == "e4m3fnuz":
        code = np.where(negative & (code != 0), code | 0x80, code)
        return np.where(np.isnan(x), np.uint8(0x80), code).astype(np.uint8)
    code = np.where(negative, code | 0x80, code)
    return np.where(np.isnan(x), np.uint8(0x7F), code).astype(np.uint8)
