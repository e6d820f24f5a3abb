"""The host a step ahead of the device: the same answers, and nothing lost when things go wrong."""

import random

import pytest

from minuet.engine import core as core_module
from minuet.engine import ipc
from minuet.engine.llm import LLM
from minuet.engine.process import Loop, Served
from minuet.engine.types import FinishReason, SamplingParams
from minuet.errors import ContractError
from tests.engine.desk import GREEDY, answer, engine, token_ids
from tests.engine.late import EOS, VOCAB, Late, answer_to, core_on


def params(max_tokens=4, **more):
    return SamplingParams(**{"max_tokens": max_tokens, **GREEDY, **more})


def drain(core):
    while core.has_work:
        core.step()
        core.scheduler.integrity()
    pool = core.scheduler.pool
    assert pool.usable == pool.capacity, "pages leaked"


# --- what overlaps -------------------------------------------------------------------------------


def test_the_next_step_is_submitted_before_the_results_of_the_one_that_runs():
    device = Late()
    core = core_on(device)
    output = core.add("r", [1, 2, 3], params(4))
    drain(core)
    assert output.token_ids == answer_to([1, 2, 3], 4)
    assert device.events == [
        *[("submit", 0), ("submit", 1), ("results", 0), ("submit", 2), ("results", 1)],
        *[("submit", 3), ("results", 2), ("results", 3)],
    ]


def test_without_depth_every_step_waits_for_the_one_before():
    device = Late(depth=0)
    core = core_on(device)
    core.add("r", [1, 2, 3], params(2))
    drain(core)
    assert device.events == [("submit", 0), ("results", 0), ("submit", 1), ("results", 1)]


def test_each_call_delivers_the_token_of_one_step():
    core = core_on(Late())
    output = core.add("r", [1, 2, 3], params(4))
    for count in (1, 2, 3, 4):
        assert core.step() == [output]
        assert len(output.token_ids) == count
    assert output.finish_reason is FinishReason.LENGTH
    assert not core.has_work


def test_prompts_in_chunks_go_ahead_and_the_first_token_follows_the_last_chunk():
    device = Late()
    core = core_on(device, budget=4)
    prompt = [index % VOCAB for index in range(10)]
    output = core.add("r", prompt, params(2))
    drain(core)
    starts = [(s.start, s.num_tokens, s.follows) for step in device.steps for s in step.scheduled]
    assert starts == [(0, 4, None), (4, 4, None), (8, 2, None), (10, 1, 0)]
    assert [kind for kind, _ in device.events[:3]] == ["submit", "submit", "results"]
    assert output.token_ids == answer_to(prompt, 2)


def test_decode_time_is_the_time_between_results(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(core_module.time, "perf_counter", lambda: now[0])
    device = Late()
    core = core_on(device)
    core.add("r", [1, 2, 3], params(6))
    took = device.submit

    def submit(step):
        pending = took(step)
        wait = pending.results

        def results():
            now[0] += 0.5
            return wait()

        pending.results = results
        return pending

    device.submit = submit
    core.step()
    now[0] += 0.125  # the host writes text meanwhile
    core.step()
    assert core.last_decode == (1, 4, 0.625)


def test_more_than_one_step_ahead_is_refused():
    with pytest.raises(ContractError, match="expected 0 or 1"):
        core_on(Late(depth=2))


# --- what is run in sequence ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "history",
    [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}],
)
def test_penalties_put_the_steps_in_sequence_until_the_request_has_left(history):
    device = Late()
    core = core_on(device)
    core.add("plain", [1, 2, 3], params(6))
    core.add("penalised", [4, 5, 6], params(3, **history))
    drain(core)
    kinds = [kind for kind, _ in device.events]
    assert kinds[:6] == ["submit", "results"] * 3
    assert kinds[6:9] == ["submit", "submit", "results"]


def test_a_grammar_puts_the_steps_in_sequence():
    class Anything:
        def mask(self, logits, ahead=()):
            pass

        def accept(self, token_id):
            return True

    device = Late()
    core = core_on(device)
    core.add("r", [1, 2, 3], params(3), grammar=Anything())
    drain(core)
    assert [kind for kind, _ in device.events] == ["submit", "results"] * 3


