"""Instructions, blocks, functions and modules: what the parser makes and the machine runs."""

from dataclasses import dataclass, field
from typing import Any

from minuet.testing.amdgpu.types import Type

# An operand: the name of a value ("%3"), or a constant as an array with one lane (tuples of them).
Operand = Any

BINARY = frozenset(
    [
        "add",
        "sub",
        "mul",
        "udiv",
        "sdiv",
        "urem",
        "srem",
        "shl",
        "lshr",
        "ashr",
        "and",
        "or",
        "xor",
        "fadd",
        "fsub",
        "fmul",
        "fdiv",
        "frem",
    ]
)
CASTS = frozenset(
    [
        "trunc",
        "zext",
        "sext",
        "fptrunc",
        "fpext",
        "fptoui",
        "fptosi",
        "uitofp",
        "sitofp",
        "ptrtoint",
        "inttoptr",
        "bitcast",
        "addrspacecast",
    ]
)


BARRIERS = ("llvm.amdgcn.s.barrier", "llvm.amdgcn.s.barrier.wait")


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes:
        op: opcode.
        result: name it defines, empty for none.
        type: of the result (of the stored value for ``store``).
        operands: values and constants.
        types: of the operands.
        extra: what else the opcode needs (predicate, alignment, callee, targets, indices).
        text: the source line, for messages.
    """

    op: str
    result: str
    type: Type
    operands: list[Operand]
    types: list[Type]
    extra: Any
    text: str


@dataclass(slots=True)
class Block:
    """A basic block, cut further at barriers so that a wave can stop there.

    Attributes:
        name: label.
        phis: incoming values by name: ``{phi: (type, {from label: operand})}``.
        code: instructions without phis; the last one is a terminator or a barrier.
        falls_to: the rest of the block after a barrier; empty after a terminator.
        origin: label as written, which is what phis of successors name.
    """

    name: str
    phis: dict[str, tuple[Type, dict[str, Operand]]] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    falls_to: str = ""
    origin: str = ""


@dataclass(slots=True)
class Function:
    """One kernel.

    Attributes:
        name: without ``@``.
        params: (name, type) in order.
        blocks: in the order of the text, which is the order in which diverged lanes are taken.
    """

    name: str
    params: list[tuple[str, Type]]
    blocks: list[Block]


@dataclass(slots=True)
class Global:
    """A module-level variable in LDS: size, alignment and, once laid out, address."""

    name: str
    bytes: int
    align: int
    address: int = 0


@dataclass(slots=True)
class Module:
    """Kernels and LDS variables of one file.

    Attributes:
        kernels: by name.
        globals: LDS variables by name, laid out one after another.
        lds_bytes: their extent.
    """

    kernels: dict[str, Function]
    globals: dict[str, Global]
    lds_bytes: int
