"""What the parts of the simulator share: the error, the target, and a front of lanes."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minuet.errors import MinuetError
from minuet.testing.amdgpu.types import Type

Value = Any  # an array whose first axis is lanes (or 1), or a tuple of such for aggregates
IntArray = NDArray[np.int64]


class SimulationError(MinuetError):
    """The program does what hardware would not define, or what the simulator does not model."""


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture as far as results depend on it.

    Attributes:
        name: ``gfx942``, ``gfx950`` or ``gfx1250``.
        wave: lanes per wave.
        fp8: flavour that conversion and matrix instructions mean by FP8.
        lds_bytes: LDS of one workgroup at most.
    """

    name: str
    wave: int
    fp8: str
    lds_bytes: int


# MI300 and MI350 instruction set manuals; gfx1250: LLVM's GCNSubtarget (320 KiB, wave32 only).
TARGETS = {
    "gfx942": Target("gfx942", 64, "e4m3fnuz", 64 * 1024),
    "gfx950": Target("gfx950", 64, "e4m3fn", 160 * 1024),
    "gfx1250": Target("gfx1250", 32, "e4m3fn", 320 * 1024),
}


@dataclass(slots=True)
class Front:
    """Lanes that execute an instruction together.

    Attributes:
        target: the architecture.
        lanes: [n] index of each active lane among all lanes of the launch, ascending.
        lane: [n] its number within its wave.
        wave: [n] index of its wave among all waves of the launch.
        whole: every wave that has an active lane has all of them active.
        block: for messages.
    """

    target: Target
    lanes: IntArray
    lane: IntArray
    wave: IntArray
    whole: bool
    block: str = ""

    @property
    def count(self) -> int:
        """Active lanes."""
        return len(self.lanes)

    def full(self, value: Value) -> Value:
        """One entry per active lane, where a uniform value has a single one."""
        if value.shape[0] == self.count:
            return value
        return np.broadcast_to(value, (self.count, *value.shape[1:]))

    def by_wave(self, value: Value, what: str) -> Value:
        """``[waves, lanes of a wave, ...]``; whole waves only.

        Raises:
            SimulationError: some lanes of a wave are masked off.
        """
        if not self.whole:
            raise SimulationError(f"{what} in divergent control flow ({self.block})")
        full = self.full(value)
        return full.reshape(-1, self.target.wave, *full.shape[1:])

    def gather_lanes(self, value: Value, source: IntArray, what: str) -> Value:
        """``value`` of lane ``source`` of the same wave, for every active lane.

        Args:
            value: per active lane.
            source: [n] lane numbers within the wave.
            what: the instruction, for the message.

        Raises:
            SimulationError: an active lane reads a masked one.
        """
        full = self.full(value)
        if self.whole:
            # whole waves stand one after another
            base = np.arange(self.count) // self.target.wave * self.target.wave
            return full[base + source]
        first = self.wave[0]
        position = np.full((int(self.wave[-1] - first) + 1) * self.target.wave, -1)
        position[(self.wave - first) * self.target.wave + self.lane] = np.arange(self.count)
        found = position[(self.wave - first) * self.target.wave + source]
        if (found < 0).any():
            raise SimulationError(f"{what} reads a lane that is masked off ({self.block})")
        return full[found]


class Executor(Protocol):
    """A launch, as instructions see it; :class:`minuet.testing.amdgpu.machine.Machine`.

    Attributes:
        workgroup_ids: per axis, [workgroups].
        workitem_ids: per axis, [lanes].
        workgroup: [lanes] index of each lane's workgroup in the batch.
        wave_in_group: [lanes] number of each lane's wave within its workgroup.
        hidden_arguments: address of the hidden kernel arguments.
    """

    workgroup_ids: list[NDArray[np.uint32]]
    workitem_ids: list[NDArray[np.uint32]]
    workgroup: IntArray
    wave_in_group: IntArray
    hidden_arguments: int

    def get(self, operand: Any) -> Value:
        """Value of an operand in the lanes of the current front."""

    def load(
        self, front: Front, address: Value, kind: Type, space: int, align: int, where: str
    ) -> Value:
        """A value per lane (one for all where the address is uniform)."""

    def store(
        self, front: Front, address: Value, value: Value, space: int, align: int, where: str
    ) -> None:
        """Store a value per lane."""

    def atomic(
        self, front: Front, address: Value, value: Value, kind: Type, space: int, what: str
    ) -> Value:
        """Lanes one after another, in order; returns what was there before."""

    def buffer_load(
        self, front: Front, rsrc: Value, offset: Value, kind: Type, where: str
    ) -> Value:
        """Zero beyond the records."""

    def buffer_store(
        self, front: Front, rsrc: Value, offset: Value, value: Value, where: str
    ) -> None:
        """Dropped beyond the records."""

    def async_to_lds(self, front: Front, source: Value, target: Value, size: int) -> None:
        """Read now, arrive at the wait."""

    def wait_async(self, front: Front, outstanding: int) -> None:
        """All but the last ``outstanding`` copies of the front's lanes arrive."""
