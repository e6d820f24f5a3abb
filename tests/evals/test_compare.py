"""Runs are compared question by question; what cannot be paired is said."""

import pytest

from minuet.errors import ConfigError
from minuet.evals.compare import compare
from minuet.evals.records import Answer, Records, Run


def run_of(path, key, outputs, settings=None, task="sums"):
    """Outputs by question; right is the question's own name."""
    records = Records(path)
    run = Run(key, task, "correct", settings or {}, "2026-11-29T00:00:00+00:00")
    records.start(run)
    for question, output in outputs.items():
        error = "refused" if output is None else ""
        scores = {} if error else {"correct": output == question}
        records.add(
            Answer(key, question, f"id-{question}", "", question, output or "", scores, error=error)
        )
    return run, Records(path).answered(key)


def test_the_four_cases_and_the_discordant_questions(tmp_path):
    first = run_of(tmp_path / "a", "k1", {"a": "a", "b": "b", "c": "x", "d": "y", "e": "e"})
    second = run_of(tmp_path / "b", "k2", {"a": "a", "b": "?", "c": "c", "d": "z", "e": "!"})
    found = compare(first, second)
    counts = found.counts
    assert (counts.both, counts.only_first, counts.only_second, counts.neither) == (1, 2, 1, 1)
    assert [(a.id, a.output, b.output) for a, b in found.discordant] == [
        ("id-b", "b", "?"),
        ("id-c", "x", "c"),
        ("id-e", "e", "!"),
    ]
    assert found.differing == 4
    assert found.as_json()["discordant"][0] == {
        "id": "id-b", "expected": "b", "first": "b", "second": "?",
    }  # fmt: skip


def test_a_loss_is_significant_from_five_lost_and_none_gained(tmp_path):
    """One-sided: 1/32 is below 0.05, 1/16 is not."""
    names = [f"q{n}" for n in range(20)]
    first = run_of(tmp_path / "a", "k1", {n: n for n in names})
    for lost, significant in ((4, False), (5, True)):
        outputs = {n: "wrong" if i < lost else n for i, n in enumerate(names)}
        second = run_of(tmp_path / f"b{lost}", "k2", outputs)
        assert compare(first, second).is_significant_loss is significant
        assert not compare(second, first).is_significant_loss


def test_questions_of_one_run_only_are_left_out_and_counted(tmp_path):
    first = run_of(tmp_path / "a", "k1", {"a": "a", "b": "b", "c": None})
    second = run_of(tmp_path / "b", "k2", {"b": "b", "c": "c", "d": "d"})
    found = compare(first, second)
    assert found.counts.questions == 1
    assert found.unpaired == 3


def test_settings_that_differ_are_named(tmp_path):
    one = {"model": "m", "served": {"kv_cache_dtype": "bfloat16", "arch": "cpu"}}
    two = {"model": "m", "served": {"kv_cache_dtype": "fp8_e4m3fn", "arch": "cpu"}, "weights": "w"}
    first = run_of(tmp_path / "a", "k1", {"a": "a"}, one)
    second = run_of(tmp_path / "b", "k2", {"a": "a"}, two)
    assert compare(first, second).settings == {
        "served.kv_cache_dtype": ("bfloat16", "fp8_e4m3fn"),
        "weights": (None, "w"),
    }


def test_runs_of_different_questions_are_no_pair(tmp_path):
    first = run_of(tmp_path / "a", "k1", {"a": "a"})
    second = run_of(tmp_path / "b", "k2", {"b": "b"}, task="needle")
    with pytest.raises(ConfigError, match="no question in common"):
        compare(first, second)


def test_a_metric_that_neither_has_is_refused(tmp_path):
    first = run_of(tmp_path / "a", "k1", {"a": "a"})
    with pytest.raises(ConfigError, match="correct"):
        compare(first, first, "strict-match")


def test_two_runs_of_one_file_are_told_apart(tmp_path):
    run_of(tmp_path / "a", "k1", {"a": "a"})
    run_of(tmp_path / "a", "k2", {"a": "b"})
    records = Records(tmp_path / "a")
    assert records.find("k1").key == "k1"
    assert records.find().key == "k2"
    assert [records.answered(key)["a"].output for key in ("k1", "k2")] == ["a", "b"]
    with pytest.raises(ConfigError, match="k1, k2"):
        records.find("k3")
