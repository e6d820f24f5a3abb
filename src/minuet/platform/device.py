"""What steps need of a device besides tensors: pinned memory, events, graphs, allocation counts.

One class per kind of device and one question, :func:`facility`; nobody else asks whether there is a
GPU. On a host everything is done at once, so events are over when recorded and a graph is the call
itself.
"""

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from minuet.errors import PreparationError
from minuet.platform import compilation

_SMALL_BYTES = 2**20  # kSmallSize of torch's CUDACachingAllocator: these live in segments of 2 MiB


class Event(Protocol):
    """A point in the device's queue."""

    def record(self) -> None:
        """Put it at the end of the queue."""
        ...

    def query(self) -> bool:
        """Whether the device is past it."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class Facility(Protocol):
    """A device as steps use it."""

    device: torch.device

    @property
    def compute_units(self) -> int | None:
        """Units that run programs beside each other; None where they are not counted."""
        ...

    def staging(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to without a stop of the host."""
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def capture(self, body: Callable[[], None], what: str) -> Callable[[], None]:
        """Record ``body`` once, after running it, and return what runs it again.

        Args:
            body: launches work and returns; the tensors it reads and writes keep their addresses.
            what: the step, for messages.

        Raises:
            PreparationError: it stops the host, compiles, or works outside the device's queue.
        """
        ...

    def allocations(self) -> int:
        """Times the framework's allocator took memory from the device, graphs included."""
        ...

    def reserved_bytes(self) -> int:
        """Bytes the framework's allocator holds of the device."""
        ...

    def trim(self) -> None:
        """Give memory that is held and not in use back to the device."""
        ...

    def spare(self, size: int) -> None:
        """Let the allocator hold about ``size`` free bytes for small tensors."""
        ...

    def idle(self) -> None:
        """Wait until everything queued is done."""
        ...


class _Over:
    """An event on a device that queues nothing."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Host:
    """The CPU: no queue, and an allocator that nobody can ask."""

    def __init__(self, device: torch.device):
        self.device = device

    @property
    def compute_units(self) -> int | None:
        """Not counted."""
        return None

    def staging(self, size: int, dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.zeros(size, dtype=dtype)

    def event(self) -> Event:
        """An event that is over."""
        return _Over()

    def capture(self, body: Callable[[], None], what: str) -> Callable[[], None]:
        """The call itself, after one run."""
        body()
        return body

    def allocations(self) -> int:
        """None that anybody counts."""
        return 0

    def reserved_bytes(self) -> int:
        """None that anybody counts."""
        return 0

    def trim(self) -> None:
        """Nothing is held."""

    def spare(self, size: int) -> None:
        """The host's allocator needs none."""

    def idle(self) -> None:
        """Nothing is queued."""


class Gpu:
    """A CUDA or ROCm device; torch has one interface for both."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool: Any = None
        # one for all captures: libraries keep a workspace for every stream they meet
        self._stream: Any = None

    @property
    def compute_units(self) -> int | None:
        """Multiprocessors, or compute units."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def staging(self, size: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory."""
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def event(self) -> Event:
        """An event of the current stream."""
        event: Event = torch.cuda.Event()
        return event

    def capture(self, body: Callable[[], None], what: str) -> Callable[[], None]:
        """A graph. All graphs share one pool of memory: they never run at the same time."""
        stream = self._stream = self._stream or torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            body()  # compiles, and lets libraries make their workspaces
            _without_syncs(body, what)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.idle()
        compiled, graph = compilation.count(), torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                body()
        except RuntimeError as problem:
            raise _not_capturable(what, problem) from problem
        if compilation.count() != compiled:
            raise PreparationError(
                f"{what}: kernels compiled while its graph was captured",
                got=compilation.names()[compiled:],
                expected="none: the runs before the capture compile everything",
            )
        return graph.replay

    def allocations(self) -> int:
        """Allocations of the device's own kind (cudaMalloc), of every pool."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(stats["segment"]["all"]["allocated"])

    def reserved_bytes(self) -> int:
        """Segments held, those of graphs included."""
        return int(torch.cuda.memory_reserved(self.device))

    def trim(self) -> None:
        """Whole segments that nothing uses; captures do the same as they begin."""
        torch.cuda.empty_cache()

    def spare(self, size: int) -> None:
        """Tensors of half the size up to which the allocator calls them small; they are freed."""
        piece = _SMALL_BYTES // 2
        pieces = range(-(-size // piece))
        held = [torch.empty(piece, dtype=torch.uint8, device=self.device) for _ in pieces]
        held.clear()

    def idle(self) -> None:
        """Wait for every stream."""
        torch.cuda.synchronize(self.device)


def facility(device: torch.device) -> Facility:
    """The facility of a device."""
    return Gpu(device) if device.type == "cuda" else Host(device)


def _without_syncs(body: Callable[[], None], what: str) -> None:
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_debug_mode("error")
        body()
    except RuntimeError as problem:
        raise _not_capturable(what, problem) from problem
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: str | int) -> None:
    with warnings.catch_warnings():
        # torch says once that it does not see every sync; the capture that follows sees the rest
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def _not_capturable(what: str, problem: RuntimeError) -> PreparationError:
    return PreparationError(
        f"{what} cannot be captured as a graph",
        got=str(problem).partition("\n")[0],
        expected="work that stays on its stream and never stops the host",
        remedy="run with --enforce-eager, and report this: it is a bug",
    )
