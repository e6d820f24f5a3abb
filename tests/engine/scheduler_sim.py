"""A world around the scheduler in which every mistake shows.

The model is a pure function of all tokens so far, so each request has one right answer, whoever
ran beside it and however often it was preempted. Memory is played: a slot holds the tokens up to
its position, and a request that reads a slot compares it with its own. ``check`` looks at the world
from outside, so that it does not depend on the book-keeping that it tests.

The device knows what a step brought with it when it was submitted, and what it drew itself. It runs
a step as late as it can, when the host asks for the results: whatever the host did to the pages in
between shows.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from minuet.engine.pages import DUMMY_PAGE, PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.scheduler import Scheduler
from minuet.engine.types import (
    FinishReason,
    Request,
    Sampled,
    SamplingParams,
    ScheduledRequest,
    Step,
)
from minuet.errors import RequestError

VOCAB, EOS = 3, 0


def next_token(tokens: tuple[int, ...]) -> int:
    """What the model draws after these tokens."""
    return random.Random(repr(tokens)).choices(range(VOCAB), weights=(1, 4, 4))[0]


def right_answer(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The output of a request that nothing ends from outside."""
    output: list[int] = []
    while len(output) < params.max_tokens:
        output.append(next_token(prompt + tuple(output)))
        stops = output[-1] in params.stop_token_ids or (output[-1] == EOS and not params.ignore_eos)
        if stops and len(output) >= params.min_tokens:
            break
    return output


def two_bit_digest(data: bytes) -> bytes:
    """A digest with four values: every key collides."""
    return bytes([sum(data) % 4])


@dataclass(frozen=True, kw_only=True)
class World:
    """Sizes, small enough that every limit is met."""

    num_pages: int = 7
    page_size: int = 2
    max_num_seqs: int = 3
    budget: int = 5
    max_model_len: int = 12
    num_drafts: int = 2
    prefix: bool = True
    digest: Callable[[bytes], bytes] | None = None
    num_reserved: int = 1
    ahead: bool = False


@dataclass(eq=False)
class Seen:
    """What the simulation knows of a request by itself."""

    request: Request
    bound: int  # steps after which it must have ended
    sick_from: int | None = None  # it writes garbage from this position on
    exposed: bool = False  # it wrote or read garbage
    steps: int = 0


@dataclass(eq=False)
class Load:
    """What the device was given of one share when its step was submitted."""

    share: ScheduledRequest
    pages: list[int]
    tokens: tuple[int, ...]  # up to the last position, without one that is still to be drawn
    num_drafts: int


