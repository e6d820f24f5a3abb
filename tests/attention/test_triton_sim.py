"""The Triton kernels, built for AMD and executed from their IR, agree with the reference and ours.

Two compilers, one model of the hardware: what FlyDSL and Triton make of different sources lands on
the same numbers. The launches, their arguments and their tuning are the backend's own.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from minuet.attention import reference
from minuet.attention.reference import Selection
from minuet.kv.cache import KVCache
from minuet.kv.layout import Form
from minuet.kv.write import write as reference_write
from minuet.testing.amdgpu import lanes
from tests.attention.conformance import (
    World,
    assert_close,
    assert_nearly_equal,
    assert_same_selection,
    build,
    norms,
    reference_blocks,
    rotation,
)
from tests.attention.flydsl_cases import EDGES, RAGGED, case, main_keys, storage

pytest.importorskip("triton")
from minuet.attention.backends.flydsl import launch as flydsl
from minuet.attention.backends.triton import attending, selecting, writing
from tests.attention import triton_sim
from tests.attention.flydsl_sim import ARCHS, SimRunner, compiled

pytestmark = [
    pytest.mark.sim,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # Triton announces its own future
]
SCALE = 128**-0.5
KINDS = ("bf16", "fp8")


@dataclass
class Step:
    """A batch of one case in the simulator.

    Attributes:
        arch: which.
        world: contexts in the form that the Triton backend reads.
        plan: of the step, for a device of ``units`` compute units.
        order: of waves.
    """

    arch: str
    world: World
    units: int = 8
    order: int | None = None

    def __post_init__(self):
        self.plan = triton_sim.plan(self.world, self.arch, self.units)

    def attend(self, blocks=None):
        """Output of ``attend`` over scores or lists, or over everything."""
        world, out = self.world, torch.full_like(self.world.q, float("nan"))
        launches = attending.attend_launches(world.q, out, world.cache, self.plan, blocks, SCALE)
        triton_sim.run(launches, self.arch, self.order)
        return out

    def scores(self):
        """Block scores, as ``select`` leaves them for ``attend``."""
        world = self.world
        shape = (world.case.kv_heads, world.batch.num_tokens, self.plan.shape.max_blocks)
        orders = torch.full(shape, -1, dtype=torch.int32)
        scores = selecting.Scores(orders, world.case.selection)
        made = selecting.score_launch(world.index_q, world.cache, self.plan, scores)
        triton_sim.run([made], self.arch, self.order)
        return scores

    def lists(self, scores):
        """Lists made from scores."""
        heads, tokens, _ = scores.orders.shape
        lists = torch.full((tokens, heads, scores.selection.top_blocks), -2, dtype=torch.int32)
        made = selecting.list_launch(scores, lists, self.plan, 0)
        triton_sim.run([made], self.arch, self.order)
        return lists

    def expected(self, blocks=None):
        world = self.world
        return reference.attend(world.q, world.cache, world.batch, blocks, SCALE)


def head_major(lens, dtype, **changes):
    return build(case(lens, dtype, form=Form.HEAD_MAJOR, **changes))


# --- dense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 16), (2, 4)])
def test_dense_decode_equals_reference_at_length_edges(arch, dtype, kv_heads, group):
    world = head_major(EDGES, storage(arch, dtype), kv_heads=kv_heads, group=group)
    step = Step(arch, world, 8 * kv_heads)
    assert_close(step.attend(), step.expected(), torch.bfloat16)
    parts = step.plan.tables["rows"][:, 1].tolist()
    assert max(parts) > 1, "the case must split"
    assert min(parts) == 1, "and write directly"


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_two_compilers_agree_on_a_ragged_batch_with_an_empty_row(arch, dtype):
    pytest.importorskip("flydsl")
    kind = storage(arch, dtype)
    step = Step(arch, head_major(RAGGED, kind), order=7)
    theirs = step.attend()
    assert_close(theirs, step.expected(), torch.bfloat16)
    assert (theirs[1] == 0).all(), "an empty row is zero"
    compiled(*main_keys(arch))
    shuffled = build(case(RAGGED, kind))  # the same contexts in the form that FlyDSL reads
    plan = flydsl.plan(shuffled.batch, 128, num_kv_heads=2, runner=SimRunner(arch))
    ours = flydsl.attend_dense(shuffled.q, shuffled.cache, plan, None, SCALE)
    assert_close(ours, theirs, torch.bfloat16)


@pytest.mark.parametrize("arch", ARCHS)
def test_verification_rows_see_only_their_past(arch):
    world = head_major((3, 130, 700), storage(arch, "bf16"), query_len=3, kv_heads=1, group=16)
    step = Step(arch, world)
    assert_close(step.attend(), step.expected(), torch.bfloat16)


# --- sparse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("kv_heads", "units"), [(1, 16), (2, 8)])  # two parts a row, one
def test_selection_and_sparse_decode_equal_reference(arch, dtype, kv_heads, units):
    lens = (*EDGES, 2500)  # 20 blocks of 16 wanted
    world = head_major(lens, storage(arch, dtype), sparse=True, kv_heads=kv_heads)
    step = Step(arch, world, units)
    assert step.plan.row_parts(kv_heads, 16) == units // 7 // kv_heads or 1
    scores = step.scores()
    lists = step.lists(scores)
    assert_same_selection(lists, reference_blocks(world), world)
    source = scores if kv_heads == 1 else lists
    assert_close(step.attend(source), step.expected(lists), torch.bfloat16)


@pytest.mark.parametrize("arch", ARCHS)
def test_sparse_rows_of_a_ragged_batch_in_random_order_of_waves(arch):
    chosen = Selection(16, init_blocks=1, local_blocks=2)
    lens = (*RAGGED[:-1], 2500)
    kind = storage(arch, "fp8")
    world = head_major(lens, kind, sparse=True, selection=chosen, kv_heads=1)
    step = Step(arch, world, 16, order=3)
    scores = step.scores()
    lists = step.lists(scores)
    assert_same_selection(lists, reference_blocks(world), world)
    got = step.attend(scores)
    assert_close(got, step.expected(lists), torch.bfloat16)
    assert (got[1] == 0).all(), "an empty row is zero"


# --- prefill -------------------------------------------------------------------------------------

# FP8 on gfx1250 is not here: the compiler takes more than a minute for it.
PREFILL = [("gfx942", "fp8"), ("gfx950", "bf16"), ("gfx1250", "bf16")]


@pytest.mark.parametrize(("arch", "dtype"), PREFILL)
def test_a_ragged_step_over_everything_equals_the_reference(arch, dtype):
    world = build(
        replace(case((40, 300), storage(arch, dtype), form=Form.HEAD_MAJOR), query_lens=(3, 20))
    )
    step = Step(arch, world)
    assert_close(step.attend(), step.expected(), torch.bfloat16)


@pytest.mark.parametrize(("arch", "dtype"), PREFILL)
def test_a_ragged_step_over_chosen_blocks_equals_the_reference(arch, dtype):
    chosen = Selection(2)
    one = case((40, 400), storage(arch, dtype), form=Form.HEAD_MAJOR, sparse=True, selection=chosen)
    world = build(replace(one, query_lens=(3, 20)))
    step = Step(arch, world)
    got = step.attend(selecting.Deferred(world.index_q, world.cache, chosen))
    assert_close(got, step.expected(reference_blocks(world)), torch.bfloat16)


# --- write ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_writer_stores_the_bytes_of_the_reference(arch, dtype):
    kind = storage(arch, dtype)
    one = case((), kind, form=Form.HEAD_MAJOR, index_dim=128, index_dtype=kind)
    slots = torch.tensor([17, 0, -1, 2 * 128 + 3, 4 * 128 - 1])
    heads = one.kv_heads * one.group
    width = (heads + 2 * one.kv_heads + one.kv_heads + 1) * 128
    generator = torch.Generator().manual_seed(3)
    packed = torch.randn(len(slots), width, generator=generator).to(torch.bfloat16)
    packed[1, heads * 128 :] = 0  # K and V of one token: scale 1
    cos, sin = rotation(torch.arange(len(slots)) * 37, 64)
    mine, theirs = [KVCache([one.layout], 4, fill=float("nan")).layers[0] for _ in range(2)]
    queries = packed.new_empty(len(slots), heads, 128), packed.new_empty(len(slots), 2, 128)
    made = writing.write_launch(
        mine, packed, slots, cos, sin, norms(one), queries, triton_sim.target(arch)
    )
    triton_sim.run([made], arch)
    want = reference_write(theirs, packed, slots, cos, sin, norms(one))
    for got, expected in zip(queries, want, strict=True):
        assert_nearly_equal(got, expected)
    for name, lane in theirs.lanes.items():
        assert_nearly_equal(mine.lanes[name], lane)


# --- is the model of transposed loads seen? ------------------------------------------------------


def no_exchange(lane, element):
    return lane + 0 * element, element + 0 * lane


SIXTEEN_BITS = lanes.TRANSPOSED["llvm.amdgcn.ds.load.tr16.b128"][1]


@pytest.mark.parametrize(
    ("arch", "dtype", "name", "wrong"),
    [
        ("gfx950", "bf16", "llvm.amdgcn.ds.read.tr16.b64", no_exchange),
        ("gfx1250", "bf16", "llvm.amdgcn.ds.load.tr16.b128", no_exchange),
        ("gfx1250", "fp8", "llvm.amdgcn.ds.load.tr8.b64", SIXTEEN_BITS),
    ],
)
def test_another_mapping_of_transposed_loads_gives_wrong_numbers(
    arch, dtype, name, wrong, monkeypatch
):
    step = Step(arch, head_major((300, 129), storage(arch, dtype)))
    world, want = step.world, step.expected().float()
    first, *_ = attending.attend_launches(world.q, world.q, world.cache, step.plan, None, SCALE)
    assert name in triton_sim.callees(first, arch)
    bits, _ = lanes.TRANSPOSED[name]
    monkeypatch.setattr(lanes, "TRANSPOSED", {**lanes.TRANSPOSED, name: (bits, wrong)})
    difference = (step.attend().float() - want).abs().max()
    assert not difference <= 0.1 * want.abs().max()
