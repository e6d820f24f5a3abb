import pytest

from minuet.engine.types import FinishReason, Sampled
from minuet.errors import ContractError, RequestError
from tests.engine.scheduler_desk import EOS, PAGE, Desk, shares

# --- what is run ---------------------------------------------------------------------------------


def test_long_prompt_is_prefilled_in_chunks_and_samples_at_its_end():
    desk = Desk()
    request = desk.add(37)
    assert shares(desk.step()[0]) == [("r0", 0, 16, False)]
    assert shares(desk.step()[0]) == [("r0", 16, 16, False)]
    assert request.output_token_ids == []
    assert shares(desk.step()[0]) == [("r0", 32, 5, True)]
    assert request.output_token_ids == [7]
    assert shares(desk.step()[0]) == [("r0", 37, 1, True)]


def test_decodes_come_first_and_prefills_share_what_is_left_by_arrival():
    desk = Desk(prefix=False)
    desk.add(30)
    desk.step()
    desk.add(2)
    desk.add(20)
    step, _ = desk.step()
    assert shares(step) == [("r0", 16, 14, True), ("r1", 0, 2, True)]
    assert step.num_decodes == 0
    step, _ = desk.step()
    assert shares(step) == [("r0", 30, 1, True), ("r1", 2, 1, True), ("r2", 0, 14, False)]
    assert step.num_decodes == 2


def test_decode_of_a_later_request_comes_before_the_prefill_of_an_earlier_one():
    desk = Desk(budget=8, prefix=False)
    desk.add(7)
    desk.add(20)
    desk.add(1)
    desk.step()
    assert shares(desk.step()[0])[:2] == [("r0", 7, 1, True), ("r1", 1, 7, False)]
    desk.scheduler.abort("r0")
    desk.step()
    assert shares(desk.step()[0])[0][:2] == ("r1", 16)
    step, _ = desk.step()
    assert [name for name, *_ in shares(step)] == ["r1", "r2"]


def test_no_more_sequences_run_than_allowed():
    desk = Desk(seqs=2)
    for _ in range(3):
        desk.add(2, max_tokens=2)
    assert len(desk.step()[0].scheduled) == 2
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (2, 1)
    desk.step()
    assert shares(desk.step()[0]) == [("r2", 0, 2, True)]


def test_nothing_to_run_is_no_step():
    desk = Desk()
    assert desk.scheduler.schedule() is None
    assert not desk.scheduler.has_work


