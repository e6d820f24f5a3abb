"""Every answer is kept, none is asked for twice, and a question without answer is not forgotten."""

import json
import threading
import time

import pytest

from minuet.errors import ConfigError
from minuet.evals.api import CHAT, Server, ServerError
from minuet.evals.questions import Question, Task, generated
from minuet.evals.records import Records
from minuet.evals.run import Sampling, ask_all, describe


def sums(count, text="What is {}+{}?"):
    questions = tuple(
        Question(
            id=f"sums/{n}",
            group="even" if n % 2 == 0 else "odd",
            route=CHAT,
            body={"messages": [{"role": "user", "content": text.format(n, n)}]},
            expected=str(2 * n),
            grade=lambda output, n=n: {"correct": output == str(2 * n)},
        )
        for n in range(count)
    )
    return Task("sums", "correct", questions, {"text": text}, max_tokens=8)


def right(body):
    a, b = body["messages"][-1]["content"].removeprefix("What is ").removesuffix("?").split("+")
    return str(int(a) + int(b))


def evaluate(fake, path, task, concurrency=4, **sampling):
    records = Records(path)
    with Server(fake.url) as server:
        run = describe(task, server, Sampling(**sampling))
        return ask_all(task, server, run, records, concurrency=concurrency)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "answers.jsonl"


def test_scores_are_those_of_the_answers(fake, path):
    fake.reply = lambda body: right(body) if "3+3" not in body["messages"][0]["content"] else "7"
    report = evaluate(fake, path, sums(10))
    assert (report.score().right, report.score().asked) == (9, 10)
    assert report.groups == ["even", "odd"]
    assert (report.score(group="odd").right, report.score(group="odd").asked) == (4, 5)
    shown = report.as_json()
    assert shown["scores"]["correct"]["value"] == 0.9
    low, high = shown["scores"]["correct"]["interval_95"]
    assert low < 0.9 < high
    assert [a.id for a in report.answers] == [f"sums/{n}" for n in range(10)]
    assert (shown["prompt_tokens"], shown["completion_tokens"]) == (70, 20)


def test_a_finished_run_is_not_asked_again(fake, path):
    fake.reply = right
    first = evaluate(fake, path, sums(6))
    asked = len(fake.bodies)
    again = evaluate(fake, path, sums(6))
    assert asked == len(fake.bodies) == 6
    assert again.resumed == 6
    assert again.answers == first.answers


def test_a_longer_run_goes_on_from_a_shorter_one(fake, path):
    fake.reply = right
    evaluate(fake, path, sums(3))
    report = evaluate(fake, path, sums(8))
    assert len(fake.bodies) == 8
    assert report.resumed == 3
    assert report.score().right == 8


def test_an_interrupted_run_goes_on_and_a_torn_line_is_asked_again(fake, path):
    fake.reply = right
    evaluate(fake, path, sums(6))
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b'"id"')])  # killed in the middle of the last line
    report = evaluate(fake, path, sums(6))
    assert len(fake.bodies) == 7
    assert report.score().right == 6
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("change", ["temperature", "server", "question"])
def test_other_settings_are_another_run(fake, path, change):
    fake.reply = right
    first = evaluate(fake, path, sums(2))
    if change == "server":
        fake.settings = {**fake.settings, "kv_cache_dtype": "fp8_e4m3fn"}
    task = generated("arithmetic", seed=0, count=2) if change == "question" else sums(2)
    fake.reply = lambda body: "0"
    sampling = {"temperature": 0.5} if change == "temperature" else {}
    second = evaluate(fake, path, task, **sampling)
    assert len(fake.bodies) == 4
    assert second.run.key != first.run.key
    assert Records(path).find().key == second.run.key
    assert Records(path).find(first.run.key[:5]).key == first.run.key


def test_where_a_server_listens_does_not_make_another_run(fake, path):
    fake.reply = right
    evaluate(fake, path, sums(2))
    fake.settings = {**fake.settings, "port": "2"}
    assert evaluate(fake, path, sums(2)).resumed == 2


