"""Which tokens of which requests run next, and in which pages.

The core loop, in full::

    while scheduler.has_work:
        while len(under_way) <= executor.depth:
            step = scheduler.schedule_ahead() if under_way else scheduler.schedule()
            if step is None:
                break
            under_way.append((step, executor.submit(step)))
        step, pending = under_way.popleft()
        finished = scheduler.commit(step, pending.results())

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
way: the step reads and writes them, so then they are released by the ``commit`` of the last such
step, which ignores what was drawn for it. What a failed request published is withdrawn at once.

**Ahead.** One step may be put together while another is under way, as it will be once that one is
committed: every request that draws there gets one token, known to the device alone
(``ScheduledRequest.follows``). Who reaches the length limit with it is left out. Who turns out to
have ended otherwise is in the step ahead for nothing, and nothing is kept of that. Order and
admission are as in sequence, but the places and pages of those who end are free one step later.
The two run in sequence when

- a request that draws in the first has penalties or a grammar: its next draw needs the token on the
  host (a minimum length does not: it goes by position);
- the engine speculates: drafts are proposed between ``commit`` and ``schedule``;
- the pages do not suffice: nobody is preempted whose pages a step under way uses.

One thread calls.
"""

from collections import OrderedDict
from collections.abc import Sequence

from minuet.engine import audit
from minuet.engine.bounds import Admission, check_length, pages_soon
from minuet.engine.flight import Behind, Flight, StepPlan, failure, outlook
from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.types import FinishReason, Request, Sampled, ScheduledRequest, Step
from minuet.errors import ContractError, IntegrityError, RequestError


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
        self.pool, self.prefix, self.num_preemptions = pool, prefix, 0
        self._live: dict[str, Request] = {}
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # both by arrival, in its order
        self._running: dict[int, Request] = {}
        self._last_arrival = -1
        self._flight = Flight()
        self._by_history: set[int] = set()  # arrivals of live requests that need it
        self._admission = Admission(pool, prefix)

    @property
    def has_work(self) -> bool:
        """Whether a step is under way or would find something to run."""
        return bool(self._running or self._waiting or self._flight)

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""
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
        if request.needs_history:
            self._by_history.add(request.arrival)

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
        if not self._flight.holds(request):
            self._release(request)
        return request

    def _end(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._live[request.request_id]
        self._by_history.discard(request.arrival)
        if reason is FinishReason.ERROR and self.prefix is not None:
            self.prefix.withdraw(request)

    def _release(self, request: Request) -> None:
        """Give back what an ended request holds."""
        self._waiting.pop(request.arrival, None)
        self._running.pop(request.arrival, None)
        if self.prefix is not None:
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
            ContractError: a step was not committed.
        """
        if self._flight:
            raise ContractError("a step is under way", expected="commit before the next schedule")
        return self._compose({})

    def schedule_ahead(self) -> Step | None:
        """Choose the step after the one under way, before that one is committed.

        Returns:
            None when that one must be committed first, and when nothing is left to run after it.

        Raises:
            ContractError: not exactly one step is under way.
        """
        if len(self._flight) != 1:
            raise ContractError(
                "a step is put together ahead of one other", got=len(self._flight), expected="1"
            )
        behind = self._flight.behind()
        in_sequence = self.num_speculative_tokens > 0 or any(
            arrival in behind and behind[arrival][1].samples for arrival in self._by_history
        )
        return None if in_sequence else self._compose(behind)

    def _compose(self, behind: Behind) -> Step | None:
        budget = self.max_num_batched_tokens
        plan = StepPlan(budget, spare=budget - len(self._running), ahead=bool(behind))
        if not self._go_on(plan, behind):
            plan.undo(self.pool)
            return None
        if not plan.preempted:
            self._admit(plan, behind)
        return self._flight.begin(plan) if plan.decodes or plan.prefills else None

    def _go_on(self, plan: StepPlan, behind: Behind) -> bool:
        """Add the running requests, decoding ones first; see :meth:`_extend`."""
        prefilling = []
        for request in list(self._running.values()):
            rest = outlook(request, behind)
            if rest is None:
                continue
            if not self._decodes(rest):
                prefilling.append(rest)
            elif not self._extend(rest, plan, decodes=True):
                return False
        return all(self._extend(rest, plan, decodes=False) for rest in prefilling)

    def _decodes(self, rest: ScheduledRequest) -> bool:
        request = rest.request
        num_left = rest.num_tokens - len(request.draft_token_ids)
        return num_left <= self.num_speculative_tokens + 1 and (
            rest.start >= len(request.prompt_token_ids)
        )

    def _extend(self, rest: ScheduledRequest, plan: StepPlan, *, decodes: bool) -> bool:
        """Add a running request to the step, unless it was preempted, with pages for its tokens.

        Args:
            rest: all that is left of it; the share is as much of that as there is room for.
            plan: the step.
            decodes: whether it decodes.

        Returns:
            False when that takes a preemption, in a step in which there can be none.
        """
        request, start, count, _, _ = rest
        if request.arrival not in self._running:
            return True
        limit = plan.spare + 1 if decodes else plan.budget
        if count > limit:
            count = limit
        if count < 1:
            return True
        if start + count > len(request.page_ids) * self.pool.page_size:
            count = self._make_room(request, start, count, plan)
            if count < 1:
                return not plan.ahead
        if count < rest.num_tokens:
            num_left = rest.num_tokens - len(request.draft_token_ids)
            # a guess is not worth waiting for
            del request.draft_token_ids[max(count - num_left, 0) :]
            rest = rest._replace(num_tokens=count, samples=count >= num_left)
        plan.add(rest, decodes=decodes)
        return True

    def _make_room(self, request: Request, start: int, limit: int, plan: StepPlan) -> int:
        """Give a request pages for up to ``limit`` tokens from ``start`` on; for how many.

        0 when it was preempted itself, and when somebody would have to be in a step ahead.
        """
        pool, held = self.pool, len(request.page_ids)
        while (count := min(limit, (held + pool.usable) * pool.page_size - start)) < 1:
            if plan.ahead or self._preempt(plan) is request:
                return 0
        pages = pool.allocate(pool.pages_for(start + count) - held)
        assert pages is not None
        request.page_ids += pages
        return count

    def _preempt(self, plan: StepPlan) -> Request:
        """Take the pages of the latest running request and put it back to the head of the queue."""
        victim = self._victim()
        del self._running[victim.arrival]
        plan.drop(victim)
        self._vacate(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[victim.arrival] = victim
        self._waiting.move_to_end(victim.arrival, last=False)
        return victim

    def _victim(self) -> Request:
        return next(reversed(self._running.values()))

    # --- admission -------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, behind: Behind) -> None:
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return
        going_on = (outlook(request, behind) for request in self._running.values())
        promised = sum(
            pages_soon(rest.request, self.pool, unknown=rest.follows is not None)
            for rest in going_on
            if rest is not None
        )
        while self._waiting and len(self._running) < self.max_num_seqs and plan.budget > 0:
            request = self._next_waiting()
            hits = self._admission.hits(request, self.pool.usable - promised)
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
            rest = outlook(request, behind)
            assert rest is not None
            self._extend(rest, plan, decodes=False)
            promised += pages_soon(request, self.pool)

    def _next_waiting(self) -> Request:
        return next(iter(self._waiting.values()))

    # --- what came of it -------------------------------------------------------------------------

    def commit(self, step: Step, sampled: Sequence[Sampled]) -> list[Request]:
        """Take in what a step drew.

        Args:
            step: the one under way, the older one of two.
            sampled: one for each of ``step.scheduled``, in that order.

        Returns:
            Requests that ended by this step, in the order of the step.

        Raises:
            ContractError: another step, or an answer that does not fit it.
        """
        self._flight.check(step, sampled)
        self._flight.end()
        ended = []
        for share, drawn in zip(step.scheduled, sampled, strict=True):
            request = share.request
            if request.finish_reason is not None:
                if failure(share, drawn) and self.prefix is not None:
                    self.prefix.withdraw(request)
            elif self._take(share, drawn):
                ended.append(request)
            if request.finish_reason is not None and not self._flight.holds(request):
                self._release(request)
        return ended

    def _take(self, share: ScheduledRequest, drawn: Sampled) -> bool:
        """Advance one live request by what was computed and drawn for it; whether that ended it."""
        request = share.request
        if error := failure(share, drawn):
            request.error = error
            self._end(request, FinishReason.ERROR)
            return True
        request.num_computed += share.num_tokens
        if share.samples:
            assert drawn.token_id is not None
            tokens = [drawn.token_id]
            if request.draft_token_ids:
                tokens = [*self._verified(request, drawn.num_accepted), drawn.token_id]
            for token_id in tokens:
                request.output_token_ids.append(token_id)
                if self._stops(request, token_id):
                    break
        if self.prefix is not None:
            size = self.pool.page_size
            if share.start // size != request.num_computed // size:  # a page is complete
                self.prefix.publish(request)
        return request.finish_reason is not None

    def _verified(self, request: Request, num_accepted: int) -> list[int]:
        """The drafts that were right; the others are forgotten."""
        accepted = request.draft_token_ids[:num_accepted]
        num_rejected = len(request.draft_token_ids) - num_accepted
        request.draft_token_ids.clear()
        self.rollback(request, num_rejected)
        return accepted

    def _stops(self, request: Request, token_id: int) -> bool:
        """End the request if this newest token does."""
        params, num_output = request.params, len(request.output_token_ids)
        if num_output >= params.min_tokens:
            if token_id in params.stop_token_ids:
                self._end(request, FinishReason.STOP, token_id)
                return True
            if token_id in request.eos_token_ids and not params.ignore_eos:
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
        if self._flight or request.num_tokens - request.num_computed != 1:
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
                be reading, or while a step under way goes on from there.
        """
        if self._flight.holds(request):
            raise ContractError("a step under way writes on", expected="commit before rollback")
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
        audit.check(
            live=self._live,
            running=self._running,
            waiting=self._waiting,
            flight=self._flight,
            pool=self.pool,
            prefix=self.prefix,
        )
        if self._by_history != {r.arrival for r in self._live.values() if r.needs_history}:
            raise IntegrityError("requests that need their history are not those noted")
