"""``minuet bench step`` without its flags: prepare an engine, measure, make a record."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from minuet.bench import record
from minuet.bench.step.cell import Cell, settings_for
from minuet.bench.step.fill import fill
from minuet.bench.step.measure import Effort, measure
from minuet.config import Options
from minuet.engine.start import Engine, start
from minuet.models.registry import find
from minuet.models.slices import SliceSpec, write_slice
from minuet.platform import arch as arch_table
from minuet.platform.detect import detect
from minuet.platform.timing import read_bandwidth
from minuet.platform.torch import device_facts, device_for
from minuet.settings import AUTO


def run(
    options: Options,
    part: SliceSpec,
    cells: Sequence[Cell],
    effort: Effort,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """Prepare once, measure every cell.

    Args:
        options: what was asked for.
        part: which part of the model.
        cells: what to measure, at least one.
        effort: how long to look.
        announce: receives lines about the start.

    Raises:
        RefusedError: the configuration cannot be served.
        ConfigError: a model, a slice or a cell that cannot be.
    """
    read_bytes_per_s, engine = prepare(options, part, cells, announce)
    found = measure(engine, cells, effort, read_bytes_per_s, options["seed"])
    return {
        **described(engine, options["model"], part, read_bytes_per_s),
        "iters": effort.iters,
        "warmup": effort.warmup,
        "cells": found,
    }


def prepare(
    options: Options, part: SliceSpec, cells: Sequence[Cell], announce: Callable[[str], None]
) -> tuple[float, Engine]:
    """Bytes/s of a plain read on the device, and an engine for the cells with a filled cache.

    Args:
        options: what was asked for.
        part: which part of the model.
        cells: what will be measured, at least one.
        announce: receives lines about the start.
    """
    model = options["model"]
    with tempfile.TemporaryDirectory(prefix="minuet-") as scratch:
        if not part.is_whole:
            path = write_slice(model, part, Path(scratch) / "slice.json")
            options = _with_model(options, str(path))
        options = settings_for(options, cells, find(options["model"]))
        arch = detect() if options["arch"] == AUTO else arch_table.get(options["arch"])
        # before the engine takes the memory
        read_bytes_per_s = read_bandwidth(device_for(arch))
        engine = start(options, announce)
    fill(engine.runner.cache, options["seed"])
    return read_bytes_per_s, engine


def described(
    engine: Engine, model: str, part: SliceSpec, read_bytes_per_s: float
) -> dict[str, Any]:
    """What a record says of the engine it is about.

    Args:
        engine: what was measured.
        model: as it was named, before it was cut.
        part: which part of it.
        read_bytes_per_s: see :func:`prepare`.
    """
    return {
        **record.header(),
        "kind": "minuet bench step",
        "model": {"name": model, **asdict(part), **_model(engine)},
        "device": _device(engine, read_bytes_per_s),
        "start_s": {name: round(s, 3) for name, s in engine.timings_s.items()},
        "config": {n: value for n, value, _ in engine.plan.config.describe() if n != "model"},
    }


def _with_model(options: Options, model: str) -> Options:
    values = {**options.values, "model": model}
    return Options(MappingProxyType(values), options.sources)


def _model(engine: Engine) -> dict[str, Any]:
    facts = engine.plan.facts
    return {"params": facts.params, "weight_bytes": engine.plan.memory.weight_bytes}


def _device(engine: Engine, read_bytes_per_s: float) -> dict[str, Any]:
    arch = engine.plan.arch
    found: dict[str, Any] = {
        "arch": arch.name,
        "backend": engine.plan.backend,
        "torch": torch.__version__,
        "plain_read_bytes_per_s": round(read_bytes_per_s),
        "bandwidth_bytes_per_s": arch.bandwidth_bytes_per_s,
        "bandwidth_source": arch.bandwidth_source,
    }
    if facts := device_facts(arch):
        found |= facts | {"gpus": record.gpus(facts["uuid"])}
    return found
