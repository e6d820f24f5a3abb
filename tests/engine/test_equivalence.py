"""An answer does not depend on caching, chunks, preemption, batch-mates, drafts or layout."""

from collections.abc import Callable
from pathlib import Path

import pytest

from minuet.engine.types import SamplingParams
from tests.engine.desk import GREEDY, answer, engine, token_ids

BLOCK = 4  # preset tiny: block 4, top-3: selection matters from token 12 on
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 45)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("tiny")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [token_ids(length, 512, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt by itself, computed in one step, nothing cached."""
    plain = engine(folder, kv_cache_pages=64, enable_prefix_caching=False)
    return [answer(plain, [prompt], max_tokens=9)[0] for prompt in prompts]


def test_batch_mates_do_not_matter(folder, prompts, alone):
    assert answer(engine(folder, kv_cache_pages=256), prompts, max_tokens=9) == alone


@pytest.mark.parametrize("budget", [BLOCK, BLOCK + 1, 7, 16])
def test_chunk_size_does_not_matter(folder, prompts, alone, budget):
    chunked = engine(folder, kv_cache_pages=256, max_num_batched_tokens=budget, max_num_seqs=4)
    assert answer(chunked, prompts, max_tokens=9) == alone


def test_a_prefix_hit_equals_a_miss_at_page_multiples_and_between(folder, alone, prompts):
    cached = engine(folder, kv_cache_pages=256)
    long = prompts[-1]
    assert answer(cached, [long], max_tokens=9) == [alone[-1]]
    for tail in (0, 1, BLOCK - 1):
        prompt = long[: 5 * BLOCK] + token_ids(tail, 512, seed=99)
        plain = engine(folder, kv_cache_pages=64, enable_prefix_caching=False)
        params = SamplingParams(max_tokens=9, **GREEDY)
        output = cached.core.add(f"hit-{tail}", prompt, params)
        while cached.core.has_work:
            cached.core.step()
        assert output.num_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        assert [output.token_ids] == answer(plain, [prompt], max_tokens=9)


def test_an_answer_continued_from_its_own_cached_output_is_the_same(folder, prompts, alone):
    cached = engine(folder, kv_cache_pages=256)
    first = answer(cached, [prompts[-1]], max_tokens=5)[0]
    assert first + answer(cached, [prompts[-1] + first], max_tokens=4)[0] == alone[-1]


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_by_recompute_does_not_matter(folder, prompts, alone, caching):
    # 45 + 9 tokens need 14 pages; five such prompts cannot run together in 20
    tight = engine(folder, kv_cache_pages=21, enable_prefix_caching=caching)
    params = SamplingParams(max_tokens=9, **GREEDY)
    outputs = [tight.core.add(f"p{i}", prompts[-1], params) for i in range(2)]
    outputs += [tight.core.add(f"q{i}", p, params) for i, p in enumerate(prompts)]
    while tight.core.has_work:
        tight.core.step()
        tight.core.scheduler.integrity()
    assert [o.token_ids for o in outputs] == [alone[-1], alone[-1], *alone]
    if not caching:
        assert tight.core.scheduler.num_preemptions > 0, "the pool was not tight enough to matter"


def test_sampled_tokens_survive_preemption(folder, prompts):
    sampling = {"temperature": 1.3, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    roomy = engine(folder, kv_cache_pages=256, enable_prefix_caching=False)
    tight = engine(folder, kv_cache_pages=21, enable_prefix_caching=False)
    mates = [prompts[-2]] * 3  # 13 tokens each, growing to 53: 14 pages, three of them in 20
    assert answer(tight, mates, **sampling) == answer(roomy, mates, **sampling)
    assert tight.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_verified_drafts_right_or_wrong_do_not_change_the_answer(
    folder, prompts, num_drafts, sampling
):
    """q_len 2..5 through the scheduler, with rollback over block borders."""
    plain = engine(folder, kv_cache_pages=64, enable_prefix_caching=False)
    want = answer(plain, [prompts[-1]], max_tokens=24, **sampling)[0]
    drafting = engine(folder, kv_cache_pages=64, num_speculative_tokens=num_drafts)
    core = drafting.core
    output = core.add("d", prompts[-1], SamplingParams(**{"max_tokens": 24, **GREEDY, **sampling}))
    steps = accepted = 0
    while core.has_work:
        request = core._live["d"].request
        if request.output_token_ids:
            known = len(request.output_token_ids)
            guess = want[known : known + num_drafts]
            if steps % 3 == 1:
                guess = [(t + 1) % 500 for t in guess]  # all wrong
            elif steps % 3 == 2:
                guess[len(guess) // 2 :] = [7] * (len(guess) - len(guess) // 2)  # half wrong
            core.scheduler.propose(request, guess)
        before = len(output.token_ids)
        core.step()
        core.scheduler.integrity()
        accepted += max(0, len(output.token_ids) - before - 1)
        steps += 1
    assert output.token_ids == want
    assert accepted > 0
    assert steps < 25, "no draft was ever accepted"


def test_stopping_inside_accepted_drafts_cuts_the_rest(folder, prompts):
    plain = engine(folder, kv_cache_pages=64)
    want = answer(plain, [prompts[-1]], max_tokens=12)[0]
    drafting = engine(folder, kv_cache_pages=64, num_speculative_tokens=4)
    params = SamplingParams(max_tokens=12, stop_token_ids=(want[4],), logprobs=1, **GREEDY)
    output = drafting.core.add("s", prompts[-1], params)
    while drafting.core.has_work:
        live = drafting.core._live["s"].request
        if len(live.output_token_ids) == 2:
            drafting.core.scheduler.propose(live, want[2:6])
        drafting.core.step()
    assert output.token_ids == want[: want.index(want[4]) + 1]
    assert [r.token_id for r in output.logprobs] == output.token_ids


@pytest.mark.parametrize("kv", ["bfloat16", "float16", "fp8", "fp8_e4m3fnuz"])
@pytest.mark.parametrize("index", ["float32", "bfloat16", "fp8"])
def test_narrow_lanes_give_finite_answers_equal_for_hit_and_miss(folder, prompts, kv, index):
    narrow = engine(folder, kv_cache_pages=64, kv_cache_dtype=kv, index_kv_cache_dtype=index)
    first = answer(narrow, [prompts[-1]], max_tokens=9)
    assert answer(narrow, [prompts[-1]], max_tokens=9) == first
    stored = {
        lane.name.value: lane.dtype
        for layout in narrow.plan.layouts.values()
        for lane in layout.lanes.values()
    }
    assert stored["k"] is stored["v"] is narrow.plan.config.kv_cache_dtype
    assert stored["index_k"] is narrow.plan.config.index_kv_cache_dtype
    assert ("k_scale" in stored) == kv.startswith("fp8")
