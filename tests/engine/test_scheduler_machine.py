"""Any order of events: no page with two owners, none leaked, nobody starved, every answer right."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from minuet.engine.types import FinishReason
from tests.engine.scheduler_sim import Simulation, World, random_run, random_world, two_bit_digest

worlds = st.builds(
    World,
    num_pages=st.integers(2, 9),
    page_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(4, 9),
    max_model_len=st.integers(4, 14),
    num_drafts=st.integers(0, 3),
    prefix=st.booleans(),
    digest=st.sampled_from([None, two_bit_digest]),
    num_reserved=st.sampled_from([0, 1]),
    ahead=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(world=worlds)
    def start(self, world):
        self.sim = Simulation(world)

    @rule(
        prompt=st.lists(st.integers(1, 2), max_size=14),
        max_tokens=st.integers(1, 8),
        sick_from=st.one_of(st.none(), st.none(), st.integers(0, 16)),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, None, 0]),
        penalty=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    )
    def add(self, prompt, max_tokens, sick_from, ignore_eos, logprobs, penalty):
        self.sim.try_add(
            tuple(prompt),
            max_tokens=max_tokens,
            sick_from=sick_from,
            ignore_eos=ignore_eos,
            prompt_logprobs=logprobs,
            presence_penalty=penalty,
        )

    @precondition(lambda self: not self.sim.steps)
    @rule(seed=st.one_of(st.none(), st.integers(0, 99)))
    def schedule(self, seed):
        if seed is not None:
            self.sim.propose(random.Random(seed))
        self.sim.schedule()

    @precondition(lambda self: len(self.sim.steps) == 1 and self.sim.world.ahead)
    @rule()
    def schedule_ahead(self):
        self.sim.schedule_ahead()

    @precondition(lambda self: self.sim.steps)
    @rule()
    def commit(self):
        self.sim.commit()

    @rule(count=st.integers(1, 4))
    def run_steps(self, count):
        for _ in range(count):
            self.sim.run_step()
            self.sim.check()

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data(), reason=st.sampled_from(FinishReason))
    def end(self, data, reason):
        self.sim.end(data.draw(st.sampled_from(sorted(self.sim.live))), reason)

    @precondition(lambda self: self.sim.prefix is not None)
    @rule()
    def reset(self):
        self.sim.prefix.reset()

    @invariant()
    def nothing_contradicts(self):
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_every_admissible_request_ends_with_the_right_answer():
    ended = preemptions = hits = collisions = withdrawn = evictions = ahead = dropped = 0
    for seed in range(500):
        sim = random_run(random_world(random.Random(seed)), seed, num_events=50)
        ended += sim.num_ended
        preemptions += sim.scheduler.num_preemptions
        hits += sim.num_hits
        ahead += sim.num_ahead
        dropped += sim.num_dropped
        if sim.prefix is not None:
            collisions += sim.prefix.stats.collisions
            withdrawn += sim.prefix.stats.withdrawn
            evictions += sim.prefix.stats.evictions
    # a run in which nothing happens proves nothing
    assert min(ended, hits, evictions, preemptions, collisions, withdrawn, ahead, dropped) > 50


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_pages", [2, 3, 4])
def test_requests_that_each_fill_the_pool_take_turns(num_pages, ahead):
    sim = Simulation(World(num_pages=num_pages, max_model_len=99, num_drafts=0, ahead=ahead))
    full = (num_pages - 1) * sim.world.page_size + 1
    requests = [sim.add((1,) * length, max_tokens=full - length) for length in (1, full - 1, 1, 2)]
    order = []
    while sim.live:
        order += sim.run_step()
        sim.check()
    assert order == requests


@pytest.mark.parametrize("ahead", [False, True])
def test_later_arrivals_never_delay_an_earlier_request(ahead):
    world = World(
        num_pages=6, max_num_seqs=3, budget=4, max_model_len=20, num_drafts=0, ahead=ahead
    )
    sim = Simulation(world)
    first = sim.add((1,) * 7, max_tokens=3, ignore_eos=True)
    steps = 0
    while first.finish_reason is None:
        if len(sim.live) < 6:
            sim.add((2,) * 3, max_tokens=4, ignore_eos=True)
        sim.run_step()
        sim.check()
        steps += 1
    assert steps <= first.max_total_tokens
    assert first.num_preemptions == 0
