"""FlyDSL kernels, executed from the compiler's IR for each arch, agree with the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from minuet.attention import reference
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.kv.cache import KVCache
from minuet.kv.write import write as reference_write
from tests.attention.conformance import (
    assert_close,
    assert_same_selection,
    build,
    norms,
    reference_blocks,
    rotation,
)
from tests.attention.flydsl_cases import (
    EDGES,
    OTHER_SHAPES,
    RAGGED,
    case,
    fp8_of,
    main_keys,
    storage,
)

pytest.importorskip("flydsl")
from minuet.attention.backends.flydsl import launch
from minuet.attention.plan import DecodePlan, PlanShape
from tests.attention.flydsl_sim import ARCHS, SimRunner, compiled

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]
SCALE = 128**-0.5


@pytest.fixture(scope="module", params=ARCHS)
def arch(request):
    """An arch whose kernels are compiled, in one go."""
    compiled(*main_keys(request.param))
    return request.param


def dense(world, runner):
    plan = launch.plan(
        world.batch, world.case.page, num_kv_heads=world.case.kv_heads, runner=runner
    )
    return launch.attend_dense(world.q, world.cache, plan, None, world.case.head_dim**-0.5)


def expected(world, blocks=None):
    return reference.attend(world.q, world.cache, world.batch, blocks, world.case.head_dim**-0.5)


# --- dense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 16), (2, 4)])
def test_dense_decode_equals_reference_at_length_edges(arch, dtype, kv_heads, group):
    world = build(case(EDGES, storage(arch, dtype), kv_heads=kv_heads, group=group))
    runner = SimRunner(arch)
    assert_close(dense(world, runner), expected(world), torch.bfloat16)
    plan, merge = runner.calls
    parts = plan.arguments["rows"][:, 1].tolist()
    assert max(parts) > 1, "the case must split"
    assert min(parts) == 1, "and write directly"
    assert merge.key.kernel == "merge"


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_ragged_batch_with_an_empty_row_and_waves_in_random_order(arch, dtype):
    world = build(case(RAGGED, storage(arch, dtype)))
    got = dense(world, SimRunner(arch, order=11))
    assert_close(got, expected(world), torch.bfloat16)
    assert (got[1] == 0).all(), "an empty row is zero"
    torch.testing.assert_close(got, dense(world, SimRunner(arch)), rtol=0, atol=0)


@pytest.mark.parametrize("query_len", [2, 8])
def test_verification_rows_see_only_their_past(arch, query_len):
    lens = (query_len, 127, 130, 700)
    world = build(case(lens, fp8_of(arch), query_len=query_len, kv_heads=1, group=16))
    assert_close(dense(world, SimRunner(arch)), expected(world), torch.bfloat16)


def test_a_ragged_step_runs_row_by_row_over_everything(arch):
    world = build(replace(case((40, 300), DType.BF16), query_lens=(3, 12)))
    runner = SimRunner(arch)
    assert_close(dense(world, runner), expected(world), torch.bfloat16)
    assert [dict(c.key.options)["mode"] for c in runner.calls] == ["rows"]


def test_other_pages_and_head_sizes(arch):
    for name, dtype, head_dim, page in OTHER_SHAPES:
        if name != arch:
            continue
        shape = {"head_dim": head_dim, "page": page}
        world = build(case((1, page, page + 1, 333), storage(arch, dtype), **shape))
        assert_close(dense(world, SimRunner(arch)), expected(world), torch.bfloat16)
        ragged = build(replace(case((40, 90), storage(arch, dtype), **shape), query_lens=(2, 12)))
        assert_close(dense(ragged, SimRunner(arch)), expected(ragged), torch.bfloat16)


def test_sparse_heads_of_64_channels():
    kind = fp8_of("gfx950")
    world = build(case((300, 700), kind, sparse=True, head_dim=64, selection=Selection(3)))
    plan = launch.plan(
        world.batch, 128, num_kv_heads=2, runner=SimRunner("gfx950", compute_units=1)
    )
    blocks = reference_blocks(world)
    got = launch.attend_sparse(world.q, world.cache, plan, blocks, 64**-0.5)
    assert_close(got, expected(world, blocks), torch.bfloat16)


# --- sparse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_selection_and_sparse_decode_equal_reference(arch, dtype, kv_heads):
    lens = (*EDGES, 2500)  # 20 blocks of 16 wanted
    world = build(case(lens, storage(arch, dtype), sparse=True, kv_heads=kv_heads))
    runner = SimRunner(arch)
    plan = launch.plan(world.batch, 128, num_kv_heads=kv_heads, runner=runner)
    got_blocks = launch.select(world.index_q, world.cache, plan, world.case.selection)
    want_blocks = reference_blocks(world)
    assert_same_selection(got_blocks, want_blocks, world)
    got = launch.attend_sparse(world.q, world.cache, plan, want_blocks, SCALE)
    assert_close(got, expected(world, want_blocks), torch.bfloat16)


# rows written directly, rows of several parts
@pytest.mark.parametrize(("units", "dtype"), [(1, "fp8"), (16, "fp8"), (16, "bf16")])
def test_sparse_rows_of_a_ragged_batch(arch, units, dtype):
    chosen = Selection(5, init_blocks=1, local_blocks=2)
    world = build(replace(case(RAGGED, storage(arch, dtype), sparse=True), selection=chosen))
    runner = SimRunner(arch, compute_units=units, order=3)
    plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=runner)
    blocks = launch.select(world.index_q, world.cache, plan, chosen)
    want_blocks = reference_blocks(world)
    assert_same_selection(blocks, want_blocks, world)
    got = launch.attend_sparse(world.q, world.cache, plan, blocks, SCALE)
    assert_close(got, expected(world, want_blocks), torch.bfloat16)
    assert [c.key.kernel for c in runner.calls].count("merge") == (units > 1)


def test_exact_ties_go_to_the_lowest_block_and_nan_ranks_last(arch):
    chosen = Selection(4)
    world = build(case((7 * 128,), DType.BF16, sparse=True, selection=chosen))
    world.cache.index_k.fill_(0.25)
    world.cache.index_k[int(world.batch.page_table[0, 1])] = float("nan")
    plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=SimRunner(arch))
    got = launch.select(world.index_q, world.cache, plan, chosen)
    assert got.tolist() == [[[0, 2, 3, 6]] * 2]


def test_scores_are_taken_in_chunks_of_the_given_scratch(arch):
    world = build(case((300, 129, 700), DType.BF16, sparse=True))
    runner = SimRunner(arch)
    plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=runner)
    plan.planner.scratch["scores"] = torch.zeros(2 * 6 * 4, dtype=torch.uint8)  # one token
    got = launch.select(world.index_q, world.cache, plan, world.case.selection)
    assert_same_selection(got, reference_blocks(world), world)
    assert [c.key.kernel for c in runner.calls] == ["scores", "choose"] * 3


def test_scratch_that_start_up_made_too_small_is_an_error():
    world = build(case((300, 129, 700), DType.BF16, sparse=True))
    shape = launch.StepShape(num_kv_heads=2, max_seqs=3, max_tokens=3, max_length=700, query_len=1)
    scratch = {"blocks": torch.zeros(8, dtype=torch.uint8)}
    planner = launch.planner(shape, torch.device("cpu"), scratch, SimRunner("gfx950"))
    with pytest.raises(ContractError, match="workspace slice blocks"):
        launch.select(world.index_q, world.cache, planner.plan(world.batch), Selection(4))
    with pytest.raises(ContractError, match="size of a step"):
        planner.plan(build(case((5,) * 4, DType.BF16)).batch)


def test_one_planner_serves_steps_of_any_size_up_to_its_own(arch):
    shape = launch.StepShape(num_kv_heads=2, max_seqs=6, max_tokens=6, max_length=2049, query_len=1)
    runner = SimRunner(arch)
    planner = launch.planner(shape, torch.device("cpu"), runner=runner)
    addresses = set()
    for lens in (EDGES, RAGGED, (2049,)):
        world = build(case(lens, DType.BF16))
        plan = planner.plan(world.batch)
        got = launch.attend_dense(world.q, world.cache, plan, None, SCALE)
        assert_close(got, expected(world), torch.bfloat16)
        held = [*planner.tables(), *planner.scratch.values()]
        addresses.add(tuple(tensor.data_ptr() for tensor in held))
    assert len(addresses) == 1, "tables and scratch stay where they are"
    assert len({call.key for call in runner.calls}) == 2, "and so do the kernels"


FAR = (
    300_000  # pages of 32 KiB and more: offsets beyond 2**32 elements in every lane but the scales
)


def test_offsets_of_a_large_cache_are_64_bits_wide(arch):
    kind = fp8_of(arch)
    world = build(case((300, 129), kind, sparse=True))
    runner = SimRunner(arch, shift=FAR)
    assert_close(dense(world, runner), expected(world), torch.bfloat16)
    plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=runner)
    blocks = launch.select(world.index_q, world.cache, plan, world.case.selection)
    want_blocks = reference_blocks(world)
    assert_same_selection(blocks, want_blocks, world)
    got = launch.attend_sparse(world.q, world.cache, plan, blocks, SCALE)
    assert_close(got, expected(world, want_blocks), torch.bfloat16)
    caches = [KVCache([world.case.layout], 4, fill=float("nan")).layers[0] for _ in range(2)]
    slots = torch.tensor([17, -1, 300])
    packed = torch.randn(3, 15 * 128, generator=torch.Generator().manual_seed(5))
    step = packed.to(torch.bfloat16), slots, *rotation(torch.arange(3), 64), norms(world.case)
    far = torch.where(slots < 0, slots, slots + FAR * 128)
    launch.write(caches[0], step[0], far, *step[2:], runner)
    reference_write(caches[1], *step)
    for name, lane in caches[1].lanes.items():
        same = caches[0].lanes[name].view(torch.uint8) == lane.view(torch.uint8)
        assert same.float().mean() > 0.999, name


# --- write ---------------------------------------------------------------------------------------


WRITERS = [
    ("bf16", {"index_dim": 128}),
    ("fp8", {"index_dim": 128}),
    ("fp8", {}),
    ("bf16", {"head_dim": 64, "page": 16}),
]


@pytest.mark.parametrize(("dtype", "changes"), WRITERS)
def test_the_writer_stores_the_bytes_of_the_reference(arch, dtype, changes):
    kind = storage(arch, dtype)
    one = case((), kind, **changes, index_dtype=kind)
    generator = torch.Generator().manual_seed(3)
    dim, page, index = one.head_dim, one.page, one.index_dim
    slots = torch.tensor([17, 0, -1, 2 * page + 3, 4 * page - 1])
    width = (4 + 2) * 2 * dim + (3 * index if index else 0)
    packed = torch.randn(len(slots), width, generator=generator).to(torch.bfloat16)
    packed[1, 8 * dim : 12 * dim] = 0  # K and V of one token: scale 1
    cos, sin = rotation(torch.arange(len(slots)) * 37, 64)
    caches = [KVCache([one.layout], 4, fill=float("nan")).layers[0] for _ in range(2)]
    got = launch.write(caches[0], packed, slots, cos, sin, norms(one), SimRunner(arch))
    want = reference_write(caches[1], packed, slots, cos, sin, norms(one))
    # the hardware's reciprocal root is within 1 ulp, so one rounding to BF16 may fall the other way
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None) == (theirs is want[1] and not index)
        if mine is not None:
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=2**-7, atol=1e-6)
    for name, lane in caches[1].lanes.items():
        mine = caches[0].lanes[name]
        same = mine.view(torch.uint8) == lane.view(torch.uint8)
        assert same.float().mean() > 0.999, name
        numbers = [torch.nan_to_num(x.float(), nan=-7.0) for x in (mine, lane)]
        torch.testing.assert_close(*numbers, rtol=2**-3 if kind.is_fp8 else 2**-7, atol=1e-6)


def test_an_index_key_of_64_channels_is_scored(arch):
    world = build(
        case((129, 2500), DType.BF16, sparse=True, index_dim=64, index_dtype=fp8_of(arch))
    )
    plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=SimRunner(arch))
    got = launch.select(world.index_q, world.cache, plan, world.case.selection)
    assert_same_selection(got, reference_blocks(world), world)


# --- plan ----------------------------------------------------------------------------------------

PLANS = [
    (dict(max_seqs=8, max_length=2**20, max_parts=256, budget=512), [200003] + [257] * 7),
    (dict(max_seqs=4, max_length=2**14, max_parts=256, budget=512), [8704] * 4),
    (dict(max_seqs=4, max_length=1000, max_parts=4, budget=6), [0, 1, 256, 257]),
    (dict(max_seqs=300, max_length=4096, max_parts=16, budget=333), [2048, 0, 700] * 97),
    (dict(max_seqs=9, max_length=4096, max_parts=4, budget=9, part_tiles=3), [4096, 0, 700, 1]),
    (dict(max_seqs=3, max_length=4096, max_parts=4, budget=10), []),
]


@pytest.mark.parametrize(("sizes", "lengths"), PLANS)
def test_the_device_planner_gives_the_hosts_integers(arch, sizes, lengths):
    shape = PlanShape(tile_tokens=256, **sizes)
    host = DecodePlan.over(shape, np.zeros(shape.size, np.int32)).refresh(lengths)
    planner = planner_of(shape, arch)
    planner.refresh_on_device(torch.tensor([*lengths, 0], dtype=torch.int32), len(lengths))
    assert np.array_equal(planner._tables.numpy(), host.buffer)


def planner_of(shape, arch):
    step = launch.StepShape(
        num_kv_heads=1,
        max_seqs=shape.max_seqs,
        max_tokens=shape.max_seqs,
        max_length=shape.max_length,
        query_len=1,
    )
    planner = launch.Planner(step, SimRunner(arch), torch.device("cpu"))
    planner.split = shape
    planner._tables = torch.full((shape.size,), -99, dtype=torch.int32)
    return planner


def test_a_planner_of_many_rows_needs_no_table_in_lds():
    # beyond 81,792 rows, what 320 KiB of LDS hold at four bytes a row
    shape = PlanShape(max_seqs=82_000, max_length=512, tile_tokens=256, max_parts=2, budget=82_100)
    lengths = np.resize(np.array([512, 3, 0], np.int64), 82_000)
    host = DecodePlan.over(shape, np.zeros(shape.size, np.int32)).refresh(lengths)
    planner = planner_of(shape, "gfx942")
    planner.refresh_on_device(torch.from_numpy(lengths.astype(np.int32)), len(lengths))
    assert np.array_equal(planner._tables.numpy(), host.buffer)
