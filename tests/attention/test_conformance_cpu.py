"""The CPU backend agrees with the reference on every dtype, layout and length edge."""

from dataclasses import replace

import pytest
import torch

from minuet.attention import reference
from minuet.attention.backends.cpu import launch
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import KVCache
from minuet.kv.layout import Form, LaneName
from minuet.kv.write import write
from tests.attention.conformance import (
    Case,
    assert_close,
    assert_same_selection,
    build,
    norms,
    reference_blocks,
    rotation,
)

PAGE = 16
EDGES = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1, 7 * PAGE - 1)
STORAGE = (DType.FP32, DType.BF16, DType.FP16, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ)


def attend(world, blocks):
    scale = world.case.head_dim**-0.5
    plan = launch.plan(world.batch, world.case.page)
    return (
        launch.attend(world.q, world.cache, plan, blocks, scale),
        reference.attend(world.q, world.cache, world.batch, blocks, scale),
    )


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("kv_dtype", STORAGE)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_dense_decode_equals_reference_at_length_edges(form, kv_dtype, kv_heads):
    case = Case(EDGES, (1,) * len(EDGES), kv_heads=kv_heads, group=2, kv_dtype=kv_dtype, form=form)
    got, want = attend(build(case), None)
    assert_close(got, want, case.q_dtype)


@pytest.mark.parametrize("query_len", [2, 3, 5, 8])
def test_verification_rows_see_only_their_past(query_len):
    lens = tuple(n for n in EDGES if n >= query_len)
    case = Case(lens, (query_len,) * len(lens))
    got, want = attend(build(case), None)
    assert_close(got, want, case.q_dtype)


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_query_types_are_kept(q_dtype):
    case = Case((5, 40), (1, 1), q_dtype=q_dtype, kv_dtype=DType.BF16)
    got, want = attend(build(case), None)
    assert got.dtype == q_dtype
    assert_close(got, want, q_dtype)


SPARSE = Case(EDGES, (1,) * len(EDGES), index_dim=32, selection=Selection(3))


@pytest.mark.parametrize("kv_dtype", STORAGE)
@pytest.mark.parametrize("index_dtype", [DType.FP32, DType.BF16, DType.FP8_E4M3FN])
def test_sparse_decode_equals_reference(kv_dtype, index_dtype):
    world = build(replace(SPARSE, kv_dtype=kv_dtype, index_dtype=index_dtype))
    want_blocks = reference_blocks(world)
    plan = launch.plan(world.batch, PAGE)
    got_blocks = launch.select(world.index_q, world.cache, plan, world.case.selection)
    assert_same_selection(got_blocks, want_blocks, world)
    got, want = attend(world, want_blocks)
    assert_close(got, want, world.case.q_dtype)


@pytest.mark.parametrize(
    "selection",
    [Selection(1), Selection(2, 1, 1), Selection(4, 1, 2), Selection(16), Selection(3, 0, 3)],
)
@pytest.mark.parametrize("query_len", [1, 2, 5])
def test_selection_equals_reference_for_forced_blocks_and_the_top_k_edge(selection, query_len):
    lens = tuple(n + query_len for n in EDGES)
    world = build(
        replace(SPARSE, lens=lens, query_lens=(query_len,) * len(lens), selection=selection)
    )
    want = reference_blocks(world)
    got = launch.select(world.index_q, world.cache, launch.plan(world.batch, PAGE), selection)
    assert_same_selection(got, want, world)
    own = world.batch.positions // PAGE
    assert (got == own[:, None, None]).any(-1).all(), "the query's own block is always chosen"
    assert_close(*attend(world, want), world.case.q_dtype)


def test_exact_ties_go_to_the_lowest_block():
    world = build(replace(SPARSE, lens=(6 * PAGE,), query_lens=(1,), selection=Selection(3)))
    world.cache.index_k.fill_(0.25)
    got = launch.select(world.index_q, world.cache, launch.plan(world.batch, PAGE), Selection(3))
    assert got[0, 0].tolist() == [0, 1, 5]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("cached", [0, 1, PAGE, 2 * PAGE + 5])
@pytest.mark.parametrize("chunk", [9, PAGE, 5 * PAGE + 3, 20 * PAGE])
def test_prefill_chunks_equal_reference_with_a_cached_prefix(sparse, cached, chunk, monkeypatch):
    monkeypatch.setattr(launch, "TILE", 48)  # several tiles, one of them partial
    case = replace(SPARSE if sparse else Case((), ()), lens=(cached + chunk,), query_lens=(chunk,))
    world = build(case)
    want_blocks = reference_blocks(world)
    if sparse:
        plan = launch.plan(world.batch, PAGE)
        got = launch.select(world.index_q, world.cache, plan, case.selection)
        assert_same_selection(got, want_blocks, world)
    assert_close(*attend(world, want_blocks), case.q_dtype)


def test_mixed_steps_keep_every_row_in_its_place():
    query_lens, lens = (1, 30, 1, 4, 100, 1), (50, 30, 3, 60, 130, 49)
    world = build(replace(SPARSE, lens=lens, query_lens=query_lens))
    assert_close(*attend(world, reference_blocks(world)), world.case.q_dtype)
    assert_close(*attend(world, None), world.case.q_dtype)