def test_a_prompt_under_way_does_not_wait_for_a_grammar_that_has_drawn_nothing():
    device = Late()
    core = core_on(device, budget=4)
    core.add("r", [1] * 10, params(2, presence_penalty=1.0))
    drain(core)
    kinds = [kind for kind, _ in device.events]
    assert " ".join(kinds) == "submit submit results submit results results submit results"


def test_a_minimum_length_needs_no_token_and_goes_ahead():
    device = Late()
    core = core_on(device)
    core.add("r", [1, 2, 3], params(4, min_tokens=3))
    drain(core)
    assert device.events[:2] == [("submit", 0), ("submit", 1)]
    assert [share.num_output for step in device.steps for share in step.scheduled] == [0, 1, 2, 3]


# --- ends that nobody saw coming -----------------------------------------------------------------


def long_enough(stops_at):
    """A prompt whose answer has its first token of this kind at index 2."""
    for first in range(1, 500):
        prompt = [first % VOCAB, first // VOCAB % VOCAB, 1, 2, 3]
        tokens = answer_to(prompt, 3)
        if tokens[2] == stops_at and stops_at not in tokens[:2]:
            return prompt
    raise AssertionError("no such prompt")


def test_a_stop_token_drops_what_was_drawn_ahead_and_frees_the_pages_after_it():
    device = Late()
    core = core_on(device)
    prompt = long_enough(EOS)
    output = core.add("r", prompt, params(9, ignore_eos=False))
    for _ in range(3):
        core.step()
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == answer_to(prompt, 3)
    pool = core.scheduler.pool
    assert pool.usable < pool.capacity  # the step ahead still reads them
    assert core.has_work
    assert core.step() == []
    assert pool.usable == pool.capacity
    assert not core.has_work
    assert [kind for kind, _ in device.events].count("submit") == 4


def test_a_stop_string_ends_a_request_that_is_in_the_step_ahead():
    core = core_on(Late())
    prompt = [1, 2, 3]
    text = "".join(chr(ord("a") + token) for token in answer_to(prompt, 8))
    stop = text[3:5]
    output = core.add("r", prompt, params(8, stop=(stop,)))
    drain(core)
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)


def test_an_id_can_be_used_again_while_the_step_ahead_still_has_the_old_request():
    core = core_on(Late())
    prompt = long_enough(EOS)
    first = core.add("same", prompt, params(9, ignore_eos=False))
    while first.finish_reason is None:
        core.step()
    again = core.add("same", [1, 2, 3], params(3))
    drain(core)
    assert again.token_ids == answer_to([1, 2, 3], 3)
    assert first.token_ids == answer_to(prompt, 3)


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_an_abort_with_two_steps_under_way_frees_every_page(steps_before):
    core = core_on(Late())
    gone = core.add("gone", [1, 2, 3, 4, 5], params(6))
    mate = core.add("mate", [1, 2, 3], params(6))
    for _ in range(steps_before):
        core.step()
    core.abort("gone")
    drain(core)
    assert gone.finish_reason is FinishReason.ABORT
    assert len(gone.token_ids) == steps_before
    assert mate.token_ids == answer_to([1, 2, 3], 6)


# --- failures ------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_requests_and_those_that_follow_but_not_who_came_later():
    device = Late(breaks={1: MemoryError("no memory")})
    core = core_on(device)
    first = core.add("first", [1, 2, 3], params(6))
    core.step()  # steps 0 and 1 are submitted, 0 is taken in
    later = core.add("later", [4, 5, 6], params(6))
    with pytest.raises(MemoryError):
        core.step()  # step 2 has both of them
    assert [s.request.request_id for s in device.steps[2].scheduled] == ["first", "later"]
    assert first.finish_reason is FinishReason.ERROR
    assert "no memory" in first.error
    assert first.token_ids == answer_to([1, 2, 3], 1)
    assert later.finish_reason is None
    drain(core)
    assert later.token_ids == answer_to([4, 5, 6], 6)
    assert len(first.token_ids) == 1


def test_a_step_that_cannot_be_submitted_fails_after_the_one_before_has_delivered():
    device = Late(refuses={1: RuntimeError("refused")})
    core = core_on(device)
    output = core.add("r", [1, 2, 3], params(6))
    assert core.step() == [output]
    assert output.token_ids == answer_to([1, 2, 3], 1)
    with pytest.raises(RuntimeError, match="refused"):
        core.step()
    assert output.finish_reason is FinishReason.ERROR
    drain(core)
    again = core.add("again", [1, 2, 3], params(3))
    drain(core)
    assert again.token_ids == answer_to([1, 2, 3], 3)


