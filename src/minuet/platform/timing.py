"""Time on the device: calls, and a plain read of memory as the yardstick for them."""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

_READ_BYTES = {"cuda": 2**31, "cpu": 2**28}  # several times any cache
# (reads before, timed reads): an idle GPU needs some 50 ms to raise its clocks
_READS = {"cuda": (150, 50), "cpu": (1, 6)}


def time_calls(
    call: Callable[[], object], device: torch.device, *, iters: int, warmup: int
) -> list[float]:
    """Seconds that the device spends on each of ``iters`` calls made back to back.

    On a GPU the calls are queued ahead, so that each begins when the one before ends, and events
    around each are read afterwards: what the host adds between two calls is not in it. On a CPU the
    calls are timed one by one.

    Args:
        call: queues work on the current stream, or does it; must not synchronise.
        device: where the work runs.
        iters: calls that are timed.
        warmup: calls before them.
    """
    for _ in range(warmup):
        call()
    if device.type == "cpu":
        return [_wall_s(call) for _ in range(iters)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iters + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]


def _wall_s(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def read_bandwidth(device: torch.device) -> float:
    """Bytes/s of reading memory from one end to the other, best of a few runs.

    What no step can beat on this machine at this moment; frees what it allocates.
    """
    size = _READ_BYTES[device.type]
    memory = torch.zeros(size // 4, dtype=torch.int32, device=device)
    read = _reader(memory)
    warmup, iters = _READS[device.type]
    seconds = min(time_calls(read, device, iters=iters, warmup=warmup))
    del memory, read
    if device.type != "cpu":
        torch.cuda.empty_cache()
    return size / seconds


def _reader(memory: torch.Tensor) -> Callable[[], object]:
    if memory.device.type == "cpu":
        return memory.max
    from minuet.platform.read_kernel import BLOCK, ROWS, read_words

    programs = memory.numel() // (ROWS * BLOCK)
    out = torch.empty(programs, dtype=torch.int32, device=memory.device)
    return lambda: read_words[(programs,)](memory, out, ROWS=ROWS, BLOCK=BLOCK, num_warps=8)
