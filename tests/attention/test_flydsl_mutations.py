"""Each mistake a paged-decode kernel can make, made in its IR, is caught in the simulator."""

import re

import pytest
import torch

from minuet.attention import reference
from tests.attention.conformance import assert_close, build
from tests.attention.flydsl_cases import case, fp8_of, main_keys

pytest.importorskip("flydsl")
from minuet.attention.backends.flydsl import launch
from minuet.attention.backends.flydsl.signatures import SIGNATURES
from minuet.testing.amdgpu import SimulationError
from tests.attention.flydsl_sim import SimRunner, compiled

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]
ARCHS = ("gfx950", "gfx1250")


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
