"""The closed set of step shapes: every reachable step has exactly one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minuet.attention.contract import Phase
from minuet.errors import ContractError
from minuet.planning.shapes import (
    MAX_BUCKETS,
    default_rungs,
    prefill_buckets,
    shape_set,
)


@st.composite
def shape_sets(draw):
    seqs = draw(st.integers(1, 1000))
    drafts = draw(st.integers(0, 7))
    tokens = draw(st.integers(seqs * (drafts + 1), 2**20))
    rungs = draw(st.lists(st.integers(1, 1000), max_size=12)) or default_rungs(seqs)
    return shape_set(rungs, seqs, tokens, drafts), seqs, tokens, drafts


def test_default_rungs_are_powers_of_two_then_steps_of_32():
    assert default_rungs(256) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
    assert default_rungs(1) == (1,)
    assert default_rungs(65) == (1, 2, 4, 8, 16, 32, 64, 65)
    assert default_rungs(100) == (1, 2, 4, 8, 16, 32, 64, 96, 100)


@given(st.integers(1, 5000))
def test_default_rungs_end_with_the_largest_batch(seqs):
    rungs = default_rungs(seqs)
    assert rungs[-1] == seqs
    assert list(rungs) == sorted(set(rungs))


@given(st.integers(1, 2**30))
def test_prefill_buckets_are_few_and_end_with_the_largest_step(tokens):
    buckets = prefill_buckets(tokens)
    assert buckets[-1] == tokens
    assert len(buckets) <= MAX_BUCKETS
    assert list(buckets) == sorted(set(buckets))


@given(shape_sets(), st.data())
def test_a_reachable_decode_step_has_exactly_one_shape(made, data):
    shapes, seqs, _, drafts = made
    num_seqs = data.draw(st.integers(1, seqs))
    for query_len in {1, drafts + 1}:
        shape = shapes.decode(num_seqs, query_len)
        holding = [
            s for s in shapes.decode_shapes if s.query_len == query_len and s.num_seqs >= num_seqs
        ]
        assert shape == min(holding, key=lambda s: s.num_seqs)
        assert shapes.all.count(shape) == 1
        assert shape.num_tokens == shape.num_seqs * query_len


@given(shape_sets(), st.data())
def test_a_reachable_prefill_step_has_exactly_one_shape(made, data):
    shapes, _, tokens, _ = made
    num_tokens = data.draw(st.integers(1, tokens))
    shape = shapes.prefill(num_tokens)
    holding = [s for s in shapes.prefill_shapes if s.num_tokens >= num_tokens]
    assert shape == min(holding, key=lambda s: s.num_tokens)
    assert shapes.all.count(shape) == 1
    assert shape.phase is Phase.PREFILL


@given(shape_sets())
def test_no_shape_is_larger_than_the_largest_step(made):
    shapes, seqs, tokens, drafts = made
    assert max(s.num_seqs for s in shapes.decode_shapes) == seqs
    assert max(s.num_tokens for s in shapes.prefill_shapes) == tokens
    assert {s.query_len for s in shapes.decode_shapes} == {1, drafts + 1}


def test_a_step_the_scheduler_must_not_build_is_a_contract_error():
    shapes = shape_set(default_rungs(8), 8, 64, 3)
    for num_seqs, query_len in ((0, 1), (9, 1), (4, 2)):
        with pytest.raises(ContractError):
            shapes.decode(num_seqs, query_len)
    for num_tokens in (0, 65):
        with pytest.raises(ContractError):
            shapes.prefill(num_tokens)
