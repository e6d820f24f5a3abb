"""Time sampling and the batch-invariant product on one GPU, next to the torch forms they replace.

    python benchmarks/gpu_sampling.py --out results.json [--parts sampling,host,linear]

Kernel times are microseconds per call under CUDA-graph replay, over sets of inputs that together
exceed the L2 cache; contenders are replayed in turn. Results are compared with the reference before
anything is timed. ``host`` is what a call of the engine's sampler costs the host, and the time from
the call to its results.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_timing import CALLS, REPLAYS, ceilings, compare, header
from tests.ops.sampling_cases import Wish, lines

from minuet.engine import sampler
from minuet.engine.rows import Row
from minuet.engine.types import Request, SamplingParams
from minuet.ops.sampling import columns, reference
from minuet.ops.triton import linear as linear_form
from minuet.ops.triton import sampling as form
from minuet.platform.triton import Launch

DEVICE = torch.device("cuda")
COLD_BYTES = 300e6
METHOD = (
    f"CUDA-graph replay of >= {CALLS} calls, median of {REPLAYS} replays, contenders alternate; "
    f"inputs of the calls are rotated over {COLD_BYTES / 1e6:.0f} MB; host: median of 30 calls"
)
VOCABS, ROWS = (200064, 50016), (1, 4, 64)
WISHES = {
    "temperature": Wish(columns.DRAW, 0.8),
    "top_k 20, top_p 0.9": Wish(temperature=0.8, top_k=20, top_p=0.9),
    "top_p 0.95": Wish(top_p=0.95),
    "min_p 0.05": Wish(min_p=0.05),
}
# One of four ranks of M3: packed q, k, v and index projections; attention output; LM head
WEIGHTS = {"qkv": (2560, 6144), "out": (6144, 2048), "lm_head": (50016, 6144)}
TOKENS = (1, 4, 16, 64, 128, 2048)
# blocks for many rows; steps of K and splits are those of the first
T, B = linear_form.Tile, linear_form.Block
TILES = (
    T(64, 128, 128, 4, 4, 132, 64, None),
    T(64, 128, 128, 4, 4, 132, 64, B(128, 128, 8, 3)),
    T(64, 128, 128, 4, 4, 132, 64, B(128, 256, 8, 2)),
    T(64, 128, 128, 4, 4, 132, 64, B(256, 128, 8, 2)),
    T(64, 128, 128, 4, 4, 132, 64, B(128, 128, 4, 3)),
)


def rows_of_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """``peaked``: a few tokens have most of the probability; ``flat``: nearly all tokens share."""
    logits = torch.randn(rows, vocab, device=DEVICE)
    return logits * 3 if kind == "peaked" else logits


def torch_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(-1), torch.isfinite(logits).all(-1)


def torch_draw(logits: torch.Tensor, wish: Wish) -> torch.Tensor:
    """The form it replaces, without its stops: a sort, and noise from the device's generator."""
    scaled = logits / wish.temperature
    if wish.mode == columns.FILTERED:
        vocab = logits.shape[1]
        ordered, order = scaled.sort(dim=-1, descending=True)
        removed = torch.arange(vocab, device=DEVICE) >= (wish.top_k or vocab)
        shares = ordered.masked_fill(removed, float("-inf")).softmax(-1)
        removed = removed | (shares.cumsum(-1) - shares >= wish.top_p)
        removed |= shares < wish.min_p * shares[:, :1]
        removed[:, 0] = False
        kept = ordered.masked_fill(removed, float("-inf"))
        scaled = torch.empty_like(scaled).scatter_(1, order, kept)
    noise = torch.empty_like(scaled).exponential_().clamp_(min=1e-20)
    return (scaled.softmax(-1) / noise).argmax(-1)


