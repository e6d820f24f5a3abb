"""The plan covers every tile once and fits its buffers: F-1, F-11f, F-11h, F-11j."""

import time
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minuet.attention.contract import Phase, recover_num_seqs
from minuet.attention.plan import DIRECT, DecodePlan, DecodePlans, PlanShape, RowSplit, split_for
from minuet.errors import ContractError
from minuet.platform.arch import ARCHS, get
from tests.attention.problems import DENSE, POLICY, SPARSE, balanced, planned


def counts(plan):
    return plan.rows[:, 1].tolist()


def tiles_of(plan):
    """For each sequence the (first, end) tile ranges of its work records, in slot order."""
    ranges = {}
    for sequence, first, end, slot in plan.work.tolist():
        if end > first:
            ranges.setdefault(sequence, []).append((slot, first, end))
    return {s: [(a, b) for _, a, b in sorted(found)] for s, found in ranges.items()}


def assert_covers_every_tile_once(plan, lengths):
    shape = plan.shape
    found = tiles_of(plan)
    for sequence, length in enumerate(lengths):
        tiles = -(-length // shape.tile_tokens)
        ends = [0, *(end for _, end in found.get(sequence, []))]
        assert [first for first, _ in found.get(sequence, [])] == ends[:-1]
        assert ends[-1] == tiles
        assert len(ends) - 1 == plan.rows[sequence, 1]
    assert set(found) <= set(range(len(lengths)))


def assert_slots_are_dense_and_only_of_split_rows(plan):
    slots = sorted(w[3] for w in plan.work.tolist() if w[2] > w[1] and w[3] != DIRECT)
    assert slots == list(range(len(slots)))
    assert len(slots) <= plan.shape.slots
    for sequence, (first_slot, parts) in enumerate(plan.rows.tolist()):
        mine = sorted(w[3] for w in plan.work.tolist() if w[0] == sequence and w[2] > w[1])
        if parts == 0:
            assert (first_slot, mine) == (0, [])
        elif parts == 1:
            assert (first_slot, mine) == (DIRECT, [DIRECT])
        else:
            assert mine == list(range(first_slot, first_slot + parts))


@st.composite
def shapes_and_lengths(draw):
    max_seqs = draw(st.integers(1, 24))
    tile = draw(st.sampled_from((1, 16, 128, 256)))
    max_length = draw(st.integers(1, 300)) * tile
    shape = PlanShape(
        max_seqs=max_seqs,
        max_length=max_length,
        tile_tokens=tile,
        max_parts=draw(st.integers(1, 40)),
        budget=draw(st.integers(1, 80)),
        part_tiles=draw(st.sampled_from((0, 0, 1, 3, 16))),
        longest_first=draw(st.booleans()),
    )
    length = st.one_of(st.just(0), st.just(1), st.just(max_length), st.integers(0, max_length))
    return shape, draw(st.lists(length, max_size=max_seqs))


# --- check values --------------------------------------------------------------------------------

CHECK_VALUES = (
    ([200003] + [257] * 7, 512, [256, 2, 2, 2, 2, 2, 2, 2]),
    ([8704] * 4, 512, [34] * 4),
    ([2048] * 64, 512, [8] * 64),
    ([2048] * 600, 600, [1] * 600),
    ([0, 1, 256, 257], 512, [0, 1, 1, 2]),
)


@pytest.mark.parametrize(("lengths", "capacity", "parts"), CHECK_VALUES)
def test_published_check_values(lengths, capacity, parts):
    plan = planned(balanced(len(lengths)), lengths)
    assert plan.shape.capacity == capacity
    assert counts(plan) == parts


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 7, 40, 100])
def test_dealt_parts_never_exceed_the_budget(num_seqs):
    for budget in (1, num_seqs, num_seqs + 1, 2 * num_seqs - 1, 5 * num_seqs + 3):
        plan = planned(balanced(num_seqs, budget=budget), [1024] * num_seqs)
        assert sum(counts(plan)) <= max(num_seqs, budget)
        # nothing is left over either, until the tiles run out
        assert sum(counts(plan)) == min(max(num_seqs, budget), 4 * num_seqs)


# --- properties ----------------------------------------------------------------------------------


