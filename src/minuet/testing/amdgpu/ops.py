"""Instructions of LLVM that stay within a lane: arithmetic, compares, casts, vectors, addresses."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from minuet.testing.amdgpu.floats import bf16_to_f32, f32_to_bf16
from minuet.testing.amdgpu.ir import BINARY, CASTS, Instruction
from minuet.testing.amdgpu.state import SimulationError, Value
from minuet.testing.amdgpu.types import (
    Arr,
    Float,
    Int,
    Ptr,
    Struct,
    Type,
    Vec,
    dtype_of,
    is_odd,
    scalar_of,
    signed_of,
    size_of,
    struct_offset,
)

Pure = Callable[..., Value]  # operand arrays to the result array


def to_bytes(value: Value) -> NDArray[np.uint8]:
    """[lanes, bytes] of a value in memory."""
    if value.dtype == np.bool_:
        value = value.astype(np.uint8)
    flat = np.ascontiguousarray(value).reshape(value.shape[0], -1)
    return flat.view(np.uint8)


def from_bytes(data: NDArray[np.uint8], kind: Type) -> Value:
    """The inverse for one type."""
    if isinstance(kind, Struct):
        raise SimulationError("loads of structures are not modelled")
    scalar = scalar_of(kind)
    if isinstance(scalar, Ptr) and size_of(scalar) == 4:
        return data.view(np.uint32)[:, 0].astype(np.uint64)
    if scalar == Int(1):
        return data.astype(bool)[:, 0] if scalar is kind else data.astype(bool)
    values = np.ascontiguousarray(data).view(dtype_of(scalar))
    return values if kind is not scalar else values[:, 0]


def is_bf16(t: Type) -> bool:
    """Whether a value of the type is held as bits."""
    return scalar_of(t) == Float("bfloat")


def widen(x: Value, t: Type) -> Value:
    """Bfloat bits to float32; others as they are."""
    return bf16_to_f32(x) if is_bf16(t) else x


def narrow(x: Value, t: Type) -> Value:
    """float32 back to bfloat bits."""
    return f32_to_bf16(x) if is_bf16(t) else x


def _truncated(a: Value, b: Value) -> Value:
    if (b == 0).any():
        raise SimulationError("division by zero")
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def _unsigned(function: Callable[[Value, Value], Value]) -> Pure:
    def divide(a: Value, b: Value) -> Value:
        if (b == 0).any():
            raise SimulationError("division by zero")
        return function(a, b)

    return divide


def binary(instruction: Instruction) -> Pure:
    """Two operands of one type."""
    op, kind = instruction.op, instruction.type
    if op in ("fadd", "fsub", "fmul", "fdiv", "frem"):
        function = {
            "fadd": np.add,
            "fsub": np.subtract,
            "fmul": np.multiply,
            "fdiv": np.divide,
            "frem": np.fmod,
        }[op]
        if is_bf16(kind):
            return lambda a, b: narrow(function(widen(a, kind), widen(b, kind)), kind)
        return function
    boolean = scalar_of(kind) == Int(1)
    if boolean:
        logic: dict[str, Pure] = {
            "and": np.logical_and,
            "or": np.logical_or,
            "xor": np.logical_xor,
            "add": np.logical_xor,
            "sub": np.logical_xor,
            "mul": np.logical_and,
        }
        return logic[op]
    if is_odd(kind) and op not in ("and", "or", "xor"):
        raise SimulationError(f"{op} of an integer of odd width: {instruction.text}")
    if is_odd(kind):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
    signed = signed_of(kind)
    unsigned = dtype_of(scalar_of(kind))
    table: dict[str, Pure] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "shl": np.left_shift,
        "lshr": np.right_shift,
        "ashr": lambda a, b: (a.view(signed) >> b.view(signed)).view(unsigned),
        "udiv": _unsigned(np.floor_divide),
        "urem": _unsigned(np.remainder),
        "sdiv": lambda a, b: _truncated(a.view(signed), b.view(signed)).view(unsigned),
        "srem": lambda a, b: (
            a.view(signed) - _truncated(a.view(signed), b.view(signed)) * b.view(signed)
        ).view(unsigned),
    }
    return table[op]


_INT_COMPARE: dict[str, Pure] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


def compare(instruction: Instruction) -> Pure:
    """``icmp`` and ``fcmp``."""
    predicate, kind = instruction.extra, instruction.types[0]
    if instruction.op == "icmp":
        if predicate in ("eq", "ne"):
            return _INT_COMPARE[predicate]
        function = _INT_COMPARE[predicate[1:]]
        if predicate[0] == "s":
            signed = signed_of(kind)
            return lambda a, b: function(a.view(signed), b.view(signed))
        return function
    if predicate in ("ord", "uno"):
        wanted = predicate == "uno"

        def ordered(a: Value, b: Value) -> Value:
            nan = np.isnan(widen(a, kind)) | np.isnan(widen(b, kind))
            return nan == wanted

        return ordered
    function, unordered = _INT_COMPARE[predicate[1:]], predicate[0] == "u"

    def floating(a: Value, b: Value) -> Value:
        a, b = widen(a, kind), widen(b, kind)
        nan = np.isnan(a) | np.isnan(b)
        return np.where(nan, unordered, function(a, b))

    return floating


def select(instruction: Instruction) -> Pure:
    """Element by element, or by one condition for a whole vector or aggregate."""
    condition_type, kind = instruction.types[0], instruction.type

    def choose(condition: Value, a: Value, b: Value) -> Value:
        if isinstance(a, tuple):
            return tuple(choose(condition, x, y) for x, y in zip(a, b, strict=True))
        if isinstance(kind, Vec) and not isinstance(condition_type, Vec):
            condition = condition[:, None]
        return np.where(condition, a, b)

    return choose


def cast(instruction: Instruction) -> Pure:
    """Conversions and bit casts."""
    op, source, target = instruction.op, instruction.types[0], instruction.type
    if op in ("bitcast", "freeze"):
        return lambda x: bitcast(x, source, target)
    if op in ("ptrtoint", "inttoptr", "addrspacecast"):
        wanted = dtype_of(scalar_of(target))
        return lambda x: x.astype(wanted)
    wanted = dtype_of(scalar_of(target))
    if op == "trunc":
        if scalar_of(target) == Int(1):
            return lambda x: (x & x.dtype.type(1)).astype(bool)
        if is_odd(target):
            return lambda x: x.astype(wanted) & all_ones(target)
        return lambda x: x.astype(wanted)
    if op == "zext":
        return lambda x: x.astype(wanted)
    if op == "sext":
        if scalar_of(source) == Int(1):
            ones = np.iinfo(np.dtype(wanted)).max
            return lambda x: np.where(x, ones, 0).astype(wanted)
        signed, wide = signed_of(source), signed_of(target)
        return lambda x: x.view(signed).astype(wide).view(wanted)
    if op in ("fptrunc", "fpext"):
        if is_bf16(target):
            return lambda x: f32_to_bf16(x.astype(np.float32))
        return lambda x: widen(x, source).astype(wanted)
    if op in ("uitofp", "sitofp"):
        signed_source = None if op == "uitofp" else signed_of(source)

        def to_float(x: Value) -> Value:
            number = x if signed_source is None else x.view(signed_source)
            return (
                f32_to_bf16(number.astype(np.float32)) if is_bf16(target) else number.astype(wanted)
            )

        return to_float
    # out of range is poison; saturation is what the hardware does
    bounds = np.iinfo(np.dtype(signed_of(target) if op == "fptosi" else wanted))

    def to_int(x: Value) -> Value:
        number = np.nan_to_num(np.trunc(widen(x, source).astype(np.float64)), nan=0.0)
        clipped = np.clip(number, float(bounds.min), float(bounds.max))
        return clipped.astype(bounds.dtype).view(wanted)

    return to_int


def all_ones(t: Type) -> Value:
    """The bits that an integer type has."""
    scalar = scalar_of(t)
    assert isinstance(scalar, Int)
    return np.array(2**scalar.bits - 1, dtype_of(scalar))


def bitcast(x: Value, source: Type, target: Type) -> Value:
    """The same bits as another type of the same size."""
    if source == target:
        return x
    to, lanes = dtype_of(scalar_of(target)), x.shape[0]
    if scalar_of(source) == Int(1) or scalar_of(target) == Int(1):
        return _bitcast_flags(x, source, target)
    flat = np.ascontiguousarray(x).reshape(lanes, -1).view(np.uint8)
    cast_to = np.ascontiguousarray(flat).view(to)
    return cast_to if isinstance(target, Vec) else cast_to[:, 0]


def _bitcast_flags(x: Value, source: Type, target: Type) -> Value:
    if isinstance(source, Vec) and isinstance(target, Int):
        weight = np.left_shift(np.uint64(1), np.arange(source.count, dtype=np.uint64))
        return (x * weight).sum(axis=1).astype(dtype_of(target))
    raise SimulationError(f"bitcast {source} to {target} is not modelled")


def extract_element(instruction: Instruction) -> Pure:
    """Constant or per-lane index."""

    def extract(vector: Value, index: Value) -> Value:
        if index.shape[0] == 1:
            return vector[:, int(index[0])]
        rows = np.broadcast_to(vector, (index.shape[0], *vector.shape[1:]))
        return rows[np.arange(index.shape[0]), index.astype(np.int64)]

    return extract


def insert_element(instruction: Instruction) -> Pure:
    """Constant or per-lane index."""

    def insert(vector: Value, element: Value, index: Value) -> Value:
        lanes = max(vector.shape[0], element.shape[0], index.shape[0])
        out = np.array(np.broadcast_to(vector, (lanes, vector.shape[1])))
        if index.shape[0] == 1:
            out[:, int(index[0])] = element
        else:
            out[np.arange(lanes), index.astype(np.int64)] = element
        return out

    return insert


def shuffle(instruction: Instruction) -> Pure:
    """Constant mask over the concatenation of two vectors."""
    vector = instruction.types[0]
    assert isinstance(vector, Vec)
    mask = np.where(instruction.extra >= 2 * vector.count, 0, instruction.extra)

    def pick(a: Value, b: Value) -> Value:
        if (mask < vector.count).all():
            return a[:, mask]
        lanes = max(a.shape[0], b.shape[0])
        both = [np.broadcast_to(side, (lanes, side.shape[1])) for side in (a, b)]
        return np.concatenate(both, axis=1)[:, mask]

    return pick


def extract_value(instruction: Instruction) -> Pure:
    """Out of an aggregate."""

    def extract(value: Value) -> Value:
        for index in instruction.extra:
            value = value[index]
        return value

    return extract


def insert_value(instruction: Instruction) -> Pure:
    """Into an aggregate of one level."""
    (index,) = instruction.extra

    def insert(value: Value, part: Value) -> Value:
        return (*value[:index], part, *value[index + 1 :])

    return insert


def get_element_ptr(instruction: Instruction) -> Pure:
    """Address arithmetic: indices are signed, offsets 64 bits wide (32 in LDS, modulo its size)."""
    steps: list[int | None] = []
    kind: Type = instruction.extra
    space = instruction.types[0]
    assert isinstance(space, Ptr)
    sizes = [size_of(kind)]
    for operand in instruction.operands[2:]:
        if isinstance(kind, Struct):
            index = int(operand[0])
            sizes.append(0)
            steps.append(struct_offset(kind, index))
            kind = kind.elements[index]
        else:
            assert isinstance(kind, (Arr, Vec))
            kind = kind.element
            sizes.append(size_of(kind))
            steps.append(None)
    fixed = sum(step for step in steps if step)
    signs = [signed_of(t) for t in instruction.types[1:]]
    local = space.space == 3

    def address(base: Value, *indices: Value) -> Value:
        offset = np.int64(fixed)
        for index, size, signed in zip(indices, sizes, signs, strict=True):
            if size:
                offset = offset + index.view(signed).astype(np.int64) * size
        moved = base.astype(np.int64) + offset
        return (moved & 0xFFFFFFFF if local else moved).astype(np.uint64)

    return address


def negate(instruction: Instruction) -> Pure:
    """``fneg``: flips the sign bit, of NaN too."""
    if is_bf16(instruction.type):
        return lambda x: x ^ np.uint16(0x8000)
    return np.negative


def build(instruction: Instruction) -> Pure | None:
    """The function of an instruction, None if it is not one of this module's."""
    if instruction.op in BINARY:
        return binary(instruction)
    if instruction.op in CASTS or instruction.op == "freeze":
        return cast(instruction)
    table = {
        "icmp": compare,
        "fcmp": compare,
        "select": select,
        "extractelement": extract_element,
        "insertelement": insert_element,
        "shufflevector": shuffle,
        "extractvalue": extract_value,
        "insertvalue": insert_value,
        "getelementptr": get_element_ptr,
        "fneg": negate,
    }
    maker = table.get(instruction.op)
    return maker(instruction) if maker else None
