"""Each mistake a paged-decode kernel can make, made in its IR, is caught in the simulator."""

import re

import pytest
import torch

from minuet.attention import reference
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import KVCache
from minuet.kv.layout import LaneName
from tests.attention.conformance import (
    assert_close,
    build,
    norms,
    reference_blocks,
    rotation,
)
from tests.attention.flydsl_cases import case, fp8_of, main_keys

pytest.importorskip("flydsl")
from minuet.attention.backends.flydsl import launch
from minuet.attention.backends.flydsl.signatures import SIGNATURES
from minuet.testing.amdgpu import SimulationError
from tests.attention.flydsl_sim import ARCHS, SimRunner, compiled

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=ARCHS)
def arch(request):
    """An arch whose kernels are compiled."""
    compiled(*main_keys(request.param))
    return request.param


def param(name):
    """The IR name of a parameter of ``attend``."""
    return f"%{[n for n, _ in SIGNATURES['attend'].params].index(name)}"


def results_of(text, pattern):
    """Names defined by lines that match."""
    return re.findall(rf"(%\d+) = {pattern}", text)


def swapped_operands(text):
    """The matrix instruction is given B's lanes for A's."""
    return re.sub(
        r"(@llvm\.amdgcn\.[mw]f?mm?a\.[^(]*\()(<[^>]*> %\d+), (<[^>]*> %\d+)", r"\1\3, \2", text
    )


def wrong_rows(text):
    """A lane takes itself for the one eight columns on."""
    return re.sub(r"(%\d+) = and i32 (%\d+), 15\n", r"\1 = xor i32 \2, 8\n", text, count=1)


def no_barrier(text):
    """Waves merge without waiting for each other."""
    return re.sub(r"call void @llvm\.amdgcn\.s\.barrier(\.wait)?\([^)]*\)\n", "\n", text, count=1)


def tail_mask_off_by_one(text):
    """A query sees one token too many."""
    (loaded,) = results_of(
        text, rf"load i64, ptr addrspace\(1\) {results_of_gep(text, 'positions')[0]},"
    )
    (narrow,) = results_of(text, rf"trunc i64 {loaded} to i32")
    return text.replace(f"add i32 {narrow}, 1", f"add i32 {narrow}, 2")


def results_of_gep(text, name):
    """Names of addresses computed straight from a parameter."""
    return results_of(text, rf"getelementptr \w+, ptr addrspace\(1\) {param(name)},")


def dropped_scale(text, name):
    """Loads through a scale's pointer are replaced by ones where they are multiplied."""
    for address in results_of_gep(text, name):
        for vector in results_of(
            text, rf"load <4 x float>, ptr addrspace\(1\) {re.escape(address)},"
        ):
            for element in results_of(text, rf"extractelement <4 x float> {vector}, i64 \d"):
                text = re.sub(
                    rf"fmul float (%\d+), {element}\n", r"fmul float \1, 1.000000e+00\n", text
                )
    return text


def dropped_k_scale(text):
    """Scores are those of the stored codes."""
    return dropped_scale(text, "k_scale")


def dropped_v_scale(text):
    """Values are the stored codes."""
    return dropped_scale(text, "v_scale")


def page_step_one(text):
    """Pages are taken to be one head apart instead of all heads."""
    for wide in results_of(text, rf"sext i32 {param('kv_heads')} to i64"):
        text = text.replace(f"mul i64 {wide}, 16384", "mul i64 1, 16384")
    return text


def stale_values_multiplied(text):
    """V of tokens that were never written is not cleared: zero times NaN."""
    return re.sub(r"select i1 (%\d+), i32 -1, i32 %\d+", r"select i1 \1, i32 -1, i32 -1", text)


def empty_records_write(text):
    """Unused records, all zero, write their empty result into slot 0."""
    (vectors,) = results_of(text, rf"mul i32 {param('group')}, {param('query_len')}")
    return re.sub(rf"select i1 %\d+, i32 {vectors}, i32 0", f"add i32 {vectors}, 0", text)


MUTANTS = [
    swapped_operands,
    wrong_rows,
    no_barrier,
    tail_mask_off_by_one,
    dropped_k_scale,
    dropped_v_scale,
    page_step_one,
    stale_values_multiplied,
    empty_records_write,
]


def run(arch, edit, order=None):
    """Dense FP8 decode of two sequences that split, under a mutation of ``attend``."""
    world = build(case((300, 700), fp8_of(arch)))
    runner = SimRunner(arch, order=order, edits={"attend": edit} if edit else {})
    plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=runner)
    got = launch.attend_dense(world.q, world.cache, plan, None, 128**-0.5)
    want = reference.attend(world.q, world.cache, world.batch, None, 128**-0.5)
    assert_close(got, want, torch.bfloat16)