@given(shapes_and_lengths())
@settings(max_examples=300)
def test_every_tile_is_covered_exactly_once_within_capacity(drawn):
    shape, lengths = drawn
    plan = planned(shape, lengths)
    assert_covers_every_tile_once(plan, lengths)
    assert_slots_are_dense_and_only_of_split_rows(plan)
    assert sum(counts(plan)) <= shape.capacity
    assert max(counts(plan), default=0) <= shape.max_parts
    assert not plan.work[sum(counts(plan)) :].any()


@given(shapes_and_lengths())
def test_empty_and_padded_rows_have_no_part_and_length_zero(drawn):
    shape, lengths = drawn
    plan = planned(shape, [shape.max_length] * shape.max_seqs).refresh(lengths)
    padded = [*lengths, *[0] * (shape.max_seqs - len(lengths))]
    assert plan.lengths.tolist() == padded
    for sequence, length in enumerate(padded):
        assert (plan.rows[sequence, 1] == 0) == (length == 0)
        if length == 0:
            assert plan.rows[sequence].tolist() == [0, 0]


@given(shapes_and_lengths())
def test_parts_of_a_sequence_differ_by_one_tile_at_most_when_balanced(drawn):
    shape, lengths = drawn
    for ranges in tiles_of(planned(replace(shape, part_tiles=0), lengths)).values():
        sizes = [end - first for first, end in ranges]
        assert max(sizes) - min(sizes) <= 1


@given(shapes_and_lengths())
def test_a_longer_sequence_never_has_two_parts_less(drawn):
    shape, lengths = drawn
    plan = planned(shape, lengths)
    ordered = sorted(zip(lengths, counts(plan), strict=False))
    slack = 0 if shape.part_tiles else 1  # prefix sums may give a tie's extra part to either
    most = 0
    for _, parts in ordered:
        assert parts >= most - slack
        most = max(most, parts)


@given(shapes_and_lengths())
def test_refresh_writes_into_the_same_memory_and_returns_the_same_plan(drawn):
    shape, lengths = drawn
    buffer = np.full(shape.size, -7, np.int32)
    plan = DecodePlan.over(shape, buffer)
    assert plan.refresh(lengths) is plan
    assert plan.buffer is buffer
    assert all(np.shares_memory(view, buffer) for view in (plan.work, plan.rows, plan.lengths))
    assert plan.work.size + plan.rows.size + plan.lengths.size == buffer.size
    again = planned(shape, lengths)
    assert np.array_equal(buffer, again.buffer)


@given(shapes_and_lengths(), st.randoms())
def test_a_fixed_partition_does_not_depend_on_batch_mates(drawn, random):
    shape, lengths = drawn
    shape = replace(shape, part_tiles=shape.part_tiles or 2)
    alone = [tiles_of(planned(shape, [length])).get(0, []) for length in lengths]
    wider = replace(shape, max_seqs=shape.max_seqs + 9, budget=shape.budget + 5)
    order = list(range(len(lengths)))
    random.shuffle(order)
    others = [random.randint(0, shape.max_length) for _ in range(9)]
    batch = [*others[:4], *(lengths[i] for i in order), *others[4:]]
    together = tiles_of(planned(wider, batch))
    for place, i in enumerate(order):
        assert together.get(4 + place, []) == alone[i]


def test_the_balanced_form_does_depend_on_batch_mates():
    # what the fixed form is for; without this the test above would prove nothing
    one, many = balanced(1), balanced(64)
    assert counts(planned(one, [8704])) != counts(planned(many, [8704] * 64))[:1]


@given(shapes_and_lengths())
def test_longest_first_only_reorders(drawn):
    shape, lengths = drawn
    plain = planned(replace(shape, longest_first=False), lengths)
    sorted_ = planned(replace(shape, longest_first=True), lengths)
    used = sum(counts(plain))
    assert sorted(plain.work[:used].tolist()) == sorted(sorted_.work[:used].tolist())
    sizes = (sorted_.work[:used, 2] - sorted_.work[:used, 1]).tolist()
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 4096), st.integers(1, 2000))
def test_capacity_and_slots_grow_with_the_batch_and_stay_within_budget(max_seqs, budget):
    shape = balanced(max_seqs, budget=budget)
    larger = balanced(max_seqs + 1, budget=budget)
    assert shape.capacity <= larger.capacity
    assert shape.capacity <= max(max_seqs, budget)
    assert shape.slots <= budget


