"""Which kernels a piece of work runs, and how long each takes, by torch's profiler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_ACTIVITY = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel (on a CPU: one operator) of a piece of work.

    Attributes:
        name: as the profiler has it.
        launches: per call of the work.
        seconds: of its own, over all its launches in one call.
        added_seconds: by how much its launches moved the end of the call. Kernels that overlap (a
            launch may begin before the one before has ended) add less than they take, so these, and
            not ``seconds``, sum to the call; the idle time before a launch counts as its own. On a
            CPU the same as ``seconds``.
    """

    name: str
    launches: float
    seconds: float
    added_seconds: float


def kernel_times(
    call: Callable[[], object], device: torch.device, *, iters: int
) -> list[KernelTime]:
    """Profile ``iters`` calls; the kernel that adds most first.

    Copies and memory sets count as kernels.

    Args:
        call: queues work, or does it.
        device: where the work runs.
        iters: calls in the profile.
    """
    kind = device.type
    call()
    _wait(device)
    with profile(activities=[_ACTIVITY[kind]], acc_events=True) as seen:
        for _ in range(iters):
            call()
        _wait(device)
    # what is left out are the host's sides of launches
    averages = [e for e in seen.key_averages() if e.device_type.name.lower() == kind]
    if kind == "cpu":  # operators call others: what each does itself adds up
        own = {e.key: e.self_cpu_time_total for e in averages}
        added = own
    else:
        own = {e.key: e.self_device_time_total for e in averages}
        added = added_us(
            (e.name, e.time_range.start, e.time_range.end)
            for e in seen.events()
            if e.device_type.name.lower() == kind
        )
    found = [
        KernelTime(e.key, e.count / iters, own[e.key] / iters / 1e6, added[e.key] / iters / 1e6)
        for e in averages
    ]
    return sorted(found, key=lambda kernel: -kernel.added_seconds)


def added_us(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """By how much each kind of work moved the end of everything before it.

    Args:
        spans: name, begin and end in us of every piece of work, in any order.

    Returns:
        us by name; the sum is the time from the first begin to the last end.
    """
    in_order = sorted(spans, key=lambda span: span[1:])
    added: dict[str, float] = {name: 0.0 for name, _, _ in in_order}
    last_end = in_order[0][1] if in_order else 0.0
    for name, _, end in in_order:
        added[name] += max(0.0, end - last_end)
        last_end = max(last_end, end)
    return added


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
