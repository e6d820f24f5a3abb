"""Global memory and LDS: every access checked for bounds, alignment and unwritten bytes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minuet.testing.amdgpu.state import IntArray, SimulationError

_BASE = 0x7F00_0000_0000  # far from small integers, so that an offset is not taken for an address
_PAGE = 4096
_MULTIPLE = 0xFF  # in a stamp of the race check: more than one wave

UInt64Array = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Pointer:
    """Address of an array in :class:`Memory`.

    Attributes:
        name: as given to :meth:`Memory.place`.
        address: of its first byte.
    """

    name: str
    address: int

    def __add__(self, offset_bytes: int) -> "Pointer":
        """A pointer into the same array."""
        return Pointer(self.name, self.address + offset_bytes)


@dataclass(slots=True)
class _Region:
    name: str
    start: int
    bytes: int
    array: NDArray[np.generic]
    readonly: bool


class Memory:
    """Global memory of a device: arrays at page-aligned addresses with unmapped pages between."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._starts = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)
        self._bytes = np.zeros(0, np.uint8)
        self._written: NDArray[np.bool_] | None = None
        self._end = _PAGE

    def __len__(self) -> int:
        """Arrays placed."""
        return len(self._regions)

    def place(
        self,
        name: str,
        array: NDArray[np.generic],
        *,
        readonly: bool = False,
        unwritten: bool = False,
    ) -> Pointer:
        """Copy an array into memory.

        Args:
            name: unique, for messages and :meth:`fetch`.
            array: any contiguous array.
            readonly: a store into it is an error.
            unwritten: its content is undefined: a load before a store is an error.

        Raises:
            SimulationError: the name is taken.
        """
        if any(region.name == name for region in self._regions):
            raise SimulationError(f"{name} is placed already")
        data = np.ascontiguousarray(array)
        start = self._end
        self._end = -(-(start + data.nbytes + 1) // _PAGE) * _PAGE + _PAGE
        grown = np.zeros(self._end, np.uint8)
        grown[: len(self._bytes)] = self._bytes
        self._bytes = grown
        self._bytes[start : start + data.nbytes] = data.reshape(-1).view(np.uint8)
        if unwritten or self._written is not None:
            written = np.ones(self._end, bool)
            if self._written is not None:
                written[: len(self._written)] = self._written
            written[start : start + data.nbytes] = not unwritten
            self._written = written
        self._regions.append(_Region(name, start, data.nbytes, data, readonly))
        self._starts = np.array([r.start for r in self._regions])
        self._ends = np.array([r.start + r.bytes for r in self._regions])
        return Pointer(name, _BASE + start)

    def fetch(self, pointer: Pointer) -> NDArray[np.generic]:
        """A copy of the array behind a pointer as it is now."""
        region = next(r for r in self._regions if r.name == pointer.name)
        raw = self._bytes[region.start : region.start + region.bytes]
        return raw.view(region.array.dtype).reshape(region.array.shape).copy()

    def _offsets(
        self, address: UInt64Array, size: int, align: int, write: bool, where: str
    ) -> IntArray:
        offset = (address - np.uint64(_BASE)).astype(np.int64)
        region = np.searchsorted(self._starts, offset, side="right") - 1
        bad = (region < 0) | (offset < 0)
        region = np.maximum(region, 0)
        bad |= offset + size > self._ends[region]
        if bad.any():
            lane = int(bad.argmax())
            near = self._regions[int(region[lane])]
            raise SimulationError(
                f"{where}: {'store' if write else 'load'} of {size} bytes outside every array: "
                f"offset {int(offset[lane]) - near.start} of {near.name} ({near.bytes} bytes), "
                f"{int(bad.sum())} of {len(bad)} lanes"
            )
        if align > 1 and (offset % align).any():
            raise SimulationError(f"{where}: address is not {align}-byte aligned as promised")
        if write and any(r.readonly for r in self._regions):
            names = {int(r) for r in np.unique(region)}
            locked = [self._regions[r].name for r in names if self._regions[r].readonly]
            if locked:
                raise SimulationError(f"{where}: store into {', '.join(locked)}, placed read-only")
        return offset

    def load(self, address: UInt64Array, size: int, align: int, where: str) -> NDArray[np.uint8]:
        """[n, size] bytes.

        Raises:
            SimulationError: out of bounds, misaligned, or a byte that was never written.
        """
        offset = self._offsets(address, size, align, False, where)
        if self._written is not None:
            wrote = self._written[offset[:, None] + np.arange(size)]
            if not wrote.all():
                raise SimulationError(f"{where}: load of memory that was never written")
        return take_bytes(self._bytes, offset, size, align)

    def store(self, address: UInt64Array, data: NDArray[np.uint8], align: int, where: str) -> None:
        """Write [n, size] bytes; of lanes with one address the last wins."""
        offset = self._offsets(address, data.shape[1], align, True, where)
        index = offset[:, None] + np.arange(data.shape[1])
        self._bytes[index] = data
        if self._written is not None:
            self._written[index] = True


def take_bytes(
    source: NDArray[np.uint8], offset: IntArray, size: int, align: int
) -> NDArray[np.uint8]:
    """[n, size] bytes at aligned offsets, by the widest element that alignment allows."""
    unit = max(u for u in (1, 2, 4, 8, 16) if align % u == 0 and size % u == 0)
    if unit == 1:
        single: NDArray[np.uint8] = source[offset[:, None] + np.arange(size)]
        return single
    wide = source[: len(source) // unit * unit].view(
        np.complex128 if unit == 16 else f"u{unit}"  # 16 bytes that numpy moves as one
    )
    picked = wide[(offset // unit)[:, None] + np.arange(size // unit)]
    flat: NDArray[np.uint8] = picked.view(np.uint8).reshape(len(offset), size)
    return flat


class Lds:
    """LDS of many workgroups at once, with a race check per barrier interval.

    Between two barriers of a workgroup a byte may be read by any waves, or touched by one wave, or
    written by several with one value.
    The check does not depend on the order in which waves happened to run.
    """

    def __init__(self, workgroups: int, size: int):
        self.size = max(size, 16)
        self._bytes = np.full(workgroups * self.size, 0xFF, np.uint8)
        self._written = np.zeros(workgroups * self.size, bool)
        # epoch * 256 + wave + 1 of the last access in that epoch; wave byte 0xFF: several waves
        self._writer = np.zeros(workgroups * self.size, np.int64)
        self._reader = np.zeros(workgroups * self.size, np.int64)
        self.epoch = np.ones(workgroups, np.int64)

    def _offsets(
        self, address: UInt64Array, workgroup: IntArray, size: int, align: int, where: str
    ) -> IntArray:
        inside = address.astype(np.int64) & 0xFFFFFFFF
        if (inside + size > self.size).any():
            worst = int((inside + size).max())
            raise SimulationError(f"{where}: LDS access ends at {worst} of {self.size} bytes")
        if align > 1 and (inside % align).any():
            raise SimulationError(f"{where}: LDS address is not {align}-byte aligned as promised")
        return workgroup * self.size + inside

    def load(
        self,
        address: UInt64Array,
        workgroup: IntArray,
        wave: IntArray,
        size: int,
        align: int,
        where: str,
    ) -> NDArray[np.uint8]:
        """[n, size] bytes.

        Args:
            address: [n] from the workgroup's start.
            workgroup: [n] index of the workgroup.
            wave: [n] number of the wave within it.
            size: bytes per lane.
            align: promised alignment.
            where: for messages.

        Raises:
            SimulationError: bounds, alignment, an unwritten byte, or a race.
        """
        offset = self._offsets(address, workgroup, size, align, where)
        index = offset[:, None] + np.arange(size)
        if not self._written[index].all():
            raise SimulationError(f"{where}: load of LDS that was never written")
        epoch = self.epoch[workgroup]
        mine = (epoch * 256 + wave + 1)[:, None]
        if self._others(self._writer, index, mine, epoch[:, None]).any():
            raise SimulationError(f"{where}: LDS race: reads what another wave wrote, no barrier")
        self._stamp(self._reader, index, mine, epoch[:, None])
        return take_bytes(self._bytes, offset, size, align)

    def store(
        self,
        address: UInt64Array,
        workgroup: IntArray,
        wave: IntArray,
        data: NDArray[np.uint8],
        align: int,
        where: str,
    ) -> None:
        """Write [n, size] bytes; arguments as :meth:`load`."""
        offset = self._offsets(address, workgroup, data.shape[1], align, where)
        index = offset[:, None] + np.arange(data.shape[1])
        epoch = self.epoch[workgroup]
        mine = (epoch * 256 + wave + 1)[:, None]
        if self._others(self._reader, index, mine, epoch[:, None]).any():
            raise SimulationError(f"{where}: LDS race: writes what another wave reads, no barrier")
        others = self._others(self._writer, index, mine, epoch[:, None])
        # compilers let several waves store what they all hold: no order of equal bytes shows
        if (others & (self._bytes[index] != data)).any():
            raise SimulationError(f"{where}: LDS race: overwrites another wave's bytes, no barrier")
        self._stamp(self._writer, index, mine, epoch[:, None])
        self._bytes[index] = data
        self._written[index] = True
        several = self._writer[index] % 256 == _MULTIPLE
        if (several & (self._bytes[index] != data)).any():
            raise SimulationError(f"{where}: LDS race: two waves write one byte differently")

    def _others(
        self, stamps: IntArray, index: IntArray, mine: IntArray, epoch: IntArray
    ) -> NDArray[np.bool_]:
        """Which bytes another wave has touched since the last barrier."""
        seen = stamps[index]
        others: NDArray[np.bool_] = (seen // 256 == epoch) & (seen != mine)
        return others

    def _stamp(self, stamps: IntArray, index: IntArray, mine: IntArray, epoch: IntArray) -> None:
        """Leave this access's stamps; bytes that several waves touched get one of their own."""
        other = self._others(stamps, index, mine, epoch)
        stamp = np.where(other, epoch * 256 + _MULTIPLE, mine)
        stamps[index] = stamp
        met = stamps[index] != stamp
        if met.any():
            stamps[index[met]] = np.broadcast_to(epoch, index.shape)[met] * 256 + _MULTIPLE

    def invalidate(self, address: UInt64Array, workgroup: IntArray, size: int) -> None:
        """Forget what is there: the target of an asynchronous copy until it has been waited for."""
        index = (workgroup * self.size + address.astype(np.int64))[:, None] + np.arange(size)
        self._written[index] = False

    def barrier(self, workgroups: IntArray) -> None:
        """A barrier of these workgroups is complete: a new interval begins."""
        self.epoch[workgroups] += 1