def sampling(limit: float) -> Iterator[dict[str, object]]:
    for vocab in VOCABS:
        for count in ROWS:
            size = count * vocab * 4
            sets = max(1, min(48, int(COLD_BYTES / size)))
            for kind in ("peaked", "flat"):
                logits = [rows_of_logits(kind, count, vocab) for _ in range(sets)]
                row = {"what": "greedy", "logits": kind, "rows": count, "vocab": vocab}
                for mine, theirs in zip(
                    form.greedy(logits[0]), torch_greedy(logits[0]), strict=True
                ):
                    assert torch.equal(mine, theirs)
                if kind == "peaked":
                    row |= compare(
                        {
                            "us": lambda i, x=logits: form.greedy(x[i]),
                            "torch_us": lambda i, x=logits: torch_greedy(x[i]),
                        },
                        sets,
                    )
                    yield row | {"read_fraction": round(size / row["us"] / 1e6 / limit, 3)}
                for name, wish in WISHES.items():
                    yield _one_draw(name, wish, kind, logits, limit)
                del logits


def _one_draw(
    name: str, wish: Wish, kind: str, logits: list[torch.Tensor], limit: float
) -> dict[str, object]:
    count, vocab = logits[0].shape
    params = lines([wish] * count).to(DEVICE)
    tokens = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    stuck = torch.zeros(count, dtype=torch.bool, device=DEVICE)
    modes = frozenset({wish.mode})
    form.draw(logits[0], params, tokens, stuck, modes)
    want = torch.zeros_like(tokens)
    reference.draw(logits[0], params, want, stuck.clone(), modes)
    assert torch.equal(tokens, want), (name, kind, tokens, want)
    row = {"what": name, "logits": kind, "rows": count, "vocab": vocab}
    row |= compare(
        {
            "us": lambda i: form.draw(logits[i], params, tokens, stuck, modes),
            "torch_us": lambda i: torch_draw(logits[i], wish),
        },
        len(logits),
    )
    size = count * vocab * 4
    return row | {"read_fraction": round(size / row["us"] / 1e6 / limit, 3)}


def launches(_: float) -> Iterator[dict[str, object]]:
    """Every launch by itself, with more and fewer warps, and tiles of other sizes."""
    vocab = 200064
    for count in (1, 64):
        logits = rows_of_logits("peaked", count, vocab)
        params = lines([Wish(temperature=0.8, top_k=20, top_p=0.9)] * count).to(DEVICE)
        noisy = lines([Wish(columns.DRAW, 0.8)] * count).to(DEVICE)
        tokens = torch.zeros(count, dtype=torch.int64, device=DEVICE)
        flags = torch.zeros(count, dtype=torch.bool, device=DEVICE)
        for tile in (1024, 2048, 4096):
            tuning = replace(form.tuning_of(DEVICE), scan_tile=tile, draw_tile=tile)
            made = [
                *form.greedy_launches(logits, tokens, flags, tuning),
                *form.draw_launches(logits, noisy, tokens, flags, tuning),
                *form.filter_launches(logits, params, tokens, flags, tuning),
            ]
            for launch in made:
                launch()
            row: dict[str, object] = {"what": "launches", "rows": count, "vocab": vocab}
            row["tile"] = tile
            # collecting again and again adds candidates: what reads them is timed before
            if tile == form.tuning_of(DEVICE).draw_tile:
                row |= compare(_with_warps([made[-2]]), 1)
            yield row | compare(_with_warps(made[:-2]), 1)


def _with_warps(launches: list[Launch]) -> dict[str, Callable[[int], object]]:
    return {
        f"{launch.kernel.__name__} w{warps}": partial(
            _launch, replace(launch, options={**launch.options, "num_warps": warps})
        )
        for launch in launches
        for warps in (4, 8, 16)
        if launch.options["num_warps"] > 1
    }


def _launch(launch: Launch, _: int) -> None:
    launch()


