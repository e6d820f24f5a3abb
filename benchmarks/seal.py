"""After ready nothing compiles and nothing grows: requests of every length against one engine.

    python benchmarks/seal.py minimax-m3 --rank-of 4 --layers 4 --dense-layers 1 \\
        --requests 2000 --output benchmarks/results/h200/seal.json

Prompt lengths are drawn from 1 to the longest there can be. Half of the requests bring a length
that no request had before, the other half repeats one that came some 64 requests earlier, in turn:
what the first time costs shows as the difference of the two. One prompt at a time is computed, and
up to `--concurrency` requests decode beside it, so queueing adds nothing and batches change all the
time. Every slot of the cache starts as NaN: a kernel that reads an unwritten one is found out.

In the record: what compiled after ready, what the allocator took (in steps that only decode, and in
all), the memory of device and process after every 100 requests and its slope, and the time to the
first token of both halves. Exit code 1 if one of the bounds in `bounds` is missed.
"""

import argparse
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from minuet.bench import record  # noqa: E402
from minuet.config import read_options  # noqa: E402
from minuet.engine.core import Core  # noqa: E402
from minuet.engine.start import Engine, start  # noqa: E402
from minuet.engine.types import SamplingParams  # noqa: E402
from minuet.models.slices import SliceSpec, write_slice  # noqa: E402
from minuet.platform.torch import device_facts  # noqa: E402

MIB = 2**20
LAG = 64  # new lengths between a length and its repetition
SAMPLE_EVERY = 100
SETTLED = 20  # requests until the first look at memory
SLOPE_BOUND = 0.1  # MiB per 100 requests
TTFT_BOUND = 1.1  # p99 of new lengths over p99 of repeated ones
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Asked:
    """One request to come.

    Attributes:
        length: prompt tokens.
        output: output tokens.
        is_new: no request before had this length.
    """

    length: int
    output: int
    is_new: bool


@dataclass
class Seen:
    """What happened."""

    ttft_new_s: list[float] = field(default_factory=list)
    ttft_repeated_s: list[float] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0


