import pytest

from minuet.engine.types import FinishReason, Sampled, SamplingParams
from minuet.errors import ContractError, IntegrityError
from tests.engine.scheduler_desk import PAGE, Desk, shares

# --- pages: admission and preemption -------------------------------------------------------------


def test_head_of_the_queue_is_not_overtaken_by_one_that_would_fit():
    desk = Desk(num_pages=7, prefix=False)
    desk.add(8, max_tokens=4)
    desk.step()
    desk.add(16, max_tokens=4)
    desk.add(1, max_tokens=1)
    step, _ = desk.step()
    assert [name for name, *_ in shares(step)] == ["r0"]
    assert desk.scheduler.num_waiting == 2


@pytest.mark.parametrize(("num_pages", "admitted"), [(6, False), (7, True)])
def test_admission_leaves_every_running_request_one_page_more(num_pages, admitted):
    desk = Desk(num_pages=num_pages + 1, prefix=False)
    desk.add(4, max_tokens=9)
    desk.step()
    desk.add(9, max_tokens=9)  # 3 pages and 1 more; the other one 2 pages and 1 more
    assert (len(desk.step()[0].scheduled) == 2) is admitted


def test_admission_counts_no_page_that_can_never_be_needed():
    desk = Desk(num_pages=4, prefix=False)
    desk.add(4, max_tokens=1)
    desk.add(8, max_tokens=1)
    assert len(desk.step()[0].scheduled) == 2


def test_latest_request_is_preempted_and_comes_back_first():
    desk = Desk(num_pages=5, prefix=False)
    first, second = desk.add(4, max_tokens=9), desk.add(3, max_tokens=9)
    third = desk.add(12, max_tokens=2)
    while not desk.scheduler.num_preemptions:
        step, _ = desk.step()
    assert step.preempted == (second,)
    assert (second.num_computed, second.page_ids) == (0, [])
    assert list(desk.scheduler._waiting.values()) == [second, third]
    drawn = list(second.output_token_ids)
    while not first.finish_reason:
        desk.step()
    step, _ = desk.step()
    assert shares(step)[0] == ("r1", 0, 3 + len(drawn), True)
    assert second.output_token_ids[: len(drawn)] == drawn


def test_preempting_takes_a_request_out_of_the_step_it_was_in():
    desk = Desk(num_pages=5, budget=4, prefix=False, seqs=4)
    early = desk.add(12, max_tokens=1)
    desk.step()
    late = desk.add(1, max_tokens=9)
    # admission would have let it wait; put it beside the other by hand, and take one page away
    desk.scheduler._running[1] = desk.scheduler._waiting.pop(1)
    late.page_ids, late.num_computed = desk.pool.allocate(1), 1
    late.output_token_ids.append(7)
    desk.pool.allocate(1)
    for expected in (("r0", 4, 3, False), ("r0", 7, 1, False)):  # as much as one page takes
        step = desk.scheduler.schedule()
        assert shares(step)[1] == expected
        assert step.preempted == ()
        desk.scheduler.commit(step, [Sampled(7), Sampled(None)])
    step = desk.scheduler.schedule()  # the later one decodes, then the earlier one needs its page
    assert step.preempted == (late,)
    assert shares(step) == [("r0", 8, 3, False)]
    assert step.num_decodes == early.num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempted():
    desk = Desk(num_pages=5, prefix=False)
    desk.add(4, max_tokens=9)
    desk.add(3, max_tokens=9)
    while not desk.scheduler.num_preemptions:
        step, _ = desk.step()
    assert [name for name, *_ in shares(step)] == ["r0"]


def test_preempted_request_finds_its_published_pages_again():
    desk = Desk(num_pages=8)
    first, second = desk.add(8, max_tokens=9), desk.add(9, max_tokens=9, first=50)
    while not desk.scheduler.num_preemptions:
        desk.step()
    while second.num_preemptions and not second.page_ids:
        step, _ = desk.step()
    share = next(s for s in step.scheduled if s.request is second)
    assert share.start >= PAGE
    assert second.num_cached == 0  # of the first admission
    assert first.finish_reason is FinishReason.LENGTH


