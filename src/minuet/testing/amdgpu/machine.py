"""Execution: a grid of workgroups as one set of lanes, diverging and meeting again.

All lanes of a launch (in batches, for large grids) are elements of numpy arrays. Each lane has a
program counter; the lanes that stand at the block that comes first in the text run together, which
brings diverged lanes back together where the text does. Lanes of one wave are never split further
than their control flow splits them, so matrix and cross-lane instructions can demand whole waves.

``order="together"`` runs all waves in step, which is fast; ``order=seed`` lets one wave at a time
run to its next barrier, waves in random order, which is the other extreme of what hardware may do.
A correct program gives the same numbers both ways.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minuet.testing.amdgpu.ir import Block, Instruction, Module
from minuet.testing.amdgpu.memory import Lds, Memory, Pointer
from minuet.testing.amdgpu.ops import from_bytes, to_bytes
from minuet.testing.amdgpu.program import Program
from minuet.testing.amdgpu.state import TARGETS, Front, IntArray, SimulationError, Target, Value
from minuet.testing.amdgpu.types import Float, Int, Ptr, Type, dtype_of, size_of

MAX_LANES = 16_384  # of one batch: arrays stay in the cache
_LOCAL = 3


@dataclass(frozen=True, slots=True)
class Geometry:
    """How many of what.

    Attributes:
        grid: workgroups per axis.
        block: work-items per axis; a multiple of the wave.
        dynamic_lds: bytes of LDS behind the module's own variables.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int = 0


