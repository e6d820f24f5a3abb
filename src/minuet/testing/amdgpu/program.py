"""A function compiled to Python closures, one per instruction, and what its blocks pass on."""

from collections.abc import Callable

from minuet.testing.amdgpu import ops
from minuet.testing.amdgpu.calls import Call
from minuet.testing.amdgpu.intrinsics import find
from minuet.testing.amdgpu.ir import Block, Function, Instruction
from minuet.testing.amdgpu.state import Executor, Front, SimulationError, Value
from minuet.testing.amdgpu.types import Ptr

Step = Callable[[Executor, Front], Value]


class Program:
    """A function compiled to Python closures, with what flows between its blocks."""

    def __init__(self, function: Function):
        self.function = function
        self.blocks = function.blocks
        self.index = {block.name: number for number, block in enumerate(self.blocks)}
        self.steps = [[self._step(i) for i in block.code] for block in self.blocks]
        self.outside = _used_outside(self.blocks)
        self.callees = {i.extra for b in self.blocks for i in b.code if i.op == "call"}

    def _step(self, instruction: Instruction) -> tuple[str, Step | None]:
        pure = ops.build(instruction)
        if pure is not None:
            return instruction.result, _pure_step(pure, instruction)
        if instruction.op == "call":
            found = find(instruction.extra)
            return instruction.result, _call_step(found.handler, instruction)
        makers = {"load": _load_step, "store": _store_step, "atomicrmw": _atomic_step}
        if instruction.op in makers:
            return instruction.result, makers[instruction.op](instruction)
        if instruction.op in ("br", "switch", "ret", "unreachable", "barrier"):
            return "", None
        raise SimulationError(f"instruction is not modelled: {instruction.text}")


def _used_outside(blocks: list[Block]) -> set[str]:
    """Names read in another block than the one that defines them; phis read at the edge."""
    home = {i.result: b.name for b in blocks for i in b.code if i.result}
    found = set()
    for block in blocks:
        for instruction in block.code:
            for operand in instruction.operands:
                if isinstance(operand, str) and home.get(operand) != block.name:
                    found.add(operand)
    leaving = {b.origin: b.name for b in blocks if not b.falls_to}
    for block in blocks:
        for _, values in block.phis.values():
            for label, operand in values.items():
                if isinstance(operand, str) and home.get(operand) != leaving.get(label):
                    found.add(operand)
    return found


def _pure_step(pure: Callable[..., Value], instruction: Instruction) -> Step:
    operands = instruction.operands
    if len(operands) == 2:
        a, b = operands

        def two(machine: Executor, front: Front) -> Value:
            return pure(machine.get(a), machine.get(b))

        return two

    def any_number(machine: Executor, front: Front) -> Value:
        return pure(*[machine.get(operand) for operand in operands])

    return any_number


def _call_step(handler: Callable[[Call], Value], instruction: Instruction) -> Step:
    def step(machine: Executor, front: Front) -> Value:
        args = [None if o is None else machine.get(o) for o in instruction.operands]
        return handler(Call(machine, front, instruction, args))

    return step


def _load_step(instruction: Instruction) -> Step:
    kind, (space,), align = instruction.type, instruction.types, instruction.extra
    assert isinstance(space, Ptr)

    def step(machine: Executor, front: Front) -> Value:
        address = machine.get(instruction.operands[0])
        return machine.load(front, address, kind, space.space, align, instruction.text)

    return step


def _store_step(instruction: Instruction) -> Step:
    space, align = instruction.types[1], instruction.extra
    assert isinstance(space, Ptr)

    def step(machine: Executor, front: Front) -> Value:
        value, address = (machine.get(o) for o in instruction.operands)
        machine.store(front, address, value, space.space, align, instruction.text)
        return None

    return step


def _atomic_step(instruction: Instruction) -> Step:
    space, kind = instruction.types
    assert isinstance(space, Ptr)

    def step(machine: Executor, front: Front) -> Value:
        address, value = (front.full(machine.get(o)) for o in instruction.operands)
        return machine.atomic(front, address, value, kind, space.space, instruction.extra)

    return step