def test_prefix_hit_shares_pages_and_computes_the_rest():
    desk = Desk()
    desk.add(12)
    desk.step()
    other = desk.add(12)
    step, _ = desk.step()
    assert shares(step)[1] == ("r1", 8, 4, True)
    assert other.num_cached == 8
    assert other.page_ids[:2] == desk.scheduler._running[0].page_ids[:2]
    assert other.page_ids[2] != desk.scheduler._running[0].page_ids[2]


def test_pages_shared_with_a_running_request_cost_nothing_at_admission():
    desk = Desk(num_pages=7)
    desk.add(12, max_tokens=5)
    desk.step()
    desk.add(12, max_tokens=5)  # 4 pages in all, 2 of them shared; 2 of 3 are left
    assert len(desk.step()[0].scheduled) == 2


def test_blocked_head_is_admitted_when_what_it_needs_was_published():
    desk = Desk(num_pages=8, budget=8)
    desk.add(24, max_tokens=1)
    desk.step()
    desk.add(24, max_tokens=1)
    desk.step()
    assert desk.scheduler.num_waiting == 1
    desk.scheduler.integrity()
    step, _ = desk.step()
    assert shares(step) == [("r0", 16, 8, True)]
    step, _ = desk.step()
    assert shares(step) == [("r1", 20, 4, True)]


# --- speculation ---------------------------------------------------------------------------------


def decoding(desk, num_prompt=6, max_tokens=12, **params):
    request = desk.add(num_prompt, max_tokens, **params)
    desk.step()
    return request


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_accepted_drafts_stay_and_rejected_ones_leave_no_trace(num_accepted):
    desk = Desk(drafts=3)
    request = decoding(desk)
    desk.scheduler.propose(request, [11, 12, 13])
    step = desk.scheduler.schedule()
    assert shares(step) == [("r0", 6, 4, True)]
    assert step.num_decodes == 1
    assert request.tokens(6, 10) == [7, 11, 12, 13]
    assert request.num_tokens == 7
    desk.commit(step, r0=Sampled(20, num_accepted=num_accepted))
    assert request.output_token_ids == [7, *[11, 12, 13][:num_accepted], 20]
    assert request.num_computed == 7 + num_accepted
    assert request.draft_token_ids == []
    assert len(request.page_ids) == desk.pool.pages_for(7 + num_accepted)


def test_page_with_a_rejected_draft_is_not_published():
    desk = Desk(drafts=3)
    request = decoding(desk)
    desk.scheduler.propose(request, [11, 12, 13])
    desk.step(r0=Sampled(20, num_accepted=0))  # positions 7 .. 9 hold drafts; page 1 ends at 7
    assert len(desk.prefix) == 1
    desk.step()
    assert desk.prefix.tokens_of(request.page_ids[1]) == (0, 1, 2, 3, 4, 5, 7, 20)


@pytest.mark.parametrize(
    ("params", "expected", "reason"),
    [
        ({"stop_token_ids": (12,)}, [7, 11, 12], FinishReason.STOP),
        ({"max_tokens": 4}, [7, 11, 12, 20], FinishReason.LENGTH),
        ({"max_tokens": 4, "stop_token_ids": (12,), "min_tokens": 4}, [7, 11, 12, 20], None),
    ],
)
def test_stop_inside_accepted_drafts_cuts_the_rest(params, expected, reason):
    desk = Desk(drafts=3)
    request = decoding(desk, **({"max_tokens": 12} | params))
    desk.scheduler.propose(request, [11, 12, 13])
    accepted = len(request.draft_token_ids)
    assert accepted == (2 if request.params.max_tokens == 4 else 3)
    desk.step(r0=Sampled(20, num_accepted=accepted))
    assert request.output_token_ids == expected
    assert request.finish_reason is (reason or FinishReason.LENGTH)
    assert desk.pool.usable == desk.pool.capacity


