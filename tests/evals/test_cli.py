"""``minuet eval``: exit codes, what is printed, what reaches the server."""

import json

import pytest

from minuet.cli import main
from minuet.cli.eval import _GENERATED
from minuet.errors import MinuetError
from minuet.evals import tasks
from minuet.evals.serving import serving


@pytest.fixture
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(fake, *words):
    return main(["eval", *words, "--base-url", fake.url, "--quiet"])


def test_a_task_prints_scores_and_keeps_answers(fake, there, capsys):
    fake.reply = lambda body: "391"
    assert ask(fake, "arithmetic", "--limit", "3") == 0
    shown = capsys.readouterr().out
    assert "correct" in shown
    assert "eval-results/arithmetic.jsonl@" in shown
    assert "expected" in shown  # the wrong answers
    lines = (there / "eval-results/arithmetic.jsonl").read_text().splitlines()
    assert len(lines) == 4


def test_json_is_one_object_with_counts(fake, there, capsys):
    assert ask(fake, "lists", "--limit", "2", "--json", "--out", "x.jsonl") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["questions"], found["errors"]) == ("lists", 2, 0)
    assert found["settings"]["served"] == {"kv_cache_dtype": "bfloat16"}


def test_options_of_a_task_and_its_seed_change_the_questions(fake, there):
    ask(fake, "arithmetic", "--limit", "5", "--option", 'operators=["*"]')
    ask(fake, "arithmetic", "--limit", "5", "--question-seed", "1")
    texts = [body["messages"][0]["content"] for body in fake.bodies]
    assert all("*" in text for text in texts[:5])
    assert any("*" not in text for text in texts[5:])


def test_an_option_that_a_task_has_not_is_one_line(fake, there, capsys):
    assert ask(fake, "arithmetic", "--option", "length=3") == 2
    assert "length" in capsys.readouterr().err


def test_questions_without_answer_give_exit_code_1(fake, there, capsys):
    fake.reply = lambda body: (400, {"error": {"message": "no"}})
    assert ask(fake, "arithmetic", "--limit", "2") == 1
    assert "no answer to arithmetic/0: /v1/chat/completions answered 400: no" in (
        capsys.readouterr().out
    )


def test_gsm8k_asks_for_a_continuation_and_stops_as_lm_eval_does(fake, there, capsys):
    doc = {"question": "2 pears and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    docs = [{**doc, "question": f"{n}: {doc['question']}"} for n in range(7)]
    (there / "data.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
    fake.reply = lambda body: " It is 5."
    assert ask(fake, "gsm8k", "--data", "data.jsonl", "--limit", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"]["flexible-extract"]["right"] == 2
    assert found["scores"]["strict-match"]["right"] == 0
    body = fake.bodies[0]
    assert body["path"] == "/v1/completions"
    assert body["prompt"].count("Question: ") == 6
    assert (body["stop"], body["max_tokens"], body["temperature"]) == (
        ["Question:", "</s>", "<|im_end|>"], 256, 0.0,
    )  # fmt: skip
    assert ask(fake, "gsm8k", "--data", "data.jsonl", "--limit", "1", "--chat") == 0
    assert [m["role"] for m in fake.bodies[-1]["messages"]] == ["user", "assistant"] * 5 + ["user"]


def test_gsm8k_without_data_says_how_to_name_it(fake, there, capsys):
    assert ask(fake, "gsm8k") == 2
    assert "--data" in capsys.readouterr().err


def test_compare_shows_what_was_lost(fake, there, capsys):
    wanted = {}

    def reply(body):
        a, op, b = body["messages"][0]["content"].removeprefix("What is ").rstrip("?= ").split()
        return wanted.get("all", str(eval(f"{a}{op}{b}")))

    fake.reply = reply
    ask(fake, "arithmetic", "--limit", "6")
    fake.settings = {"kv_cache_dtype": "fp8_e4m3fn"}
    wanted["all"] = "nonsense"
    ask(fake, "arithmetic", "--limit", "6", "--out", "second.jsonl")
    capsys.readouterr()
    words = ["eval", "compare", "eval-results/arithmetic.jsonl", "second.jsonl"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "served.kv_cache_dtype: 'bfloat16' -> 'fp8_e4m3fn'" in shown
    assert "difference -1.0000; exact McNemar: p 0.03125 two-sided, p 0.01562 for a loss" in shown
    assert "second 'nonsense'" in shown
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["only_first_right"] == 6
    assert len(found["discordant"]) == 6


def test_an_entry_passes_or_fails_by_its_threshold(fake, there, capsys):
    entry = {
        "type": "accuracy", "name": "sums", "summary": "Sums", "model": "m",
        "task": "arithmetic", "count": 4, "at_least": 0.75,
    }  # fmt: skip
    (there / "catalog").mkdir()
    (there / "catalog/a.json").write_text(json.dumps([entry]))
    wrong = []

    def reply(body):
        question = body["messages"][0]["content"]
        a, op, b = question.removeprefix("What is ").rstrip("?= ").split()
        return "0.5" if question in wrong else str(eval(f"{a}{op}{b}"))

    fake.reply = reply
    words = ["--entry", "sums", "--catalog", "catalog"]
    assert ask(fake, *words) == 0
    assert "passed  sums: 1.0000 (4/4" in capsys.readouterr().out
    wrong += [body["messages"][0]["content"] for body in fake.bodies[:2]]
    assert ask(fake, *words, "--out", "again.jsonl") == 1
    assert "FAILED  sums: 0.5000 (2/4" in capsys.readouterr().out


def test_the_list_shows_every_entry_with_its_rule(capsys):
    assert main(["eval", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "tiny-needle-4k " in shown
    assert "needle correct >= 0.95" in shown


def test_the_check_fails_with_the_faults(there, capsys):
    assert main(["eval", "--check"]) == 0
    pair = {"type": "paired", "name": "p", "summary": "s", "against": "x", "p_at_least": 0.05}
    (there / "bad.json").write_text(json.dumps([{**pair, "flags": {"port": 1}}]))
    assert main(["eval", "--check", "--catalog", "."]) == 1
    assert "p: against 'x', which is no accuracy entry" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why():
    said = []
    with (
        pytest.raises(MinuetError, match=r"ended with code 2: unknown flag --nonsense"),
        serving(["--nonsense"], said.append),
    ):
        raise AssertionError("it started")
    assert any("--nonsense" in line for line in said)


def test_a_running_server_takes_no_flags_of_the_engine(fake, there, capsys):
    assert ask(fake, "arithmetic", "--kv-cache-dtype", "fp8") == 2
    assert "--kv-cache-dtype fp8" in capsys.readouterr().err
    assert fake.bodies == []


def test_a_model_that_a_running_server_has_not_is_named(fake, there, capsys):
    assert ask(fake, "arithmetic", "fake", "--limit", "1") == 0
    assert ask(fake, "arithmetic", "other") == 1
    assert "serves fake, not other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "name a task"),
        (["--entry", "nothing"], "--list"),
        (["compare", "a", "b"], "no such file"),
        (["arithmetic", "--limit", "x"], "no count"),
        (["arithmetic", "--chat-template-kwargs", "3"], "no JSON object"),
        (["selection", "/nowhere"], "no such model"),
        (["arithmetic", "/nowhere"], "no such model"),
        (["arithmetic", "--kv-cache-type", "fp8"], "--kv-cache-dtype"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_exit_code_2(there, capsys, words, named):
    assert main(["eval", *words]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert len(captured.err.splitlines()) == 1


def test_every_task_has_its_sub_command():
    assert set(_GENERATED) == set(tasks.TASKS)
