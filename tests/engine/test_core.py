"""Bad requests, aborts, broken logits: one clear error each, neighbours whole, engine alive."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minuet.engine.llm import LLM
from minuet.engine.sampler import NOT_FINITE
from minuet.engine.types import FinishReason, SamplingParams
from minuet.errors import RequestError
from tests.engine.desk import GREEDY, answer, engine, token_ids

PARAMS = SamplingParams(max_tokens=6, **GREEDY)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("tiny")


@pytest.fixture
def prepared(folder):
    return engine(folder, kv_cache_pages=33, max_model_len=100)


def drain(core):
    while core.has_work:
        core.step()
        core.scheduler.integrity()


def assert_untouched(prepared):
    """All pages are back, and a fresh request is answered."""
    core = prepared.core
    core.scheduler.integrity()
    assert not core.has_work
    assert core.scheduler.pool.usable == core.scheduler.pool.capacity
    assert len(answer(prepared, [[5, 6, 7]])[0]) == 8


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ([], {}, "prompt", "empty"),
        ([1, 99_999], {}, "prompt", "from 0 to"),
        ([1, -1], {}, "prompt", "from 0 to"),
        ([1, 1.0], {}, "prompt", "integers"),
        ([True], {}, "prompt", "integers"),
        ([1] * 101, {}, "prompt", "at most 99"),
        ([1] * 60, {"max_tokens": 60}, "max_tokens", "at most 40"),
        ([1], {"logprobs": 21}, "logprobs", "20"),
        ([1], {"prompt_logprobs": 999}, "prompt_logprobs", "20"),
        ([1], {"stop_token_ids": (99_999,)}, "stop_token_ids", "from 0 to"),
        ([1], {"logit_bias": {-3: 1.0}}, "logit_bias", "from 0 to"),
        ([1], {"stop": ("",)}, "stop", "non-empty"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_its_field(
    prepared, prompt, params, param, words
):
    with pytest.raises(RequestError) as caught:
        prepared.core.add("bad", prompt, SamplingParams(**{"max_tokens": 4, **params}))
    assert caught.value.param == param
    assert words in str(caught.value)
    assert_untouched(prepared)


def test_a_prompt_longer_than_the_pool_is_refused_and_nobody_waits_behind_it(folder):
    small = engine(folder, kv_cache_pages=6)  # 5 pages of 4 tokens
    with pytest.raises(RequestError):
        small.core.add("big", [3] * 21, PARAMS)
    assert_untouched(small)


def test_a_live_id_is_refused_and_a_finished_one_can_be_used_again(prepared):
    prepared.core.add("same", [1, 2], PARAMS)
    with pytest.raises(RequestError, match="in use"):
        prepared.core.add("same", [1, 2], PARAMS)
    drain(prepared.core)
    prepared.core.add("same", [1, 2], PARAMS)
    drain(prepared.core)
    assert_untouched(prepared)


@pytest.mark.parametrize("steps_before", [0, 1, 2, 4])
def test_an_abort_at_any_moment_gives_every_page_back(prepared, steps_before):
    core = prepared.core
    want = answer(prepared, [token_ids(30, 512)], max_tokens=6)[0]
    outputs = [core.add(f"a{i}", token_ids(30, 512, seed=i), PARAMS) for i in range(3)]
    mate = core.add("mate", token_ids(30, 512), PARAMS)
    for _ in range(steps_before):
        core.step()
    for output in outputs:
        core.abort(output.request_id)
        core.abort(output.request_id)  # twice is as good as once
        assert output.finish_reason is FinishReason.ABORT
    core.abort("never seen")
    drain(core)
    assert mate.token_ids == want
    assert_untouched(prepared)


def test_an_abort_while_the_step_runs_frees_the_pages_after_it(prepared):
    core = prepared.core
    output = core.add("mid", token_ids(20, 512), PARAMS)
    inner = core._executor.execute

    def execute(step):
        core.abort("mid")
        return inner(step)

    core._executor.execute = execute
    try:
        core.step()
    finally:
        del core._executor.execute
    assert output.finish_reason is FinishReason.ABORT
    assert output.token_ids == []
    assert_untouched(prepared)


def test_non_finite_logits_end_one_request_and_keep_nothing_of_it_in_the_cache(prepared):
    core = prepared.core
    good_prompt, bad_prompt = token_ids(30, 512, seed=1), token_ids(30, 512, seed=2)
    want = answer(prepared, [good_prompt], max_tokens=6)[0]
    core.scheduler.prefix.reset()
    model = core._executor.model
    inner, calls = model.logits, []

    def logits(hidden):
        values = inner(hidden)
        calls.append(len(values))
        if len(calls) == 3:
            values[-1, 7] = float("nan")
        return values

    model.logits = logits
    good, bad = core.add("good", good_prompt, PARAMS), core.add("bad", bad_prompt, PARAMS)
    drain(core)
    del model.logits
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error == NOT_FINITE
    assert len(bad.token_ids) == 2
    assert good.token_ids == want
    again = core.add("again", bad_prompt, PARAMS)
    drain(core)
    assert again.num_cached_tokens == 0
    assert again.finish_reason is FinishReason.LENGTH
    assert_untouched(prepared)


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(prepared):
    core = prepared.core
    output = core.add("x", [1, 2, 3], PARAMS)
    core._executor.execute = lambda step: (_ for _ in ()).throw(MemoryError("no memory"))
    with pytest.raises(MemoryError):
        core.step()
    del core._executor.execute
    assert output.finish_reason is FinishReason.ERROR
    assert "no memory" in output.error
    assert_untouched(prepared)


def test_stop_token_is_reported_and_kept_out_of_the_text(prepared):
    free = answer(prepared, [[5, 6, 7]], max_tokens=6)[0]
    stop = free[2]
    output = prepared.core.add(
        "s", [5, 6, 7], SamplingParams(max_tokens=6, stop_token_ids=(stop,), **GREEDY)
    )
    drain(prepared.core)
    assert output.token_ids == free[: free.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    tokenizer = prepared.tokenizer
    assert output.text == tokenizer.decode(output.token_ids[:-1])


def test_eos_ends_a_request_unless_it_is_ignored(prepared):
    core = prepared.core
    free = answer(prepared, [[5, 6, 7]], max_tokens=6)[0]
    eos = core._limits.eos_token_ids[0]
    bias = {eos: 1000.0}
    ended = core.add("e", [5, 6, 7], SamplingParams(max_tokens=6, temperature=0.0, logit_bias=bias))
    late = core.add(
        "m", [5, 6, 7], SamplingParams(max_tokens=6, min_tokens=3, temperature=0.0, logit_bias=bias)
    )
    drain(core)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (
        [eos],
        FinishReason.STOP,
        None,
    )
    assert late.token_ids[:3] != [eos] * 3
    assert len(late.token_ids) == 4
    assert eos not in late.token_ids[:3]
    assert len(free) == 6


def test_a_stop_string_over_token_borders_ends_the_request(prepared):
    tokenizer, core = prepared.tokenizer, prepared.core
    free = answer(prepared, [[5, 6, 7]], max_tokens=12)[0]
    text = tokenizer.decode(free)
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    output = core.add("t", [5, 6, 7], SamplingParams(max_tokens=12, stop=(stop,), **GREEDY))
    drain(core)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert output.text == text[: text.index(stop)]
    assert_untouched(prepared)


def test_prompt_logprobs_are_the_same_in_chunks_and_after_preemption(folder):
    prompt = token_ids(30, 512)
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=1, **GREEDY)
    reports = []
    for settings in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 2}):
        prepared = engine(folder, kv_cache_pages=64, **settings)
        answer(prepared, [prompt])  # fills the prefix cache: such a request must not use it
        output = prepared.core.add("p", prompt, params)
        drain(prepared.core)
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        assert [r.token_id for r in output.prompt_logprobs[1:]] == prompt[1:]
        reports.append([r.logprob for r in output.prompt_logprobs[1:]])
        assert output.num_cached_tokens == 0
    assert reports[0] == pytest.approx(reports[1], abs=1e-4)


def test_generate_refuses_the_whole_call_or_answers_the_rest(prepared):
    llm = LLM.over(prepared)
    with pytest.raises(RequestError):
        llm.generate([[1, 2], []], PARAMS)
    assert_untouched(prepared)
    good, bad, also = llm.generate([[1, 2], [], "hello"], PARAMS, on_error="return")
    assert bad.finish_reason is FinishReason.ERROR
    assert "empty" in bad.error
    assert len(good.token_ids) == len(also.token_ids) == 6
    assert_untouched(prepared)


def test_an_interrupted_generate_leaves_no_request_behind(prepared):
    llm, core = LLM.over(prepared), prepared.core
    inner, steps = core.step, []

    def step():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return inner()

    core.step = step
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3], [4, 5]], PARAMS)
    del core.step
    assert_untouched(prepared)


def test_nothing_reads_memory_that_was_not_written(folder):
    """Every engine of these tests starts on a pool of NaN; a freed page is poisoned again here."""
    prepared = engine(folder, kv_cache_pages=33)
    want = answer(prepared, [token_ids(30, 512)])
    prepared.core.scheduler.prefix.reset()
    for layer in prepared.core._executor.cache.layers:
        for lane in layer.lanes.values():
            lane.copy_(torch.full((), float("nan")).to(lane.dtype).expand(lane.shape))
    assert answer(prepared, [token_ids(30, 512)]) == want
