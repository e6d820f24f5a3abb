"""Time the attention kernels of a decode step on one GPU, next to a plain read and a peer.

    python benchmarks/decode_kernels.py --out results.json [--cases dense-fp8,...] [--peer ...]

Every number is microseconds per call under CUDA-graph replay (median of replays), with enough sets
of pages that none of them is left in the L2 cache. Contenders of a cell are replayed in turn. A
cell is timed only after its result agreed with FP32 arithmetic on the dequantised cache. See
README.md.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_timing import CALLS, REPLAYS, ceilings, compare, header, plain_read

from minuet.attention.backends.triton import config, launch
from minuet.attention.backends.triton.spec import SPLIT
from minuet.attention.backends.triton.step import Plan, Planner, StepShape
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import LayerCache
from minuet.kv.layout import KVLayout, LaneName

DEVICE = torch.device("cuda")
DIM = PAGE = 128
TOP = 16
COLD_BYTES, MOST_SETS = 300e6, 72  # together the sets of a cell exceed the L2 cache several times
SIZES = ((1, 8192), (4, 8192), (16, 8192), (64, 8192), (4, 131072), (32, 131072))
POOL_PAGES = 32 * 131072 // PAGE
METHOD = (
    f"CUDA-graph replay of >= {CALLS} calls, median of {REPLAYS} replays, contenders alternate; "
    f"sets of random pages >= {COLD_BYTES / 1e6:.0f} MB or {MOST_SETS} sets"
)
CU = 0  # compute units to plan for; 0: the device's


@dataclass(frozen=True)
class Case:
    """A row of the table: what is stored, and how a layer attends."""

    name: str
    kv: DType
    index: DType | None = None

    def read_bytes(self, batch: int, context: int) -> int:
        """Bytes a call cannot avoid reading."""
        scales = 8 if self.kv.is_fp8 else 0
        token = 2 * DIM * self.kv.itemsize + scales
        if self.index is None:
            return batch * context * token
        blocks = min(TOP, context // PAGE)
        return batch * (context * DIM * self.index.itemsize + blocks * PAGE * token)


CASES = {
    case.name: case
    for case in (
        Case("dense-bf16", DType.BF16),
        Case("dense-fp8", DType.FP8_E4M3FN),
        Case("sparse-fp8", DType.FP8_E4M3FN, DType.BF16),
        Case("sparse-fp8-index-fp8", DType.FP8_E4M3FN, DType.FP8_E4M3FN),
        Case("sparse-bf16", DType.BF16, DType.BF16),
    )
}


# --- cells ---------------------------------------------------------------------------------------


@dataclass
class Pool:
    """Random pages of every lane; rows of all cells draw from them."""

    lanes: dict[object, torch.Tensor] = field(default_factory=dict)

    def _lane(self, key: object, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self.lanes:
            self.lanes[key] = make()
        return self.lanes[key]

    def values(self, which: str, dtype: DType) -> torch.Tensor:
        """[pages, 128, 128] random normal values."""
        torch_type = {DType.BF16: torch.bfloat16, DType.FP8_E4M3FN: torch.float8_e4m3fn}[dtype]

        def make() -> torch.Tensor:
            lane = torch.empty(POOL_PAGES, PAGE, DIM, dtype=torch_type, device=DEVICE)
            for first in range(0, POOL_PAGES, 4096):
                part = torch.randn(4096, PAGE, DIM, device=DEVICE)
                lane[first : first + 4096] = (part * (50 if dtype.is_fp8 else 1)).to(torch_type)
            return lane

        return self._lane((which, dtype), make)

    def scales(self, which: str) -> torch.Tensor:
        """[pages, 1, 128] scales that make FP8 values about normal."""
        return self._lane(
            (which, "scale"),
            lambda: torch.rand(POOL_PAGES, 1, PAGE, device=DEVICE) * 0.02 + 0.01,
        )

    def cache(self, case: Case) -> LayerCache:
        """One layer of the case."""
        index_dim = DIM if case.index else 0
        layout = KVLayout(PAGE, 1, DIM, case.kv, index_dim, case.index or DType.BF16)
        lanes = {
            LaneName.K: self.values("k", case.kv)[:, None],
            LaneName.V: self.values("v", case.kv)[:, None],
        }
        if case.kv.is_fp8:
            lanes |= {LaneName.K_SCALE: self.scales("k"), LaneName.V_SCALE: self.scales("v")}
        if case.index:
            lanes[LaneName.INDEX_K] = self.values("index", case.index)
        return LayerCache(layout, lanes)


@dataclass
class Cell:
    """One case at one size: inputs, plans of every set, and the calls to time."""

    case: Case
    batch: int
    context: int
    cache: LayerCache
    target: config.Target
    heads: int = 16

    def __post_init__(self) -> None:
        self.bytes = self.case.read_bytes(self.batch, self.context)
        blocks = self.context // PAGE
        sets = math.ceil(COLD_BYTES / self.bytes)
        self.sets = max(1, min(sets, MOST_SETS, POOL_PAGES // (self.batch * blocks)))
        pages = torch.randperm(POOL_PAGES, device=DEVICE).to(torch.int32)
        pages = pages[: self.sets * self.batch * blocks]
        self.tables = pages.view(self.sets, self.batch, blocks).contiguous()
        self.q = torch.randn(self.batch, self.heads, DIM, device=DEVICE).bfloat16()
        self.index_q = torch.randn(self.batch, 1, DIM, device=DEVICE).bfloat16()
        self.selection = Selection(TOP, 0, 1)

    def plans(self, target: config.Target, lens: tuple[int, ...] | None = None) -> list[Plan]:
        """One plan per set; they share tables, not pages."""
        lens = lens or (self.context,) * self.batch
        shape = StepShape(
            page_size=PAGE, num_kv_heads=1, group=self.heads, max_seqs=self.batch,
            max_tokens=self.batch, max_length=self.context, query_len=1,
            kv_fp8=self.case.kv.is_fp8,
            compute_units=CU or torch.cuda.get_device_properties(DEVICE).multi_processor_count,
        )  # fmt: skip
        planner = Planner(shape, DEVICE, target)
        batch = AttentionBatch(
            (1,) * self.batch,
            lens,
            torch.tensor([n - 1 for n in lens], device=DEVICE),
            torch.full((self.batch,), -1, device=DEVICE),
            self.tables[0],
        )
        plan = planner.plan(batch, PAGE)
        return [replace(plan, page_table=table) for table in self.tables]

    def call(self, target: config.Target | None = None) -> Callable[[int], torch.Tensor]:
        """The step of one layer: dense attention, or selection and attention over it."""
        plans, scale = self.plans(target or self.target), DIM**-0.5

        def dense(i: int) -> torch.Tensor:
            return launch.attend(self.q, self.cache, plans[i], None, scale)

        def sparse(i: int) -> torch.Tensor:
            chosen = launch.select(self.index_q, self.cache, plans[i], self.selection)
            return launch.attend(self.q, self.cache, plans[i], chosen, scale)

        return sparse if self.case.index else dense

    def check(self) -> float:
        """Cosine to FP32 arithmetic; raises if a selection or a value is wrong.

        Selections may differ where two scores are equal but for rounding.
        """
        plan, scale = self.plans(self.target)[0], DIM**-0.5
        rows = range(0, self.batch, max(1, self.batch // 4))
        lists = None
        if self.case.index:
            chosen = launch.select(self.index_q, self.cache, plan, self.selection)
            lists = launch.block_lists(chosen, plan)
            got = launch.attend(self.q, self.cache, plan, chosen, scale)
        else:
            got = launch.attend(self.q, self.cache, plan, None, scale)
        worst = 1.0
        for row in rows:
            pages = self.tables[0][row].long()
            if lists is not None:
                keys = self.cache.index_k[pages].float().flatten(0, 1)
                scores = (keys @ self.index_q[row, 0].float()).view(-1, PAGE).amax(1)
                scores[-1] = float("inf")
                want = scores.topk(min(TOP, len(scores))).values.sort().values
                mine = scores[lists[row, 0].long()].sort().values
                torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-2)
                pages = pages[lists[row, 0].long()]
            k, v = (self.cache.lanes[n][pages, 0].float() for n in (LaneName.K, LaneName.V))
            if self.case.kv.is_fp8:
                k = k * self.cache.lanes[LaneName.K_SCALE][pages, 0][..., None]
                v = v * self.cache.lanes[LaneName.V_SCALE][pages, 0][..., None]
            weights = (self.q[row].float() @ k.flatten(0, 1).T * scale).softmax(-1)
            want = (weights @ v.flatten(0, 1)).double().flatten()
            cosine = torch.nn.functional.cosine_similarity(got[row].double().flatten(), want, dim=0)
            worst = min(worst, float(cosine))
        assert worst >= (0.999 if self.case.kv.is_fp8 else 0.9999), worst
        return worst


def static_call(cell: Cell, lens: tuple[int, ...]) -> Callable[[int], torch.Tensor]:
    """Dense attention under a static split: the same number of parts for every sequence."""
    plans, scale = cell.plans(cell.target, lens), DIM**-0.5
    shape = plans[0].shape
    split = shape.split(SPLIT.tile_tokens, SPLIT.parts_per_unit)
    most = max(1, split.budget // cell.batch)
    work, rows, slot = [], [], 0
    for sequence, length in enumerate(lens):
        tiles = -(-length // split.tile_tokens)
        parts = min(most, tiles)
        rows.append((slot if parts > 1 else -1, parts))
        for part in range(parts):
            ends = part * tiles // parts, (part + 1) * tiles // parts
            work.append((sequence, *ends, slot + part if parts > 1 else -1))
        slot += parts if parts > 1 else 0
    tables = dict(plans[0].tables)
    tables["work"] = torch.tensor(work, dtype=torch.int32, device=DEVICE)
    tables["rows"] = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    fixed = [replace(plan, tables=tables) for plan in plans]
    return lambda i: launch.attend(cell.q, cell.cache, fixed[i], None, scale)


def uneven(pool: Pool, target: config.Target, ceiling: float) -> Iterator[dict[str, object]]:
    """One long sequence among many short ones: what balancing gains over a static split."""
    lens = (200003,) + (257,) * 7
    for name in ("dense-fp8", "dense-bf16"):
        case = CASES[name]
        cell = Cell(case, 8, 200064, pool.cache(case), target)
        plans, scale = cell.plans(target, lens), DIM**-0.5
        contenders = {
            "us": lambda i, p=plans, c=cell, s=scale: launch.attend(c.q, c.cache, p[i], None, s),
            "static_us": static_call(cell, lens),
        }
        results = [call(0).float() for call in contenders.values()]
        cosine = torch.nn.functional.cosine_similarity(*(r.flatten() for r in results), dim=0)
        assert cosine > 0.9999, cosine
        times = compare(contenders, cell.sets)
        num_bytes = sum(lens) * case.read_bytes(1, 1)
        yield {
            "case": f"uneven-{name}", "lens": "200003 + 7 x 257", "batch": 8, "hq": 16, "hkv": 1,
            **times, "static_ratio": round(times["static_us"] / times["us"], 2),
            "read_fraction": round(num_bytes / times["us"] / 1e6 / ceiling, 3),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sizes", default="", help="as in 1x8192,4x131072; all by default")
    parser.add_argument("--commit", default="unknown", help="what was measured, for the header")
    parser.add_argument("--peer", choices=("none", "flashinfer"), default="none")
    args = parser.parse_args()
    sizes = SIZES
    if args.sizes:
        sizes = tuple(tuple(map(int, s.split("x"))) for s in args.sizes.split(","))
    torch.manual_seed(0)
    pool, target = Pool(), config.TARGETS[launch.arch_name(DEVICE)]
    report: dict[str, object] = {
        "header": header(sys.argv, METHOD) | {"commit": args.commit},
        "rows": [],
    }
    limits = ceilings(pool.values("k", DType.BF16))
    report["header"] |= {"ceilings": limits}
    print(report["header"], flush=True)
    peer_module, why = None, "not asked for"
    if args.peer == "flashinfer":
        try:
            import peer_flashinfer as peer_module
        except ImportError as missing:
            why = f"not importable: {missing}"
    report["header"] |= {"peer": peer_module.VERSION if peer_module else why}
    for row in uneven(pool, target, limits["read_tbs"]):
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
    for name in args.cases.split(","):
        for batch, context in sizes:
            cell = Cell(CASES[name], batch, context, pool.cache(CASES[name]), target)
            row = {"case": name, "batch": batch, "context": context, "hq": 16, "hkv": 1}
            row["cosine"] = round(cell.check(), 7)
            contenders = {"us": cell.call()}
            if target.pdl:
                contenders["no_pdl_us"] = cell.call(replace(target, pdl=False))
            contenders["floor_us"] = plain_read(cell.cache.k, cell.bytes, cell.sets)
            if peer_module:
                try:
                    call = peer_module.call(cell, pool)
                    if call is not None:
                        call(0)
                        contenders["peer_us"] = call
                    row["peer"] = peer_module.describe(cell) if call else "has no such kernel"
                except (RuntimeError, ValueError, TypeError, AttributeError) as failed:
                    row["peer"] = f"failed: {str(failed)[:200]}"
            else:
                row["peer"] = why
            row |= compare(contenders, cell.sets)
            row["read_fraction"] = round(cell.bytes / row["us"] / 1e6 / limits["read_tbs"], 3)
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
            del cell, contenders
            torch.cuda.empty_cache()
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
