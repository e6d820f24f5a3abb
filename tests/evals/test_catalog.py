"""The catalog is valid, and the check finds every kind of fault."""

import json
from pathlib import Path

import msgspec
import pytest

import minuet
from minuet.errors import ConfigError, MinuetError
from minuet.evals import catalog, entries
from minuet.evals.compare import compare
from minuet.evals.logits import Divergence
from minuet.evals.records import Answer, Run
from minuet.evals.run import Report

GOOD = {
    "type": "accuracy",
    "name": "good",
    "summary": "A sum",
    "model": "m",
    "task": "arithmetic",
    "count": 3,
    "at_least": 0.9,
}
PAIR = {
    "type": "paired",
    "name": "pair",
    "summary": "The same under FP8",
    "against": "good",
    "flags": {"kv-cache-dtype": "fp8"},
    "p_at_least": 0.05,
}
LOGITS = {
    "type": "logits",
    "name": "logits",
    "summary": "The same under FP8",
    "model": "m",
    "task": "arithmetic",
    "count": 2,
    "change": {"kv-cache-dtype": "fp8"},
    "kl_mean_at_most": 0.01,
    "same_top_at_least": 0.99,
}
BENCH = {
    "type": "benchmark",
    "name": "bench",
    "summary": "A step",
    "command": ["step", "m", "--json", "{out}"],
    "figure": "rows.0.us",
    "unit": "us",
    "archs": ["sm90"],
    "card": "H200",
    "at_most": 100,
}


def folder_of(tmp_path, *found):
    (tmp_path / "a.json").write_text(json.dumps(list(found)))
    return tmp_path


def test_the_catalog_is_valid():
    assert len(catalog.load()) >= 8
    assert catalog.check() == {}


def test_the_catalog_is_part_of_the_package():
    """So an installed wheel, which holds `src/minuet` and nothing else, has it."""
    assert catalog.FOLDER.is_relative_to(Path(minuet.__file__).parent)


def test_good_entries_have_no_faults(tmp_path):
    assert catalog.check(folder_of(tmp_path, GOOD, PAIR, LOGITS, BENCH)) == {}


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (GOOD, {"task": "sudoku"}, "no task 'sudoku'"),
        (GOOD, {"options": {"operators": ["+"], "size": 3}}, "size"),
        (GOOD, {"count": 2000, "options": {"operators": ["+"]}}, "too few problems"),
        (GOOD, {"count": 0}, "asks nothing"),
        (GOOD, {"at_least": 0.0}, "no score that can be missed"),
        (GOOD, {"at_least": 1.5}, "no score that can be missed"),
        (GOOD, {"damaged_at_most": 0.95}, "below at_least"),
        (GOOD, {"metric": "strict-match"}, "no metric"),
        (GOOD, {"task": "gsm8k", "metric": "correct"}, "no metric"),
        (GOOD, {"archs": ["sm9000"]}, "no arch 'sm9000'"),
        (GOOD, {"flags": {"kv-cache-type": "fp8"}}, "no flag --kv-cache-type"),
        (GOOD, {"flags": {"kv-cache-dtype": "int3"}}, "--kv-cache-dtype"),
        (GOOD, {"summary": ""}, "summary"),
        (GOOD, {"baseline": {"value": 0.9, "source": " "}}, "without its source"),
        (PAIR, {"against": "nobody"}, "no accuracy entry"),
        (PAIR, {"against": "pair"}, "no accuracy entry"),
        (PAIR, {"flags": {}}, "the same"),
        (PAIR, {"p_at_least": None}, "either"),
        (PAIR, {"identical": True}, "either"),
        (PAIR, {"p_at_least": 1.0}, "no probability that can be missed"),
        (LOGITS, {"task": "gsm8k"}, "no task"),
        (LOGITS, {"count": 0}, "asks nothing"),
        (LOGITS, {"change": {}}, "the same"),
        (LOGITS, {"change": {"kv": 1}}, "no flag --kv"),
        (LOGITS, {"same_top_at_least": 0.0}, "can be missed"),
        (LOGITS, {"kl_mean_at_most": 0.0}, "above 0"),
        (BENCH, {"command": ["step", "m"]}, "no {out}"),
        (BENCH, {"at_most": None}, "no threshold"),
    ],
)
def test_each_fault_is_found_and_named(tmp_path, base, change, named):
    others = [entry for entry in (GOOD, PAIR, BENCH) if entry["name"] != base["name"]]
    found = catalog.check(folder_of(tmp_path, *others, {**base, **change}))
    assert list(found) == [base["name"]]
    assert any(named in fault for fault in found[base["name"]]), found


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[{", "truncated"),
        (json.dumps([{**GOOD, "minimum": 0.9}]), "minimum"),
        (json.dumps([{k: v for k, v in GOOD.items() if k != "at_least"}]), "at_least"),
        (json.dumps([{**GOOD, "at_least": "0.9"}]), "at_least"),
        (json.dumps([{**GOOD, "type": "feeling"}]), "feeling"),
        (json.dumps([GOOD, GOOD]), "one entry of a name"),
    ],
)
def test_what_is_no_entry_is_refused_with_the_file(tmp_path, text, named):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=named) as problem:
        catalog.load(tmp_path)
    assert "a.json" in str(problem.value)


