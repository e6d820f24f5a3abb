"""Intervals and the paired test have the values that tables and definitions give."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minuet.errors import ContractError
from minuet.evals.stats import Paired, paired, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_agrees_with_published_values(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_nothing_asked_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share_and_stays_in_bounds(counts):
    low, high = wilson(*counts)
    assert 0 <= low <= counts[0] / counts[1] <= high <= 1
    assert low < high


@pytest.mark.parametrize("counts", [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ContractError):
        wilson(*counts)


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 0.0625),
        (6, 0, 0.03125),
        (0, 6, 0.03125),
        (9, 1, 22 / 1024),
        (7, 7, 1.0),
        (8, 6, 0.790527),
    ],
)
def test_mcnemar_is_the_exact_binomial(lost, gained, p):
    assert Paired(50, lost, gained, 3).p_value == pytest.approx(p, abs=1e-6)


@given(st.integers(0, 60), st.integers(0, 60))
def test_p_is_the_weight_of_outcomes_at_least_as_uneven(lost, gained):
    total = lost + gained
    uneven = abs(lost - gained)
    weight = sum(comb(total, k) for k in range(total + 1) if abs(2 * k - total) >= uneven)
    found = Paired(0, lost, gained, 0)
    assert found.p_value == pytest.approx(float(Fraction(weight, 2**total)), rel=1e-12)
    assert found.smallest_p <= found.p_value + 1e-15
    one_sided = sum(comb(total, k) for k in range(gained + 1))
    assert found.p_loss == pytest.approx(float(Fraction(one_sided, 2**total)), rel=1e-12)


def test_pairs_are_counted_by_question():
    counts = paired([True, True, False, False, True], [True, False, True, False, False])
    assert counts == Paired(both=1, only_first=2, only_second=1, neither=1)
    assert (counts.questions, counts.discordant) == (5, 3)
    assert counts.difference == pytest.approx(-0.2)


def test_runs_over_different_numbers_of_questions_are_no_pairs():
    with pytest.raises(ContractError):
        paired([True], [True, False])
