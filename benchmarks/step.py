"""The decode step of M3's rank slice: BF16 and FP8 KV beside each other, batch 1 to 64.

    python benchmarks/step.py --output benchmarks/results/h200/step.json

Two engines of the same weights are prepared in one process, one per KV type. Each cell is measured
in turns, BF16 then FP8, `--rounds` times, and the median round of each is kept, so that the ratio
of the two is one of neighbours in time. The figures are those of `minuet bench step`; see
docs/benchmarking.md.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from minuet.attention.contract import Phase  # noqa: E402
from minuet.bench import record  # noqa: E402
from minuet.bench.step import report  # noqa: E402
from minuet.bench.step.cell import Cell  # noqa: E402
from minuet.bench.step.measure import (  # noqa: E402
    Effort,
    Times,
    distinct_experts,
    entry,
    profile_step,
    step_of,
    time_step,
)
from minuet.bench.step.run import described, prepare  # noqa: E402
from minuet.config import read_options  # noqa: E402
from minuet.engine.start import Engine  # noqa: E402
from minuet.engine.types import Step  # noqa: E402
from minuet.models.slices import SliceSpec  # noqa: E402

KV_TYPES = ("bfloat16", "fp8")
CELLS = ((1, 8704), (4, 8704), (16, 8704), (64, 8704), (4, 131072))  # batch, context
AT_CONCURRENCY, AT_BATCH, LONG = (4, 8704), (64, 8704), (4, 131072)
OVERHEAD_US, FRACTION, RATIO = 44.0, 0.60, 1.02


def in_turns(
    engines: dict[str, Engine], steps: dict[str, list[Step]], args: argparse.Namespace
) -> dict[str, list[list[Times]]]:
    """Times by KV type, cell and round; the types take turns within a cell."""
    times: dict[str, list[list[Times]]] = {kv: [[] for _ in CELLS] for kv in engines}
    for _ in range(args.rounds):
        for place in range(len(CELLS)):
            for kv, engine in engines.items():
                seen = time_step(engine.runner, steps[kv][place], Effort(args.num_iters))
                times[kv][place].append(seen)
    return times


def kept(rounds: list[Times]) -> tuple[Times, list[float]]:
    """The median round, and the median of every round in ms."""
    medians = [statistics.median(seen.device_s) for seen in rounds]
    middle = rounds[medians.index(statistics.median_low(medians))]
    return middle, [round(s * 1e3, 4) for s in medians]


def measure(
    engines: dict[str, Engine], cells: list[Cell], args: argparse.Namespace, read: float
) -> list[dict[str, Any]]:
    """An entry per cell and KV type; first all times, then a look into each step."""
    steps = {kv: [step_of(engine, cell) for cell in cells] for kv, engine in engines.items()}
    times = in_turns(engines, steps, args)
    found = []
    for place, cell in enumerate(cells):
        for kv, engine in engines.items():
            step, (middle, rounds_ms) = steps[kv][place], kept(times[kv][place])
            kernels = profile_step(engine.runner, step)
            experts = distinct_experts(engine.runner, step)
            one = entry(engine, cell, middle, kernels, experts, read)
            found.append({"kv_cache_dtype": kv, **one, "rounds_ms": rounds_ms})
    return found


def judge(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was to be shown, beside what was found."""

    def cell(kv: str, place: tuple[int, int]) -> dict[str, Any]:
        (found,) = (
            c
            for c in cells
            if c["kv_cache_dtype"] == kv and (c["batch_size"], c["context"]) == place
        )
        return found

    def ratio(place: tuple[int, int]) -> float:
        fp8, bf16 = (cell(kv, place)["step_ms"]["median"] for kv in ("fp8", "bfloat16"))
        return round(fp8 / bf16, 4)

    def against(place: tuple[int, int], what: str) -> float:
        found = cell("bfloat16", place)[what]
        return float(found.get("arch", found["plain_read"]))

    overhead = against(AT_CONCURRENCY, "overhead_us_per_layer")
    fraction = against(AT_BATCH, "fraction_of_limit")
    near, far = ratio(AT_CONCURRENCY), ratio(LONG)
    return {
        f"overhead per layer at batch 4 <= {OVERHEAD_US} us": _judged(
            overhead, overhead <= OVERHEAD_US
        ),
        f"fraction of the limit at batch 64 >= {FRACTION}": _judged(fraction, fraction >= FRACTION),
        f"FP8 step / BF16 step at batch 4 <= {RATIO}": _judged(near, near <= RATIO),
        "FP8 step / BF16 step at batch 4 of 128K < 1": _judged(far, far < 1.0),
    }


def _judged(value: float, held: bool) -> dict[str, Any]:
    return {"value": value, "held": held}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="minimax-m3")
    parser.add_argument("--rank-of", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dense-layers", type=int)
    parser.add_argument("--num-iters", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="odd, so that one is the median")
    parser.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(words)


def main() -> int:
    args = parse()
    part = SliceSpec(args.rank_of, args.layers, args.dense_layers)
    cells = [Cell(Phase.DECODE, batch, context) for batch, context in CELLS]
    engines, read = {}, 0.0
    for kv in KV_TYPES:
        options = read_options({"model": args.model, "kv_cache_dtype": kv, "seal": "warn"})
        seen, engines[kv] = prepare(options, part, cells, lambda line: print(line, file=sys.stderr))
        read = max(read, seen)
    found = measure(engines, cells, args, read)
    whole = {
        **described(engines[KV_TYPES[0]], args.model, part, read),
        "rounds": args.rounds,
        "iters": args.num_iters,
        "cells": found,
        "bounds": judge(found),
        **record.metadata(args.metadata),
    }
    if args.output:
        record.write(whole, args.output)
    for line in report.lines(whole):
        print(line)
    for bound, judged in whole["bounds"].items():
        print(f"{'held  ' if judged['held'] else 'MISSED'} {bound}: {judged['value']}")
    return 0 if all(judged["held"] for judged in whole["bounds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
