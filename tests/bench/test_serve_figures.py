"""Outcomes become vLLM's figures; prompts and arrivals are what was asked for."""

import asyncio
import itertools
import json
import math
import statistics

import pytest

from minuet.bench.serve import metrics, prompts
from minuet.bench.serve.client import Outcome
from minuet.bench.serve.load import arrivals
from minuet.bench.serve.metrics import Wanted, parse_goodput
from minuet.bench.serve.prompts import RandomLengths
from minuet.errors import ConfigError


def answered(start_s, ttft_s, gaps, input_tokens=10, per_event=1):
    events = [per_event] * (len(gaps) + 1)
    return Outcome(
        input_tokens=input_tokens,
        output_tokens=sum(events),
        start_s=start_s,
        ttft_s=ttft_s,
        itls_s=list(gaps),
        events=events,
        latency_s=ttft_s + sum(gaps),
    )


# two requests: 100 ms, then 10 ms a token; 300 ms, then 20 ms a token; and one that failed
FIRST = answered(1.0, 0.1, [0.01] * 4)
SECOND = answered(1.2, 0.3, [0.02] * 9, input_tokens=30)
FAILED = Outcome(start_s=1.1, error="429 Too Many Requests: full")


def test_figures_are_those_of_vllms_definitions():
    found = metrics.figures([FIRST, SECOND, FAILED], 2.0, Wanted())
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (40, 15)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 7.5
    assert found["total_token_throughput"] == 27.5
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["median_tpot_ms"] == pytest.approx(15)
    # per gap, not per request: nine of the thirteen are long
    assert found["median_itl_ms"] == pytest.approx(20)
    assert found["mean_e2el_ms"] == pytest.approx((140 + 480) / 2)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["p20_ttft_ms"] == pytest.approx(140)
    assert found["p80_ttft_ms"] == pytest.approx(260)
    assert found["p99_ttft_ms"] == pytest.approx(298)


def test_goodput_counts_requests_within_every_limit():
    def goodput(*words):
        wanted = Wanted(goodput_ms=parse_goodput(words))
        return metrics.figures([FIRST, SECOND, FAILED], 2.0, wanted)["request_goodput"]

    assert goodput("ttft:500", "tpot:50") == 1.0
    assert goodput("ttft:200") == 0.5
    assert goodput("ttft:500", "tpot:15") == 0.5
    assert goodput("e2el:100") == 0.0
    assert metrics.figures([FIRST], 1.0, Wanted())["request_goodput"] is None


def test_the_fullest_second_and_the_fullest_moment():
    # ten tokens within the first second, one after it
    early, late = answered(0.0, 0.1, [0.05] * 9), answered(1.5, 0.1, [])
    found = metrics.figures([early, late], 2.0, Wanted())
    assert found["max_output_tokens_per_s"] == 10.0
    assert found["max_concurrent_requests"] == 1
    assert metrics.figures([FIRST, SECOND], 2.0, Wanted())["max_concurrent_requests"] == 1
    other = answered(1.05, 0.1, [])
    assert metrics.figures([FIRST, other], 2.0, Wanted())["max_concurrent_requests"] == 2


def test_an_event_of_several_tokens_counts_them_all():
    found = metrics.figures([answered(0.0, 0.1, [0.1], per_event=3)], 1.0, Wanted())
    assert found["max_output_tokens_per_s"] == 6.0
    assert found["median_tpot_ms"] == pytest.approx(1e3 * 0.1 / 5)


def test_nothing_answered_gives_zeros_and_every_failure():
    found = metrics.figures([FAILED], 2.0, Wanted())
    assert (found["completed"], found["failed"], found["p99_itl_ms"]) == (0, 1, 0.0)
    assert list(metrics.failures([FAILED, FIRST, FAILED])) == [
        "2 failed: 429 Too Many Requests: full"
    ]


def test_lists_keep_a_place_for_requests_that_failed():
    lists = metrics.details([FIRST, FAILED, SECOND])
    assert lists["output_lens"] == [5, 0, 10]
    assert lists["errors"] == ["", FAILED.error, ""]
    assert {len(values) for values in lists.values()} == {3}


