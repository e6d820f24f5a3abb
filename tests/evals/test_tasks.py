import json
import subprocess
import sys
from itertools import islice

import pytest

from minuet.errors import ConfigError
from minuet.evals import tasks
from minuet.evals.tasks import needle
from minuet.evals.tasks.base import units

OPTIONS = {"needle": {"length": 512, "questions": 4}}


def draw(task, split, seed, count):
    return list(tasks.problems(task, split, seed, count, **OPTIONS.get(task, {})))


def reply_text(problem):
    calls = problem.reply.get("tool_calls")
    return json.dumps(calls[0]["function"]) if calls else problem.reply["content"]


@pytest.mark.parametrize("task", list(tasks.TASKS))
def test_the_same_seed_gives_the_same_problems_in_another_process(task):
    program = (
        "from minuet.evals import tasks;"
        f"print(list(tasks.problems({task!r}, 'train', 7, 5, **{OPTIONS.get(task, {})})))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == str(draw(task, "train", 7, 5))
    assert draw(task, "train", 7, 5) != draw(task, "train", 8, 5)


@pytest.mark.parametrize("task", list(tasks.TASKS))
def test_the_reply_that_is_taught_is_scored_right_and_a_changed_one_wrong(task):
    for problem in draw(task, "heldout", 0, 40):
        assert tasks.score(problem, reply_text(problem))
        assert not tasks.score(problem, "")
        wrong = reply_text(problem).replace(problem.answer[-1], "")
        assert not tasks.score(problem, wrong)
        assert not tasks.score(problem, reply_text(problem) + " 7")


@pytest.mark.parametrize("task", list(tasks.TASKS))
def test_no_held_out_question_is_ever_trained_on(task):
    def asked(split, count):
        return {p.messages[0]["content"].split("\n\n")[-1] for p in draw(task, split, 1, count)}

    if task == "needle":  # the same key may be asked for with another value
        facts = [
            {(n.key, n.value) for seed in range(60) for n in stack(split, seed).needles}
            for split in ("train", "heldout")
        ]
        assert len(facts[1]) > 100
        assert not facts[0] & facts[1]
    else:
        assert not asked("train", 3000) & asked("heldout", 200)


def stack(split, seed):
    return tasks.haystack(split, seed, 1024)


def test_a_product_is_on_the_same_side_as_its_mirror_image():
    def pairs(split, count):
        drawn = tasks.problems("arithmetic", split, 2, count, operators=("*",))
        return {(p.meta["a"], p.meta["b"]) for p in drawn}

    assert not pairs("train", 3000) & {(b, a) for a, b in pairs("heldout", 400)}


@pytest.mark.parametrize("operator", ["+", "-", "*", "+++"])
def test_columns_add_up(operator):
    for p in tasks.problems("arithmetic", "train", 0, 300, operators=(operator,)):
        a, b = p.meta["a"], p.meta["b"]
        value = {"+": a + b, "-": a - b, "*": a * b}[operator[0]]
        thought = p.reply["reasoning_content"]
        assert p.answer == str(value)
        assert thought.endswith(f"={abs(value):04}")
        for column in thought.split(": ")[1].split(" ")[:4]:
            left, right = column.split("=")
            result = eval(left)
            assert int(right[1]) == result % 10
            assert int(right[0]) == (result < 0 if operator == "-" else result // 10)


def test_held_out_problems_are_all_different():
    drawn = draw("arithmetic", "heldout", 0, 200)
    asked = [(p.meta["operator"], p.meta["a"], p.meta["b"]) for p in drawn]
    assert len(set(asked)) == 200


def test_a_task_says_so_when_it_has_no_more_held_out_problems():
    with pytest.raises(ConfigError, match="too few problems"):
        list(tasks.problems("arithmetic", "heldout", 0, 5000, operators=("-",)))
    with pytest.raises(ConfigError, match="no such task"):
        tasks.problems("riddles", "train", 0, 1)


@pytest.mark.parametrize("length", [256, 1000, 4096, 8192])
def test_a_haystack_has_the_asked_length_and_facts_at_their_depths(length):
    found = tasks.haystack("heldout", 3, length)
    assert length - 16 <= found.length == units(found.text) <= length
    assert len(found.needles) == max(1, length // needle.UNITS_PER_FACT)
    for fact in found.needles:
        before, _, _ = found.text.partition(needle.FACT.format(fact.key, fact.value))
        assert units(before) / length == pytest.approx(fact.depth, abs=1e-9)
        assert found.text.count(f"code of the {fact.key}") == 1
    assert found.needles[-1].depth > 1 - 1.5 / len(found.needles)


def test_questions_of_one_text_share_everything_before_the_last_line():
    first, second, third = islice(tasks.problems("needle", "heldout", 0, 3, **OPTIONS["needle"]), 3)
    heads = {p.messages[0]["content"].rpartition("\n\n")[0] for p in (first, second, third)}
    assert len(heads) == 1
    assert len({p.meta["key"] for p in (first, second, third)}) == 3


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_chosen_depth_is_met_within_one_fact(depth):
    for p in tasks.problems("needle", "heldout", 0, 4, length=2048, depth=depth):
        assert abs(p.meta["depth"] - depth) < 1.5 / 16


def test_a_haystack_without_room_is_refused():
    with pytest.raises(ConfigError, match="facts in a text"):
        tasks.haystack("train", 0, 256, facts=64)
