"""Time prepared steps, and say what they come to beside the limit.

The figures are those that compare machines: bytes per step by part, the fraction of the time below
which no machine can read them, and what is left over per layer, ``(step - limit) / layers``.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minuet.attention.contract import LayerKind
from minuet.bench.record import summary
from minuet.bench.step.cell import Cell
from minuet.engine.batch import build
from minuet.engine.start import Engine
from minuet.engine.types import Pending, Step
from minuet.errors import ConfigError
from minuet.kv.cache import KVCache
from minuet.ops.moe import Experts, route
from minuet.planning.memory import DUMMY_PAGES
from minuet.platform.profiling import KernelTime, kernel_times
from minuet.platform.timing import time_calls

_ENGINE_STEPS = 20
_PROFILED = 10


class Runner(Protocol):
    """What is measured: an engine's runner."""

    @property
    def cache(self) -> KVCache:
        """The pool."""
        ...

    @property
    def model(self) -> Any:
        """The model, for a look at its routed FFNs."""
        ...

    def launcher(self, step: Step) -> Callable[[], None]:
        """A call that queues what a served step of this shape queues on the device."""
        ...

    def submit(self, step: Step) -> Pending:
        """Start the step as the engine does, host's share included."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look.

    Attributes:
        iters: timed steps.
        warmup: steps before them.
        profile: list the kernels as well.
    """

    iters: int = 100
    warmup: int = 10
    profile: bool = True


