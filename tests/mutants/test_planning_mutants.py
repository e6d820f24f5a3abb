"""Every fault of planning is caught by every test that exists for it."""

import pytest

from minuet.planning import kernels
from tests.mutants.harness import caught
from tests.mutants.planning_faults import MUTANTS

CASES = [
    pytest.param(mutant, killer, id=f"{mutant.id}-{killer.test.partition(':')[2]}")
    for mutant in MUTANTS
    for killer in mutant.killers
]


@pytest.fixture(autouse=True)
def _nothing_remembered():
    """What was worked out under a fault must not be remembered after it, nor before."""
    kernels.forget()
    yield
    kernels.forget()


@pytest.mark.parametrize(("mutant", "killer"), CASES)
def test_the_fault_is_caught(mutant, killer):
    assert caught(mutant, killer) is not None, f"{killer.test} passes although: {mutant.fault}"
