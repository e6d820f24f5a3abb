"""Types of LLVM IR and how their values are held: one numpy array, first axis the lanes.

============  =======================  =====================================================
type          array                    note
============  =======================  =====================================================
``iN``        ``[lanes]`` uintN        ``i1`` is bool; N in 1, 8, 16, 32, 64. Of another N up
                                        to 64: the next wider, upper bits zero; in registers only
``bfloat``    ``[lanes]`` uint16       bits; arithmetic goes through float32
``half`` ...  ``[lanes]`` float16 ...
``ptr``       ``[lanes]`` uint64       byte address; LDS addresses count from the workgroup's start
``<n x T>``   ``[lanes, n]``
``[n x T]``   tuple of n values        as ``{...}``
============  =======================  =====================================================

A value that is the same in all lanes may have 1 instead of ``lanes``.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike


@dataclass(frozen=True, slots=True)
class Type:
    """Base of all types."""


@dataclass(frozen=True, slots=True)
class Void(Type):
    """No value."""


@dataclass(frozen=True, slots=True)
class Int(Type):
    """``iN``."""

    bits: int


@dataclass(frozen=True, slots=True)
class Float(Type):
    """``half``, ``bfloat``, ``float`` or ``double``."""

    kind: str


@dataclass(frozen=True, slots=True)
class Ptr(Type):
    """``ptr addrspace(N)``: 0 generic, 1 global, 3 LDS, 4 constant, 5 private, 7 and 8 buffers."""

    space: int


@dataclass(frozen=True, slots=True)
class Vec(Type):
    """``<n x T>``."""

    count: int
    element: Type


@dataclass(frozen=True, slots=True)
class Arr(Type):
    """``[n x T]``."""

    count: int
    element: Type


@dataclass(frozen=True, slots=True)
class Struct(Type):
    """``{T, ...}``."""

    elements: tuple[Type, ...]


_FLOATS: dict[str, tuple[type, int]] = {
    "half": (np.float16, 2),
    "bfloat": (np.uint16, 2),
    "float": (np.float32, 4),
    "double": (np.float64, 8),
}
_INTS = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def dtype_of(t: Type) -> DTypeLike:
    """Array type of one scalar; KeyError for a width that is not modelled."""
    if isinstance(t, Int):
        return _INTS[next(bits for bits in _INTS if bits >= t.bits)]
    if isinstance(t, Float):
        return _FLOATS[t.kind][0]
    if isinstance(t, Ptr):
        return np.uint64
    raise KeyError(t)


def is_odd(t: Type) -> bool:
    """Whether an integer (or vector of them) has a width that no array has."""
    scalar = scalar_of(t)
    return isinstance(scalar, Int) and scalar.bits not in _INTS


def signed_of(t: Type) -> DTypeLike:
    """Signed numpy type of an integer (or vector of them); KeyError for an odd width."""
    scalar = t.element if isinstance(t, Vec) else t
    assert isinstance(scalar, Int)
    return _SIGNED[scalar.bits]


def size_of(t: Type) -> int:
    """Bytes in memory; our data layouts pad nothing but odd vectors, which are refused."""
    if isinstance(t, Int):
        return np.dtype(_INTS[t.bits]).itemsize
    if isinstance(t, Float):
        return _FLOATS[t.kind][1]
    if isinstance(t, Ptr):
        return 4 if t.space in (3, 5) else 8
    if isinstance(t, (Vec, Arr)):
        return t.count * size_of(t.element)
    if isinstance(t, Struct):
        return struct_offset(t, len(t.elements))
    raise KeyError(t)


def struct_offset(t: Struct, index: int) -> int:
    """Byte offset of an element, each aligned to its size."""
    offset = 0
    for element in t.elements[:index]:
        size = size_of(element)
        offset = -(-offset // size) * size + size
    if index < len(t.elements):
        size = size_of(t.elements[index])
        offset = -(-offset // size) * size
    return offset


def scalar_of(t: Type) -> Type:
    """Element of a vector, the type itself otherwise."""
    return t.element if isinstance(t, Vec) else t
