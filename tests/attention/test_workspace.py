"""Scratch is asked for by its kernel and never shared by two steps: F-1, F-10, F-11l."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minuet.attention import backends
from minuet.attention.capability import StepSizes, WorkspaceSpec
from minuet.attention.contract import Op, Phase
from minuet.attention.plan import split_for
from minuet.attention.workspace import (
    ALIGNMENT_BYTES,
    Workspace,
    attend_workspace,
    covers_step,
    lay_out,
    score_chunk_tokens,
    select_workspace,
)
from minuet.errors import ContractError
from tests.attention.problems import DENSE, POLICY, SELECT, SPARSE

MIB = 2**20
OPS = st.sampled_from([(a, b) for i, a in enumerate(Op) for b in list(Op)[i:]])


@st.composite
def specs(draw):
    found = []
    for number in range(draw(st.integers(0, 6))):
        first, last = draw(OPS)
        size = draw(st.integers(0, 5000))
        found.append(WorkspaceSpec(f"s{number}", size, first=first, last=last))
    if draw(st.booleans()):
        found.append(WorkspaceSpec("counters", draw(st.integers(1, 999)), zeroed=True))
    return found


def meet(a, b):
    return a.offset < b.end and b.offset < a.end


DEMANDS = st.dictionaries(st.integers(0, 4), specs(), max_size=4)


# --- layout --------------------------------------------------------------------------------------


@given(DEMANDS, st.integers(1, 3))
@settings(max_examples=200)
def test_slices_that_live_together_never_overlap(demands, in_flight):
    layout = lay_out(demands, in_flight)
    for key, wanted in demands.items():
        for i, a in enumerate(wanted):
            place = layout.slice(key, a.name)
            assert place.bytes == a.bytes
            assert place.offset % ALIGNMENT_BYTES == 0
            assert place.end <= layout.lane_bytes
            for b in wanted[i + 1 :]:
                if a.zeroed or b.zeroed or a.overlaps(b):
                    assert not meet(place, layout.slice(key, b.name))


@given(DEMANDS)
def test_nothing_is_ever_placed_on_zeroed_memory(demands):
    layout = lay_out(demands)
    for key, wanted in demands.items():
        for spec in wanted:
            if not spec.zeroed:
                assert not any(meet(layout.slice(key, spec.name), z) for z in layout.zeroed)


@given(DEMANDS, st.integers(2, 4))
def test_two_steps_in_flight_never_share_a_byte(demands, in_flight):
    layout = lay_out(demands, in_flight)
    assert layout.total_bytes == in_flight * layout.lane_bytes
    places = [
        [layout.slice(key, spec.name, lane) for key, wanted in demands.items() for spec in wanted]
        for lane in range(in_flight)
    ]
    for lane, mine in enumerate(places):
        for others in places[lane + 1 :]:
            assert not any(meet(a, b) for a in mine for b in others)


@given(DEMANDS)
def test_demands_that_never_run_together_reuse_the_same_bytes(demands):
    sizes = [lay_out({key: wanted}).lane_bytes for key, wanted in demands.items()]
    zeroed = sum(s.bytes + ALIGNMENT_BYTES for w in demands.values() for s in w if s.zeroed)
    assert lay_out(demands).lane_bytes <= max(sizes, default=0) + zeroed


def test_lifetimes_that_do_not_meet_share_bytes():
    scores = WorkspaceSpec("scores", 1000, first=Op.SELECT, last=Op.SELECT)
    partials = WorkspaceSpec("partial_out", 900)
    blocks = WorkspaceSpec("blocks", 10, first=Op.SELECT)
    layout = lay_out({"step": [scores, partials, blocks]})
    assert layout.slice("step", "scores").offset == layout.slice("step", "partial_out").offset
    assert layout.lane_bytes == 1024 + ALIGNMENT_BYTES


def test_the_layout_answers_only_for_what_was_laid_out():
    layout = lay_out({"step": [WorkspaceSpec("a", 1)]})
    for key, name, lane in (("other", "a", 0), ("step", "b", 0), ("step", "a", 1)):
        with pytest.raises(ContractError):
            layout.slice(key, name, lane)
    with pytest.raises(ContractError):
        lay_out({"step": [WorkspaceSpec("a", 1), WorkspaceSpec("a", 2)]})
    with pytest.raises(ContractError):
        lay_out({}, in_flight=0)


def test_memory_is_allocated_once_and_zeroed_places_are_cleared_in_every_lane():
    allocations, cleared = [], []
    layout = lay_out({"step": [WorkspaceSpec("counters", 8, zeroed=True)]}, in_flight=2)
    workspace = Workspace(
        layout, lambda n: allocations.append(n), lambda _, place: cleared.append(place)
    )
    assert allocations == [layout.total_bytes]
    assert cleared == [workspace.slice("step", "counters", lane) for lane in (0, 1)]
    with pytest.raises(ContractError):
        Workspace(layout, lambda n: None)


# --- T10: what each kernel asks for --------------------------------------------------------------

DECODE = StepSizes(num_seqs=64, query_tokens=64, max_length=131072, slots=512, score_bytes=64 * MIB)
PREFILL = replace(DECODE, num_seqs=0, query_tokens=16384, slots=0)


def names(kernel, problem, sizes):
    return {spec.name for spec in kernel.workspace(problem, sizes)}


@pytest.mark.parametrize("backend", ["triton", "flydsl"])
def test_scratch_is_asked_for_by_the_kernel_that_uses_it_and_no_other(backend):
    for kernel in backends.capabilities(backend):
        if kernel.op is Op.WRITE:
            assert names(kernel, replace(SPARSE, op=Op.WRITE), DECODE) == set()
        elif kernel.op is Op.SELECT:
            assert names(kernel, SELECT, DECODE) == {"scores", "blocks"}
        else:
            problem = SPARSE if SPARSE.layer_kind in kernel.layer_kinds else DENSE
            prefill = replace(problem, phase=Phase.PREFILL)
            assert names(kernel, problem, DECODE) == {"partial_out", "partial_lse"}
            assert names(kernel, prefill, PREFILL) == set()


def test_the_cpu_backend_asks_for_nothing():
    for kernel in backends.capabilities("cpu"):
        assert kernel.workspace(SPARSE, DECODE) == ()


def test_partials_are_fp32_per_slot_and_query_vector():
    out, lse = attend_workspace(DENSE, DECODE)
    assert out.bytes == 512 * 16 * 128 * 4
    assert lse.bytes == 512 * 16 * 4
    verify, _ = attend_workspace(replace(DENSE, query_len=4), DECODE)
    assert verify.bytes == 4 * out.bytes
    rows, _ = attend_workspace(replace(SPARSE, query_len=4), DECODE)
    assert rows.bytes == out.bytes


def test_partials_are_bounded_by_the_budget_and_not_by_the_batch():
    def partial_bytes(batch):
        shape = split_for(
            POLICY, DENSE, compute_units=256, num_seqs=batch, query_tokens=batch, max_length=2**20
        )
        sizes = replace(DECODE, num_seqs=batch, query_tokens=batch, slots=shape.slots)
        return sum(spec.bytes for spec in attend_workspace(DENSE, sizes))

    assert partial_bytes(16384) == partial_bytes(512) <= 5 * MIB


# --- T11l ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("tokens", [1, 2048, 16384])
@pytest.mark.parametrize("max_length", [2048, 131072, 2**20])
def test_block_scores_stay_within_their_budget_at_any_context(heads, tokens, max_length):
    problem = replace(SELECT, num_q_heads=16 * heads, num_kv_heads=heads, index_heads=heads)
    sizes = replace(PREFILL, query_tokens=tokens, max_length=max_length, score_bytes=64 * MIB)
    scores, blocks = select_workspace(problem, sizes)
    assert scores.bytes <= sizes.score_bytes
    assert blocks.bytes == tokens * heads * 16 * 4
    chunk = score_chunk_tokens(problem, max_length, sizes.score_bytes)
    assert chunk >= 1
    assert scores.bytes == min(chunk, tokens) * heads * -(-max_length // 128) * 4


def test_a_budget_below_one_query_token_is_refused_with_the_least_that_works():
    select = next(k for k in backends.capabilities("triton") if k.op is Op.SELECT)
    sizes = replace(PREFILL, max_length=2**20, score_bytes=1000)
    (refusal,) = covers_step(select, SELECT, sizes)
    assert (refusal.field, refusal.flag) == ("index_score_memory", "--index-score-memory")
    assert covers_step(select, SELECT, replace(sizes, score_bytes=int(refusal.value))) == ()
    assert covers_step(select, SELECT, replace(sizes, score_bytes=int(refusal.value) - 1))