def launch(
    module: Module,
    kernel: str,
    arguments: Sequence[Any],
    memory: Memory,
    geometry: Geometry,
    *,
    arch: str,
    order: int | None = None,
) -> None:
    """Run a kernel to its end.

    Args:
        module: parsed IR.
        kernel: name of a function in it.
        arguments: one per parameter: :class:`Pointer`, None for a null pointer, or a number.
        memory: global memory; changed in place.
        geometry: grid, block and dynamic LDS.
        arch: key of :data:`minuet.testing.amdgpu.state.TARGETS`.
        order: None runs waves in step; a number seeds the random order of whole waves.

    Raises:
        SimulationError: whatever the hardware would not define, and what is not modelled.
    """
    target = TARGETS[arch]
    function = module.kernels[kernel]
    lds_bytes = module.lds_bytes + geometry.dynamic_lds
    size = math.prod(geometry.block)
    if lds_bytes > target.lds_bytes:
        raise SimulationError(f"{lds_bytes} bytes of LDS exceed {target.lds_bytes} of {arch}")
    if size % target.wave:
        raise SimulationError(f"{size} work-items are not whole waves of {target.wave}")
    program = Program(function)
    hidden = _place_hidden_arguments(program, memory, geometry)
    count = math.prod(geometry.grid)
    step = max(1, MAX_LANES // size)
    for first in range(0, count, step):
        groups = np.arange(first, min(first + step, count))
        machine = Machine(program, target, memory, groups, geometry, lds_bytes)
        machine.hidden_arguments = hidden
        machine.bind(arguments)
        with np.errstate(all="ignore"):
            machine.run(order)


def _place_hidden_arguments(program: Program, memory: Memory, geometry: Geometry) -> int:
    """Address of the hidden kernel arguments, 0 if the kernel does not ask for them.

    LLVM, User Guide for the AMDGPU backend, code object V5: workgroups per axis (32 bits each),
    then work-items per workgroup (16 bits each), then the rest of a partial workgroup. What
    follows is not modelled: reading it is out of bounds.
    """
    if "llvm.amdgcn.implicitarg.ptr" not in program.callees:
        return 0
    sizes = np.array([*geometry.block, 0, 0, 0], np.uint16)
    words = np.concatenate([np.array(geometry.grid, np.uint32), sizes.view(np.uint32)])
    return memory.place(f"hidden arguments {len(memory)}", words, readonly=True).address


class Machine:
    """A batch of workgroups in execution."""

    def __init__(
        self,
        program: Program,
        target: Target,
        memory: Memory,
        groups: IntArray,
        geometry: Geometry,
        lds_bytes: int,
    ):
        grid, block = geometry.grid, geometry.block
        size = math.prod(block)
        self.program, self.target, self.memory = program, target, memory
        self.lds = Lds(len(groups), lds_bytes)
        self.total = len(groups) * size
        item = np.tile(np.arange(size), len(groups))
        self.workgroup: IntArray = np.repeat(np.arange(len(groups)), size)
        self.workgroup_ids = [
            x.astype(np.uint32)
            for x in (groups % grid[0], groups // grid[0] % grid[1], groups // grid[0] // grid[1])
        ]
        self.workitem_ids = [
            x.astype(np.uint32)
            for x in (item % block[0], item // block[0] % block[1], item // block[0] // block[1])
        ]
        self.lane: IntArray = item % target.wave
        self.wave_in_group: IntArray = item // target.wave
        self.wave: IntArray = self.workgroup * (size // target.wave) + self.wave_in_group
        self.waves_per_group = size // target.wave
        self.pc = np.zeros(self.total, np.int64)
        self.waiting = np.zeros(self.total, bool)
        self.done = np.zeros(self.total, bool)
        self.hidden_arguments = 0
        self.values: dict[str, Value] = {}
        self._local: dict[str, Value] | None = None
        self._subset: IntArray | None = None
        self._lanes = np.arange(self.total)
        self._pending: list[tuple[IntArray, IntArray, NDArray[np.uint8], int]] = []
        self._all = Front(target, self._lanes, self.lane, self.wave, True)

    def bind(self, arguments: Sequence[Any]) -> None:
        """Give the parameters their values, the same in all lanes."""
        params = self.program.function.params
        if len(arguments) != len(params):
            raise SimulationError(f"{len(arguments)} arguments for {len(params)} parameters")
        for (name, kind), given in zip(params, arguments, strict=True):
            if isinstance(kind, Ptr):
                address = given.address if isinstance(given, Pointer) else int(given or 0)
                self.values[name] = np.array([address], np.uint64)
            elif isinstance(kind, Int):
                bits = int(given) & (2**kind.bits - 1)
                self.values[name] = np.array([bits], dtype_of(kind))
            elif isinstance(kind, Float):
                self.values[name] = np.array([given], dtype_of(kind))
            else:
                raise SimulationError(f"parameter {name} of type {kind} is not modelled")

    # --- control ---------------------------------------------------------------------------------

    def run(self, order: int | None) -> None:
        """To the end of every lane."""
        chance = None if order is None else np.random.default_rng(order)
        turns: list[IntArray] = [self._lanes]
        while not self.done.all():
            if chance is not None:
                slots = chance.permutation(self.waves_per_group)
                turns = [np.flatnonzero(self.wave_in_group == slot) for slot in slots]
            for turn in turns:
                self._run_until_blocked(turn)
            self._release()

    def _run_until_blocked(self, turn: IntArray) -> None:
        blocked_at = len(self.program.blocks)
        while True:
            place = np.where(self.waiting[turn] | self.done[turn], blocked_at, self.pc[turn])
            lowest = int(place.min())
            if lowest == blocked_at:
                return
            chosen = turn[place == lowest]
            self._run_block(lowest, chosen)

    def _release(self) -> None:
        """Complete every barrier that all live lanes of a workgroup have reached."""
        if not self.waiting.any():
            return
        size = self.total // len(self.lds.epoch)
        waiting = self.waiting.reshape(-1, size)
        ready = (waiting | self.done.reshape(-1, size)).all(axis=1) & waiting.any(axis=1)
        if not ready.any():
            raise SimulationError("a barrier that not all waves of a workgroup reach")
        places = np.where(waiting, self.pc.reshape(-1, size), -1).max(axis=1, keepdims=True)
        if (waiting & (self.pc.reshape(-1, size) != places))[ready].any():
            raise SimulationError("waves of a workgroup wait at different barriers")
        self.waiting.reshape(-1, size)[ready] = False
        self.lds.barrier(np.flatnonzero(ready))

    def _front(self, chosen: IntArray, name: str) -> Front:
        if len(chosen) == self.total:
            self._all.block = name
            return self._all
        wave = self.wave[chosen]
        per_wave = np.bincount(wave - wave[0])
        whole = bool(((per_wave == 0) | (per_wave == self.target.wave)).all())
        return Front(self.target, chosen, self.lane[chosen], wave, whole, name)

    def _run_block(self, number: int, chosen: IntArray) -> None:
        block = self.program.blocks[number]
        front = self._front(chosen, f"block {block.name}")
        self._subset = None if front is self._all else chosen
        self._local = None if self._subset is None else {}
        for result, step in self.program.steps[number]:
            if step is None:
                continue
            value = step(self, front)
            if result:
                if self._local is None:
                    self.values[result] = value
                else:
                    self._local[result] = value
                    if result in self.program.outside:
                        self._scatter(result, value)
        self._leave(block, front)

    def get(self, operand: Any) -> Value:
        """Value of an operand in the lanes of the current front."""
        if operand.__class__ is not str:
            return operand
        local = self._local
        if local is None:
            return self.values[operand]
        if operand in local:
            return local[operand]
        value = _pick(self.values[operand], self._subset)
        local[operand] = value
        return value

    def _scatter(self, name: str, value: Value) -> None:
        self.values[name] = _merge(self.values.get(name), value, self._subset, self.total)

    def _leave(self, block: Block, front: Front) -> None:
        last = block.code[-1]
        if last.op == "barrier":
            if not front.whole:
                raise SimulationError(f"barrier in divergent control flow ({front.block})")
            self.pc[front.lanes] = self.program.index[block.falls_to]
            self.waiting[front.lanes] = True
        elif last.op in ("ret", "unreachable"):
            if last.op == "unreachable":
                raise SimulationError(f"unreachable was reached ({front.block})")
            self.done[front.lanes] = True
        else:
            self._branch(block, last, front)

    def _branch(self, block: Block, last: Instruction, front: Front) -> None:
        if last.op == "switch":
            default, cases = last.extra
            value = front.full(self.get(last.operands[0]))
            left = np.ones(front.count, bool)
            for constant, label in cases:
                self._go(block, label, front, left & (value == constant))
                left &= value != constant
            self._go(block, default, front, left)
        elif len(last.extra) == 1:
            self._go(block, last.extra[0], front, None)
        else:
            condition = self.get(last.operands[0])
            if condition.shape[0] == 1 or condition.all() or not condition.any():
                self._go(block, last.extra[0 if condition.all() else 1], front, None)
            else:
                self._go(block, last.extra[0], front, condition)
                self._go(block, last.extra[1], front, ~condition)

    def _go(self, source: Block, label: str, front: Front, taken: NDArray[np.bool_] | None) -> None:
        """Move lanes to a block and give its phis their values, all at once."""
        if taken is not None and not taken.any():
            return
        number = self.program.index[label]
        lanes = front.lanes if taken is None else front.lanes[taken]
        everything = len(lanes) == self.total
        incoming = {}
        for name, (_, values) in self.program.blocks[number].phis.items():
            value = self.get(values[source.origin])
            incoming[name] = value if taken is None else _pick(value, taken)
        for name, value in incoming.items():
            if everything:
                self.values[name] = value
            else:
                self.values[name] = _merge(self.values.get(name), value, lanes, self.total)
        self.pc[lanes] = number

    # --- memory ----------------------------------------------------------------------------------

    def load(
        self, front: Front, address: Value, kind: Type, space: int, align: int, where: str
    ) -> Value:
        """A value per lane (one for all where the address is uniform)."""
        size = size_of(kind)
        if space == _LOCAL:
            data = self.lds.load(
                front.full(address),
                self.workgroup[front.lanes],
                self.wave_in_group[front.lanes],
                size,
                align,
                where,
            )
        elif space in (0, 1, 4):
            data = self.memory.load(address, size, align, where)
        else:
            raise SimulationError(f"address space {space} is not modelled: {where}")
        return from_bytes(data, kind)

    def store(
        self, front: Front, address: Value, value: Value, space: int, align: int, where: str
    ) -> None:
        """Store a value per lane."""
        address, data = front.full(address), to_bytes(front.full(value))
        if space == _LOCAL:
            groups, waves = self.workgroup[front.lanes], self.wave_in_group[front.lanes]
            self.lds.store(address, groups, waves, data, align, where)
        elif space in (0, 1):
            self.memory.store(address, data, align, where)
        else:
            raise SimulationError(f"address space {space} is not modelled: {where}")

    def atomic(
        self, front: Front, address: Value, value: Value, kind: Type, space: int, what: str
    ) -> Value:
        """Lanes one after another, in order; returns what was there before."""
        size, where = size_of(kind), f"atomicrmw {what}"
        if space == _LOCAL or what not in _ATOMICS:
            raise SimulationError(f"{where} in address space {space} is not modelled")
        before = np.empty_like(value)
        for lane in range(front.count):
            at, mine = address[lane : lane + 1], value[lane : lane + 1]
            old = from_bytes(self.memory.load(at, size, size, where), kind)
            self.memory.store(at, to_bytes(_ATOMICS[what](old, mine)), size, where)
            before[lane] = old[0]
        return before

    def buffer_load(
        self, front: Front, rsrc: Value, offset: Value, kind: Type, where: str
    ) -> Value:
        """Zero beyond the records, as the hardware gives."""
        size = size_of(kind)
        inside, address = self._in_buffer(front, rsrc, offset, size)
        data = np.zeros((front.count, size), np.uint8)
        data[inside] = self.memory.load(address, size, min(size, 4), where)
        return from_bytes(data, kind)

    def buffer_store(
        self, front: Front, rsrc: Value, offset: Value, value: Value, where: str
    ) -> None:
        """Dropped beyond the records."""
        data = to_bytes(front.full(value))
        inside, address = self._in_buffer(front, rsrc, offset, data.shape[1])
        self.memory.store(address, data[inside], min(data.shape[1], 4), where)

    def _in_buffer(
        self, front: Front, rsrc: Value, offset: Value, size: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        base, records = (front.full(part).astype(np.int64) for part in rsrc)
        at = front.full(offset).astype(np.int64)
        inside = at + size <= records
        return inside, (base + at)[inside].astype(np.uint64)

    def async_to_lds(self, front: Front, source: Value, target: Value, size: int) -> None:
        """Read now, arrive at the wait; until then the target counts as unwritten."""
        source, target = front.full(source), front.full(target)
        data = self.memory.load(source, size, min(size, 16), "async load to LDS")
        self.lds.invalidate(target, self.workgroup[front.lanes], size)
        self._pending.append((front.lanes, target.astype(np.int64), data, size))

    def wait_async(self, front: Front, outstanding: int) -> None:
        """All but the last ``outstanding`` copies of the front's lanes arrive."""
        mine = [e for e in self._pending if np.isin(e[0], front.lanes).any()]
        for entry in mine[: len(mine) - outstanding]:
            lanes, target, data, size = entry
            here = np.isin(lanes, front.lanes)
            self.lds.store(
                target[here].astype(np.uint64),
                self.workgroup[lanes[here]],
                self.wave_in_group[lanes[here]],
                data[here],
                min(size, 16),
                "async load to LDS",
            )
            self._pending = [e for e in self._pending if e is not entry]
            if not here.all():
                rest = ~here
                self._pending.append((lanes[rest], target[rest], data[rest], size))


_ATOMICS: dict[str, Callable[[Value, Value], Value]] = {
    "add": np.add,
    "sub": np.subtract,
    "fadd": np.add,
    "umax": np.maximum,
    "umin": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "xchg": lambda old, new: new,
    "max": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "min": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
}


def _pick(value: Value, lanes: NDArray[Any] | None) -> Value:
    if isinstance(value, tuple):
        return tuple(_pick(part, lanes) for part in value)
    return value if value.shape[0] == 1 else value[lanes]


def _merge(old: Value | None, new: Value, lanes: IntArray | None, total: int) -> Value:
    if isinstance(new, tuple):
        parts = old if isinstance(old, tuple) else (None,) * len(new)
        return tuple(_merge(o, n, lanes, total) for o, n in zip(parts, new, strict=True))
    if old is None:
        out = np.zeros((total, *new.shape[1:]), new.dtype)
    elif old.shape[0] != total or not old.flags.writeable or old.base is not None:
        out = np.array(np.broadcast_to(old, (total, *old.shape[1:])))
    else:
        out = old.copy()  # an SSA value may be shared with a phi that took it whole
    out[lanes] = new
    return out