def test_more_sequences_than_budget_need_no_split_and_no_slot_is_used():
    shape = balanced(1000)
    plan = planned(shape, [2048] * 700)
    assert counts(plan) == [1] * 700 + [0] * 300
    assert (plan.work[:700, 3] == DIRECT).all()


# --- batch is a run-time value -------------------------------------------------------------------


def test_one_plan_serves_every_batch_up_to_its_size():
    shape = balanced(81_793 + 1000, max_length=4096)
    plan = DecodePlan.over(shape, np.zeros(shape.size, np.int32))
    for batch in (0, 1, 3, 4097, 81_793):
        plan.refresh([300] * batch)
        assert counts(plan)[:batch] == [counts(plan)[0]] * batch if batch > 512 else True
        assert sum(c > 0 for c in counts(plan)) == batch


def test_four_thousand_sequences_are_planned_within_a_millisecond():
    shape = balanced(4096, max_length=131072)
    plan = DecodePlan.over(shape, np.zeros(shape.size, np.int32))
    lengths = np.random.default_rng(0).integers(1, 131072, 4096).astype(np.int32)
    runs = []
    for _ in range(40):
        start = time.thread_time()
        plan.refresh(lengths)
        runs.append(time.thread_time() - start)
    assert min(median(runs[i : i + 10]) for i in range(0, 40, 10)) < 1e-3


@pytest.mark.parametrize(
    ("lengths", "word"),
    [
        ([1] * 5, "sequences"),
        ([-1], "lengths"),
        ([2**20 + 1], "lengths"),
        (np.array([1.5]), "integers"),
        (np.ones((2, 2), np.int32), "integers"),
    ],
)
def test_what_does_not_fit_is_a_contract_error_and_changes_nothing(lengths, word):
    plan = planned(balanced(4), [5, 6, 700])
    before = plan.buffer.copy()
    with pytest.raises(ContractError, match=word):
        plan.refresh(lengths)
    assert np.array_equal(plan.buffer, before)


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(7, np.int32),
        np.zeros(balanced(4).size, np.int64),
        np.zeros(2 * balanced(4).size, np.int32)[::2],
    ],
    ids=["size", "dtype", "stride"],
)
def test_a_plan_refuses_memory_that_is_not_its_own_size(buffer):
    with pytest.raises(ContractError, match="buffer"):
        DecodePlan.over(balanced(4), buffer)


def test_plans_are_made_once_per_prepared_batch_and_lane():
    made = []

    def allocate(size):
        made.append(np.zeros(size, np.int32))
        return made[-1]

    plans = DecodePlans([balanced(n) for n in (32, 1, 8)], allocate, in_flight=2)
    assert len(plans) == len(made) == 6
    assert [plans.for_batch(n).shape.max_seqs for n in (1, 2, 8, 9, 32)] == [1, 8, 8, 32, 32]
    assert plans.for_batch(9, lane=0) is not plans.for_batch(9, lane=1)
    assert len(made) == 6
    with pytest.raises(ContractError, match="largest prepared batch"):
        plans.for_batch(33)
    with pytest.raises(ContractError):
        DecodePlans([balanced(8), balanced(8)], allocate)


# --- T11f ----------------------------------------------------------------------------------------

BATCHES = (1, 2, 3, 4, 7, 8, 16, 20, 32, 48, 63, 64)
CONTEXTS = (2048, 4096, 8704, 16384, 65536, 131072)