def test_the_schema_is_that_of_the_entries():
    schema = json.loads(catalog.schema())
    assert set(schema["$defs"]) >= {"Accuracy", "Paired", "Benchmark", "Baseline"}
    assert "at_least" in schema["$defs"]["Accuracy"]["required"]
    assert schema["$defs"]["Accuracy"]["additionalProperties"] is False


# --- verdicts ------------------------------------------------------------------------------------


def entry(fields):
    return msgspec.convert(fields, catalog.Entry)


def report(right, wrong=0, errors=0):
    run = Run("k", "arithmetic", "correct", {}, "")
    marks = [True] * right + [False] * wrong + [None] * errors
    answers = tuple(
        Answer(
            "k", f"q{n}", f"q{n}", "", "1", "1" if mark else "0",
            {} if mark is None else {"correct": mark}, error="x" if mark is None else "",
        )
        for n, mark in enumerate(marks)
    )  # fmt: skip
    return Report(run, answers)


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (report(9, 1), True),
        (report(89, 11), False),
        (report(99, 0, errors=1), False),
        (report(0), False),
    ],
)
def test_a_score_below_the_threshold_or_a_missing_answer_fails(found, passes):
    assert entries.judge_accuracy(entry(GOOD), found).passed is passes


def judged(fields, first, second):
    return entries.judge_paired(entry(fields), compare(first.side, second.side))


def test_a_pair_fails_when_chance_does_not_explain_the_loss():
    assert judged(PAIR, report(20), report(16, 4)).passed
    assert not judged(PAIR, report(20), report(15, 5)).passed


@pytest.mark.parametrize(("right", "passes"), [(20, True), (0, False)])
def test_nothing_is_compared_with_a_measure_that_fails(tmp_path, monkeypatch, right, passes):
    """Two servers that answer nothing rightly lose nothing against each other."""
    found = report(right, 20 - right)
    monkeypatch.setattr(entries, "_ask", lambda *_: found)
    means = entries.Means(tmp_path / "x", print)
    outcome = entries.run_entry(entry(PAIR), means, folder_of(tmp_path, GOOD, PAIR))
    assert outcome.passed is passes
    assert ("did not pass" in outcome.said) is not passes


def test_identical_means_every_answer():
    fields = {**PAIR, "p_at_least": None, "identical": True}
    assert judged(fields, report(5, 2), report(5, 2)).passed
    # a wrong answer that became another wrong answer is no loss, and still not identical
    changed = report(5, 2)
    last = msgspec.structs.replace(changed.answers[-1], output="other")
    changed = Report(changed.run, (*changed.answers[:-1], last))
    outcome = judged(fields, report(5, 2), changed)
    assert not outcome.passed
    assert "1 of 7 answers differ" in outcome.said


def test_questions_that_one_run_did_not_answer_fail_a_pair():
    assert not judged(PAIR, report(20), report(19, errors=1)).passed


@pytest.mark.parametrize(
    ("kl", "same", "passes"), [(0.01, 0.99, True), (0.011, 1.0, False), (0.0, 0.98, False)]
)
def test_distributions_must_be_close_in_both_measures(kl, same, passes):
    found = Divergence(10, kl, 1.0, same, 0.0, (1.0, 1.0))
    assert entries.judge_logits(entry(LOGITS), found).passed is passes


@pytest.mark.parametrize(("us", "passes"), [(99.0, True), (100.0, True), (100.5, False)])
def test_a_benchmark_passes_within_its_bounds(us, passes):
    found = entries.judge_benchmark(entry(BENCH), {"rows": [{"us": us}]})
    assert found.passed is passes
    assert "us, wanted -inf to 100" in found.said


def test_a_record_without_the_figure_is_refused_with_what_it_has():
    with pytest.raises(ConfigError, match=r"no rows\.0\.us.*'ms'"):
        entries.judge_benchmark(entry(BENCH), {"rows": [{"ms": 1.0}]})


def test_a_benchmark_that_fails_says_why(tmp_path):
    nothing = entry({**BENCH, "command": ["nothing", "--json", "{out}"]})
    with pytest.raises(MinuetError, match=r"ended with code 2.*nothing"):
        entries.run_entry(nothing, entries.Means(tmp_path / "x", print))