def test_a_refused_question_counts_as_wrong_and_is_asked_again(fake, path):
    fake.reply = lambda body: (400, {"error": {"message": "too long"}})
    report = evaluate(fake, path, sums(2))
    assert (report.score().right, report.score().asked) == (0, 2)
    assert [a.error for a in report.errors] == [f"{CHAT} answered 400: too long"] * 2
    fake.reply = right
    assert evaluate(fake, path, sums(2)).score().right == 2
    assert len(fake.bodies) == 4


def test_a_busy_server_is_asked_again(fake, path):
    busy = iter([429, 503])

    def reply(body):
        status = next(busy, None)
        return (status, {"error": {"message": "later"}}) if status else right(body)

    fake.reply = reply
    assert evaluate(fake, path, sums(1)).score().right == 1
    assert len(fake.bodies) == 3


def test_nobody_there_is_said_with_the_address(path):
    with (
        Server("http://127.0.0.1:9") as server,
        pytest.raises(ServerError, match=r"no answer from http://127\.0\.0\.1:9/"),
    ):
        describe(sums(1), server, Sampling())


def test_an_address_without_scheme_is_refused():
    with pytest.raises(ConfigError, match="--base-url"):
        Server("localhost:8000")


def test_requests_in_flight_stay_below_the_limit(fake, path):
    def reply(body):
        time.sleep(0.02)
        return right(body)

    fake.reply = reply
    evaluate(fake, path, sums(12), concurrency=3)
    assert fake.most == 3


def test_of_questions_about_one_text_the_first_is_asked_alone(fake, path):
    """Else a prefix cache has nothing to offer to any of them."""
    texts = ["x" * 2000 + " {} {}", "y" * 2000 + " {} {}"]
    questions = [q for text in texts for q in sums(4, text).questions]
    first = {}

    def reply(body):
        text = body["messages"][0]["content"]
        if text[0] in first:
            assert first[text[0]].is_set(), "asked before the first of its text was answered"
            time.sleep(0.1)
        else:
            first[text[0]] = threading.Event()
            time.sleep(0.1)
            first[text[0]].set()
        return "0"

    fake.reply = reply
    task = Task("texts", "correct", tuple(questions), {}, max_tokens=8)
    assert not evaluate(fake, path, task, concurrency=8).errors
    assert fake.most >= 3  # the others are asked together


def test_servers_of_others_have_no_settings_and_are_asked_all_the_same(fake, path):
    fake.settings, fake.reply = None, right
    report = evaluate(fake, path, sums(2))
    assert report.score().right == 2
    assert report.run.settings["served"] == {}


def test_a_tool_call_is_graded_as_the_call_it_is(fake, path):
    task = generated("toolcalls", seed=0, count=4)
    wanted = {q.body["messages"][0]["content"]: json.loads(q.expected) for q in task.questions}

    def reply(body):
        call = wanted[body["messages"][0]["content"]]
        assert any(tool["function"]["name"] == call["name"] for tool in body["tools"])
        arguments = json.dumps(call["arguments"])
        return {
            "content": None,
            "tool_calls": [{"function": {"name": call["name"], "arguments": arguments}}],
        }

    fake.reply = reply
    assert evaluate(fake, path, task).score().right == 4
    fake.reply = lambda body: {
        "content": None,
        "tool_calls": [{"function": {"name": "other", "arguments": "{not json"}}],
    }
    path.unlink()
    assert evaluate(fake, path, task).score().right == 0


def test_sampling_and_key_reach_the_server(fake, path):
    task = sums(1)
    with Server(fake.url + "/v1/", api_key="secret") as server:
        sampling = Sampling(seed=3, chat_template_kwargs={"thinking_mode": "disabled"})
        ask_all(task, server, describe(task, server, sampling), Records(path))
    (body,) = fake.bodies
    assert body["auth"] == "Bearer secret"
    assert (body["model"], body["temperature"], body["max_tokens"], body["seed"]) == (
        "fake", 0.0, 8, 3,
    )  # fmt: skip
    assert body["chat_template_kwargs"] == {"thinking_mode": "disabled"}


def test_a_file_of_something_else_is_refused_with_its_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"line": "other"}\n')
    with pytest.raises(ConfigError, match=r"x\.jsonl:1"):
        Records(path)
