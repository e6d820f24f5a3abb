"""What a decode step costs the host: schedule, commit, report and text, with a device that is free.

CPU time of the loop's thread over steps in which every request decodes one token, in windows of
``--window`` steps: with 128 each request completes one page in each. The fastest window of a
process counts, as other work on the machine only adds; and the median over ``--repeats`` processes.
``--against`` names another checkout, measured in turn with this one.

    python benchmarks/host_loop.py --output benchmarks/results/cpu/host-loop.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_SOURCE = sys.argv[sys.argv.index("--child") + 1] if "--child" in sys.argv else str(ROOT / "src")
sys.path[:0] = [_SOURCE, str(ROOT)]

from minuet.engine import types  # noqa: E402
from minuet.engine.core import Core, Limits  # noqa: E402
from minuet.engine.pages import PagePool  # noqa: E402
from minuet.engine.prefix import PrefixCache  # noqa: E402
from minuet.engine.scheduler import Scheduler  # noqa: E402
from minuet.engine.types import Sampled, SamplingParams  # noqa: E402
from minuet.models.m3.export import make_checkpoint  # noqa: E402
from minuet.models.tokenizer import Tokenizer  # noqa: E402

_PAGE, _PROMPT, _WARM_UP = 128, 100, 60
_NOTHING = Sampled(None)


class Device:
    """Draws at once. What it drew of a step is there when the host asks."""

    def __init__(self, depth: int, token_id: int):
        self.depth, self._drawn = depth, Sampled(token_id)
        self._answers = [self._drawn] * 1024
        self.done = True

    def execute(self, step: Any) -> list[Sampled]:
        """One answer per share."""
        if step.num_decodes == len(step.scheduled):
            return self._answers[: step.num_decodes]
        return [self._drawn if share.samples else _NOTHING for share in step.scheduled]

    def submit(self, step: Any) -> Any:
        """The same, wrapped as the loop wants it."""
        return types.Answered(self.execute(step))


def measure(requests: int, depth: int, tokenizer: Any, windows: int, window: int) -> float:
    """Microseconds of a step: the fastest window."""
    length = _PROMPT + windows * window + 4 * _WARM_UP
    pool = PagePool(requests * (-(-length // _PAGE) + 2) + 1, _PAGE)
    scheduler = Scheduler(
        max_num_seqs=requests,
        max_num_batched_tokens=max(8192, requests),
        max_model_len=length,
        pool=pool,
        prefix=PrefixCache(pool, b"benchmark"),
    )
    core = Core(scheduler, Device(depth, 70), Limits(512, 20, (1,)), tokenizer)
    params = SamplingParams(max_tokens=length - _PROMPT, temperature=0.0, ignore_eos=True)
    for number in range(requests):
        core.add(f"r{number}", [number % 512, *range(_PROMPT - 1)], params)
    for _ in range(_WARM_UP):
        core.step()
    costs = []
    for _ in range(windows):
        began = time.thread_time()
        for _ in range(window):
            changed = core.step()
        costs.append(1e6 * (time.thread_time() - began) / window)
        assert len(changed) == requests
    scheduler.integrity()
    return min(costs)


def child(args: argparse.Namespace) -> None:
    """Measure the tree that is first on the path; one JSON line."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(make_checkpoint(folder))
        for requests in args.requests:
            for name, codec in (("ids", None), ("text", tokenizer)):
                cost = measure(requests, args.depth, codec, args.windows, args.window)
                figures[f"{requests}-{name}"] = cost
    print(json.dumps(figures))


def run(source: Path, depth: int, args: argparse.Namespace) -> dict[str, float]:
    """One process over one tree."""
    command = [sys.executable, __file__, "--child", str(source), f"--depth={depth}"]
    command += [f"--windows={args.windows}", f"--window={args.window}", "--requests"]
    command += map(str, args.requests)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=_PAGE, help="steps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="root of another checkout")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--depth", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    contenders = {"depth 0": (ROOT / "src", 0), "depth 1": (ROOT / "src", 1)}
    if args.against:
        contenders["before"] = (args.against / "src", 0)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(args.repeats):
        for name, (source, depth) in contenders.items():
            runs[name].append(run(source, depth, args))
    rows = []
    for cell in runs["depth 0"][0]:
        row: dict[str, Any] = {"requests": int(cell.split("-")[0]), "with": cell.split("-")[1]}
        for name in contenders:
            row[name] = [round(figures[cell], 1) for figures in runs[name]]
        medians = {name: statistics.median(row[name]) for name in contenders}
        if args.against:
            row["ratio"] = {
                name: round(medians[name] / medians["before"], 3)
                for name in contenders
                if name != "before"
            }
        rows.append(row)
        print(cell, {name: round(value, 1) for name, value in medians.items()}, row.get("ratio"))
    from minuet.bench.record import header  # here: a checkout to compare with may not have it

    record = {**header(), "unit": "CPU microseconds per decode step", "steps": args.window}
    if args.against:
        record["command"] = record["command"].replace(str(args.against), "BEFORE")
        git = ["git", "-C", str(args.against), "rev-parse", "--short", "HEAD"]
        before = subprocess.run(git, capture_output=True, text=True, check=False)
        record["before"] = before.stdout.strip()
    record["rows"] = rows  # one figure per repeat; the ratio is of their medians
    if args.output:
        args.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
