"""Time the attention kernels of a prefill step on one GPU, next to torch's attention.

    python benchmarks/prefill_kernels.py --out results.json [--cases sparse-fp8,...] [--sizes ...]

A step is one sequence: new tokens after cached ones. Sparse cases are timed in three forms: every
query token for itself (``rows_us``), by tiles of query tokens that read the union of their blocks
(``tiles_us``), and as served, where each tile takes the form that is less work (``us``). Index
queries are drawn with a correlation from token to token: ``similar`` neighbours choose mostly the
same blocks, ``unrelated`` ones share only what all see, which is the worst case for tiles. A cell
is timed only after rows of every form agreed with FP32 arithmetic on the dequantised cache.

Microseconds per call under CUDA-graph replay (median of replays), contenders replayed in turn.
TFLOP/s count the multiplications of visible tokens (of chosen blocks), not what masks throw away.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_timing import compare, header

from minuet.attention.backends.triton import config, launch
from minuet.attention.backends.triton.selecting import Deferred, block_lists
from minuet.attention.backends.triton.step import Plan, Planner, StepShape
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import LayerCache
from minuet.kv.layout import KVLayout, LaneName

DEVICE = torch.device("cuda")
DIM = PAGE = 128
HEADS, TOP, TILE_TOKENS = 16, 16, 8
SIZES = ((2048, 0), (8192, 0), (32768, 0), (4096, 28672))  # new tokens, cached tokens
CORRELATION = {"similar": 0.995, "loose": 0.95, "unrelated": 0.0}
CALLS, REPLAYS = 4, 7
CHECKED_ROWS = 24
SCALE = DIM**-0.5
MATMUL = 8192
METHOD = f"CUDA-graph replay of {CALLS} calls, median of {REPLAYS} replays, contenders alternate"
TORCH_TYPES = {DType.BF16: torch.bfloat16, DType.FP8_E4M3FN: torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """A row of the table: what is stored, and how a layer attends."""

    name: str
    kv: DType
    index: DType | None = None


CASES = {
    case.name: case
    for case in (
        Case("dense-bf16", DType.BF16),
        Case("dense-fp8", DType.FP8_E4M3FN),
        Case("sparse-bf16", DType.BF16, DType.BF16),
        Case("sparse-fp8", DType.FP8_E4M3FN, DType.BF16),
    )
}


class Cell:
    """One case at one size: a filled cache, a plan, and the calls to time."""

    def __init__(self, case: Case, new: int, cached: int, correlation: float = 0.0):
        self.case, self.new, self.cached = case, new, cached
        self.blocks = -(-(new + cached) // PAGE)
        self.pages = torch.randperm(self.blocks, device=DEVICE).to(torch.int32)
        self.cache = self._cache()
        self.q = torch.randn(new, HEADS, DIM, device=DEVICE).bfloat16()
        self.index_q = _walk(new, correlation)
        self.selection = Selection(TOP, 0, 1)
        self.plan = self._plan()

    def _cache(self) -> LayerCache:
        case, lanes = self.case, {}
        layout = KVLayout(PAGE, 1, DIM, case.kv, DIM if case.index else 0, case.index or DType.BF16)
        names = [(LaneName.K, case.kv), (LaneName.V, case.kv)]
        for name, dtype in names:
            values = torch.randn(self.blocks, 1, PAGE, DIM, device=DEVICE)
            lanes[name] = (values * (50 if dtype.is_fp8 else 1)).to(TORCH_TYPES[dtype])
        if case.kv.is_fp8:
            for name in (LaneName.K_SCALE, LaneName.V_SCALE):
                lanes[name] = torch.rand(self.blocks, 1, PAGE, device=DEVICE) * 0.02 + 0.01
        if case.index:
            keys = torch.randn(self.blocks, PAGE, DIM, device=DEVICE)
            lanes[LaneName.INDEX_K] = keys.to(TORCH_TYPES[case.index])
        return LayerCache(layout, lanes)

    def _plan(self) -> Plan:
        total = self.new + self.cached
        shape = StepShape(
            page_size=PAGE, num_kv_heads=1, group=HEADS, max_seqs=1, max_tokens=self.new,
            max_length=total, query_len=0, kv_fp8=self.case.kv.is_fp8,
            compute_units=torch.cuda.get_device_properties(DEVICE).multi_processor_count,
        )  # fmt: skip
        batch = AttentionBatch(
            (self.new,),
            (total,),
            torch.arange(self.cached, total, device=DEVICE),
            torch.full((self.new,), -1, device=DEVICE),
            self.pages[None],
        )
        target = config.TARGETS[launch.arch_name(DEVICE)]
        return Planner(shape, DEVICE, target).plan(batch, PAGE)

    def call(self, row_blocks_per_step: int | None = None) -> Callable[[int], torch.Tensor]:
        """Selection and attention of a layer, or attention alone of a dense one."""
        plan = self.plan
        if row_blocks_per_step is not None:
            target = replace(
                plan.target,
                row_blocks_per_step=row_blocks_per_step,
                row_blocks_per_step_fp8=row_blocks_per_step,
            )
            plan = replace(plan, target=target)

        def dense(i: int) -> torch.Tensor:
            return launch.attend(self.q, self.cache, plan, None, SCALE)

        def sparse(i: int) -> torch.Tensor:
            chosen = launch.select(self.index_q, self.cache, plan, self.selection)
            return launch.attend(self.q, self.cache, plan, chosen, SCALE)

        return sparse if self.case.index else dense

    def select_call(self) -> Callable[[int], None]:
        """Selection alone: scores and lists."""
        chosen = Deferred(self.index_q, self.cache, self.selection)
        lists = torch.empty(self.new, 1, TOP, dtype=torch.int32, device=DEVICE)

        def select(i: int) -> None:
            for chunk in self.plan.chunks_of(self.new):
                for made in chosen.launches(self.plan, chunk, lists[chunk.first : chunk.end]):
                    made()

        return select

    def lists(self) -> torch.Tensor:
        """What is selected."""
        return block_lists(Deferred(self.index_q, self.cache, self.selection), self.plan)

    def flops(self) -> int:
        """Of both products, over visible tokens (of the chosen blocks)."""
        position = torch.arange(self.cached, self.cached + self.new)
        seen = position + 1
        if self.case.index:
            seen = torch.where(seen > TOP * PAGE, (TOP - 1) * PAGE + position % PAGE + 1, seen)
        return int(seen.sum()) * 4 * HEADS * DIM

    def check(self, calls: dict[str, Callable[[int], torch.Tensor]]) -> float:
        """The least cosine to FP32 arithmetic; raises if a selection or a value is wrong."""
        lists = self.lists() if self.case.index else None
        results = [call(0) for call in calls.values()]
        rows = {0, self.new - 1} | set(torch.randint(self.new, (CHECKED_ROWS,)).tolist())
        worst = 1.0
        for row in sorted(rows):
            pages, seen = self.pages.long(), self.cached + row + 1
            token = torch.arange(self.blocks * PAGE, device=DEVICE).view(-1, PAGE)
            if lists is not None:
                chosen = self._checked_choice(row, lists[row, 0], seen)
                pages, token = pages[chosen], token[chosen]
            k, v = (self._values(name, pages) for name in (LaneName.K, LaneName.V))
            scores = self.q[row].float() @ k.T * SCALE
            scores[:, token.flatten() >= seen] = float("-inf")
            want = (scores.softmax(-1) @ v).double().flatten()
            for got in results:
                mine = got[row].double().flatten()
                cosine = torch.nn.functional.cosine_similarity(mine, want, dim=0)
                worst = min(worst, float(cosine))
        assert worst >= (0.999 if self.case.kv.is_fp8 else 0.9999), worst
        return worst

    def _checked_choice(self, row: int, chosen: torch.Tensor, seen: int) -> torch.Tensor:
        """The row's blocks; their scores must be the best ones, but for rounding."""
        count = -(-seen // PAGE)
        keys = self.cache.index_k[self.pages[:count].long()].float().flatten(0, 1)
        scores = keys @ self.index_q[row, 0].float()
        scores[seen:] = float("-inf")
        scores = scores.view(-1, PAGE).amax(1)
        scores[-1] = float("inf")
        mine = chosen[chosen >= 0].long()
        assert len(mine) == min(TOP, count)
        torch.testing.assert_close(
            scores[mine].sort().values,
            scores.topk(len(mine)).values.sort().values,
            rtol=1e-4,
            atol=1e-2,
        )
        return mine

    def _values(self, name: LaneName, pages: torch.Tensor) -> torch.Tensor:
        values = self.cache.lanes[name][pages, 0].float()
        if self.case.kv.is_fp8:
            scale = LaneName.K_SCALE if name is LaneName.K else LaneName.V_SCALE
            values = values * self.cache.lanes[scale][pages, 0][..., None]
        return values.flatten(0, 1)


def _walk(tokens: int, correlation: float) -> torch.Tensor:
    """Index queries [tokens, 1, DIM] of unit variance, each correlated with the one before."""
    noise = torch.randn(tokens, DIM, device=DEVICE)
    made = [noise[0]]
    for step in noise[1:]:
        made.append(correlation * made[-1] + (1 - correlation**2) ** 0.5 * step)
    return torch.stack(made).bfloat16()[:, None]


def shared(lists: torch.Tensor) -> dict[str, float]:
    """Blocks of a tile's union and of its lists together, on average over whole tiles."""
    tiles = lists[: len(lists) // TILE_TOKENS * TILE_TOKENS, 0].reshape(-1, TILE_TOKENS * TOP)
    ordered = tiles.sort(1).values
    new = (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    union = new.sum(1) + (ordered[:, 0] >= 0)
    return {
        "union_blocks": round(float(union.float().mean()), 1),
        "list_blocks": round(float((tiles >= 0).sum(1).float().mean()), 1),
    }


def torch_attention(cell: Cell) -> Callable[[int], torch.Tensor]:
    """The peer: causal attention over contiguous BF16 keys and values, no pages, no cache."""
    q = cell.q.transpose(0, 1)[None].contiguous()
    k, v = (
        cell._values(name, cell.pages.long()).bfloat16()[None, None]
        for name in (LaneName.K, LaneName.V)
    )
    return lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def matmul_tflops() -> float:
    """What a large BF16 product reaches in this process."""
    a, b = (torch.randn(MATMUL, MATMUL, device=DEVICE).bfloat16() for _ in range(2))
    us = compare({"us": lambda i: a @ b}, 1, CALLS, REPLAYS)["us"]
    return round(2 * MATMUL**3 / us / 1e6, 1)


def measure(case: Case, new: int, cached: int, ceiling: float) -> list[dict[str, object]]:
    """The rows of a case at a size: one, or one per correlation of a sparse case."""
    rows = []
    for queries, correlation in CORRELATION.items() if case.index else (("", 0.0),):
        cell = Cell(case, new, cached, correlation)
        row: dict[str, object] = {"case": case.name, "new": new, "cached": cached}
        calls = {"us": cell.call()}
        if case.index:
            calls |= {"rows_us": cell.call(1000), "tiles_us": cell.call(0)}
            row |= {"queries": queries, **shared(cell.lists())}
        row["cosine"] = round(cell.check(calls), 7)
        if case.index:
            calls["select_us"] = cell.select_call()
        elif not cached:
            calls["torch_us"] = torch_attention(cell)
        row |= compare(calls, 1, CALLS, REPLAYS)
        row["tflops"] = round(cell.flops() / row["us"] / 1e6, 1)
        row["matmul_fraction"] = round(row["tflops"] / ceiling, 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sizes", default="", help="as in 8192+0,4096+28672; all by default")
    parser.add_argument("--commit", default="unknown", help="what was measured, for the header")
    args = parser.parse_args()
    sizes = SIZES
    if args.sizes:
        sizes = tuple(tuple(map(int, size.split("+"))) for size in args.sizes.split(","))
    torch.manual_seed(0)
    ceiling = matmul_tflops()
    report: dict[str, object] = {
        "header": header(sys.argv, METHOD)
        | {"commit": args.commit, "ceilings": {"matmul_bf16_tflops": ceiling}},
        "rows": [],
    }
    print(report["header"], flush=True)
    for name in args.cases.split(","):
        for new, cached in sizes:
            report["rows"] += measure(CASES[name], new, cached, ceiling)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
