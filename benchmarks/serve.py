"""A server on a slice of the model, loaded at several concurrencies, as one record.

    PYTHONPATH=src python benchmarks/serve.py --output benchmarks/results/h200/serve.json

Starts `minuet serve` over the share that one of `--rank-of` GPUs has of the first `--layers`
layers, with random weights, and loads it as `minuet bench serve` does: lengths uniform around the
means, all requests at once, `--max-concurrency` in flight, answers to their full length. Flags that
are not listed here go to the server. Needs minuet[bench].
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from minuet.bench import record  # noqa: E402
from minuet.bench.serve import metrics  # noqa: E402
from minuet.bench.serve.prompts import RandomLengths  # noqa: E402
from minuet.bench.serve.run import Load  # noqa: E402
from minuet.bench.serve.run import main as ask  # noqa: E402
from minuet.models.slices import SliceSpec, write_slice  # noqa: E402

SERVING = re.compile(r"serving .* on (http://\S+)")
START_S = 240.0


@contextmanager
def serving(words: list[str]) -> Iterator[tuple[str, float]]:
    """The address of a server, and the seconds until it answered; its log goes to stderr."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "minuet", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found: list[str] = []
    listening = threading.Event()

    def read() -> None:
        for line in process.stderr:  # type: ignore[union-attr]
            sys.stderr.write(line)
            if match := SERVING.search(line):
                found.append(match[1])
                listening.set()
        listening.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        listening.wait(START_S)
        if not found:
            raise SystemExit("the server did not start; its log is above")
        yield found[0], time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def load(url: str, concurrency: int, args: argparse.Namespace) -> Load:
    return Load(
        base_url=url,
        backend="minuet",
        endpoint="",
        model="",
        dataset="random",
        dataset_path=None,
        num_prompts=concurrency * args.prompts_per_slot,
        num_warmups=min(4, concurrency),
        lengths=RandomLengths(
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
        ),
        output_len=None,
        vocab_size=None,
        request_rate=float("inf"),
        burstiness=1.0,
        max_concurrency=concurrency,
        ignore_eos=True,
        temperature=0.0,
        seed=args.seed + concurrency,  # no prompt of one load is in another
        ready_timeout_s=START_S,
        progress=sys.stderr.isatty(),
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="minimax-m3")
    parser.add_argument("--rank-of", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dense-layers", type=int)
    parser.add_argument(
        "--serve", nargs="*", default=[], metavar="WORD", help="flags of the server"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--prompts-per-slot", type=int, default=10)
    # uniform in [0.8, 1] of 8192 and of 1024, as published figures of this model
    parser.add_argument("--random-input-len", type=int, default=7373)
    parser.add_argument("--random-output-len", type=int, default=922)
    parser.add_argument("--random-range-ratio", type=float, default=0.111)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path)
    args, rest = parser.parse_known_args(words)
    args.serve = rest
    return args


def without_paths(server: dict[str, Any], name: str) -> dict[str, Any]:
    """What a server says of itself, less where this run kept its files and ports."""
    said = {key: value for key, value in server.items() if key not in ("base_url", "after_ready")}
    said["model"] = {**said["model"], "name": name}
    said["config"] = {key: value for key, value in said["config"].items() if key != "model"}
    return said


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start, load at each concurrency, and write what is known after each."""
    part = SliceSpec(args.rank_of, args.layers, args.dense_layers)
    wanted = metrics.Wanted(percentiles=(50.0, 90.0, 99.0))
    with tempfile.TemporaryDirectory(prefix="minuet-") as scratch:
        path, name = args.model, Path(args.model).name
        if not part.is_whole:
            path = str(write_slice(args.model, part, Path(scratch) / "slice.json"))
        words = [path, "--load-format", "dummy", "--served-model-name", name]
        words += ["--max-num-seqs", str(max(args.concurrency)), "--no-enable-prefix-caching"]
        with serving(words + args.serve) as (url, start_s):
            found = {
                **record.header(),
                "kind": "minuet bench serve on a slice",
                "model": {"name": name, "rank_of": args.rank_of, "layers": args.layers},
                "gpus": record.gpus(),
                "until_ready_s": round(start_s, 1),
                "runs": [],
                **record.metadata(args.metadata),
            }
            for concurrency in args.concurrency:
                result, outcomes = ask(load(url, concurrency, args), wanted)
                for line in (*metrics.block(result, wanted), *metrics.failures(outcomes)):
                    print(line, flush=True)
                del result["environment"]
                server = result.pop("server")
                found["server"] = without_paths(server, name)
                found["runs"].append({**result, "after_ready": server["after_ready"]})
                if args.output:
                    record.write(found, args.output)
    return found


def main() -> int:
    found = run(parse())
    return 1 if any(one["failed"] for one in found["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