def test_the_kernel_as_it_is_passes(arch):
    run(arch, None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_the_mutation_is_caught(arch, mutant):
    with pytest.raises((AssertionError, SimulationError)) as caught:
        run(arch, mutant)
    assert "the mutation changes nothing" not in str(caught.value)


def test_a_missing_barrier_is_called_a_race_whatever_the_order_of_waves(arch):
    for order in (None, 0, 1):
        with pytest.raises(SimulationError, match=r"race|never written"):
            run(arch, no_barrier, order)


# --- the other kernels ---------------------------------------------------------------------------


def another_flavours_maximum(text):
    """The scale of e4m3fn is taken from fnuz's 240, and stores what fits there."""
    return text.replace("4.480000e+02", "2.400000e+02")


def ties_to_the_highest(text):
    """Equal scores are ordered by rising block."""
    return re.sub(r"sub i32 -1, (%\d+)\n", r"add i32 \1, 0\n", text, count=1)


def tokens_of_the_future(text):
    """Scores take in tokens behind the query's own."""
    first, *rest = re.split(r"(?<=icmp sle i32 )", text)
    return (
        first
        + rest[0]
        + "".join(re.sub(r"^(%\d+), %\d+", r"\1, 2147483647", part) for part in rest[1:])
    )


def no_barrier_in_the_scan(text):
    """A step of the planner's scan reads before the one before it is written."""
    barrier = "call void @llvm.amdgcn.s.barrier()"
    before, _, after = text.partition(barrier)
    return before + barrier + after.replace(barrier, "", 1)


def test_ties_to_the_highest_block_are_caught():
    compiled(*main_keys("gfx950"))
    chosen, lists = Selection(3), []
    world = build(case((6 * 128 - 40,), DType.BF16, sparse=True, selection=chosen))
    world.cache.index_k.fill_(0.25)
    for edits in ({}, {"choose": ties_to_the_highest}):
        runner = SimRunner("gfx950", edits=edits)
        plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=runner)
        lists.append(launch.select(world.index_q, world.cache, plan, chosen)[0, 0].tolist())
    assert lists[0] == [0, 1, 5] == reference_blocks(world)[0, 0].tolist()
    assert lists[1] != lists[0]


def test_scores_of_the_future_are_caught():
    compiled(*main_keys("gfx950"))
    world = build(case((100,), DType.BF16, sparse=True, selection=Selection(3)))
    own = int(world.batch.page_table[0, 0])
    world.cache.index_k[own, 100:] = 1e4 * torch.sign(world.index_q[0, 0])
    for edits, seen in (({}, False), ({"scores": tokens_of_the_future}, True)):
        runner = SimRunner("gfx950", edits=edits)
        plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=runner)
        launch.select(world.index_q, world.cache, plan, world.case.selection)
        scores = plan.planner.scratch["scores"].view(torch.float32)
        assert (float(scores.max()) > 1e3) == seen


def test_a_maximum_of_the_other_flavour_is_caught():
    compiled(*main_keys("gfx950"))
    one = case((), DType.FP8_E4M3FN)
    packed = torch.randn(2, 12 * 128, generator=torch.Generator().manual_seed(1))
    scales = []
    for edits in ({}, {"write": another_flavours_maximum}):
        cache = KVCache([one.layout], 1, fill=float("nan")).layers[0]
        step = (torch.tensor([0, 1]), *rotation(torch.arange(2), 64), norms(one))
        launch.write(cache, packed.to(torch.bfloat16), *step, SimRunner("gfx950", edits=edits))
        scales.append(cache.lanes[LaneName.V_SCALE][0, :, :2])
    torch.testing.assert_close(scales[1], scales[0] * 448 / 240)


def test_a_missing_barrier_of_the_planner_is_caught():
    compiled(*main_keys("gfx950"))
    shape = launch.StepShape(num_kv_heads=1, max_seqs=9, max_tokens=9, max_length=4096, query_len=1)
    lengths = torch.tensor([700, 0, 4096, 1], dtype=torch.int32)
    for edits, order in (({}, 0), ({"plan": no_barrier_in_the_scan}, None)):
        runner = SimRunner("gfx950", edits=edits, order=order)
        planner = launch.planner(shape, torch.device("cpu"), runner=runner)
        if edits:
            with pytest.raises(SimulationError, match=r"race|never written"):
                planner.refresh_on_device(lengths, 4)
        else:
            planner.refresh_on_device(lengths, 4)