def test_the_block_is_vllms():
    wanted = Wanted(metrics=("ttft",), goodput_ms={"ttft": 500.0})
    result = {
        **metrics.figures([FIRST, SECOND, FAILED], 2.0, wanted),
        "max_concurrency": 4,
        "request_rate": 2.5,
    }
    lines = list(metrics.block(result, wanted))
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert {len(line) for line in lines[:1]} == {50}
    for row in (
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             4         ",
        "Request rate configured (RPS):           2.50      ",
        "Request goodput (req/s):                 1.00      ",
        "Output token throughput (tok/s):         7.50      ",
        "---------------Time to First Token----------------",
        "P99 TTFT (ms):                           298.00    ",
    ):
        assert row in lines
    assert not any("ITL" in line for line in lines)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Wanted(metrics=("ttft", "tbt")),
        lambda: Wanted(percentiles=(100.0,)),
        lambda: parse_goodput(["itl:5"]),
        lambda: parse_goodput(["ttft"]),
        lambda: RandomLengths(input_len=1, output_len=1, range_ratio=1.0),
        lambda: RandomLengths(input_len=0, output_len=1, range_ratio=0.0),
    ],
)
def test_what_cannot_be_reported_or_asked_is_refused(make):
    with pytest.raises(ConfigError):
        make()


# --- prompts -------------------------------------------------------------------------------------


def test_random_lengths_are_uniform_around_their_means():
    lengths = RandomLengths(input_len=100, output_len=40, range_ratio=0.5, prefix_len=3)
    made = prompts.random_prompts(2000, lengths, vocab=50, seed=1)
    inputs = [len(prompt.content) - 3 for prompt in made]
    outputs = [prompt.output_tokens for prompt in made]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (20, 60)
    assert statistics.mean(inputs) == pytest.approx(100, rel=0.03)
    assert len({tuple(prompt.content[:3]) for prompt in made}) == 1
    assert {token for prompt in made for token in prompt.content} == set(range(50))
    assert made == prompts.random_prompts(2000, lengths, vocab=50, seed=1)
    assert made != prompts.random_prompts(2000, lengths, vocab=50, seed=2)


def test_a_ratio_of_zero_gives_one_length():
    lengths = RandomLengths(input_len=7, output_len=2, range_ratio=0.0)
    made = prompts.random_prompts(20, lengths, vocab=9, seed=0)
    assert {(len(prompt.content), prompt.output_tokens) for prompt in made} == {(7, 2)}


def test_custom_prompts_are_texts_or_token_ids(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Hi", "output_tokens": 3}\n\n{"prompt": [1, 2]}\n{"other": 1}\n')
    made = prompts.custom_prompts(path, 2, output_len=9)
    assert [(prompt.content, prompt.output_tokens) for prompt in made] == [("Hi", 3), ([1, 2], 9)]
    with pytest.raises(ConfigError, match=r"entry 3.*prompt"):
        prompts.custom_prompts(path, 3, output_len=9)
    path.write_text('{"prompt": "Hi"}\n')
    with pytest.raises(ConfigError, match="--num-prompts 1 or fewer"):
        prompts.custom_prompts(path, 2, output_len=9)


@pytest.mark.parametrize("as_list", [True, False])
def test_sharegpt_takes_first_turns_of_a_useful_length(tmp_path, as_list):
    def talk(*turns):
        return {"conversations": [{"from": "x", "value": turn} for turn in turns]}

    good = talk("one two three four", "a b c d e")
    talks = [talk("short", "a b c d e"), talk("no answer to this one"), good]
    path = tmp_path / "s.json"
    path.write_text(
        json.dumps(talks) if as_list else "\n".join(json.dumps(entry) for entry in talks)
    )

    async def length(text):
        return len(text.split())

    made = asyncio.run(prompts.sharegpt_prompts(path, 1, None, length, seed=0))
    assert [(prompt.content, prompt.output_tokens) for prompt in made] == [
        ("one two three four", 5)
    ]
    with pytest.raises(ConfigError, match="too few"):
        asyncio.run(prompts.sharegpt_prompts(path, 2, None, length, seed=0))


# --- arrivals ------------------------------------------------------------------------------------


def test_arrivals_keep_the_rate_and_burstiness_its_spread():
    def gaps(burstiness):
        times = arrivals(20000, 50.0, burstiness, seed=3)
        assert times[0] == 0.0
        return [after - before for before, after in itertools.pairwise(times)]

    for burstiness in (0.25, 1.0, 100.0):
        found = gaps(burstiness)
        assert statistics.mean(found) == pytest.approx(1 / 50, rel=0.05)
        # a gamma distribution: deviation over mean is 1 / sqrt(shape)
        spread = statistics.pstdev(found) / statistics.mean(found)
        assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_an_infinite_rate_sends_all_at_once():
    assert arrivals(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]
