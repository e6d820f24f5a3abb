"""The promise, counted: after ready nothing compiles and nothing grows.

A step's launches are where a kernel would compile and where the allocator would go to the device,
so the runner asks after each. Decoding may take nothing at all; a prefill may, within the
activations that start-up declared, since its intermediates are the framework's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from minuet.errors import SealError
from minuet.log import get_logger
from minuet.platform import compilation
from minuet.platform.device import Facility

log = get_logger(__name__)

STRICT, WARN = "strict", "warn"


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened after ready.

    Attributes:
        compilations: kernels and graphs that compiled.
        growth_bytes: device memory the allocator took.
        decode_growth_bytes: the share of it that steps of decoding requests alone took.
        compiled: names of the kernels.
    """

    compilations: int = 0
    growth_bytes: int = 0
    decode_growth_bytes: int = 0
    compiled: tuple[str, ...] = ()


@dataclass(slots=True)
class Seal:
    """Counters from ready on.

    Attributes:
        facility: the device.
        mode: ``strict`` raises, ``warn`` logs.
        limit_bytes: the allocator may hold as much; None: no limit was declared.
    """

    facility: Facility
    mode: str = WARN
    limit_bytes: int | None = None
    _compiled: int = field(init=False, default=0)
    _allocations: int = field(init=False, default=0)
    _reserved: int = field(init=False, default=0)
    _at_ready: tuple[int, int] = field(init=False, default=(0, 0))
    _in_decode: int = field(init=False, default=0)
    _closed: bool = field(init=False, default=False)

    def close(self) -> None:
        """Ready: counters start at 0."""
        self._compiled = compilation.count()
        self._allocations = self.facility.allocations()
        self._reserved = self.facility.reserved_bytes()
        self._at_ready = (self._compiled, self._reserved)
        self._in_decode, self._closed = 0, True

    def check(self, *, decode: bool) -> None:
        """Look at the counters after a step's launches.

        Args:
            decode: the step had decoding requests only.

        Raises:
            SealError: something happened, and the mode is ``strict``.
        """
        if not self._closed:
            return
        found = [*self._new_kernels(), *self._new_memory(decode)]
        if not found:
            return
        what = "; ".join(found)
        if self.mode == STRICT:
            raise SealError(f"after ready {what}; --seal warn serves on")
        log.warning("after ready %s", what)

    def counters(self) -> Counters:
        """What happened since :meth:`close`."""
        if not self._closed:
            return Counters()
        first, reserved = self._at_ready
        grown = max(0, self.facility.reserved_bytes() - reserved)
        return Counters(
            compilation.count() - first, grown, self._in_decode, compilation.names(first)
        )

    def _new_kernels(self) -> Sequence[str]:
        compiled = compilation.count()
        first, self._compiled = self._compiled, compiled
        if compiled == first:
            return ()
        named = ", ".join(compilation.names(first)) or "a graph of torch's compiler"
        return (f"{compiled - first} kernels compiled: {named}",)

    def _new_memory(self, decode: bool) -> Sequence[str]:
        allocations = self.facility.allocations()
        if allocations == self._allocations:
            return ()
        self._allocations = allocations
        reserved = self.facility.reserved_bytes()
        grown, self._reserved = reserved - self._reserved, reserved
        if decode:
            self._in_decode += max(0, grown)
            return (f"decoding took {grown} bytes of the device",)
        if self.limit_bytes is not None and reserved > self.limit_bytes:
            return (f"a prefill took {grown} bytes: {reserved} of {self.limit_bytes} declared",)
        return ()