def host(_: float) -> Iterator[dict[str, object]]:
    vocab = 200064
    kinds = {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 0.8},
        "top_k 20, top_p 0.9": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        "greedy, 5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
        "penalties, 2000 tokens": {"temperature": 0.8, "repetition_penalty": 1.1},
    }
    sampler.rehearse(64, vocab, 20, DEVICE)
    for count in ROWS:
        logits = rows_of_logits("peaked", count, vocab)
        for name, fields in kinds.items():
            prompt = tuple(range(2000)) if "penalties" in name else (1,)
            rows = [Row(Request(f"{i}", prompt, SamplingParams(**fields), i)) for i in range(count)]
            found = sampler.greedy(logits)
            calls, answers = [], []
            for _ in range(30):
                torch.cuda.synchronize()
                began = time.perf_counter()
                drawn = sampler.draw(logits, rows, 0, greedy=found)
                called = time.perf_counter()
                drawn.results()
                answers.append(time.perf_counter() - began)
                calls.append(called - began)
            yield {
                "what": f"host: {name}", "rows": count, "vocab": vocab,
                "call_us": round(sorted(calls)[15] * 1e6, 1),
                "answer_us": round(sorted(answers)[15] * 1e6, 1),
            }  # fmt: skip


def linear(limit: float, tiles: Sequence[linear_form.Tile | None] = (None,)) -> Iterator[dict]:
    for name, (n, k) in WEIGHTS.items():
        sets = max(1, int(COLD_BYTES / (n * k * 2)))
        weights = [torch.randn(n, k, device=DEVICE).bfloat16() / k**0.5 for _ in range(sets)]
        for tokens in TOKENS:
            if None in tiles or tokens in (128, 2048):
                yield {"what": f"linear {name}"} | _one_product(weights, tokens, limit, tiles)
        del weights
        torch.cuda.empty_cache()


def _one_product(
    weights: list[torch.Tensor],
    tokens: int,
    limit: float,
    tiles: Sequence[linear_form.Tile | None],
) -> dict[str, object]:
    n, k = weights[0].shape
    x = torch.randn(tokens, k, device=DEVICE).bfloat16()
    exact = x.float() @ weights[0].float().T
    contenders: dict[str, Callable[[int], object]] = {}
    for tile in tiles:
        got = linear_form.invariant_linear(x, weights[0], tile=tile)
        error = float((got.float() - exact).norm() / exact.norm())
        assert error < 3e-3, error
        label = "us"
        if tile is not None:
            label = f"{tile.m}x{tile.n}x{tile.k} w{tile.num_warps} s{tile.num_stages}"
            label += f" {tile.many}"
            same = torch.equal(got[:1], linear_form.invariant_linear(x[:1], weights[0], tile=tile))
            label += " same bits" if same else " OTHER BITS"
        contenders[label] = lambda i, t=tile: linear_form.invariant_linear(x, weights[i], tile=t)
    contenders["cublas_us"] = lambda i: torch.nn.functional.linear(x, weights[i])
    times = compare(contenders, len(weights))
    row: dict[str, object] = {"tokens": tokens, "n": n, "k": k, **times}
    if "us" in times:
        row["of_cublas"] = round(times["cublas_us"] / times["us"], 2)
        row["read_fraction"] = round(n * k * 2 / times["us"] / 1e6 / limit, 3)
        row["tflops"] = round(2 * tokens * n * k / times["us"] / 1e6, 1)
    return row


PARTS = {
    "sampling": sampling,
    "launches": launches,
    "host": host,
    "linear": linear,
    "tiles": lambda limit: linear(limit, TILES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="sampling,host,linear")
    parser.add_argument("--commit", default="unknown", help="what was measured, for the header")
    args = parser.parse_args()
    torch.manual_seed(0)
    limits = ceilings(torch.randn(1 << 28, device=DEVICE))
    report: dict[str, object] = {
        "header": header(sys.argv, METHOD) | {"commit": args.commit, "ceilings": limits},
        "rows": [],
    }
    for part in args.parts.split(","):
        for row in PARTS[part](limits["read_tbs"]):
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