def test_groups_hold_every_token_once_and_little_padding():
    lens = (*range(1, 400, 7), 5000)
    world = build(Case(lens, (1,) * len(lens), kv_heads=1, group=1, head_dim=16))
    plan = launch.plan(world.batch, PAGE)
    tokens = torch.cat([g.tokens for g in plan.groups]).sort().values
    assert tokens.tolist() == list(range(len(lens)))
    gathered = sum(g.pages.numel() for g in plan.groups)
    assert gathered <= 1.35 * sum(-(-n // PAGE) for n in lens)


# --- write ---------------------------------------------------------------------------------------


def written(case, slots, fill=float("nan")):
    layout = case.layout
    cache = KVCache([layout], 6, fill=fill).layers[0]
    generator = torch.Generator().manual_seed(3)
    width = (case.group + 2) * case.kv_heads * case.head_dim
    width += (case.kv_heads + 1) * case.index_dim if case.index_dim else 0
    packed = torch.randn(len(slots), width, generator=generator)
    cos, sin = rotation(torch.arange(len(slots)) * 37, 32)
    q, index_q = write(cache, packed, torch.tensor(slots), cos, sin, norms(case))
    return cache, packed, q, index_q


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("kv_dtype", STORAGE)
@pytest.mark.parametrize("index_dim", [0, 32])
def test_written_lanes_read_back_at_the_layouts_addresses(form, kv_dtype, index_dim):
    case = Case((), (), kv_dtype=kv_dtype, form=form, index_dim=index_dim)
    slots = [17, 0, 95, 40]
    cache, packed, _, _ = written(case, slots)
    layout = case.layout
    v = packed[:, (case.group + 1) * 128 : (case.group + 2) * 128].view(-1, 2, 64)
    flat_v = cache.v.float().flatten()
    for row, slot in enumerate(slots):
        page, token = divmod(slot, PAGE)
        for head in range(2):
            scale = 1.0
            if layout.has_scales:
                at = layout.address(LaneName.V_SCALE, page, token, head)
                scale = float(cache.lanes[LaneName.V_SCALE].flatten()[at])
                top = torch.finfo(cache.v.dtype).max
                torch.testing.assert_close(scale, float(v[row, head].abs().max()) / top)
            for channel in (0, 15, 16, 63):
                at = layout.address(LaneName.V, page, token, head, channel)
                got, want = float(flat_v[at]) * scale, float(v[row, head, channel])
                assert abs(got - want) <= 0.07 * abs(want) + scale * 2**-9


@pytest.mark.parametrize("kv_dtype", STORAGE)
def test_rows_with_slot_minus_one_leave_the_cache_untouched(kv_dtype):
    case = Case((), (), kv_dtype=kv_dtype, index_dim=32)
    cache, *_ = written(case, [-1, 33, -1])
    for lane in cache.lanes.values():
        touched = ~torch.isnan(lane.float()).flatten(1).all(1)
        assert touched.nonzero().flatten().tolist() == [33 // PAGE]


def test_a_zero_vector_is_stored_with_scale_one_and_a_large_one_saturates():
    case = Case((), (), kv_dtype=DType.FP8_E4M3FN)
    cache = KVCache([case.layout], 2, fill=float("nan")).layers[0]
    k = torch.zeros(2, 2, 64)
    k[1] = 3.0e38
    from minuet.kv.write import store

    store(cache, torch.tensor([0, 1]), k, k, None)
    scales = cache.lanes[LaneName.K_SCALE][0, :, :2]
    assert scales[:, 0].tolist() == [1.0, 1.0]
    read_k, _, _ = reference.read(cache, torch.tensor([0]), 2)
    assert torch.isfinite(read_k).all()
    torch.testing.assert_close(read_k[1], k[1], rtol=1e-6, atol=0)


def test_index_dtype_is_its_own_and_not_that_of_the_kv_lanes():
    case = Case((), (), kv_dtype=DType.FP8_E4M3FN, index_dim=32, index_dtype=DType.BF16)
    cache, *_ = written(case, [5])
    assert cache.index_k.dtype == torch.bfloat16
    assert torch.isfinite(cache.index_k[0, 5].float()).all()


def test_a_tile_stays_within_its_bytes_whatever_the_context(monkeypatch):
    world = build(replace(SPARSE, lens=(4000,), query_lens=(90,)))
    plan = launch.plan(world.batch, PAGE)
    whole = launch.select(world.index_q, world.cache, plan, world.case.selection)
    monkeypatch.setattr(launch, "_TILE_BYTES", 4 * 2 * 4000 * 7)  # 7 query tokens at this context
    widths = [t.stop - t.start for t in launch._tiles(plan.groups[0], 4 * 2 * 4000)]
    assert max(widths) == 7
    assert sum(widths) == 90
    assert torch.equal(launch.select(world.index_q, world.cache, plan, world.case.selection), whole)
