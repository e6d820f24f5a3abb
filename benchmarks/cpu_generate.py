"""How fast does Minuet generate on this CPU, beside `transformers` on the same checkpoint?

Both answer the same prompts greedily, in turn, each in a process of its own and with the same
number of threads; what is reported is the ratio, pair by pair, since absolute times of a shared
machine mean little. The peer gets its best form: one static batch of equally long prompts, so that
it wastes nothing on padding. Before any time is taken both must draw the same tokens.

    python benchmarks/cpu_generate.py                      some minutes
    python benchmarks/cpu_generate.py --requests 4 --input 64 --output 16 --repeats 1      a look
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import minuet
from minuet import LLM, SamplingParams
from minuet.models.m3.export import make_checkpoint, shape_of

Runner = Callable[[list[list[int]]], list[list[int]]]


def main() -> int:
    """Run, print a table, write JSON."""
    args = _arguments()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in [args.checkpoint.name] if args.checkpoint else args.presets.split(","):
            folder = args.checkpoint or make_checkpoint(
                Path(scratch) / name, preset=name, dtype="float32"
            )
            counts = sorted({1, args.requests})
            rows += [{"checkpoint": name, **_compare(folder, c, args)} for c in counts]
    report = {**_header(args), "rows": rows}
    _show(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder; default: a random one is written"
    )
    parser.add_argument(
        "--presets",
        default="small,bench",
        help="sizes of the random ones: small has the released head geometry (16 heads of 128 per "
        "KV head), bench wider experts and smaller heads (default both)",
    )
    parser.add_argument("--requests", type=int, default=16, help="concurrent requests (default 16)")
    parser.add_argument("--input", type=int, default=512, help="prompt tokens (default 512)")
    parser.add_argument("--output", type=int, default=64, help="tokens drawn (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs (default 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser.parse_args()


class _Contender:
    """An engine in a process of its own, as its users run it.

    They must not share one: Minuet changes how the process's allocator works, which makes a
    neighbour faster too.
    """

    def __init__(self, make: Callable[..., Runner], *parameters: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, parameters), daemon=True)
        self._process.start()

    def run(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        """Tokens of each prompt, and seconds."""
        self._pipe.send(prompts)
        tokens, seconds = self._pipe.recv()
        return tokens, seconds

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Runner], parameters: tuple[Any, ...]) -> None:
    run = make(*parameters)
    while (prompts := pipe.recv()) is not None:
        start = time.perf_counter()
        tokens = run(prompts)
        pipe.send((tokens, time.perf_counter() - start))


def _compare(folder: Path, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: ``count`` concurrent requests, both engines in turn."""
    contenders = {
        "minuet": _Contender(_ours, folder, count, args),
        "transformers": _Contender(_peer, folder, count, args),
    }
    prompts = _prompts(folder, count, args.input, seed=0)
    first = [contender.run(prompts)[0] for contender in contenders.values()]
    if first[0] != first[1]:
        raise SystemExit("the two engines draw different tokens: no times are taken")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    title = f"{count} requests"
    for repeat in tqdm(range(args.repeats), desc=title, disable=not sys.stderr.isatty()):
        # new prompts each time: a prefix cache must not answer from memory
        prompts = _prompts(folder, count, args.input, seed=repeat + 1)
        for name, contender in contenders.items():
            seconds[name].append(contender.run(prompts)[1])
    for contender in contenders.values():
        contender.close()
    tokens = count * args.output
    row: dict[str, Any] = {"requests": count, "input": args.input, "output": args.output}
    for name, times in seconds.items():
        row[name] = {
            "tokens_per_s": round(tokens / statistics.median(times), 3),
            "seconds": [round(t, 4) for t in times],
        }
    ratios = [b / a for a, b in zip(seconds["minuet"], seconds["transformers"], strict=True)]
    row["ratio_median"] = round(statistics.median(ratios), 3)
    row["ratio_min"], row["ratio_max"] = round(min(ratios), 3), round(max(ratios), 3)
    return row


def _ours(folder: Path, count: int, args: argparse.Namespace) -> Runner:
    torch.set_num_threads(args.threads)
    pages = count * (-(-(args.input + args.output) // 128) + 1) + 1
    llm = LLM(folder, max_num_seqs=count, kv_cache_pages=pages, announce=lambda line: None)
    params = SamplingParams(max_tokens=args.output, temperature=0.0, ignore_eos=True)
    return lambda prompts: [output.token_ids for output in llm.generate(prompts, params)]


def _peer(folder: Path, count: int, args: argparse.Namespace) -> Runner:
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    model = transformers.MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = model.generate(
            input_ids=ids,
            max_new_tokens=args.output,
            min_new_tokens=args.output,
            do_sample=False,
            # every token may be drawn, the end-of-sequence token too, as with ignore_eos here
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return tokens

    return run


def _prompts(folder: Path, count: int, length: int, seed: int) -> list[list[int]]:
    vocab = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab - 20, (count, length), generator=generator).tolist()


def _header(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit,
        "machine": f"{platform.machine()}, {args.threads} threads",
        "versions": {
            "minuet": minuet.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "shapes": {} if args.checkpoint else {p: str(shape_of(p)) for p in args.presets.split(",")},
    }


def _show(report: dict[str, Any]) -> None:
    table = Table(title="greedy generation, FP32; output tokens per second, medians")
    for column in (
        "checkpoint",
        "requests",
        "in / out",
        "minuet",
        "transformers",
        "ratio",
        "min .. max",
    ):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["checkpoint"],
            str(row["requests"]),
            f"{row['input']} / {row['output']}",
            f"{row['minuet']['tokens_per_s']:.1f}",
            f"{row['transformers']['tokens_per_s']:.1f}",
            f"{row['ratio_median']:.2f}x",
            f"{row['ratio_min']:.2f} .. {row['ratio_max']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