@pytest.mark.parametrize("arch_name", [n for n, a in ARCHS.items() if a.is_gpu])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_decode_step_fills_the_machine_or_uses_every_tile(arch_name, num_kv_heads):
    problem = replace(DENSE, num_q_heads=16 * num_kv_heads, num_kv_heads=num_kv_heads)
    units = get(arch_name).compute_units
    for batch in BATCHES:
        shape = split_for(
            POLICY, problem, compute_units=units, num_seqs=64, query_tokens=64, max_length=2**20
        )
        ragged = [max(1, context // (1 + i % 5)) for i, context in enumerate((131072,) * batch)]
        for lengths in [[c] * batch for c in CONTEXTS] + [ragged]:
            plan = planned(shape, lengths)
            tiles = sum(-(-n // shape.tile_tokens) for n in lengths) * num_kv_heads
            assert sum(counts(plan)) * num_kv_heads >= min(units, tiles)


@pytest.mark.parametrize("arch_name", [n for n, a in ARCHS.items() if a.is_gpu])
def test_a_sparse_decode_step_fills_the_machine_or_uses_every_block(arch_name):
    units = get(arch_name).compute_units
    for batch in BATCHES:
        split = split_for(
            POLICY,
            SPARSE,
            compute_units=units,
            num_seqs=batch,
            query_tokens=batch,
            max_length=2**20,
        )
        assert isinstance(split, RowSplit)
        assert split.parts * batch >= min(units, batch * SPARSE.top_blocks)


def test_one_long_request_among_short_ones_is_split_like_alone():
    alone = counts(planned(balanced(1), [200003]))[0]
    among = counts(planned(balanced(200), [200003] + [257] * 199))[0]
    assert alone == 256
    assert among >= 200


def test_work_follows_real_lengths_and_not_the_longest_allowed():
    # a captured graph knows the model's maximum only; the split must not be made from it
    short, long = balanced(4, max_length=16384), balanced(4, max_length=2**20)
    assert counts(planned(short, [8704] * 4)) == counts(planned(long, [8704] * 4)) == [34] * 4


# --- T11h, T11j ----------------------------------------------------------------------------------


def test_every_draft_pass_plans_the_padded_batch_with_its_new_lengths():
    plans = DecodePlans([balanced(n) for n in (16, 32, 64)], lambda n: np.zeros(n, np.int32))
    plans.for_batch(32).refresh([9999] * 32)  # an earlier, full step
    lengths = np.arange(20) * 257 + 255
    for draft in range(4):
        plan = plans.for_batch(20).refresh(lengths + draft)
        assert plan.shape.max_seqs == 32
        assert plan.rows.shape == (32, 2)
        assert plan.lengths.tolist() == [*(lengths + draft).tolist(), *[0] * 12]
        assert counts(plan)[20:] == [0] * 12
        assert_covers_every_tile_once(plan, (lengths + draft).tolist())


def test_sequences_are_recovered_from_a_padded_rectangle():
    assert recover_num_seqs(12, 4) == 3
    assert recover_num_seqs(0, 4) == 0
    for rows, query_len in ((15, 4), (12, 0), (12, -1), (-4, 4)):
        with pytest.raises(ContractError):
            recover_num_seqs(rows, query_len)


# --- rows ----------------------------------------------------------------------------------------


@given(st.integers(1, 16), st.integers(0, 16))
def test_parts_of_a_row_cover_its_list_once(parts, num_blocks):
    split = RowSplit(max_rows=1, parts=parts)
    ranges = [split.block_range(part, num_blocks) for part in range(parts)]
    assert [block for first, end in ranges for block in range(first, end)] == list(
        range(num_blocks)
    )


@pytest.mark.parametrize("problem", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 16384, 131072])
def test_prefill_rows_are_written_directly_whatever_their_number(problem, tokens):
    prefill = replace(problem, phase=Phase.PREFILL)
    split = split_for(
        POLICY, prefill, compute_units=256, num_seqs=0, query_tokens=tokens, max_length=2**20
    )
    assert split == RowSplit(max_rows=tokens, parts=1)
    assert split.slots == 0


def test_the_batch_invariant_split_ignores_the_batch():
    def split(problem, batch):
        return split_for(
            POLICY,
            problem,
            compute_units=132,
            num_seqs=batch,
            query_tokens=batch,
            max_length=2**20,
            batch_invariant=True,
        )

    assert {split(SPARSE, batch).parts for batch in (1, 7, 64, 512)} == {POLICY.fixed_row_parts}
    small, large = split(DENSE, 1), split(DENSE, 512)
    assert (small.part_tiles, small.max_parts) == (large.part_tiles, large.max_parts)
    lengths = [1, 256, 257, 8704, 131072]
    for length in lengths:
        assert tiles_of(planned(small, [length]))[0] == tiles_of(planned(large, [5, length]))[1]