def test_nothing_is_put_ahead_of_a_step_that_could_not_be_submitted():
    device = Late(refuses={1: RuntimeError("refused")})
    core = core_on(device)
    first = core.add("first", [1, 2, 3], params(6))
    core.step()
    later = core.add("later", [4, 5, 6], params(3))
    with pytest.raises(RuntimeError, match="refused"):
        core.step()
    assert len(device.steps) == 2
    assert first.finish_reason is FinishReason.ERROR
    drain(core)
    assert later.token_ids == answer_to([4, 5, 6], 3)


def test_a_row_that_is_not_finite_ends_its_request_and_drops_what_followed():
    device = Late(sick={(1, "sick"), (2, "sick")})
    core = core_on(device)
    sick = core.add("sick", [1, 2, 3, 4, 5], params(6))
    mate = core.add("mate", [1, 2, 3], params(6))
    drain(core)
    assert sick.finish_reason is FinishReason.ERROR
    assert sick.token_ids == answer_to([1, 2, 3, 4, 5], 1)
    assert core.num_nonfinite == 1
    assert mate.token_ids == answer_to([1, 2, 3], 6)


def test_pages_of_a_failed_request_are_withdrawn_before_the_step_ahead_is_done():
    device = Late(sick={(0, "sick")})
    core = core_on(device)
    prompt = [index % VOCAB for index in range(9)]
    core.add("sick", prompt, params(6))
    core.step()
    assert core.has_work  # the step ahead still uses its pages
    again = core.add("again", prompt, params(2))
    drain(core)
    assert again.num_cached_tokens == 0
    assert again.token_ids == answer_to(prompt, 2)


def test_an_interrupt_while_waiting_leaves_the_step_to_be_taken_in():
    device = Late(breaks={1: KeyboardInterrupt()})
    core = core_on(device)
    output = core.add("r", [1, 2, 3], params(4))
    core.step()
    with pytest.raises(KeyboardInterrupt):
        core.step()
    device.breaks.clear()
    drain(core)
    assert output.token_ids == answer_to([1, 2, 3], 4)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_interrupt_while_submitting_ends_the_requests_of_that_step_only(depth):
    device = Late(depth, refuses={1: KeyboardInterrupt()})
    core = core_on(device)
    output = core.add("r", [1, 2, 3], params(4))
    with pytest.raises(KeyboardInterrupt):
        drain(core)
    waits = core.add("waits", [4, 5], params(3))
    drain(core)
    assert "interrupted" in output.error
    assert all(s.request.request_id != "r" for step in device.steps[2:] for s in step.scheduled)
    assert output.token_ids == answer_to([1, 2, 3], 1)
    assert waits.token_ids == answer_to([4, 5], 3)


# --- the engine process --------------------------------------------------------------------------


def test_the_process_sends_each_token_when_its_step_is_done_and_stops_with_an_empty_pool():
    device = Late()
    core = core_on(device)
    limited = params(4)
    messages = {
        0: [ipc.Submit("a", [1, 2, 3], limited), ipc.Submit("b", [4, 5], params(9))],
        2: [ipc.Submit("c", [6], limited)],
        3: [ipc.Abort(["b"])],
        12: [ipc.Stop()],
    }
    # only looks between steps count: each ends with None
    inbox = [m for look in range(13) for m in [*messages.get(look, []), None]]
    sent = []
    ready = ipc.Ready(1, 64, VOCAB, core.scheduler.pool.capacity, [], {}, {})
    loop = Loop(
        Served(core, ready),
        lambda wait_ms: ipc.encode(m) if (m := inbox.pop(0)) is not None else None,
        lambda report: sent.append(ipc.decode_report(report)),
    )
    loop.run()
    steps = [report for report in sent if isinstance(report, ipc.StepDone)]
    told = [[(d.request_id, len(d.token_ids), d.finish_reason) for d in s.deltas] for s in steps]
    assert told[:2] == [[("a", 1, None), ("b", 1, None)]] * 2
    tokens = {name: [] for name in "abc"}
    for delta in (delta for step in steps for delta in step.deltas):
        tokens[delta.request_id] += delta.token_ids
    assert tokens["a"] == answer_to([1, 2, 3], 4)
    assert tokens["c"] == answer_to([6], 4)
    assert tokens["b"] == answer_to([4, 5], 9)[:3]
    assert core.scheduler.pool.usable == core.scheduler.pool.capacity


