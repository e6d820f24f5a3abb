"""Time the operations of a layer besides attention, on one GPU, next to torch and a plain read.

    python benchmarks/gpu_ops.py --out results.json [--tokens 1,4,...] [--cases moe,...]
    python benchmarks/gpu_ops.py --out sweep.json --sweep up,down --tokens 4,64

Shapes are MiniMax-M3's on one of four ranks, BF16. Microseconds per call under CUDA-graph replay,
median of replays with their spread; contenders of a row are replayed in turn. Every call of a graph
takes the next of several sets of weights and tokens, so that no weight is left in the L2 cache. A
row is timed only after its result agreed with plain torch. See README.md.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_timing import ceilings, compare, header, plain_read, samples

from minuet.ops.activation import swiglu_oai
from minuet.ops.embedding import Embedded, Embedding, Follows
from minuet.ops.moe import Experts, route
from minuet.ops.rope import inverse_frequencies
from minuet.ops.table import REFERENCE, ops_for
from minuet.ops.triton import config
from minuet.ops.triton import experts as moe
from minuet.ops.triton.common import target_of
from minuet.ops.triton.config import MANY, Product, Tiling
from minuet.platform.triton import Launch

DEVICE = torch.device("cuda")
HIDDEN, EXPERTS, TOP, WIDTH, DENSE, VOCAB = 6144, 128, 4, 768, 3072, 50016
LAYERS, INPUTS = 3, 6  # sets of weights; of tokens
TOKENS = (1, 4, 16, 64, 512, 2048, 8192)
CALLS, REPLAYS = 12, 9
METHOD = (
    f"CUDA-graph replay of >= {CALLS} calls, median of {REPLAYS} replays, contenders alternate; "
    f"{LAYERS} sets of expert weights (3.6 GB each), {INPUTS} of random tokens in turn"
)
NO_PDL = "no_pdl_us"


@dataclass
class Pool:
    """Weights of several layers, drawn once."""

    @cached_property
    def experts(self) -> list[Experts]:
        return [self._layer() for _ in range(LAYERS)]

    def _layer(self) -> Experts:
        def matrix(*shape: int) -> torch.Tensor:
            out = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
            return out.normal_(0.0, shape[-1] ** -0.5)

        return Experts(
            router=torch.randn(EXPERTS, HIDDEN, device=DEVICE) * 1.5 * HIDDEN**-0.5,
            bias=torch.randn(EXPERTS, device=DEVICE) * 0.02,
            gate_up=matrix(EXPERTS, 2 * WIDTH, HIDDEN),
            down=matrix(EXPERTS, HIDDEN, WIDTH),
            shared_gate_up=matrix(2 * WIDTH, HIDDEN),
            shared_down=matrix(HIDDEN, WIDTH),
            top_k=TOP,
            routed_scale=2.0,
            alpha=1.702,
            limit=7.0,
        )

    def tokens(self, count: int, width: int = HIDDEN) -> list[torch.Tensor]:
        return [
            torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(INPUTS)
        ]


@dataclass
class Row:
    """One operation at one number of tokens.

    Attributes:
        contenders: ``call(i)`` of each, by the name of its figure; ``us`` is ours.
        num_bytes: what a call cannot avoid reading; 0: not a question of bytes.
        flops: of a call.
        check: raises if ours is wrong.
        sets: different sets of inputs.
        facts: more to record.
    """

    contenders: dict[str, Callable[[int], object]]
    num_bytes: float
    check: Callable[[], float]
    flops: float = 0.0
    sets: int = LAYERS * INPUTS
    facts: dict[str, object] | None = None


def error_of(got: torch.Tensor, want: torch.Tensor, limit: float = 1e-2) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= limit, error
    return error


# --- rows ----------------------------------------------------------------------------------------


def norm_row(pool: Pool, tokens: int) -> Row:
    ours, plain = ops_for("triton"), ops_for(REFERENCE)
    weight = torch.randn(HIDDEN, device=DEVICE) * 0.1
    xs, deltas = pool.tokens(tokens), pool.tokens(tokens)

    def call(ops) -> Callable[[int], object]:
        return lambda i: ops.add_norm(xs[i % INPUTS], deltas[i % INPUTS], weight, 1e-6)

    def check() -> float:
        (total, normed), (want_total, want) = call(ours)(0), call(plain)(0)
        assert torch.equal(total, want_total)
        return error_of(normed, want)

    return Row({"us": call(ours), "torch_us": call(plain)}, 4.0 * tokens * HIDDEN, check)


def parts_row(pool: Pool, tokens: int) -> Row:
    ours = ops_for("triton")
    weight = torch.randn(HIDDEN, device=DEVICE) * 0.1
    xs = pool.tokens(tokens)
    values = [x.view(tokens, TOP + 1, HIDDEN) for x in pool.tokens(tokens, (TOP + 1) * HIDDEN)]
    shares = torch.rand(tokens, TOP, device=DEVICE)

    def call(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = moe.Parts(values[i % INPUTS], shares)
        return ours.add_norm(xs[i % INPUTS], parts, weight, 1e-6)

    def torch_form(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        of_experts, shared = values[i % INPUTS][:, :TOP], values[i % INPUTS][:, TOP]
        routed = torch.bmm(shares[:, None], of_experts.float())[:, 0].to(shared.dtype)
        return ops_for(REFERENCE).add_norm(xs[i % INPUTS], routed + shared, weight, 1e-6)

    def check() -> float:
        return error_of(call(0)[1], torch_form(0)[1])

    num_bytes = 2.0 * tokens * HIDDEN * (TOP + 2)
    return Row({"us": call, "torch_us": torch_form}, num_bytes, check)


def swiglu_row(pool: Pool, tokens: int) -> Row:
    ours, xs = ops_for("triton"), pool.tokens(tokens, 2 * DENSE)

    def call(function) -> Callable[[int], torch.Tensor]:
        return lambda i: function(xs[i % INPUTS], 1.702, 7.0)

    contenders = {"us": call(ours.swiglu), "torch_us": call(swiglu_oai)}
    check = lambda: error_of(contenders["us"](0), contenders["torch_us"](0))  # noqa: E731
    return Row(contenders, 4.0 * tokens * DENSE, check)


def embed_row(pool: Pool, tokens: int) -> Row:
    """Half of the tokens were drawn before; each call takes others."""
    ids = torch.randint(0, VOCAB, (INPUTS, tokens), device=DEVICE)
    positions = torch.randint(0, 1 << 20, (tokens,), device=DEVICE)
    follows = Follows(torch.arange(tokens, device=DEVICE) % 2 - 1, ids[0])
    embedding = Embedding(
        torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=torch.bfloat16),
        torch.randn(HIDDEN, device=DEVICE) * 0.1,
        1e-6,
        inverse_frequencies(64, 5e6, DEVICE),
    )

    def call(ops) -> Callable[[int], Embedded]:
        return lambda i: ops.embed(ids[i % INPUTS], positions, embedding, follows)

    def check() -> float:
        got, want = call(ops_for("triton"))(0), call(ops_for(REFERENCE))(0)
        assert torch.equal(got.hidden, want.hidden)
        return max(error_of(got.normed, want.normed), error_of(got.sin, want.sin, 1e-5))

    contenders = {"us": call(ops_for("triton")), "torch_us": call(ops_for(REFERENCE))}
    return Row(contenders, 6.0 * tokens * HIDDEN, check)


def linear_row(outputs: int, inputs: int, pool: Pool, tokens: int) -> Row:
    """A projection; six sets of weights."""
    ours, xs = ops_for("triton"), pool.tokens(tokens, inputs)
    weights = [
        torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) * inputs**-0.5
        for _ in range(INPUTS)
    ]

    def call(function) -> Callable[[int], torch.Tensor]:
        return lambda i: function(xs[i % INPUTS], weights[i % INPUTS])

    def check() -> float:
        want = F.linear(xs[0].float(), weights[0].float())
        return error_of(call(ours.linear)(0), want.to(torch.bfloat16), 5e-3)

    contenders = {"us": call(ours.linear), "torch_us": call(F.linear)}
    return Row(contenders, 2.0 * outputs * inputs, check, 2.0 * tokens * outputs * inputs)


def route_row(pool: Pool, tokens: int) -> Row:
    xs, target = pool.tokens(tokens), target_of(DEVICE)
    rows = moe.tiling_for(tokens, target, False).rows

    def call(how: config.Target) -> Callable[[int], object]:
        return lambda i: moe.route(xs[i % INPUTS], pool.experts[i % LAYERS], rows, how)

    def torch_form(i: int) -> object:
        mine = pool.experts[i % LAYERS]
        chosen, shares = route(xs[i % INPUTS], mine.router, mine.bias, TOP)
        flat = chosen.reshape(-1)
        return flat.argsort(stable=True), ends_of(flat), shares

    def check() -> float:
        mine, routing = pool.experts[0], call(target)(0)
        _, shares = route(xs[0], mine.router, mine.bias, TOP)
        return error_of(routing.shares.sort(-1).values, 2 * shares.sort(-1).values, 1e-4)

    no_pdl = call(replace(target, pdl=False))
    contenders = {"us": call(target), NO_PDL: no_pdl, "torch_us": torch_form}
    return Row(contenders, EXPERTS * HIDDEN * 4.0, check)


def ends_of(flat: torch.Tensor) -> torch.Tensor:
    """Where each expert's rows end; no value is read back."""
    counts = torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE)
    ones = torch.ones_like(flat, dtype=torch.int32)
    return counts.index_add_(0, flat, ones).cumsum(0, dtype=torch.int32)