def test_drafts_give_way_to_the_tokens_of_other_running_requests():
    desk = Desk(drafts=3, budget=4, seqs=2)
    first = desk.add(2, 12)
    second = desk.add(2, 12, first=30)
    desk.step()
    for request in (first, second):
        desk.scheduler.propose(request, [1, 2, 3])
    step = desk.scheduler.schedule()
    assert shares(step) == [("r0", 2, 3, True), ("r1", 2, 1, True)]
    assert (first.draft_token_ids, second.draft_token_ids) == ([1, 2], [])
    desk.commit(step, r0=Sampled(5, num_accepted=2))


def test_drafts_preempt_nobody():
    desk = Desk(num_pages=3, drafts=3, prefix=False)
    first, second = desk.add(3, 2), desk.add(2, 2)
    desk.step()
    first.params = second.params = SamplingParams(max_tokens=12)
    desk.scheduler.propose(first, [1, 2, 3])
    step = desk.scheduler.schedule()
    assert step.preempted == ()
    assert shares(step) == [("r0", 3, 1, True), ("r1", 2, 1, True)]
    desk.commit(step)


def test_drafts_of_a_preempted_request_are_dropped():
    desk = Desk(num_pages=5, prefix=False, drafts=3)
    desk.add(4, max_tokens=9)
    second = desk.add(3, max_tokens=9)
    desk.step()
    while not second.num_preemptions:
        if second.page_ids:
            desk.scheduler.propose(second, [1, 2])
        desk.step()
    assert second.draft_token_ids == []


def test_drafts_follow_the_newest_token_only():
    desk = Desk(drafts=3)
    request = desk.add(20)
    with pytest.raises(ContractError, match="20 tokens to compute"):
        desk.scheduler.propose(request, [1])
    desk.step()
    desk.step()
    step = desk.scheduler.schedule()
    with pytest.raises(ContractError, match="between commit and schedule"):
        desk.scheduler.propose(request, [1])
    desk.commit(step)


@pytest.mark.parametrize(("prefix", "most"), [(False, 6), (True, 3)])
def test_rollback_stops_at_the_prompt_and_at_settled_pages(prefix, most):
    desk = Desk(prefix=prefix)
    request = decoding(desk, num_prompt=5, max_tokens=20)
    for _ in range(6):
        desk.step()
    assert request.num_computed == 11
    with pytest.raises(ContractError, match=f"0 to {most}"):
        desk.scheduler.rollback(request, most + 1)
    with pytest.raises(ContractError):
        desk.scheduler.rollback(request, -1)
    desk.scheduler.rollback(request, most)
    assert request.num_computed == 11 - most
    assert len(request.page_ids) == 2
    desk.scheduler.integrity()


def test_request_with_a_few_known_tokens_to_compute_decodes_them_at_once():
    desk = Desk(drafts=3, prefix=False)
    request = decoding(desk, num_prompt=5, max_tokens=20)
    for _ in range(4):
        desk.step()
    desk.scheduler.rollback(request, 3)
    step = desk.scheduler.schedule()
    assert shares(step) == [("r0", 6, 4, True)]
    assert step.num_decodes == 1
    desk.commit(step)


# --- integrity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda desk: desk.scheduler._running[0].page_ids.append(20),
        lambda desk: desk.scheduler._running[0].page_ids.pop(),
        lambda desk: desk.scheduler._running.pop(0),
        lambda desk: desk.scheduler._waiting.popitem(),
        lambda desk: desk.scheduler._waiting.move_to_end(2),
        lambda desk: desk.scheduler._live.pop("r1"),
        lambda desk: desk.pool.allocate(1),
        lambda desk: setattr(desk.scheduler._running[0], "finish_reason", FinishReason.STOP),
        lambda desk: setattr(desk.scheduler._running[0], "num_computed", 10),
        lambda desk: setattr(desk.scheduler._waiting[2], "num_computed", 1),
        lambda desk: desk.prefix.forget(desk.scheduler._running[0]),
    ],
)
def test_integrity_finds_damage(damage):
    desk = Desk(seqs=2)
    for _ in range(4):
        desk.add(9)
    desk.step()
    damage(desk)
    with pytest.raises(IntegrityError):
        desk.scheduler.integrity()
