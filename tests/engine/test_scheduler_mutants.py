"""The simulation can fail: each of these mistakes is found by a random run within a few seeds."""

import inspect
import random
from collections.abc import Callable

import pytest

from minuet.engine import scheduler
from minuet.engine.bounds import pages_soon
from minuet.engine.flight import Flight, StepPlan, outlook
from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.scheduler import Scheduler
from minuet.engine.types import FinishReason, Request, ScheduledRequest
from minuet.errors import MinuetError
from tests.engine.scheduler_sim import random_run, random_world

Patch = Callable[[type, str, object], None]
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(function):
    MUTANTS[function.__name__] = function
    return function


@mutant
def abort_forgets_the_pages(patch):
    original = Scheduler._vacate

    def vacate(self, request):
        if request.finish_reason is FinishReason.ABORT:
            request.page_ids.clear()
        original(self, request)

    patch(Scheduler, "_vacate", vacate)


@mutant
def abort_under_way_frees_the_pages_at_once(patch):
    original = Scheduler.finish

    def finish(self, *args):
        request = original(self, *args)
        if request is not None and request.page_ids:
            self._vacate(request)
        return request

    patch(Scheduler, "finish", finish)


@mutant
def token_of_an_ended_request_is_taken(patch):
    original = Scheduler.commit

    def commit(self, step, sampled):
        ended = original(self, step, sampled)
        return ended + [s.request for s in step.scheduled if s.request.finish_reason is not None]

    patch(Scheduler, "commit", commit)


@mutant
def preempts_the_oldest(patch):
    patch(Scheduler, "_victim", lambda self: next(iter(self._running.values())))


@mutant
def preempted_goes_to_the_end_of_the_queue(patch):
    original = Scheduler._preempt

    def preempt(self, draft):
        victim = original(self, draft)
        self._waiting.move_to_end(victim.arrival)
        return victim

    patch(Scheduler, "_preempt", preempt)


@mutant
def preempting_keeps_the_computed_tokens(patch):
    original = Scheduler._preempt

    def preempt(self, draft):
        done = self._victim().num_computed
        victim = original(self, draft)
        victim.num_computed = done
        return victim

    patch(Scheduler, "_preempt", preempt)


@mutant
def admits_out_of_order(patch):
    patch(Scheduler, "_next_waiting", lambda self: next(reversed(self._waiting.values())))


@mutant
def admits_the_shortest_first(patch):
    def shortest(self):
        return min(self._waiting.values(), key=lambda request: request.num_tokens)

    patch(Scheduler, "_next_waiting", shortest)


@mutant
def rejected_drafts_stay_computed(patch):
    patch(Scheduler, "rollback", lambda self, request, num_tokens: None)


@mutant
def rollback_keeps_the_pages(patch):
    def rollback(self, request, num_tokens):
        request.num_computed -= num_tokens

    patch(Scheduler, "rollback", rollback)


@mutant
def min_tokens_is_ignored(patch):
    original = Scheduler._stops

    def stops(self, request, token_id):
        if token_id in request.stop_ids and request.finish_reason is None:
            self._end(request, FinishReason.STOP)
            return True
        return original(self, request, token_id)

    patch(Scheduler, "_stops", stops)


@mutant
def publishes_the_incomplete_page(patch):
    def num_complete(self, request):
        return self._pool.pages_for(request.num_computed)

    patch(PrefixCache, "_num_complete", num_complete)


@mutant
def publishes_drafts(patch):
    original = Scheduler.rollback

    def rollback(self, request, num_tokens):
        if self.prefix is not None:
            self.prefix.publish(request)
        original(self, request, num_tokens)

    def num_complete(self, request):
        return request.num_computed // self._pool.page_size

    patch(PrefixCache, "_num_complete", num_complete)
    patch(Scheduler, "rollback", rollback)


@mutant
def skips_the_token_verification(patch):
    patch(PrefixCache, "_stands_for", lambda self, entry, parent, tokens: True)


@mutant
def skips_the_parent_verification(patch):
    patch(PrefixCache, "_stands_for", lambda self, entry, parent, tokens: entry.tokens == tokens)


