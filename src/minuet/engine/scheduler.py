"""Which tokens of which requests run next, and in which pages.

The core loop, in full::

    while scheduler.has_work:
        step = scheduler.schedule()
        finished = scheduler.commit(step, runner.execute(step))

**Order.** Requests are served first come, first served. The running ones are always the earliest of
the live ones: only the head of the queue is admitted, only the latest running one is preempted, and
it goes back to the head. So the earliest live request is never preempted by another, gets at least
one token in every step (there are no fewer batched tokens than sequences), and ends after at most
``max_total_tokens`` steps; then the next is the earliest. Nobody starves.

**Admission.** The head is admitted when the usable pages cover, for it and for all running
requests, every token known so far and one page more, or as many pages as they can ever need. Pages
are counted for that, not set aside. It keeps a prompt from being begun that cannot be finished, and
after an admission nobody is preempted before some request has filled a whole page more. With
nothing running the rule always holds, because ``add`` refuses what does not fit an empty pool.
Nobody is admitted in a step that preempted.

**Preemption** is by recomputation: the pages are released, published ones stay in the prefix cache
and are most likely found again.

**Ending.** A request is reported as ended exactly once: by ``commit``, or by the ``finish`` or
``abort`` that ended it. Its pages are released at once, unless it is part of a step that is under
way: the step writes to them, so then they are released by ``commit``, which ignores what it drew.

One step is under way at a time, and one thread calls.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from minuet.engine.bounds import check_length, pages_soon
from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.types import FinishReason, Request, Sampled, ScheduledRequest, Step
from minuet.errors import ContractError, IntegrityError, RequestError


@dataclass(slots=True)
class _Draft:
    """A step being put together; its parts are found by arrival."""

    budget: int  # tokens that still fit
    spare: int  # those of them that drafts may use, so that each running request keeps one token
    decodes: dict[int, ScheduledRequest] = field(default_factory=dict)
    prefills: dict[int, ScheduledRequest] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill over one page pool.

    Args:
        max_num_seqs: requests that run at a time.
        max_num_batched_tokens: tokens of one step; no fewer than ``max_num_seqs``.
        max_model_len: prompt and output tokens of one request.
        pool: the pages; nobody else takes any.
        prefix: finds pages to reuse; None computes every prompt.
        num_speculative_tokens: drafts a request may have in one step.

    Attributes:
        num_preemptions: since the start.

    Raises:
        ContractError: sizes with which some running request could get no token.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        pool: PagePool,
        prefix: PrefixCache | None = None,
        num_speculative_tokens: int = 0,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ContractError(
                "a step must hold one token of every running request",
                got=f"max_num_seqs {max_num_seqs}, max_num_batched_tokens {max_num_batched_tokens}",
                expected="1 <= max_num_seqs <= max_num_batched_tokens",
            )
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.num_speculative_tokens = max_model_len, num_speculative_tokens
        self.pool, self.prefix = pool, prefix
        self.num_preemptions = 0
        self._live: dict[str, Request] = {}
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # both by arrival, in its order
        self._running: dict[int, Request] = {}
        self._last_arrival = -1
        self._step: Step | None = None
        self._in_flight: dict[int, ScheduledRequest] = {}
        self._blocked: tuple[int, int, int] | None = None  # see _hits_if_admissible

    @property
    def has_work(self) -> bool:
        """Whether a step is under way or would find something to run."""
        return bool(self._running or self._waiting or self._step)

    @property
    def num_running(self) -> int:
        """Requests that hold their place in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    # --- requests come and go --------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises:
            RequestError: it has no prompt, its id is in use, or prompt and ``max_tokens`` together
                exceed the model length or all pages of the cache. Such a request could wait for
                ever, and everyone behind it.
            ContractError: its ``arrival`` is not higher than all before.
        """
        if not request.prompt_token_ids:
            raise RequestError(
                "the prompt is empty", param="prompt", got=0, expected="at least 1 token"
            )
        if request.request_id in self._live:
            raise RequestError(
                "this request id is in use",
                param="request_id",
                got=request.request_id,
                expected="an id no live request has",
                remedy="leave it out, and the server makes one",
            )
        check_length(request, self.max_model_len, self.pool)
        if request.arrival <= self._last_arrival or request.finish_reason is not None:
            raise ContractError(
                "a new request has a new arrival number",
                got=request.arrival,
                expected=f"more than {self._last_arrival}",
            )
        self._last_arrival = request.arrival
        self._live[request.request_id] = request
        self._waiting[request.arrival] = request

    def abort(self, request_id: str) -> Request | None:
        """End a request because nobody waits for it any more; see :meth:`finish`."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request from outside, at any moment.

        Args:
            request_id: whose.
            reason: ERROR also withdraws its pages from the prefix cache.
            stop_reason: the stop string that appeared in its text.

        Returns:
            The request, whose end no ``commit`` will report; None when no live request has this id,
            as when it ended by itself just before.
        """
        request = self._live.get(request_id)
        if request is None:
            return None
        self._end(request, reason, stop_reason)
        if request.arrival not in self._in_flight:
            self._release(request)
        return request

    def _end(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._live[request.request_id]

    def _release(self, request: Request, *, failed: bool = False) -> None:
        """Give back what an ended request holds; ``failed`` in its last step, even if aborted."""
        self._waiting.pop(request.arrival, None)
        self._running.pop(request.arrival, None)
        if self.prefix is not None:
            if failed or request.finish_reason is FinishReason.ERROR:
                self.prefix.withdraw(request)
            self.prefix.forget(request)
        self._vacate(request)

    def _vacate(self, request: Request) -> None:
        self.pool.release(request.page_ids)
        request.page_ids.clear()
        request.draft_token_ids.clear()
        request.num_computed = 0

    # --- one step --------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Choose the next step and give it its pages; None when there is nothing to run.

        Decoding requests come first, then prefills, each by arrival, then admissions. A prefill
        takes what the decodes left of the token budget.

        Raises:
            ContractError: the previous step was not committed.
        """
        if self._step is not None:
            raise ContractError("a step is under way", expected="commit before the next schedule")
        budget, running = self.max_num_batched_tokens, list(self._running.values())
        draft = _Draft(budget, spare=budget - len(running))
        decoding = [self._decodes(request) for request in running]
        for decodes in (True, False):
            for request, is_decode in zip(running, decoding, strict=True):
                if is_decode is decodes and request.arrival in self._running:
                    self._extend(request, draft, decodes=decodes)
        if not draft.preempted:
            self._admit(draft)
        if not draft.decodes and not draft.prefills:
            return None
        self._in_flight = draft.decodes | draft.prefills
        self._step = Step(
            tuple(self._in_flight.values()), tuple(draft.preempted), len(draft.decodes)
        )
        return self._step

    def _decodes(self, request: Request) -> bool:
        num_left = request.num_tokens - request.num_computed
        return (
            request.num_computed >= len(request.prompt_token_ids)
            and num_left <= self.num_speculative_tokens + 1
        )

    def _extend(self, request: Request, draft: _Draft, *, decodes: bool) -> None:
        """Add a running request to the step, with the pages for its tokens."""
        num_left = request.num_tokens - request.num_computed
        limit = draft.spare + 1 if decodes else draft.budget
        limit = min(limit, num_left + len(request.draft_token_ids))
        if limit < 1:
            return
        while (count := min(limit, self._room(request))) < 1:
            if self._preempt(draft) is request:
                return
        num_new = self.pool.pages_for(request.num_computed + count) - len(request.page_ids)
        pages = self.pool.allocate(num_new)
        assert pages is not None
        request.page_ids += pages
        del request.draft_token_ids[max(count - num_left, 0) :]  # a guess is not worth waiting for
        share = ScheduledRequest(request, request.num_computed, count, samples=count >= num_left)
        (draft.decodes if decodes else draft.prefills)[request.arrival] = share
        draft.budget -= count
        if decodes:
            draft.spare -= count - 1

    def _room(self, request: Request) -> int:
        """Tokens that its own pages and the usable ones can still take."""
        pages = len(request.page_ids) + self.pool.usable
        return pages * self.pool.page_size - request.num_computed

    def _preempt(self, draft: _Draft) -> Request:
        """Take the pages of the latest running request and put it back to the head of the queue."""
        victim = self._victim()
        del self._running[victim.arrival]
        for part in (draft.decodes, draft.prefills):
            if victim.arrival in part:
                draft.budget += part.pop(victim.arrival).num_tokens
        self._vacate(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[victim.arrival] = victim
        self._waiting.move_to_end(victim.arrival, last=False)
        draft.preempted.append(victim)
        return victim

    def _victim(self) -> Request:
        return next(reversed(self._running.values()))

    # --- admission -------------------------------------------------------------------------------

    def _admit(self, draft: _Draft) -> None:
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return
        promised = sum(pages_soon(request, self.pool) for request in self._running.values())
        while self._waiting and len(self._running) < self.max_num_seqs and draft.budget > 0:
            request = self._next_waiting()
            hits = self._hits_if_admissible(request, self.pool.usable - promised)
            if hits is None:
                return
            del self._waiting[request.arrival]
            self._running[request.arrival] = request
            if self.prefix is not None:
                self.prefix.share(request, hits)
            request.page_ids = hits
            request.num_computed = len(hits) * self.pool.page_size
            if request.num_preemptions == 0:
                request.num_cached = request.num_computed
            self._extend(request, draft, decodes=False)
            promised += pages_soon(request, self.pool)

    def _next_waiting(self) -> Request:
        return next(iter(self._waiting.values()))

    def _hits_if_admissible(self, request: Request, available: int) -> list[int] | None:
        """The pages it finds in the prefix cache, or None when it must wait.

        Args:
            request: the head of the queue.
            available: usable pages that the running requests will not need soon.
        """
        if self.prefix is None:
            return [] if pages_soon(request, self.pool) <= available else None
        # a long prompt is not looked up at every step, only with more room or more to be found
        published = self.prefix.stats.published
        if self._blocked is not None:
            arrival, then, cost = self._blocked
            if (arrival, then) == (request.arrival, published) and available < cost:
                return None
        hits = self.prefix.match(request)
        # a cached page that is found costs a usable one, just as a new one does
        cost = pages_soon(request, self.pool) - sum(self.pool.num_holders(p) > 0 for p in hits)
        if cost > available:
            self._blocked = (request.arrival, published, cost)
            return None
        self._blocked = None
        return hits

    # --- what came of it -------------------------------------------------------------------------

    def commit(self, step: Step, sampled: Sequence[Sampled]) -> list[Request]:
        """Take in what a step drew.

        Args:
            step: the one under way.
            sampled: one for each of ``step.scheduled``, in that order.

        Returns:
            Requests that ended by this step, in the order of the step.

        Raises:
            ContractError: another step, or an answer that does not fit it.
        """
        if step is not self._step:
            raise ContractError("only the step under way can be committed", expected="schedule()")
        _check_answer(step, sampled)
        self._step, self._in_flight = None, {}
        ended = []
        for share, drawn in zip(step.scheduled, sampled, strict=True):
            request = share.request
            if request.finish_reason is not None:
                self._release(request, failed=bool(_failure(share, drawn)))
            elif self._take(share, drawn):
                self._release(request)
                ended.append(request)
        return ended

    def _take(self, share: ScheduledRequest, drawn: Sampled) -> bool:
        """Advance one live request by what was computed and drawn for it; whether that ended it."""
        request = share.request
        if error := _failure(share, drawn):
            request.error = error
            self._end(request, FinishReason.ERROR)
            return True
        request.num_computed += share.num_tokens
        if share.samples:
            accepted = request.draft_token_ids[: drawn.num_accepted]
            num_rejected = len(request.draft_token_ids) - len(accepted)
            request.draft_token_ids.clear()
            self.rollback(request, num_rejected)
            assert drawn.token_id is not None
            for token_id in (*accepted, drawn.token_id):
                request.output_token_ids.append(token_id)
                if self._stops(request, token_id):
                    break
        if self.prefix is not None:
            self.prefix.publish(request)
        return request.finish_reason is not None

    def _stops(self, request: Request, token_id: int) -> bool:
        """End the request if this newest token does."""
        params, num_output = request.params, len(request.output_token_ids)
        if num_output >= params.min_tokens:
            if token_id in params.stop_token_ids:
                self._end(request, FinishReason.STOP, token_id)
                return True
            if token_id in request.stop_ids:
                self._end(request, FinishReason.STOP)
                return True
        if num_output >= params.max_tokens:
            self._end(request, FinishReason.LENGTH)
            return True
        return False

    # --- speculation -----------------------------------------------------------------------------

    def propose(self, request: Request, draft_token_ids: Sequence[int]) -> None:
        """Give a decoding request guesses to verify in the next step, in place of earlier ones.

        Those beyond ``num_speculative_tokens``, or beyond what ``max_tokens`` can still use, are
        left out; the step leaves out more when its budget or the pool is short.

        Raises:
            ContractError: a step is under way, or more than one token is left to compute.
        """
        if self._step is not None or request.num_tokens - request.num_computed != 1:
            raise ContractError(
                "drafts follow the newest token",
                got=f"{request.num_tokens - request.num_computed} tokens to compute",
                expected="exactly 1, between commit and schedule",
            )
        useful = request.params.max_tokens - len(request.output_token_ids) - 1
        request.draft_token_ids[:] = draft_token_ids[: min(self.num_speculative_tokens, useful)]

    def rollback(self, request: Request, num_tokens: int) -> None:
        """Forget the last computed tokens of a running request, and free the pages past the end.

        Their slots are stale until overwritten, and no reader looks past the length.

        Raises:
            ContractError: more than was computed after the prompt, or into a page that others may
                be reading.
        """
        kept = request.num_computed - num_tokens
        settled = 0 if self.prefix is None else self.prefix.num_published(request)
        floor = max(len(request.prompt_token_ids), settled * self.pool.page_size)
        if num_tokens < 0 or (num_tokens > 0 and kept < floor):
            raise ContractError(
                "cannot roll back so far",
                got=num_tokens,
                expected=f"0 to {max(request.num_computed - floor, 0)}",
            )
        request.num_computed = kept
        num_pages = self.pool.pages_for(kept)
        self.pool.release(request.page_ids[num_pages:])
        del request.page_ids[num_pages:]

    # --- book-keeping ----------------------------------------------------------------------------

    def integrity(self) -> None:
        """Check queue, requests, pages and prefix cache against each other, at any moment.

        Raises:
            IntegrityError: names what contradicts what.
        """
        running, waiting = list(self._running), list(self._waiting)
        if (order := running + waiting) != sorted(set(order)):
            raise IntegrityError(f"arrivals out of order: running {running}, waiting {waiting}")
        for request in self._waiting.values():
            if request.page_ids or request.num_computed or request.draft_token_ids:
                raise IntegrityError(f"request {request.request_id}: waits, but holds pages")
        everyone = [*self._running.values(), *self._waiting.values()]
        for request in everyone:
            known = self._live.get(request.request_id) is request
            # one that ended keeps its pages while the step under way writes to them
            if known is (request.finish_reason is not None):
                raise IntegrityError(f"request {request.request_id}: kept after its end, or lost")
            if not known and request.arrival not in self._in_flight:
                raise IntegrityError(f"request {request.request_id}: ended, but not released")
        if len(self._live) != sum(r.finish_reason is None for r in everyone):
            raise IntegrityError("a live request is neither running nor waiting")
        for request in self._running.values():
            self._check_pages(request)
        self.pool.integrity(request.page_ids for request in everyone)
        if self.prefix is not None:
            self.prefix.integrity(everyone)

    def _check_pages(self, request: Request) -> None:
        share = self._in_flight.get(request.arrival)
        num_tokens = request.num_computed + (share.num_tokens if share else 0)
        if len(request.page_ids) != self.pool.pages_for(num_tokens):
            raise IntegrityError(
                f"request {request.request_id}: {len(request.page_ids)} pages for "
                f"{num_tokens} tokens of {self.pool.page_size} each"
            )
        if not share and request.num_computed >= request.num_tokens:
            raise IntegrityError(f"request {request.request_id}: nothing left to compute")


def _failure(share: ScheduledRequest, drawn: Sampled) -> str:
    if share.samples and drawn.token_id is None and not drawn.error:
        return "no token could be drawn: the logits are not finite"
    return drawn.error


def _check_answer(step: Step, sampled: Sequence[Sampled]) -> None:
    if len(sampled) != len(step.scheduled):
        raise ContractError(
            "one answer per scheduled request", got=len(sampled), expected=str(len(step.scheduled))
        )
    for share, drawn in zip(step.scheduled, sampled, strict=True):
        num_drafts = len(share.request.draft_token_ids) if share.samples else 0
        if not share.samples and drawn.token_id is not None:
            raise ContractError(
                "a token was drawn before the end of a prompt", got=share.request.request_id
            )
        if not 0 <= drawn.num_accepted <= num_drafts:
            raise ContractError(
                "accepted drafts that were not scheduled",
                got=drawn.num_accepted,
                expected=f"0 to {num_drafts}",
            )
