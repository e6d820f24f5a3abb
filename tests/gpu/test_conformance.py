"""The conformance suite on a GPU, and what only a GPU shows: graphs, offsets, recompilation."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from minuet.attention import reference
from minuet.attention.backends.triton import launch
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import KVCache, LayerCache
from tests.attention.conformance import (
    Case,
    assert_close,
    build,
    cases,
    check,
    check_ties,
    check_write,
    check_write_of_sums,
    moved,
)
from tests.attention.triton_choice import LONG, MIDDLE, SHORT, check_choice
from tests.attention.triton_forms import cases as form_cases
from tests.attention.triton_forms import check_forms
from tests.attention.triton_planned import check_planned
from tests.gpu.support import (
    GPU,
    backend,
    counted_compilations,
    device,
    fp8,
    poisoned_scratch,
    step_shape,
)

pytestmark = [pytest.mark.gpu, GPU]
BF16 = torch.bfloat16
M3 = {"kv_heads": 1, "group": 16, "head_dim": 128, "page": 128, "q_dtype": BF16}
FLAVOUR = DType.FP8_E4M3FN
SPARSE = {"index_dim": 128, "index_dtype": DType.BF16, "selection": Selection(16)}


@pytest.mark.parametrize("name", list(cases(FLAVOUR)))
def test_suite(name):
    if fp8() is not FLAVOUR:
        pytest.skip("names are those of e4m3fn")
    check(cases(FLAVOUR)[name], backend())


def test_ties_go_to_the_lowest_block():
    check_ties(backend())


@pytest.mark.parametrize("selection", [Selection(16), Selection(16, 2, 3), Selection(5, 1, 1)])
@pytest.mark.parametrize("counts", [SHORT, MIDDLE, LONG])
def test_the_choice_from_any_scores_is_that_of_the_definition(counts, selection):
    check_choice(device(), counts, selection)


@pytest.mark.parametrize("kv_dtype", [DType.BF16, FLAVOUR])
@pytest.mark.parametrize(
    ("index_dtype", "index_dim"), [(DType.BF16, 0), (DType.BF16, 64), (FLAVOUR, 128)]
)
def test_written_lanes_are_those_of_the_definition(kv_dtype, index_dtype, index_dim):
    check_write(backend(), kv_dtype, index_dtype, index_dim)


@pytest.mark.parametrize("kv_dtype", [DType.BF16, FLAVOUR])
@pytest.mark.parametrize("index_dim", [0, 128])
def test_rows_not_added_up_are_written_as_their_sum(kv_dtype, index_dim):
    check_write_of_sums(backend(), kv_dtype, index_dim)


@pytest.mark.parametrize("kv_dtype", [DType.BF16, FLAVOUR])
@pytest.mark.parametrize("lens", [(8192,), (8192, 5000, 129, 1), (16000, 100)])
def test_m3_shape(kv_dtype, lens):
    case = Case(lens, (1,) * len(lens), kv_dtype=kv_dtype, **M3)
    check(case, backend())
    check(replace(case, **SPARSE), backend())
    check(replace(case, **(SPARSE | {"index_dtype": FLAVOUR})), backend())


@pytest.mark.parametrize("score_bytes", [4096, 1 << 16])
def test_scores_over_budget_are_chunked(score_bytes):
    made = cases(FLAVOUR)
    for name in ("prefill-sparse-fp8_e4m3fn-37+83", "sparse-bfloat16-q3", "sparse-bfloat16-kv4"):
        check(made[name], backend(score_bytes=score_bytes))


@pytest.mark.parametrize("name", list(form_cases(FLAVOUR)))
def test_every_form_of_sparse_prefill(name):
    check_forms(form_cases(FLAVOUR)[name], backend())


@pytest.mark.parametrize("score_bytes", [1 << 20, 1 << 10])
def test_planned_workspace_serves_every_shape(score_bytes):
    check_planned(device(), score_bytes)


def test_batch_invariant_rows_do_not_depend_on_their_batch():
    case = Case((9000, 300, 64, 1000), (1,) * 4, kv_dtype=FLAVOUR, **M3)
    world = moved(build(case), device())
    wide = launch.planner(step_shape(case, batch_invariant=True), device(), poisoned_scratch())
    all_rows = launch.attend(world.q, world.cache, wide.plan(world.batch, 128), None, 0.09).clone()
    for row in range(4):
        batch = replace(
            world.batch,
            query_lens=(1,),
            seq_lens=(case.lens[row],),
            positions=world.batch.positions[row : row + 1],
            page_table=world.batch.page_table[row : row + 1],
        )
        alone = launch.attend(
            world.q[row : row + 1], world.cache, wide.plan(batch, 128), None, 0.09
        )
        assert torch.equal(alone[0], all_rows[row])


@pytest.mark.parametrize("kv_dtype", [DType.BF16, FLAVOUR])
def test_batch_invariant_rows_of_chosen_blocks_are_the_same_in_every_shape(kv_dtype):
    lens = (9000, 300, 64, 1000, 2500) * 12
    case = Case(lens, (1,) * len(lens), kv_dtype=kv_dtype, **M3, **SPARSE)
    world = moved(build(case), device())

    def attend(rows: int) -> torch.Tensor:
        batch = replace(
            world.batch,
            query_lens=(1,) * rows,
            seq_lens=lens[:rows],
            positions=world.batch.positions[:rows],
            page_table=world.batch.page_table[:rows],
        )
        shape = replace(step_shape(case, batch_invariant=True), max_seqs=rows, max_tokens=rows)
        plan = launch.planner(shape, device(), poisoned_scratch()).plan(batch, 128)
        chosen = launch.select(world.index_q[:rows], world.cache, plan, case.selection)
        return launch.attend(world.q[:rows], world.cache, plan, chosen, 0.09).clone()

    every = attend(len(lens))
    for rows in (1, 4, 5, 17):
        assert torch.equal(attend(rows), every[:rows])


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6, 1e12])
def test_extreme_value_scales(scale):
    case = Case((300, 129), (1, 1), kv_dtype=FLAVOUR, **M3)
    world = build(case)
    for name, lane in world.cache.lanes.items():
        if name.value == "v_scale":
            lane.mul_(scale)
    there = moved(world, device())
    plan = backend().plan(there.batch, case)
    got = launch.attend(there.q.float().to(BF16), there.cache, plan, None, 0.09)
    want = reference.attend(world.q, world.cache, world.batch, None, 0.09)
    assert_close(got.cpu().float() / scale, want.float() / scale, BF16)


@pytest.mark.parametrize("kv_dtype", [DType.BF16, FLAVOUR])
def test_pages_beyond_two_to_the_31_elements(kv_dtype):
    case = Case(
        (700, 130), (1, 1), kv_dtype=kv_dtype, **M3, **(SPARSE | {"selection": Selection(3)})
    )
    world = build(case)
    pages = 2**31 // (128 * 128) + 50
    pool = KVCache([case.layout], pages, device())
    lanes = pool.layers[0].lanes
    few = world.cache.num_pages
    for name, lane in lanes.items():
        source = world.cache.lanes[name].to(device())
        if lane.dtype.itemsize == 1:
            lane, source = lane.view(torch.uint8), source.view(torch.uint8)
        lane.fill_(float("nan") if lane.is_floating_point() else 0x7F)
        lane[-few:] = source
    table = world.batch.page_table
    high = torch.where(table >= 0, table + pages - few, -1)
    there = moved(world, device())
    batch = replace(there.batch, page_table=high.to(device()))
    cache = LayerCache(case.layout, lanes)
    plan = backend().plan(batch, case)
    blocks = reference.select(world.index_q, world.cache, world.batch, case.selection)
    chosen = launch.select(there.index_q, cache, plan, case.selection)
    assert torch.equal(launch.block_lists(chosen, plan).cpu(), blocks)
    for which, given in ((None, None), (blocks, chosen)):
        want = reference.attend(world.q, world.cache, world.batch, which, 0.09)
        assert_close(launch.attend(there.q, cache, plan, given, 0.09).cpu(), want, BF16)


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_captured_step_serves_other_lengths_and_fewer_sequences(query_len):
    """Lengths, pages and queries change in place; the graph is replayed, nothing is compiled."""
    lens = (5000, 700, 129, 2048)
    case = Case(lens, (query_len,) * 4, kv_dtype=FLAVOUR, **M3, **SPARSE)
    shape = step_shape(case, max_seqs=4, max_tokens=4 * query_len, max_length=8192)
    planner = launch.planner(shape, device(), poisoned_scratch())
    worlds = [
        moved(build(replace(case, lens=other)), device())
        for other in (lens, (130, 4000, 257, 8), (0, 0, 700, 3))
    ]
    most = max(w.cache.num_pages for w in worlds)
    cache = KVCache([case.layout], most, device(), fill=float("nan")).layers[0]
    table = torch.full((4, 64), -1, dtype=torch.int32, device=device())
    q, index_q = torch.empty_like(worlds[0].q), torch.empty_like(worlds[0].index_q)
    positions = worlds[0].batch.positions.clone()

    def load(world):
        for name, lane in cache.lanes.items():
            byte = lane.dtype.itemsize == 1
            target = lane.view(torch.uint8) if byte else lane
            source = world.cache.lanes[name]
            target[: world.cache.num_pages] = source.view(torch.uint8) if byte else source
        table.fill_(-1)
        table[:, : world.batch.page_table.shape[1]] = world.batch.page_table
        q.copy_(world.q)
        index_q.copy_(world.index_q)
        return planner.plan(replace(world.batch, page_table=table, positions=positions), 128)

    def step(plan):
        dense = launch.attend(q, cache, plan, None, 0.09)
        chosen = launch.select(index_q, cache, plan, case.selection)
        return dense, launch.attend(q, cache, plan, chosen, 0.09)

    plan = load(worlds[0])
    step(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(plan)
    with counted_compilations() as compiled:
        for world in worlds:
            plan = load(world)
            for result in captured:
                result.fill_(float("nan"))
            graph.replay()
            eager = step(plan)
            torch.cuda.synchronize()
            for got, want in zip(captured, eager, strict=True):
                assert torch.isfinite(got.float()).all()
                assert torch.equal(got, want), "graph and eager differ"
    assert not compiled


def test_nothing_compiles_after_warm_up():
    """Random batches, lengths, tables and slices through prepared shapes."""
    generator = random.Random(0)
    case = Case((1,), (1,), kv_dtype=FLAVOUR, **M3, **SPARSE)
    scratch = poisoned_scratch()
    shapes = {
        query_len: step_shape(
            case, max_seqs=16, max_tokens=400 if query_len == 0 else 16 * query_len,
            max_length=4096, query_len=query_len,
        )
        for query_len in (0, 1, 4)
    }  # fmt: skip
    planners = {n: launch.planner(shape, device(), scratch) for n, shape in shapes.items()}

    def run(query_len: int) -> None:
        if query_len:
            seqs = generator.randint(1, 16)
            query_lens = (query_len,) * seqs
        else:
            query_lens = tuple(generator.randint(1, 70) for _ in range(generator.randint(1, 5)))
        lens = tuple(q + generator.randint(0, 2000) for q in query_lens)
        world = moved(build(replace(case, lens=lens, query_lens=query_lens)), device())
        # slices of larger tensors, so that addresses have every alignment a step can meet
        wide = torch.full(
            (len(lens) + 3, world.batch.page_table.shape[1] + 5), -1, dtype=torch.int32
        )
        table = wide.to(device())[1 : len(lens) + 1]
        table[:, : world.batch.page_table.shape[1]] = world.batch.page_table
        batch = replace(world.batch, page_table=table)
        plan = planners[query_len].plan(batch, 128)
        launch.attend(world.q, world.cache, plan, None, 0.09)
        chosen = launch.select(world.index_q, world.cache, plan, case.selection)
        launch.attend(world.q, world.cache, plan, chosen, 0.09)

    for query_len in shapes:
        run(query_len)
    with counted_compilations() as compiled:
        for _ in range(20):
            run(generator.choice(list(shapes)))
    torch.cuda.synchronize()
    assert not compiled, compiled
