"""The registry of ``call`` instructions: what each does, and after which source.

:data:`MODELS` is the closed set once ``intrinsics`` is imported. A name that is not in it is an
error when the kernel is loaded, not when it is reached. tests/testing holds a test per entry and
compares the two lists.
"""

from collections.abc import Callable
from dataclasses import dataclass

from minuet.testing.amdgpu.ir import Instruction
from minuet.testing.amdgpu.state import Executor, Front, SimulationError, Value
from minuet.testing.amdgpu.types import Type, signed_of

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
