"""After start-up nothing is allocated, planned anew or chosen again: F-1 (T1a, T1b, T1e), F-4."""

import random

import pytest

from minuet.attention import dispatch
from minuet.platform.arch import get
from tests.attention.fake_engine import RUNGS, FakeEngine, FakeMemory

ARCHS = ["sm90", "gfx1250"]
MAX_TOKENS = 16384
MEMORY_BYTES = 100 * 2**30
MAX_BUCKETS = 16


def engine(arch_name="gfx1250", **sizes):
    return FakeEngine(get(arch_name), FakeMemory(MEMORY_BYTES), max_tokens=MAX_TOKENS, **sizes)


@pytest.mark.parametrize("arch_name", ARCHS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_five_thousand_steps_of_any_length_allocate_and_plan_nothing(arch_name, num_kv_heads):
    served = engine(arch_name, num_kv_heads=num_kv_heads)
    assert len(served.buckets) <= MAX_BUCKETS
    allocations, plans = len(served.memory.taken), len(served.plans)
    evaluations = dispatch.evaluations()
    assert plans <= len(RUNGS)

    rng = random.Random(0)
    used = set()
    for step in range(5000):
        if step % 5:
            served.prefill(rng.randint(1, MAX_TOKENS))
        else:
            lengths = [rng.randint(1, 131072) for _ in range(rng.randint(1, RUNGS[-1]))]
            served.decode(lengths)
            used.add(id(served.plans.for_batch(len(lengths))))
    assert len(served.memory.taken) == allocations
    assert len(served.plans) == plans
    assert len(used) <= len(RUNGS)
    assert dispatch.evaluations() == evaluations


@pytest.mark.parametrize("arch_name", ARCHS)
def test_prefill_scratch_is_the_block_scores_and_lists_and_stays_below_a_declared_constant(
    arch_name,
):
    small, large = engine(arch_name), engine(arch_name, rungs=(1,))
    for served in (small, large):
        for tokens in range(1, MAX_TOKENS, 97):
            assert all(s.end <= served.workspace.layout.total_bytes for s in served.prefill(tokens))
    # scores 64 MiB, lists of 16384 tokens 1 MiB, partial results of 512 parts
    assert small.workspace.layout.total_bytes <= 72 * 2**20


@pytest.mark.parametrize("arch_name", ARCHS)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_kv_sizer_sees_memory_less_exactly_what_was_declared(arch_name, in_flight):
    served = engine(arch_name, in_flight=in_flight)
    assert served.kv_bytes == MEMORY_BYTES - served.declared_bytes
    assert served.declared_bytes > 0
    served.decode([5, 131072])
    served.prefill(MAX_TOKENS)
    assert served.memory.free_bytes == 0


def test_two_micro_batches_in_flight_share_neither_scratch_nor_plan():
    served = engine(in_flight=2)
    steps = [lambda lane: served.decode([100, 5000], lane), lambda lane: served.prefill(300, lane)]
    for first in steps:
        for second in steps:
            mine, other = first(0), second(1)
            assert mine
            assert other
            assert not any(a.offset < b.end and b.offset < a.end for a in mine for b in other)
    a, b = (served.plans.for_batch(2, lane) for lane in (0, 1))
    assert a.buffer is not b.buffer
