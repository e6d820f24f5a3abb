"""A world around the scheduler in which every mistake shows.

The model is a pure function of all tokens so far, so each request has one right answer, whoever
ran beside it and however often it was preempted. Memory is played: a slot holds the tokens up to
its position, and a request that reads a slot compares it with its own. ``check`` looks at the world
from outside, so that it does not depend on the book-keeping that it tests.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from minuet.engine.pages import DUMMY_PAGE, PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.scheduler import Scheduler
from minuet.engine.types import FinishReason, Request, Sampled, SamplingParams, Step
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


@dataclass(eq=False)
class Seen:
    """What the simulation knows of a request by itself."""

    request: Request
    bound: int  # steps after which it must have ended
    sick_from: int | None = None  # it writes garbage from this position on
    exposed: bool = False  # it wrote or read garbage
    steps: int = 0


@dataclass(eq=False)
class Simulation:
    world: World
    live: dict[str, Seen] = field(default_factory=dict)
    step: Step | None = None
    lost_poison: bool = False  # garbage may stay: whoever wrote it was aborted before it showed
    num_added: int = 0
    num_ended: int = 0
    num_hits: int = 0

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
        bound = sum(seen.request.max_total_tokens for seen in self.live.values())
        seen = Seen(request, bound + request.max_total_tokens, sick_from)
        self.live[request.request_id] = seen
        return request

    def try_add(self, prompt: tuple[int, ...], **params) -> Request | None:
        try:
            return self.add(prompt, **params)
        except RequestError:
            return None

    def schedule(self) -> Step | None:
        before = {id(seen.request) for seen in self.live.values() if seen.request.page_ids}
        self.step = self.scheduler.schedule()
        if self.step is None:
            assert not self.live, "live requests, but nothing to run"
        else:
            self._check_step(self.step, before)
        return self.step

    def commit(self) -> list[Request]:
        step, self.step = self.step, None
        assert step is not None
        drawn = self._execute(step)
        ended = self.scheduler.commit(step, drawn)
        for seen in self.live.values():
            seen.steps += 1
            assert seen.steps <= seen.bound, f"{seen.request.request_id} starves"
        assert all(request.finish_reason is not None for request in ended)
        for request in ended:
            self._ended(self.live.pop(request.request_id))
        return ended

    def run_step(self) -> list[Request]:
        return self.commit() if self.schedule() else []

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
        for _ in range(sum(seen.request.max_total_tokens for seen in self.live.values()) + 1):
            if not self.live:
                break
            self.run_step()
            self.check()
        assert not self.live, f"not finished: {sorted(self.live)}"
        assert self.pool.usable == self.pool.capacity, "pages leaked"
        assert not self.scheduler.has_work

    # --- the device ------------------------------------------------------------------------------

    def _execute(self, step: Step) -> list[Sampled]:
        size = self.world.page_size
        for share in step.scheduled:
            request, seen = share.request, self._seen(share.request)
            stop = share.start + share.num_tokens
            tokens = tuple(request.tokens(0, stop))
            assert len(tokens) == stop
            assert len(request.page_ids) * size >= stop, "fewer pages than tokens"
            for position in range(share.start, stop):
                if seen and seen.sick_from is not None and position >= seen.sick_from:
                    seen.exposed = True
                slot = (request.page_ids[position // size], position % size)
                poison = self._reads_poison(request, position) or bool(seen and seen.exposed)
                self.slots[slot] = (tokens[: position + 1], poison)
        return [self._draw(share) for share in step.scheduled]

    def _draw(self, share) -> Sampled:
        request, size = share.request, self.world.page_size
        stop = share.start + share.num_tokens
        tokens = tuple(request.tokens(0, stop))
        for position in range(stop):
            held = self.slots[request.page_ids[position // size], position % size][0]
            assert held == tokens[: position + 1], f"{request.request_id} reads another's slot"
        if self._reads_poison(request, stop):
            seen = self._seen(request)
            if seen:
                seen.exposed = True
            if share.samples:
                return Sampled(None, error="not finite")
        if not share.samples:
            return Sampled(None)
        known, accepted = request.num_tokens, 0
        while known + accepted < stop and tokens[known + accepted] == next_token(
            tokens[: known + accepted]
        ):
            accepted += 1
        return Sampled(next_token(tokens[: known + accepted]), num_accepted=accepted)

    def _reads_poison(self, request: Request, stop: int) -> bool:
        size = self.world.page_size
        return any(self.slots[request.page_ids[p // size], p % size][1] for p in range(stop))

    def _seen(self, request: Request) -> Seen | None:
        seen = self.live.get(request.request_id)
        return seen if seen and seen.request is request else None

    # --- the judge -------------------------------------------------------------------------------

    def _check_step(self, step: Step, before: set[int]) -> None:
        world, shares = self.world, step.scheduled
        assert 0 < step.num_tokens <= world.budget
        assert len(shares) <= world.max_num_seqs
        decodes, prefills = shares[: step.num_decodes], shares[step.num_decodes :]
        for part in (decodes, prefills):
            arrivals = [share.request.arrival for share in part]
            assert arrivals == sorted(set(arrivals)), "out of order"
        for share in shares:
            request = share.request
            left = request.num_tokens - share.start
            assert share.start == request.num_computed
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
        earliest = min(self.live.values(), key=lambda seen: seen.request.arrival).request
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
                owners = [s for s in self.live.values() if page in s.request.page_ids]
                assert len(owners) == 1, "writes to a page of another request"

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

    def check(self) -> None:
        self.scheduler.integrity()
        size = self.world.page_size
        holders: dict[int, int] = {}
        requests = [seen.request for seen in self.live.values()]
        requests += [s.request for s in self.step.scheduled] if self.step else []
        for request in {id(r): r for r in requests}.values():
            for page in request.page_ids:
                holders[page] = holders.get(page, 0) + 1
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
        if not self.live and self.step is None:
            assert self.pool.usable == self.pool.capacity, "pages leaked"


def random_world(rng: random.Random) -> World:
    """Any mix of limits; every request that passes them fits in at least one page."""
    return World(
        num_pages=rng.choice((2, 5, 8, 12)),
        page_size=rng.choice((1, 1, 2, 3)),
        max_num_seqs=rng.choice((1, 3, 5)),
        budget=rng.choice((5, 6, 9)),
        max_model_len=rng.choice((6, 12, 18)),
        num_drafts=rng.choice((0, 1, 3)),
        prefix=rng.random() < 0.85,
        digest=rng.choice((None, two_bit_digest)),
        num_reserved=rng.choice((0, 1)),
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
        elif sim.step is None:
            sim.propose(rng)
            sim.schedule()
        else:
            sim.commit()
        sim.check()
    if sim.step is not None:
        sim.commit()
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
        sick_from=rng.randint(0, length + max_tokens) if rng.random() < 0.1 else None,
    )
