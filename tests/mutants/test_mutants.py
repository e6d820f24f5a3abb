"""Every fault of the catalogue is caught by every test that exists for it."""

import pytest

from tests.mutants import catalogue, faults
from tests.mutants.harness import caught

CASES = [
    pytest.param(mutant, killer, id=f"{mutant.id}-{killer.test.partition(':')[2]}")
    for mutant in catalogue.MUTANTS
    for killer in mutant.killers
]


@pytest.mark.parametrize(("mutant", "killer"), CASES)
def test_the_fault_is_caught(mutant, killer):
    assert caught(mutant, killer) is not None, f"{killer.test} passes although: {mutant.fault}"


def test_every_number_is_held_or_accounted_for():
    held = {mutant.id.rstrip("abc") for mutant in catalogue.MUTANTS if mutant.id.startswith("M")}
    assert held | set(catalogue.ELSEWHERE) == {f"M{number}" for number in range(1, 23)}
    assert not held & set(catalogue.ELSEWHERE)


def test_a_patch_is_undone():
    before = {
        name: vars(owner)[name]
        for owner, name in (
            (faults.plan.DecodePlan, "refresh"),
            (faults.layout.KVLayout, "address"),
            (faults.launch, "_gather"),
        )
    }
    for mutant in catalogue.MUTANTS:
        if mutant.id in ("M17", "M21a", "M19"):
            caught(mutant, mutant.killers[0])
    assert vars(faults.plan.DecodePlan)["refresh"] is before["refresh"]
    assert vars(faults.layout.KVLayout)["address"] is before["address"]
    assert vars(faults.launch)["_gather"] is before["_gather"]