def measure(
    engine: Engine, cells: Sequence[Cell], effort: Effort, read_bytes_per_s: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Time steps, and hold them against the limit.

    Args:
        engine: prepared for the cells, its cache filled.
        cells: what to run.
        effort: how long to look.
        read_bytes_per_s: of a plain read on this device, measured before.
        seed: of tokens and pages.

    Raises:
        ConfigError: the pool does not hold a cell's contexts.
    """
    steps = [step_of(engine, cell, seed) for cell in cells]
    runner = engine.runner
    times = [time_step(runner, step, effort) for step in steps]
    kernels = [profile_step(runner, step) if effort.profile else [] for step in steps]
    # last: outside their graphs, steps take memory and kernels that nobody prepared
    experts = [distinct_experts(runner, step) for step in steps]
    return [
        entry(engine, *seen, read_bytes_per_s)
        for seen in zip(cells, times, kernels, experts, strict=True)
    ]


def step_of(engine: Engine, cell: Cell, seed: int = 0) -> Step:
    """A cell's step over random pages of the engine's pool.

    Raises:
        ConfigError: the pool does not hold the cell's contexts.
    """
    plan, page_size = engine.plan, engine.plan.config.block_size
    pages = _pages(cell, engine.runner.cache.num_pages, page_size, seed)
    return cell.step(pages, page_size, plan.facts.vocab, seed)


@dataclass(frozen=True, slots=True)
class Times:
    """How long a step took.

    Attributes:
        device_s: on the device, per iteration.
        engine_s: from handing it to the engine to holding its tokens, per iteration.
    """

    device_s: list[float]
    engine_s: list[float]


def time_step(runner: Runner, step: Step, effort: Effort) -> Times:
    """Run a step, over and over."""
    device = runner.cache.layers[0].k.device
    with torch.inference_mode():
        launch = runner.launcher(step)
        seconds = time_calls(launch, device, iters=effort.iters, warmup=effort.warmup)
    rounds = range(min(effort.iters, _ENGINE_STEPS))
    return Times(seconds, [_engine_step_s(runner, step) for _ in rounds])


def profile_step(runner: Runner, step: Step) -> list[KernelTime]:
    """The kernels of a step. Times taken after it are no longer those of a process at rest."""
    device = runner.cache.layers[0].k.device
    with torch.inference_mode():
        return kernel_times(runner.launcher(step), device, iters=_PROFILED)


def entry(
    engine: Engine,
    cell: Cell,
    times: Times,
    kernels: Sequence[KernelTime],
    experts: Sequence[int],
    read_bytes_per_s: float,
) -> dict[str, Any]:
    """A cell as a record has it.

    Args:
        engine: that ran it.
        cell: what was run.
        times: how long it took.
        kernels: of one step; may be empty.
        experts: see :func:`distinct_experts`.
        read_bytes_per_s: see :func:`measure`.
    """
    step_ms = summary(times.device_s, 1e3)
    found = {
        "phase": cell.phase.value,
        "batch_size": cell.batch,
        "context": cell.context,
        "query_len": cell.query_len,
        "step_ms": step_ms,
        "tokens_per_s": round(cell.num_tokens / statistics.median(times.device_s), 1),
        "submit_to_result_ms": summary(times.engine_s, 1e3),
        **_against_limit(engine, cell, times.device_s, experts, read_bytes_per_s),
    }
    if kernels:
        found["kernels"] = kernel_rows(kernels, step_ms["median"])
    return found


def _pages(cell: Cell, num_pages: int, page_size: int, seed: int) -> list[int]:
    """Ids of the pages a cell uses, in no order: contexts of a long service are scattered."""
    needed, there = cell.pages(page_size), num_pages - DUMMY_PAGES
    if needed > there:
        raise ConfigError(
            f"{cell}: the pool is too small",
            got=f"{there} pages",
            expected=f"{needed}",
            remedy="raise --kv-cache-pages or lower --batch-size or --context",
        )
    return random.Random(seed).sample(range(DUMMY_PAGES, num_pages), needed)


def _engine_step_s(runner: Runner, step: Step) -> float:
    began = time.perf_counter()
    runner.submit(step).results()
    return time.perf_counter() - began


# --- experts -------------------------------------------------------------------------------------


def distinct_experts(runner: Runner, step: Step) -> list[int]:
    """Experts that a step visits, per routed layer: the step is run again, outside any graph."""
    cache, counts = runner.cache, list[int]()
    batch = build(step, cache.layers[0].layout.page_size, cache.layers[0].k.device)
    with torch.inference_mode(), _watched(runner.model, counts):
        runner.model.forward(batch.token_ids, batch.attention, cache)
    return counts


@contextmanager
def _watched(model: Any, counts: list[int]) -> Iterator[None]:
    routed = [ffn for ffn in model.ffn if hasattr(ffn, "moe")]
    inner = [ffn.moe for ffn in routed]

    def watching(moe: Callable[..., Any]) -> Callable[..., Any]:
        def call(hidden: torch.Tensor, experts: Experts) -> Any:
            chosen, _ = route(hidden, experts.router, experts.bias, experts.top_k)
            counts.append(int(chosen.unique().numel()))
            return moe(hidden, experts)

        return call

    try:
        for ffn in routed:
            ffn.moe = watching(ffn.moe)
        yield
    finally:
        for ffn, moe in zip(routed, inner, strict=True):
            ffn.moe = moe


# --- beside the limit ----------------------------------------------------------------------------


def _against_limit(
    engine: Engine,
    cell: Cell,
    seconds: Sequence[float],
    experts: Sequence[int],
    read_bytes_per_s: float,
) -> dict[str, Any]:
    plan = engine.plan
    mean = sum(experts) / len(experts) if experts else None
    step = cell.roofline(plan, mean)
    limit = step.limit(plan.arch)
    median_s = statistics.median(seconds)
    limits = {"plain_read": step.bytes / read_bytes_per_s} | (
        {"arch": limit.seconds} if limit else {}
    )
    layers = len(plan.facts.layer_kinds)
    return {
        "bytes": {part.name: round(part.bytes) for part in step.parts},
        "total_bytes": round(step.bytes),
        "gflop": round(step.flops / 1e9, 3),
        "distinct_experts": {
            "per_layer": list(experts),
            "mean": None if mean is None else round(mean, 2),
            "if_uniform": round(cell.roofline(plan).distinct_experts, 2),
        },
        "limit_ms": {name: round(s * 1e3, 4) for name, s in limits.items()},
        "bound_by": limit.bound_by if limit else "memory",
        "fraction_of_limit": {name: round(s / median_s, 4) for name, s in limits.items()},
        "achieved_bytes_per_s": round(step.bytes / median_s),
        "layers": {kind.value: plan.facts.count(kind) for kind in LayerKind},
        "overhead_us_per_layer": {
            name: round((median_s - s) * 1e6 / layers, 2) for name, s in limits.items()
        },
    }


def kernel_rows(kernels: Sequence[KernelTime], step_ms: float) -> dict[str, Any]:
    """The kernels of a step, and what they add to it.

    Args:
        kernels: that which adds most first.
        step_ms: the step's, measured without a profiler.

    Returns:
        ``rows``: ``us`` of its own, ``adds_us`` to the step and that as a share of it; ``sum_us``
        of what they add; ``rest_us``, the step less that: what the profiler itself changed.
    """
    rows = [
        {
            "name": kernel.name,
            "launches": round(kernel.launches, 2),
            "us": round(kernel.seconds * 1e6, 2),
            "adds_us": round(kernel.added_seconds * 1e6, 2),
            "share": round(kernel.added_seconds * 1e3 / step_ms, 4),
        }
        for kernel in kernels
    ]
    total_us = sum(kernel.added_seconds for kernel in kernels) * 1e6
    return {
        "launches": round(sum(kernel.launches for kernel in kernels), 2),
        "sum_us": round(total_us, 2),
        "rest_us": round(step_ms * 1e3 - total_us, 2),
        "rows": rows,
    }
