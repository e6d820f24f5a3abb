"""The reported divergence is a lower bound of the true one, exact where everything is known."""

import json
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minuet.cli import main
from minuet.engine.llm import LLM
from minuet.engine.types import SamplingParams
from minuet.errors import ConfigError
from minuet.evals.logits import divergence, kl_at_least
from minuet.evals.questions import generated
from minuet.evals.records import Records, Scored

weights = st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6)


def logs(values):
    total = sum(values)
    return {i: math.log(value / total) for i, value in enumerate(values)}


def true_kl(first, second):
    return sum(math.exp(p) * (p - second[i]) for i, p in first.items())


def top(logprobs, count):
    return dict(sorted(logprobs.items(), key=lambda pair: -pair[1])[:count])


@given(weights, weights)
def test_with_the_whole_vocabulary_it_is_the_divergence(one, two):
    first, second = logs(one), logs(two)
    assert kl_at_least(first, second) == pytest.approx(true_kl(first, second), abs=1e-7)


@given(weights, weights, st.integers(1, 5), st.integers(1, 5))
def test_with_less_it_is_never_more(one, two, seen, also):
    first, second = logs(one), logs(two)
    assert kl_at_least(top(first, seen), top(second, also)) <= true_kl(first, second) + 1e-7


@given(weights, st.integers(1, 6))
def test_a_distribution_does_not_diverge_from_itself(one, seen):
    first = top(logs(one), seen)
    assert kl_at_least(first, first) == pytest.approx(0.0, abs=1e-9)


def test_moved_mass_is_seen_even_where_the_tokens_differ():
    sure = {7: math.log(0.99)}
    assert kl_at_least(sure, {7: math.log(0.01)}) > 4.0


def scored(question, tops, ids=(5, 6, 7), answer_at=2):
    drawn = [pairs[0][1] for pairs in tops]
    return Scored("k", question, question, list(ids), answer_at, drawn, tops)


def test_agreement_shift_and_perplexity_by_position():
    first = [scored("a", [[(6, math.log(0.5)), (1, math.log(0.4))], [(7, math.log(0.5))]])]
    second = [scored("a", [[(1, math.log(0.5)), (6, math.log(0.4))], [(7, math.log(0.25))]])]
    whole = divergence(first, second)
    assert whole.positions == 2
    assert whole.same_top == 0.5
    assert whole.perplexity[0] == pytest.approx(2.0)
    assert whole.kl_max >= whole.kl_mean > 0
    answers = divergence(first, second, answers_only=True)
    assert answers.positions == 1
    assert answers.same_top == 1.0
    assert answers.logprob_shift == pytest.approx(math.log(2))
    assert answers.perplexity == pytest.approx((2.0, 4.0))


@given(st.permutations(["a", "b", "c"]))
def test_texts_are_paired_by_what_they_are(order):
    assume(order != ["a", "b", "c"])
    pairs = {name: [[(6, -0.1 * n)], [(7, -0.2 * n)]] for n, name in enumerate("abc", 1)}
    first = [scored(name, pairs[name]) for name in "abc"]
    second = [scored(name, pairs[name]) for name in order]
    assert divergence(first, second).kl_max == pytest.approx(0.0, abs=1e-9)


def test_other_tokens_are_no_pair():
    tops = [[(6, -0.5)], [(7, -0.5)]]
    with pytest.raises(ConfigError, match="not the same tokens"):
        divergence([scored("a", tops)], [scored("a", tops, ids=(5, 6, 8))])
    with pytest.raises(ConfigError, match="no text in common"):
        divergence([scored("a", tops)], [scored("b", tops)])


# --- through a real server -----------------------------------------------------------------------


def test_a_servers_logprobs_are_the_engines_and_do_not_diverge_from_themselves(
    tiny, tiny_folder, tmp_path, capsys
):
    out = tmp_path / "a.jsonl"
    words = ["eval", "logits", "--task", "lists", "--limit", "2", "--top", "5", "--quiet"]
    for path in (out, tmp_path / "b.jsonl"):
        assert main([*words, "--base-url", tiny.url, "--out", str(path)]) == 0
    capsys.readouterr()
    assert main(["eval", "compare", str(out), str(tmp_path / "b.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["all tokens"]["kl_max_at_least"] == pytest.approx(0.0, abs=1e-6)
    assert found["all tokens"]["same_top_token"] == 1.0
    assert 0 < found["answers"]["positions"] < found["all tokens"]["positions"]

    llm = LLM(tiny_folder, kv_cache_pages=256, announce=lambda line: None)
    (texts,) = Records(out).scored.values()
    assert len(texts) == 2
    for text in texts.values():
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5)
        (output,) = llm.generate([text.token_ids], params)
        reports = output.prompt_logprobs[1:]
        assert text.logprobs == pytest.approx([r.logprob for r in reports], abs=2e-5)
        for kept, report in zip(text.top, reports, strict=True):
            assert (
                dict(report.top).items() <= {i: pytest.approx(p, abs=2e-5) for i, p in kept}.items()
            )
        answer = llm.engine.tokenizer.decode(text.token_ids[text.answer_at :])
        assert answer == next(
            q.expected
            for q in generated("lists", seed=0, count=2).questions
            if q.key == text.question
        )


def test_a_text_that_is_not_scored_is_said_and_asked_again_next_time(fake, tmp_path, capsys):
    words = ["eval", "logits", "--task", "lists", "--limit", "1", "--quiet"]
    out = ["--out", str(tmp_path / "a.jsonl")]
    fake.reply = lambda body: (404, {"error": {"message": "no such route"}})
    assert main([*words, *out, "--base-url", fake.url]) == 1
    assert "not scored: lists/0: /tokenize answered 404" in capsys.readouterr().out
    records = Records(tmp_path / "a.jsonl")
    assert records.texts(records.find().key) == {}