def torch_moe(x: torch.Tensor, mine: Experts) -> torch.Tensor:
    """The reference with offsets that stay on the device."""
    chosen, shares = route(x, mine.router, mine.bias, TOP)
    flat = chosen.reshape(-1)
    order, ends = flat.argsort(stable=True), ends_of(flat)
    inner = F.grouped_mm(x[order // TOP], mine.gate_up.transpose(1, 2), offs=ends)
    out = F.grouped_mm(
        swiglu_oai(inner, mine.alpha, mine.limit), mine.down.transpose(1, 2), offs=ends
    )
    by_token = torch.empty_like(out).index_copy_(0, order, out).view(len(x), TOP, -1)
    routed = torch.bmm((2 * shares)[:, None], by_token.float())[:, 0].to(x.dtype)
    inner = swiglu_oai(F.linear(x, mine.shared_gate_up), mine.alpha, mine.limit)
    return routed + F.linear(inner, mine.shared_down)


def distinct(pool: Pool, xs: list[torch.Tensor]) -> float:
    """Distinct experts of a set, on average."""
    found = []
    for i in range(LAYERS * INPUTS):
        mine = pool.experts[i % LAYERS]
        chosen, _ = route(xs[i % INPUTS], mine.router, mine.bias, TOP)
        found.append(len(chosen.unique()))
    return sum(found) / len(found)


def expert_bytes(num_experts: float) -> float:
    return num_experts * 3 * WIDTH * HIDDEN * 2


def moe_row(pool: Pool, tokens: int) -> Row:
    target, xs = target_of(DEVICE), pool.tokens(tokens)
    ours, plain = ops_for("triton"), ops_for(REFERENCE)
    invariant = ops_for("triton", batch_invariant=True)

    def call(ops) -> Callable[[int], object]:
        return lambda i: ops.moe(xs[i % INPUTS], pool.experts[i % LAYERS])

    def check() -> float:
        zero, weight = torch.zeros_like(xs[0]), torch.zeros(HIDDEN, device=DEVICE)
        errors = []
        for i in range(LAYERS):
            want = plain.moe(xs[i % INPUTS], pool.experts[i])
            errors += [
                error_of(ops.add_norm(zero, call(ops)(i), weight, 1e-6)[0], want, 2e-2)
                for ops in (ours, invariant)
            ]
        return max(errors)

    def plainly(how: config.Target) -> Callable[[int], object]:
        return lambda i: moe.moe(xs[i % INPUTS], pool.experts[i % LAYERS], target=how)

    contenders = {
        "us": call(ours),
        NO_PDL: plainly(replace(target, pdl=False)),
        "invariant_us": call(invariant),
        "torch_us": lambda i: torch_moe(xs[i % INPUTS], pool.experts[i % LAYERS]),
    }
    experts = distinct(pool, xs)
    return Row(
        contenders,
        expert_bytes(experts + 1) + EXPERTS * HIDDEN * 4,
        check,
        flops=6.0 * tokens * (TOP + 1) * WIDTH * HIDDEN,
        facts={"distinct_experts": round(experts, 2), "tile_rows":
               moe.tiling_for(tokens, target, False).rows},
    )  # fmt: skip


ROWS = {
    "add_norm": norm_row,
    "add_norm_of_experts": parts_row,
    "swiglu_dense": swiglu_row,
    "embed": embed_row,
    "linear_qkv": partial(linear_row, 2560, HIDDEN),
    "linear_o": partial(linear_row, HIDDEN, 2048),
    "route": route_row,
    "moe": moe_row,
}


def measured(name: str, tokens: int, pool: Pool, limits: dict[str, float]) -> dict[str, object]:
    """Check, then time."""
    made = ROWS[name](pool, tokens)
    row: dict[str, object] = {"case": name, "tokens": tokens, "error": f"{made.check():.1e}"}
    contenders = dict(made.contenders)
    if made.num_bytes:
        memory = pool.experts[0].gate_up
        whole = min(made.num_bytes, memory.nbytes)
        contenders["floor_us"] = plain_read(memory, whole, 1 if whole > 1e9 else made.sets)
    times = samples(contenders, made.sets, CALLS, REPLAYS)
    for contender, found in times.items():
        middle = sorted(found)[len(found) // 2]
        row[contender] = round(middle, 2)
        row[contender.replace("_us", "").replace("us", "ours") + "_spread"] = round(
            (max(found) - min(found)) / middle, 3
        )
    if made.num_bytes:
        row["bytes"] = round(made.num_bytes)
        row["floor_us"] = round(row["floor_us"] * made.num_bytes / whole, 2)
        row["read_fraction"] = round(made.num_bytes / row["us"] / 1e6 / limits["read_tbs"], 3)
    if made.flops:
        row["tflops"] = round(made.flops / row["us"] / 1e6, 1)
    return row | (made.facts or {})


# --- sweeps --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One tiling of one product."""

    which: str
    rows: int
    product: Product


def candidates(which: str, tokens: int) -> Iterator[Candidate]:
    """Tilings that fit shared memory."""
    if tokens <= 64:
        grid = itertools.product(
            (16,), (16, 32, 64, 128), (64, 128, 256, 512), (2, 4, 8), (2, 3, 4, 5, 6)
        )
    else:
        rows = (
            (16, 32, 64) if tokens <= 512 else (32, 64, 128) if tokens <= 2048 else (64, 128, 256)
        )
        grid = itertools.product(rows, (64, 128, 256), (64, 128), (4, 8), (3, 4))
    for rows, n, c, warps, stages in grid:
        weights = n * (2 if which == "up" else 1)
        step = (weights + rows) * c * 2
        sums = weights * rows * 4 / (warps * 32) / 4  # registers of a thread
        if (
            step * stages > 220 * 1024
            or sums > 128
            or (warps == 8 and n < 128)
            or (warps == 2 and n > 32)
        ):
            continue
        if tokens <= 64 and not 20 * 1024 <= step * (stages - 1) <= 160 * 1024:
            continue
        if tokens > 64 and sums < 16:
            continue
        yield Candidate(which, rows, Product(n, c, warps, stages))


def tiling_of(one: Candidate) -> Tiling:
    other = Product(64, 64, 4, 3)
    up, down = (one.product, other) if one.which == "up" else (other, one.product)
    return Tiling(MANY, one.rows, up, down)


def product_launch(
    one: Candidate, x: torch.Tensor, mine: Experts, routing: moe.Routing, target: config.Target
) -> Launch:
    """The launch of one product."""
    values = torch.empty((len(x), TOP + 1, HIDDEN), dtype=x.dtype, device=x.device)
    made = moe.expert_launches(x, mine, routing, values, tiling_of(one), target)
    return made[0 if one.which == "up" else 1]


def compile_one(one: Candidate) -> str:
    """In a process of its own: fills the compiler's cache. Returns what went wrong."""
    target = config.TARGETS["sm90"]
    empty = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    mine = Experts(
        empty(EXPERTS, HIDDEN), empty(EXPERTS), empty(EXPERTS, 2 * WIDTH, HIDDEN),
        empty(EXPERTS, HIDDEN, WIDTH), empty(2 * WIDTH, HIDDEN), empty(HIDDEN, WIDTH),
        TOP, 2.0, 1.702, 7.0,
    )  # fmt: skip
    index = torch.empty(4, dtype=torch.int32, device="meta")
    routing = moe.Routing(index, index, index.view(1, 4).expand(17, 4), index)
    made = product_launch(one, empty(4, HIDDEN), mine, routing, target)
    args = [made.args[parameter.name] for parameter in made.kernel.params]
    args = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
    try:
        made.kernel.warmup(*args, grid=made.grid, **made.options)
    except Exception as problem:  # noqa: BLE001 - a candidate that does not compile is left out
        return f"{type(problem).__name__}: {str(problem)[:120]}"
    return ""


def compiled(todo: list[Candidate]) -> list[Candidate]:
    """Those that compile; before this process touches the device."""
    unique = list(dict.fromkeys(todo))
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as workers:
        problems = dict(zip(unique, workers.map(compile_one, unique, chunksize=2), strict=True))
    for one, problem in problems.items():
        if problem:
            print("left out:", one, problem, flush=True)
    return [one for one in todo if not problems[one]]


def sweep(todo: dict[int, list[Candidate]], pool: Pool) -> Iterator[dict[str, object]]:
    """Every candidate at its number of tokens; replays of one number alternate in groups."""
    target = target_of(DEVICE)
    for tokens, ones in todo.items():
        xs = pool.tokens(tokens)
        sets = LAYERS * INPUTS if tokens <= 64 else LAYERS
        num_bytes = expert_bytes(distinct(pool, xs) + 1)
        routings = {
            rows: [moe.route(xs[i % INPUTS], pool.experts[i % LAYERS], rows) for i in range(sets)]
            for rows in {one.rows for one in ones}
        }
        for first in range(0, len(ones), 12):
            contenders, made = {}, {}
            for one in ones[first : first + 12]:
                launches = [
                    product_launch(
                        one, xs[i % INPUTS], pool.experts[i % LAYERS], routings[one.rows][i], target
                    )
                    for i in range(sets)
                ]
                contenders[repr(one)] = lambda i, them=launches: them[i]()
                made[repr(one)] = one
            calls, replays = (sets, 5) if tokens <= 64 else (sets, 3)
            for label, us in compare(contenders, sets, calls, replays).items():
                one = made[label]
                share = num_bytes * (2 / 3 if one.which == "up" else 1 / 3)
                flops = (4.0 if one.which == "up" else 2.0) * tokens * (TOP + 1) * WIDTH * HIDDEN
                yield {
                    "tokens": tokens, "which": one.which, "rows": one.rows, "n": one.product.n,
                    "c": one.product.c, "warps": one.product.warps, "stages": one.product.stages,
                    "us": us, "tbs": round(share / us / 1e6, 3), "tflops": round(flops / us / 1e6),
                }  # fmt: skip
            del contenders, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(ROWS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", default="", help="up,down: time tilings instead")
    parser.add_argument("--commit", default="unknown", help="what was measured, for the header")
    args = parser.parse_args()
    numbers = [int(n) for n in args.tokens.split(",")]
    todo = {}
    if args.sweep:
        todo = {n: [c for w in args.sweep.split(",") for c in candidates(w, n)] for n in numbers}
        kept = set(compiled([one for ones in todo.values() for one in ones]))
        todo = {n: [one for one in ones if one in kept] for n, ones in todo.items()}
    torch.manual_seed(0)
    pool = Pool()
    limits = ceilings(pool.experts[0].gate_up)
    report: dict[str, object] = {
        "header": header(sys.argv, METHOD) | {"commit": args.commit, "ceilings": limits},
        "rows": [],
    }
    print(report["header"], flush=True)
    if args.sweep:
        rows = sweep(todo, pool)
    else:
        names = args.cases.split(",")
        rows = (measured(name, n, pool, limits) for n in numbers for name in names)
    for row in rows:
        report["rows"].append(row)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        if not args.sweep:
            print(json.dumps(row), flush=True)
    if args.sweep:
        best(report["rows"])


def best(rows: list[dict[str, object]], show: int = 8) -> None:
    """Print the fastest of every number of tokens, product and tile."""
    key = lambda row: (row["tokens"], row["which"], row["rows"])  # noqa: E731
    for _, group in itertools.groupby(sorted(rows, key=lambda r: (*key(r), r["us"])), key):
        for row in itertools.islice(group, show):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