@pytest.mark.parametrize(("num_prompt", "num_pages"), [(PAGE - 1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_pages_cover_exactly_the_computed_tokens(num_prompt, num_pages):
    desk = Desk()
    request = desk.add(num_prompt)
    desk.step()
    assert len(request.page_ids) == num_pages
    desk.step()
    assert len(request.page_ids) == -(-(num_prompt + 1) // PAGE)


# --- how a request ends --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "drawn", "reason", "stop_reason"),
    [
        ({"max_tokens": 3}, [1, 2, 3], FinishReason.LENGTH, None),
        ({"max_tokens": 9}, [1, EOS], FinishReason.STOP, None),
        ({"max_tokens": 9, "stop_token_ids": (5,)}, [1, 5], FinishReason.STOP, 5),
        ({"max_tokens": 2, "stop_token_ids": (5,)}, [1, 5], FinishReason.STOP, 5),
        ({"max_tokens": 3, "ignore_eos": True}, [EOS, EOS, 1], FinishReason.LENGTH, None),
        ({"max_tokens": 9, "min_tokens": 3}, [EOS, 1, EOS], FinishReason.STOP, None),
        ({"max_tokens": 9, "min_tokens": 2, "stop_token_ids": (5,)}, [5, 5], FinishReason.STOP, 5),
        (
            {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (EOS,)},
            [EOS],
            FinishReason.STOP,
            EOS,
        ),
    ],
)
def test_stop_conditions(params, drawn, reason, stop_reason):
    desk = Desk()
    request = desk.add(3, **params)
    for token in drawn[:-1]:
        assert desk.step(r0=token)[1] == []
    assert desk.step(r0=drawn[-1])[1] == [request]
    assert request.output_token_ids == drawn
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert not desk.scheduler.has_work
    assert desk.pool.usable == desk.pool.capacity


def test_stop_string_ends_a_request_between_steps():
    desk = Desk()
    request = desk.add(3)
    desk.step()
    assert desk.scheduler.finish("r0", FinishReason.STOP, "\n\n") is request
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "\n\n")
    assert not desk.scheduler.has_work
    assert desk.scheduler.finish("r0", FinishReason.STOP) is None


@pytest.mark.parametrize("answer", ["out of memory", None])
def test_failure_ends_one_request_and_withdraws_its_pages(answer):
    desk = Desk()
    sick, healthy = desk.add(8), desk.add(8, first=50)
    desk.step()
    assert len(desk.prefix) == 4
    assert desk.step(r0=answer)[1] == [sick]
    assert sick.finish_reason is FinishReason.ERROR
    assert sick.error == (answer or "no token could be drawn: the logits are not finite")
    assert len(desk.prefix) == 2
    assert healthy.output_token_ids == [7, 7]


def test_failure_in_the_middle_of_a_prompt_ends_the_request():
    desk = Desk()
    request = desk.add(30)
    assert desk.step(r0="bad")[1] == [request]
    assert request.output_token_ids == []


# --- abort ---------------------------------------------------------------------------------------


def test_abort_of_a_waiting_request():
    desk = Desk(seqs=1)
    desk.add(3)
    waiting = desk.add(3)
    desk.step()
    assert desk.scheduler.abort("r1") is waiting
    assert desk.scheduler.num_waiting == 0


def test_abort_of_a_running_request_frees_its_pages():
    desk = Desk(prefix=False)
    request = desk.add(9)
    desk.step()
    desk.scheduler.abort("r0")
    assert request.page_ids == []
    assert desk.pool.usable == desk.pool.capacity


def test_abort_under_way_keeps_the_pages_until_the_commit_and_ignores_the_token():
    desk = Desk(prefix=False)
    request = desk.add(9)
    step = desk.scheduler.schedule()
    pages = list(request.page_ids)
    assert desk.scheduler.abort("r0") is request
    assert request.finish_reason is FinishReason.ABORT
    assert request.page_ids == pages
    assert desk.scheduler.has_work
    assert desk.commit(step) == []
    assert request.output_token_ids == []
    assert desk.pool.usable == desk.pool.capacity
    assert not desk.scheduler.has_work


def test_abort_under_way_of_a_request_that_is_not_in_the_step_takes_effect_at_once():
    desk = Desk(seqs=1)
    desk.add(4)
    desk.add(12)
    step = desk.scheduler.schedule()
    desk.scheduler.abort("r1")
    assert desk.scheduler.num_waiting == 0
    desk.scheduler.integrity()
    desk.commit(step)


def test_abort_of_a_preempted_request():
    desk = Desk(num_pages=5, prefix=False)
    desk.add(4, max_tokens=9)
    victim = desk.add(3, max_tokens=9)
    while not victim.num_preemptions:
        desk.step()
    desk.scheduler.abort("r1")
    assert desk.scheduler.num_waiting == 0
    desk.step()


def test_abort_of_a_request_that_fails_under_way_withdraws_its_pages():
    desk = Desk()
    desk.add(8)
    desk.step()
    step = desk.scheduler.schedule()
    desk.scheduler.abort("r0")
    assert desk.commit(step, r0="not finite") == []
    assert len(desk.prefix) == 0


def test_id_of_a_request_aborted_under_way_can_be_used_again():
    desk = Desk()
    desk.add(8, name="same")
    step = desk.scheduler.schedule()
    desk.scheduler.abort("same")
    again = desk.add(8, name="same")
    desk.commit(step)
    desk.step()
    assert again.output_token_ids == [7]


# --- what is refused -----------------------------------------------------------------------------


def refused(desk, *args, **kwargs):
    with pytest.raises(RequestError) as info:
        desk.add(*args, **kwargs)
    assert not desk.scheduler.has_work or desk.scheduler.num_waiting == 1
    return info.value


def test_empty_prompt_is_refused():
    assert refused(Desk(), 0).param == "prompt"


def test_id_in_use_is_refused():
    desk = Desk()
    desk.add(3, name="same")
    error = refused(desk, 3, name="same")
    assert (error.param, error.got) == ("request_id", "same")


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [
        (20, 12, None),
        (31, 1, None),
        (32, 1, "prompt"),
        (20, 13, "max_tokens"),
        (1, 32, "max_tokens"),
    ],
)
def test_model_length_bounds_prompt_and_output(num_prompt, max_tokens, param):
    desk = Desk(length=32)
    if param is None:
        desk.add(num_prompt, max_tokens)
    else:
        error = refused(desk, num_prompt, max_tokens)
        assert error.param == param
        assert "--max-model-len" in str(error)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [(8, 1, None), (7, 2, None), (9, 1, "prompt"), (8, 2, "max_tokens"), (1, 9, "max_tokens")],
)
def test_what_can_never_fit_the_cache_is_refused(num_prompt, max_tokens, param):
    desk = Desk(num_pages=3)  # 8 tokens; the last one drawn is never stored
    if param is None:
        request = desk.add(num_prompt, max_tokens)
        while not request.finish_reason:
            desk.step()
        assert len(request.output_token_ids) == max_tokens
    else:
        error = refused(desk, num_prompt, max_tokens)
        assert error.param == param
        assert "--kv-cache-pages" in str(error)


def test_refused_request_does_not_stand_in_the_way():
    desk = Desk(num_pages=3)
    refused(desk, 60)
    behind = desk.add(3)
    desk.step()
    assert behind.output_token_ids == [7]


@pytest.mark.parametrize(("seqs", "budget"), [(0, 4), (4, 3)])
def test_step_too_small_for_all_running_requests_is_refused(seqs, budget):
    with pytest.raises(ContractError, match="max_num_batched_tokens"):
        Desk(seqs=seqs, budget=budget)


def test_arrival_must_count_upwards():
    desk = Desk()
    desk.add(3)
    desk.arrivals = 0
    with pytest.raises(ContractError, match="more than 0"):
        desk.add(3, name="late")


def test_one_step_is_under_way_at_a_time():
    desk = Desk()
    desk.add(3)
    step = desk.scheduler.schedule()
    with pytest.raises(ContractError, match="under way"):
        desk.scheduler.schedule()
    desk.commit(step)
    with pytest.raises(ContractError, match="under way"):
        desk.commit(step)


@pytest.mark.parametrize(
    "answers", [[], [Sampled(1), Sampled(1)], [Sampled(1)], [Sampled(None, num_accepted=1)]]
)
def test_answer_that_does_not_fit_the_step_is_refused(answers):
    desk = Desk()
    desk.add(20)
    step = desk.scheduler.schedule()
    with pytest.raises(ContractError):
        desk.scheduler.commit(step, answers)
    desk.commit(step)  # nothing was taken in