def plan_requests(count: int, longest: int, most_output: int, seed: int) -> list[Asked]:
    """New lengths and repetitions in turn; 1 and ``longest`` are among them."""
    draw = random.Random(seed)
    fresh = min(count - count // 2, longest)
    between = draw.sample(range(2, longest), max(0, fresh - 2))
    lengths = [1, longest][:fresh] + between
    draw.shuffle(lengths)
    lag = min(LAG, len(lengths))
    asked = []
    for place in range(len(lengths) + lag):
        for at, is_new in ((place, True), (place - lag, False)):
            if 0 <= at < len(lengths):
                asked.append(Asked(lengths[at], draw.randint(1, most_output), is_new))
    return asked[:count]


def serve(engine: Engine, asked: list[Asked], concurrency: int, seed: int) -> Seen:
    """Send every request and note what happens."""
    core, vocab, draw = engine.core, engine.plan.facts.vocab, np.random.default_rng(seed)
    seen, waiting, live = Seen(), list(reversed(asked)), {}
    computing = None
    with tqdm(total=len(asked), unit="req", disable=not sys.stderr.isatty()) as bar:
        while waiting or core.has_work:
            if waiting and computing is None and len(live) < concurrency:
                request = waiting.pop()
                computing = f"r{len(asked) - len(waiting)}"
                prompt = draw.integers(0, vocab, request.length).tolist()
                live[computing] = request
                add(core, computing, prompt, request.output)
            for output in core.step():
                if output.request_id == computing and output.first_token_s is not None:
                    computing = None
                    times = seen.ttft_new_s if request.is_new else seen.ttft_repeated_s
                    times.append(output.first_token_s - output.arrived_s)
                if output.finish_reason is not None:
                    if output.request_id == computing:
                        computing = None  # it failed before its first token
                    finish(seen, live.pop(output.request_id), output)
                    bar.update()
                    if seen.finished == SETTLED or seen.finished % SAMPLE_EVERY == 0:
                        seen.memory.append({"requests": seen.finished, **memory(engine)})
    return seen


def add(core: Core, request_id: str, prompt: list[int], output: int) -> None:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    core.add(request_id, prompt, params)


def finish(seen: Seen, request: Asked, output: Any) -> None:
    seen.finished += 1
    seen.prompt_tokens += request.length
    seen.output_tokens += len(output.token_ids)
    if output.error:
        seen.errors.append(output.error)


def memory(engine: Engine) -> dict[str, float]:
    """MiB of this process on the host and, where there is one, taken of the device."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host_mib": pages * PAGE_BYTES / MIB}
    if engine.plan.arch.is_gpu:
        free, total = torch.cuda.mem_get_info()
        found["device_mib"] = (total - free) / MIB
        found["allocator_mib"] = torch.cuda.memory_reserved() / MIB
    return found


def slopes(samples: list[dict[str, float]]) -> dict[str, float]:
    """MiB per 100 requests, by least squares, once the first requests are served."""
    if len(samples) < 2:
        return {}
    at = np.array([sample["requests"] for sample in samples])
    names = [name for name in samples[0] if name != "requests"]
    return {
        name: round(
            100 * float(np.polyfit(at, np.array([sample[name] for sample in samples]), 1)[0]), 4
        )
        for name in names
    }


def poison(engine: Engine) -> None:
    """NaN in every slot of the cache; all bits set is one in every type of a lane but fnuz."""
    for layer in engine.runner.cache.layers:
        for lane in layer.lanes.values():
            lane.view(torch.uint8).fill_(0xFF)


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Serve, and judge."""
    longest = engine.plan.config.max_model_len - args.output_tokens
    asked = plan_requests(args.requests, longest, args.output_tokens, args.seed)
    poison(engine)
    at_ready = memory(engine)
    began = time.perf_counter()
    seen = serve(engine, asked, args.concurrency, args.seed)
    wall_s = time.perf_counter() - began
    counters = asdict(engine.seal.counters())
    new, repeated = (
        {**record.summary(times, 1e3), "p99": round(float(np.percentile(times, 99)) * 1e3, 4)}
        for times in (seen.ttft_new_s, seen.ttft_repeated_s)
    )
    found = {
        "requests": seen.finished,
        "lengths": {
            "shortest": min(a.length for a in asked),
            "longest": max(a.length for a in asked),
            "different": len({a.length for a in asked}),
        },
        "prompt_tokens": seen.prompt_tokens,
        "output_tokens": seen.output_tokens,
        "wall_s": round(wall_s, 2),
        "errors": seen.errors,
        "nonfinite": engine.core.num_nonfinite,
        "after_ready": counters,
        "activation_budget_bytes": engine.plan.memory.activation_bytes,
        "ttft_ms": {"new_length": new, "repeated_length": repeated},
        "ttft_p99_ratio": round(new["p99"] / repeated["p99"], 4),
        "memory_at_ready": at_ready,
        "memory": seen.memory,
        "slope_mib_per_100_requests": slopes(seen.memory),
    }
    return {**found, "bounds": judge(found, engine.plan.arch.is_gpu)}


def judge(found: dict[str, Any], is_gpu: bool) -> dict[str, bool]:
    """Whether each promise held."""
    after, slope = found["after_ready"], found["slope_mib_per_100_requests"]
    return {
        "every request was answered": not found["errors"] and not found["nonfinite"],
        "compilations after ready = 0": after["compilations"] == 0,
        "allocator growth of decode steps = 0": after["decode_growth_bytes"] == 0,
        "allocator growth <= activation budget": after["growth_bytes"]
        <= found["activation_budget_bytes"],
        f"memory slope <= {SLOPE_BOUND} MiB / 100 requests": slope.get(
            "device_mib" if is_gpu else "host_mib", float("inf")
        )
        <= SLOPE_BOUND,
        f"p99 TTFT of new lengths <= {TTFT_BOUND} x repeated": found["ttft_p99_ratio"]
        <= TTFT_BOUND,
    }


def prepare(args: argparse.Namespace) -> Engine:
    part = SliceSpec(args.rank_of, args.layers, args.dense_layers)
    with tempfile.TemporaryDirectory(prefix="minuet-") as scratch:
        model = args.model
        if not part.is_whole:
            model = str(write_slice(model, part, Path(scratch) / "slice.json"))
        settings = {
            "model": model,
            "load_format": args.load_format,
            "seal": args.seal,
            "enable_prefix_caching": False,  # a hit would be no first time
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.concurrency,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "kv_cache_dtype": args.kv_cache_dtype,
            "arch": args.arch,
        }
        return start(read_options(settings), lambda line: print(line, file=sys.stderr))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="minimax-m3")
    parser.add_argument("--rank-of", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dense-layers", type=int)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--arch", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--seal", default="strict", help="warn goes on, so that all is counted")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output-tokens", type=int, default=16, help="at most, per request")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(words)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prepare, measure, make a record."""
    engine = prepare(args)
    found = measure(engine, args)
    return {
        **record.header(),
        "kind": "seal",
        "model": {
            "name": args.model,
            "rank_of": args.rank_of,
            "layers": args.layers,
            "dense_layers": args.dense_layers,
        },
        "arch": engine.plan.arch.name,
        "gpus": record.gpus(facts["uuid"]) if (facts := device_facts(engine.plan.arch)) else [],
        "torch": torch.__version__,
        "start_s": {name: round(s, 3) for name, s in engine.timings_s.items()},
        "config": {
            name: value for name, value, _ in engine.plan.config.describe() if name != "model"
        },
        **found,
        **record.metadata(args.metadata),
    }


def main() -> int:
    args = parse()
    found = run(args)
    if args.output:
        record.write(found, args.output)
    after, ttft = found["after_ready"], found["ttft_ms"]
    print(f"{found['requests']} requests, {found['lengths']['different']} lengths")
    print(
        f"compilations {after['compilations']}, growth {after['growth_bytes']} bytes, "
        f"of it decoding {after['decode_growth_bytes']}"
    )
    print(f"slope, MiB per 100 requests: {found['slope_mib_per_100_requests']}")
    for name in ("new_length", "repeated_length"):
        print(f"TTFT, {name}: median {ttft[name]['median']} ms, p99 {ttft[name]['p99']} ms")
    for bound, held in found["bounds"].items():
        print(f"{'held  ' if held else 'MISSED'} {bound}")
    return 0 if all(found["bounds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