@dataclass(eq=False)
class Simulation:
    world: World
    live: dict[str, Seen] = field(default_factory=dict)
    steps: list[tuple[Step, list[Load]]] = field(default_factory=list)  # under way, oldest first
    drawn: list[int] = field(default_factory=list)  # what the device drew last, one per share
    lost_poison: bool = False  # garbage may stay: whoever wrote it was aborted before it showed
    num_added: int = 0
    num_ended: int = 0
    num_hits: int = 0
    num_ahead: int = 0
    num_dropped: int = 0

    def __post_init__(self) -> None:
        world = self.world
        self.pool = PagePool(world.num_pages, world.page_size, num_reserved=world.num_reserved)
        options = {} if world.digest is None else {"digest": world.digest}
        self.prefix = PrefixCache(self.pool, b"salt", **options) if world.prefix else None
        self.scheduler = Scheduler(
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.budget,
            max_model_len=world.max_model_len,
            pool=self.pool,
            prefix=self.prefix,
            num_speculative_tokens=world.num_drafts,
        )
        self.slots: dict[tuple[int, int], tuple[tuple[int, ...], bool]] = {}

    # --- what happens ----------------------------------------------------------------------------

    def add(self, prompt: tuple[int, ...], *, sick_from: int | None = None, **params) -> Request:
        request = Request(
            f"r{self.num_added}",
            prompt,
            SamplingParams(**params),
            arrival=self.num_added,
            eos_token_ids=(EOS,),
        )
        self.num_added += 1
        self.scheduler.add(request)
        seen = Seen(request, 0, sick_from)
        self.live[request.request_id] = seen
        # the step ahead of the one that ended a request may hold nothing else
        seen.bound = sum(s.request.max_total_tokens + self.world.ahead for s in self.live.values())
        return request

    def try_add(self, prompt: tuple[int, ...], **params) -> Request | None:
        try:
            return self.add(prompt, **params)
        except RequestError:
            return None

    def schedule(self) -> Step | None:
        assert not self.steps
        before = {id(seen.request) for seen in self.live.values() if seen.request.page_ids}
        step = self.scheduler.schedule()
        if step is None:
            assert not self.live, "live requests, but nothing to run"
        else:
            self._check_step(step, before)
            self._submit(step)
        return step

    def schedule_ahead(self) -> Step | None:
        """The second of two steps under way, or None for a reason."""
        assert len(self.steps) == 1
        before = {id(seen.request) for seen in self.live.values() if seen.request.page_ids}
        usable = self.pool.usable
        step = self.scheduler.schedule_ahead()
        if step is None:
            self._check_refusal(usable)
            return None
        assert step.preempted == ()
        assert not self._needs_the_host(), "a draw goes by a token that nobody knows"
        self._check_step(step, before)
        self._submit(step)
        self.num_ahead += 1
        return step

    def _submit(self, step: Step) -> None:
        loads = []
        for share in step.scheduled:
            stop = share.start + share.num_tokens
            tokens = tuple(share.request.tokens(0, stop))
            assert len(tokens) == stop - (share.follows is not None), "a token nobody knows"
            drafts = len(share.request.draft_token_ids)
            loads.append(Load(share, list(share.request.page_ids), tokens, drafts))
        self.steps.append((step, loads))

    def commit(self) -> list[Request]:
        step, loads = self.steps.pop(0)
        drawn = self._execute(loads)
        self.num_dropped += sum(share.request.finish_reason is not None for share in step.scheduled)
        ended = self.scheduler.commit(step, drawn)
        for seen in self.live.values():
            seen.steps += 1
            assert seen.steps <= seen.bound, f"{seen.request.request_id} starves"
        assert all(request.finish_reason is not None for request in ended)
        for request in ended:
            self._ended(self.live.pop(request.request_id))
        return ended

    def run_step(self) -> list[Request]:
        """As the engine does it: submit what can be submitted, then take one step in."""
        if not self.steps and self.schedule() is None:
            return []
        if self.world.ahead and len(self.steps) == 1:
            self.schedule_ahead()
        return self.commit()

    def end(self, request_id: str, reason: FinishReason) -> None:
        request = self.scheduler.finish(request_id, reason, "word")
        seen = self.live.pop(request_id)
        assert request is seen.request
        assert request.finish_reason is reason
        assert self.scheduler.abort(request_id) is None, "ended twice"
        self.lost_poison |= seen.exposed or seen.sick_from is not None
        self.num_ended += 1

    def propose(self, rng: random.Random) -> None:
        for seen in self.live.values():
            request = seen.request
            if request.page_ids and request.num_tokens - request.num_computed == 1:
                tokens = list(request.tokens(0, request.num_tokens))
                for _ in range(rng.randint(0, 4)):  # right with luck, as drafts are
                    guess = (
                        next_token(tuple(tokens)) if rng.random() < 0.6 else rng.randrange(VOCAB)
                    )
                    tokens.append(guess)
                self.scheduler.propose(request, tokens[request.num_tokens :])

    def drain(self) -> None:
        for _ in range(sum(seen.request.max_total_tokens + 1 for seen in self.live.values()) + 2):
            if not self.live and not self.steps:
                break
            self.run_step()
            self.check()
        assert not self.live, f"not finished: {sorted(self.live)}"
        assert self.pool.usable == self.pool.capacity, "pages leaked"
        assert not self.scheduler.has_work

    # --- the device ------------------------------------------------------------------------------

    def _execute(self, loads: list[Load]) -> list[Sampled]:
        size, before, self.drawn = self.world.page_size, self.drawn, []
        for load in loads:
            share, seen = load.share, self._seen(load.share.request)
            if share.follows is not None:
                load.tokens += (before[share.follows],)
            stop = share.start + share.num_tokens
            assert len(load.tokens) == stop
            assert len(load.pages) * size >= stop, "fewer pages than tokens"
            for position in range(share.start, stop):
                if seen and seen.sick_from is not None and position >= seen.sick_from:
                    seen.exposed = True
                slot = (load.pages[position // size], position % size)
                poison = self._reads_poison(load, position) or bool(seen and seen.exposed)
                self.slots[slot] = (load.tokens[: position + 1], poison)
        answers = [self._draw(load) for load in loads]
        # a row that failed leaves any token on the device
        self.drawn = [VOCAB if a.token_id is None else a.token_id for a in answers]
        return answers

    def _draw(self, load: Load) -> Sampled:
        share, tokens, size = load.share, load.tokens, self.world.page_size
        stop = share.start + share.num_tokens
        for position in range(stop):
            held = self.slots[load.pages[position // size], position % size][0]
            name = share.request.request_id
            assert held == tokens[: position + 1], f"{name} reads another's slot"
        if self._reads_poison(load, stop):
            seen = self._seen(share.request)
            if seen:
                seen.exposed = True
            if share.samples:
                return Sampled(None, error="not finite")
        if not share.samples:
            return Sampled(None)
        known, accepted = stop - load.num_drafts, 0
        while known + accepted < stop and tokens[known + accepted] == next_token(
            tokens[: known + accepted]
        ):
            accepted += 1
        return Sampled(next_token(tokens[: known + accepted]), num_accepted=accepted)

    def _reads_poison(self, load: Load, stop: int) -> bool:
        size = self.world.page_size
        return any(self.slots[load.pages[p // size], p % size][1] for p in range(stop))

    def _seen(self, request: Request) -> Seen | None:
        seen = self.live.get(request.request_id)
        return seen if seen and seen.request is request else None

    # --- the judge -------------------------------------------------------------------------------

    def _under_way(self, request: Request) -> list[ScheduledRequest]:
        shares = [share for step, _ in self.steps for share in step.scheduled]
        return [share for share in shares if share.request is request]

    def _certainly_ends(self, request: Request) -> bool:
        """By its length, in a step under way."""
        num_drawn = sum(share.samples for share in self._under_way(request))
        return len(request.output_token_ids) + num_drawn >= request.params.max_tokens

    def _needs_the_host(self) -> bool:
        """Whether a live request draws under way and its next draw needs that token."""
        requests = [s.request for s in self.live.values()]
        return any(
            share.samples and request.params.presence_penalty
            for request in requests
            for share in self._under_way(request)
        )

    def _check_refusal(self, usable: int) -> None:
        """Whoever is not put into a step ahead has a reason."""
        if self.world.num_drafts or self._needs_the_host():
            return
        pages, running = 0, False
        for request in [seen.request for seen in self.live.values()]:
            shares = self._under_way(request)
            if (request.page_ids or shares) and not self._certainly_ends(request):
                running = True
                start = request.num_computed + sum(share.num_tokens for share in shares)
                left = request.num_tokens + sum(share.samples for share in shares) - start
                stop = start + min(left, self.world.budget)
                pages += self.pool.pages_for(stop) - len(request.page_ids)
        assert not running or pages > usable, "nothing kept the step from going ahead"

    def _check_step(self, step: Step, before: set[int]) -> None:
        world, shares = self.world, step.scheduled
        assert 0 < step.num_tokens <= world.budget
        assert len(shares) <= world.max_num_seqs
        decodes, prefills = shares[: step.num_decodes], shares[step.num_decodes :]
        for part in (decodes, prefills):
            arrivals = [share.request.arrival for share in part]
            assert arrivals == sorted(set(arrivals)), "out of order"
        for share in shares:
            request, behind = share.request, self._under_way(share.request)
            assert request.finish_reason is None
            assert not self._certainly_ends(request)
            left = request.num_tokens + sum(s.samples for s in behind) - share.start
            assert share.start == request.num_computed + sum(s.num_tokens for s in behind)
            assert (share.follows is not None) == (bool(behind) and behind[-1].samples)
            if share.follows is not None:
                assert self.steps[-1][0].scheduled[share.follows] is behind[-1]
                assert share.num_tokens == 1
            num_drafts = len(request.draft_token_ids)
            num_output = share.start + share.num_tokens - len(request.prompt_token_ids)
            assert share.num_output == num_output - num_drafts
            assert share.samples == (share.num_tokens >= left > 0)
            assert max(share.num_tokens - left, 0) == len(request.draft_token_ids)
            is_decode = share in decodes
            assert is_decode == (
                id(request) in before
                and share.start >= len(request.prompt_token_ids)
                and left <= world.num_drafts + 1
            )
            if id(request) not in before:
                self.num_hits += share.start
                assert share.start <= (request.num_tokens - 1) // world.page_size * world.page_size
                assert share.start == 0 or request.params.prompt_logprobs is None
                if request.num_preemptions == 0:
                    assert request.num_cached == share.start
        going_on = [s.request for s in self.live.values() if not self._certainly_ends(s.request)]
        earliest = min(going_on, key=lambda request: request.arrival)
        assert any(share.request is earliest for share in shares), "the earliest does not advance"
        holding = [s.request.arrival for s in self.live.values() if s.request.page_ids]
        idle = [s.request.arrival for s in self.live.values() if not s.request.page_ids]
        assert max(holding) < min(idle, default=10**9), "overtaken"
        assert all(victim.arrival > max(holding) for victim in step.preempted), "wrong victim"
        size = world.page_size
        for share in shares:
            stop = share.start + share.num_tokens
            for page in share.request.page_ids[share.start // size : -(-stop // size)]:
                assert page >= world.num_reserved, f"writes to the dummy page {DUMMY_PAGE}"
                assert not self.pool.is_published(page), "writes to a published page"
                owners = [r for r in self._holding() if page in r.page_ids]
                assert owners == [share.request], "writes to a page of another request"

    def _ended(self, seen: Seen) -> None:
        self.num_ended += 1
        request = seen.request
        expected = right_answer(request.prompt_token_ids, request.params)
        if request.finish_reason is FinishReason.ERROR:
            assert seen.exposed, f"unfounded error: {request.error}"
            assert request.error
            assert request.output_token_ids == expected[: len(request.output_token_ids)]
            return
        assert not seen.exposed, "an answer drawn from garbage"
        assert request.output_token_ids == expected
        last = expected[-1]
        if len(expected) < request.params.min_tokens or last not in request.stop_ids:
            assert request.finish_reason is FinishReason.LENGTH
        else:
            assert request.finish_reason is FinishReason.STOP
            by_name = last in request.params.stop_token_ids
            assert request.stop_reason == (last if by_name else None)

    def _holding(self) -> list[Request]:
        """Requests that live, and those that only a step under way keeps."""
        requests = [seen.request for seen in self.live.values()]
        requests += [load.share.request for _, loads in self.steps for load in loads]
        return list({id(request): request for request in requests}.values())

    def check(self) -> None:
        self.scheduler.integrity()
        size = self.world.page_size
        holders: dict[int, int] = {}
        for request in self._holding():
            for page in request.page_ids:
                holders[page] = holders.get(page, 0) + 1
        for load in (load for _, loads in self.steps for load in loads):
            kept = load.share.request.page_ids[: len(load.pages)]
            assert kept == load.pages, "a page was taken away while a step under way uses it"
        assert DUMMY_PAGE not in holders or not self.world.num_reserved
        for page in range(self.world.num_reserved, self.world.num_pages):
            assert self.pool.num_holders(page) == holders.get(page, 0), f"page {page} miscounted"
        healthy = not self.lost_poison and not any(
            seen.exposed or seen.sick_from is not None for seen in self.live.values()
        )
        for page in range(self.world.num_pages):
            if self.pool.is_published(page):
                written = [self.slots[page, offset] for offset in range(size)]
                assert self.prefix is not None
                assert written[-1][0] == self.prefix.tokens_of(page), "published under wrong tokens"
                assert not (healthy and any(poison for _, poison in written)), "garbage for hire"
        if not self.live and not self.steps:
            assert self.pool.usable == self.pool.capacity, "pages leaked"


def random_world(rng: random.Random) -> World:
    """Any mix of limits; every request that passes them fits in at least one page."""
    return World(
        num_pages=rng.choice((2, 4, 5, 8, 12)),
        page_size=rng.choice((1, 1, 2, 3)),
        max_num_seqs=rng.choice((1, 3, 5)),
        budget=rng.choice((5, 6, 9)),
        max_model_len=rng.choice((6, 12, 18)),
        num_drafts=rng.choice((0, 0, 0, 1, 3)),
        prefix=rng.random() < 0.85,
        digest=rng.choice((None, two_bit_digest)),
        num_reserved=rng.choice((0, 1)),
        ahead=rng.random() < 0.7,
    )


def random_run(world: World, seed: int, num_events: int = 40) -> Simulation:
    """Arrivals, steps, aborts, failures and resets in random order, then until all have ended."""
    rng = random.Random(seed)
    sim = Simulation(world)
    for _ in range(num_events):
        event = rng.random()
        if event < 0.35:
            add_random(sim, rng)
        elif event < 0.40 and sim.live:
            sim.end(rng.choice(sorted(sim.live)), rng.choice(list(FinishReason)))
        elif event < 0.41 and sim.prefix is not None:
            sim.prefix.reset()
        elif not sim.steps:
            sim.propose(rng)
            sim.schedule()
        elif world.ahead and len(sim.steps) == 1 and rng.random() < 0.7:
            sim.schedule_ahead()
        else:
            sim.commit()
        sim.check()
    sim.drain()
    return sim


def add_random(sim: Simulation, rng: random.Random) -> Request | None:
    length = rng.randint(0, rng.choice((4, sim.world.max_model_len)))
    prompt = tuple(rng.choice((1, 1, 1, 2)) for _ in range(length))
    max_tokens = rng.randint(1, 14)
    return sim.try_add(
        prompt,
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(2,) if rng.random() < 0.2 else (),
        prompt_logprobs=1 if rng.random() < 0.1 else None,
        presence_penalty=1.0 if rng.random() < 0.05 else 0.0,
        sick_from=rng.randint(0, length + max_tokens) if rng.random() < 0.15 else None,
    )
