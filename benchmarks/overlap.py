"""What preparing a step while another runs saves: decode steps of the whole loop, in turns.

    python benchmarks/overlap.py --output benchmarks/results/h200/overlap.json

The engine of M3's rank slice serves a fixed number of requests, ids only. Rounds of decode steps
are timed with the executor's depth at 0 (each step waits for the results of the one before) and at
1 (the host is a step ahead), in turns. Beside them: the same step on the device alone, replayed
back to back, and how often the device was done already when the host asked for the results.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from minuet.attention.contract import Phase  # noqa: E402
from minuet.bench import record  # noqa: E402
from minuet.bench.step.cell import Cell  # noqa: E402
from minuet.bench.step.measure import Effort, step_of, time_step  # noqa: E402
from minuet.bench.step.run import described, prepare  # noqa: E402
from minuet.config import read_options  # noqa: E402
from minuet.engine.start import Engine  # noqa: E402
from minuet.engine.types import Pending, Sampled, SamplingParams, Step  # noqa: E402
from minuet.models.slices import SliceSpec  # noqa: E402

_PROMPT, _WARM_UP = 512, 24


class Watched:
    """An executor, and where the host's time goes in it."""

    def __init__(self, inner: Any):
        self.inner, self.depth = inner, inner.depth
        self.submit_s: list[float] = []
        self.results_s: list[float] = []
        self.was_done: list[bool] = []

    def clear(self) -> None:
        """Forget what was seen."""
        self.submit_s, self.results_s, self.was_done = [], [], []

    def submit(self, step: Step) -> "_Watched":
        """Start a step."""
        began = time.perf_counter()
        pending = self.inner.submit(step)
        self.submit_s.append(time.perf_counter() - began)
        return _Watched(self, pending)


class _Watched:
    def __init__(self, watch: Watched, pending: Pending):
        self._watch, self._pending = watch, pending

    @property
    def done(self) -> bool:
        return self._pending.done

    def results(self) -> Sequence[Sampled]:
        self._watch.was_done.append(self._pending.done)
        began = time.perf_counter()
        results = self._pending.results()
        self._watch.results_s.append(time.perf_counter() - began)
        return results


def serve(engine: Engine, batch: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Figures of each depth over rounds of steps, depths in turns."""
    core, vocab, draw = engine.core, engine.plan.facts.vocab, random.Random(batch)
    watch = core._executor = Watched(engine.runner)
    length = 2 * rounds * (steps + _WARM_UP) + 4 * _WARM_UP
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = [draw.randrange(vocab) for _ in range(_PROMPT)]
        core.add(f"{batch}-{number}", prompt, params)
    while any(live.output.first_token_s is None for live in core._live.values()):
        core.step()
    seen: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(rounds):
        for depth in (0, 1):
            watch.depth = depth
            for _ in range(_WARM_UP):
                core.step()
            watch.clear()
            began = time.perf_counter()
            for _ in range(steps):
                core.step()
            seen[depth].append(_figures(watch, time.perf_counter() - began, steps))
    for number in range(batch):
        core.abort(f"{batch}-{number}")
    while core.has_work:
        core.step()
    core._executor = engine.runner
    return [{"depth": depth, **_middle(found)} for depth, found in seen.items()]


def _figures(watch: Watched, wall: float, steps: int) -> dict[str, float]:
    return {
        "step_ms": 1e3 * wall / steps,
        "submit_ms": 1e3 * sum(watch.submit_s) / steps,
        "results_ms": 1e3 * sum(watch.results_s) / steps,
        "other_host_ms": 1e3 * (wall - sum(watch.submit_s) - sum(watch.results_s)) / steps,
        "device_was_done": sum(watch.was_done) / len(watch.was_done),
    }


def _middle(rounds: list[dict[str, float]]) -> dict[str, Any]:
    middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    found: dict[str, Any] = {name: round(value, 4) for name, value in middle.items()}
    return {**found, "rounds_step_ms": [round(r["step_ms"], 4) for r in rounds]}


def main() -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="minimax-m3")
    parser.add_argument("--rank-of", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dense-layers", type=int)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-iters", type=int, default=80)
    parser.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    tokens = 2 * args.rounds * (args.num_iters + _WARM_UP) + 4 * _WARM_UP
    cells = [Cell(Phase.DECODE, batch, _PROMPT + tokens) for batch in args.batch_size]
    part = SliceSpec(args.rank_of, args.layers, args.dense_layers)
    options = read_options(
        {"model": args.model, "seal": "warn", "max_num_batched_tokens": 2048, "dtype": "bfloat16"}
    )
    read, engine = prepare(options, part, cells, lambda line: print(line, file=sys.stderr))
    rows = []
    for batch in args.batch_size:
        alone = Cell(Phase.DECODE, batch, _PROMPT + tokens // 2)
        by_depth = serve(engine, batch, args.rounds, args.num_iters)
        times = time_step(engine.runner, step_of(engine, alone), Effort(60, profile=False))
        device_ms = round(statistics.median(times.device_s) * 1e3, 4)
        rows.append({"batch": batch, "device_step_ms": device_ms, "by_depth": by_depth})
        print(batch, "device", device_ms, *by_depth, sep="\n  ", flush=True)
    whole = {
        **described(engine, args.model, part, read),
        "kind": "overlap",
        "prompt": _PROMPT,
        "rounds": args.rounds,
        "iters": args.num_iters,
        "rows": rows,
        **record.metadata(args.metadata),
    }
    if args.output:
        record.write(whole, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