# --- any order of events -------------------------------------------------------------------------


def random_request(rng):
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
    max_tokens = rng.randint(1, 12)
    asked = {"ignore_eos": rng.random() < 0.5, "min_tokens": rng.randint(0, max_tokens)}
    if rng.random() < 0.2:
        asked["stop"] = (chr(ord("a") + rng.randrange(VOCAB)),)
        asked["min_tokens"] = 0
    if rng.random() < 0.1:
        asked["presence_penalty"] = 1.0
    return prompt, params(max_tokens, **asked)


def answers(depth, seed):
    """Outputs of random requests with random aborts, over a small pool."""
    rng = random.Random(seed)
    pages, budget = rng.choice((12, 20)), rng.choice((4, 7))
    core = core_on(Late(depth), num_pages=pages, budget=budget, length=40)
    outputs, aborted = [], set()
    for number in range(30):
        prompt, asked = random_request(rng)
        outputs.append(core.add(f"r{number}", prompt, asked))
        if rng.random() < 0.2:
            aborted.add(f"r{rng.randrange(number + 1)}")
        for _ in range(rng.choice((0, 1, 3))):
            core.step()
            core.scheduler.integrity()
        for request_id in sorted(aborted):
            core.abort(request_id)
    drain(core)
    kept = [(o.token_ids, o.text, o.finish_reason) for o in outputs if o.request_id not in aborted]
    for output in outputs:
        right = answer_to(output.prompt_token_ids, 12)
        assert output.token_ids == right[: len(output.token_ids)]
    return kept, core.scheduler.num_preemptions


def test_a_step_ahead_answers_as_in_sequence_whatever_happens():
    preemptions = 0
    for seed in range(12):
        in_sequence, _ = answers(0, seed)
        ahead, preempted = answers(1, seed)
        assert ahead == in_sequence
        preemptions += preempted
    assert preemptions > 5


# --- the real model ------------------------------------------------------------------------------


class Held:
    """A runner of the real model whose results are taken a step later, as on a device."""

    depth = 1

    def __init__(self, runner):
        self.runner, self.drawn, self.num_ahead = runner, [], 0

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def submit(self, step):
        following = [share for share in step.scheduled if share.follows is not None]
        for share in following:  # the token is in the device's memory: lend it to the runner
            share.request.output_token_ids.append(self.drawn[share.follows])
        self.num_ahead += bool(following)
        pending = self.runner.submit(step)
        for share in following:
            share.request.output_token_ids.pop()
        self.drawn = [result.token_id or 0 for result in pending.results()]
        return pending


MIXED = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "min_tokens": 6, "ignore_eos": False},
    {"logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 1.0, "presence_penalty": 0.7, "max_tokens": 3},
]


@pytest.mark.parametrize("pages", [64, 14])
def test_the_model_answers_the_same_a_step_ahead(checkpoint, pages):
    folder = checkpoint("tiny")
    told = []
    for ahead in (False, True):
        sizes = {"max_model_len": 40, "max_num_seqs": 8, "max_num_batched_tokens": 16}
        prepared = engine(folder, kv_cache_pages=pages, **sizes)
        if ahead:
            prepared.core._executor = Held(prepared.core._executor)
        prompts = [token_ids(9 + 3 * index, 512, seed=index) for index in range(len(MIXED))]
        asked = [SamplingParams(**{"max_tokens": 10, **GREEDY, **more}) for more in MIXED]
        outputs = LLM.over(prepared).generate(prompts, asked)
        told.append([(o.token_ids, o.text, o.logprobs, o.prompt_logprobs) for o in outputs])
        assert all(output.finish_reason is not FinishReason.ERROR for output in outputs)
        prepared.core.scheduler.integrity()
    assert told[0] == told[1]
    assert prepared.core._executor.num_ahead > 5
    assert len(answer(prepared, [[5, 6, 7]])[0]) == 8