@mutant
def hit_covers_the_last_token(patch):
    patch(PrefixCache, "_max_hit_pages", lambda self, r: r.num_tokens // self._pool.page_size)


@mutant
def failed_request_keeps_its_pages_published(patch):
    patch(PrefixCache, "withdraw", lambda self, request: None)


@mutant
def sharer_of_a_withdrawn_page_goes_on_publishing(patch):
    original = PrefixCache._publish_next

    def publish_next(self, request, chain):
        if chain.tail is not None and chain.tail.key not in self._entries:
            chain.tail = None
        return original(self, request, chain)

    patch(PrefixCache, "_publish_next", publish_next)


@mutant
def eviction_leaves_descendants(patch):
    original = PrefixCache._remove

    def remove(self, entry):
        entry.children.clear()
        return original(self, entry)

    patch(PrefixCache, "_remove", remove)


@mutant
def shared_page_is_not_counted(patch):
    original = PagePool.share

    def share(self, page_ids):
        original(self, page_ids)
        for page_id in page_ids:
            if self._num_holders[page_id] > 1:
                self._num_holders[page_id] -= 1

    patch(PagePool, "share", share)


@mutant
def shared_page_can_still_be_evicted(patch):
    def share(self, page_ids):
        for page_id in page_ids:
            self._num_holders[page_id] += 1

    patch(PagePool, "share", share)


@mutant
def released_page_forgets_that_it_is_published(patch):
    original = PagePool.release

    def release(self, page_ids):
        original(self, page_ids)
        for page_id in page_ids:
            if page_id in self._cached:
                del self._cached[page_id]
                self._free.append(page_id)

    patch(PagePool, "release", release)


@mutant
def hands_out_the_dummy_page(patch):
    original = PagePool.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.num_reserved:
            self._free.appendleft(0)

    patch(PagePool, "__init__", init)


# --- a step ahead --------------------------------------------------------------------------------


@mutant
def pages_are_released_while_the_step_ahead_uses_them(patch):
    original = Flight.holds

    def holds(self, request):
        # right with one step under way; a commit leaves the one ahead, and forgets it
        return inspect.currentframe().f_back.f_code.co_name != "commit" and original(self, request)

    patch(Flight, "holds", holds)


@mutant
def a_step_ahead_preempts(patch):
    original = StepPlan.__init__

    def init(self, budget, spare, ahead):
        original(self, budget, spare, False)

    patch(StepPlan, "__init__", init)


@mutant
def a_step_given_up_keeps_its_pages(patch):
    patch(StepPlan, "undo", lambda self, pool: None)


@mutant
def a_step_ahead_leaves_out_who_finds_no_page(patch):
    original = Scheduler._extend

    def extend(self, rest, plan, *, decodes):
        return original(self, rest, plan, decodes=decodes) or plan.ahead

    patch(Scheduler, "_extend", extend)


@mutant
def a_step_ahead_has_who_certainly_ended(patch):
    def look(request, behind):
        rest = outlook(request, behind)
        if rest is None and request.finish_reason is None:
            index, share = behind[request.arrival]
            rest = ScheduledRequest(request, share.start + share.num_tokens, 1, True, index)
        return rest

    patch(scheduler, "outlook", look)


@mutant
def a_step_ahead_follows_a_neighbour(patch):
    def look(request, behind):
        rest = outlook(request, behind)
        if rest is not None and rest.follows is not None:
            rest = rest._replace(follows=(rest.follows + 1) % len(behind))
        return rest

    patch(scheduler, "outlook", look)


@mutant
def a_step_ahead_forgets_what_is_under_way(patch):
    patch(scheduler, "outlook", lambda request, behind: outlook(request, {}))


@mutant
def a_penalty_does_not_wait_for_the_token(patch):
    patch(Request, "needs_history", False)


@mutant
def admission_ahead_forgets_the_token_under_way(patch):
    def soon(request, pool, *, unknown=False):
        return pages_soon(request, pool) - unknown

    patch(scheduler, "pages_soon", soon)


@mutant
def a_failure_withdraws_its_pages_when_they_are_released(patch):
    end, release, late = Scheduler._end, Scheduler._release, []

    def end_without(self, request, reason, stop_reason=None):
        prefix, self.prefix = self.prefix, None
        end(self, request, reason, stop_reason)
        self.prefix = prefix
        late.append(request)

    def release_with(self, request):
        if self.prefix is not None and request.finish_reason is FinishReason.ERROR:
            self.prefix.withdraw(request)
        release(self, request)

    patch(Scheduler, "_end", end_without)
    patch(Scheduler, "_release", release_with)


def runs_until_one_fails(num_seeds: int) -> None:
    for seed in range(num_seeds):
        random_run(random_world(random.Random(seed)), seed, num_events=50)


@pytest.mark.parametrize("name", MUTANTS)
def test_scheduler_mutants_are_caught(name, monkeypatch):
    MUTANTS[name](monkeypatch.setattr)
    with pytest.raises((AssertionError, MinuetError, KeyError, IndexError)):
        runs_until_one_fails(1000)


def test_what_is_not_mutated_is_not_caught():
    runs_until_one_fails(150)
