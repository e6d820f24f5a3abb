"""Which kernels a piece of work runs, and how long each takes, by torch's profiler."""

from collections.abc import Callable
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
    """

    name: str
    launches: float
    seconds: float


def kernel_times(
    call: Callable[[], object], device: torch.device, *, iters: int
) -> list[KernelTime]:
    """Profile ``iters`` calls; the longest kernel first. Copies and memory sets count as kernels.

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
    found = []
    for event in seen.key_averages():
        if event.device_type.name.lower() != kind:
            continue  # the host's side of a launch
        own_us = event.self_cpu_time_total if kind == "cpu" else event.self_device_time_total
        found.append(KernelTime(event.key, event.count / iters, own_us / iters / 1e6))
    return sorted(found, key=lambda kernel: -kernel.seconds)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
