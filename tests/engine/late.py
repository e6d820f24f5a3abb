"""Executors that keep their results to themselves until they are asked, and an engine on one."""

import functools
import random
from dataclasses import dataclass, field

from minuet.engine.core import Core, Limits
from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.scheduler import Scheduler
from minuet.engine.types import NOT_FINITE, Sampled, Step

VOCAB, EOS = 12, 0


@functools.cache
def next_token(tokens):
    """What the model draws after these tokens."""
    return random.Random(repr(tokens)).randrange(VOCAB)


def answer_to(prompt, max_tokens, stop_ids=(), min_tokens=0):
    """The output of a request that is left alone."""
    output = []
    while len(output) < max_tokens:
        output.append(next_token((*prompt, *output)))
        if output[-1] in stop_ids and len(output) >= min_tokens:
            break
    return output


@dataclass(eq=False)
class Late:
    """A device with a queue: tokens pass from step to step on it, whatever the host knows.

    Attributes:
        depth: as of an executor.
        events: what happened, in order: ("submit" or "results", number of the step).
        breaks: by number of the step: what its results raise.
        refuses: by number of the step: what its submission raises.
        sick: (number of the step, request id) whose row is not finite.
    """

    depth: int = 1
    events: list = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    breaks: dict = field(default_factory=dict)
    refuses: dict = field(default_factory=dict)
    sick: set = field(default_factory=set)
    drawn: list = field(default_factory=list)

    def submit(self, step):
        number = len(self.steps)
        self.steps.append(step)
        self.events.append(("submit", number))
        if number in self.refuses:
            raise self.refuses[number]
        before, self.drawn = self.drawn, []
        answers = []
        for share in step.scheduled:
            request, stop = share.request, share.start + share.num_tokens
            tokens = request.tokens(0, stop)
            if share.follows is not None:
                tokens.append(before[share.follows])
            assert len(tokens) == stop
            self.drawn.append(next_token(tuple(tokens)))
            if (number, request.request_id) in self.sick:
                answers.append(Sampled(None, error=NOT_FINITE))
            else:
                answers.append(Sampled(self.drawn[-1] if share.samples else None))
        return _Results(self, number, answers)


@dataclass(eq=False)
class _Results:
    device: Late
    number: int
    answers: list

    @property
    def done(self):
        return False

    def results(self):
        self.device.events.append(("results", self.number))
        if self.number in self.device.breaks:
            raise self.device.breaks[self.number]
        return self.answers


class Letters:
    """A tokenizer with a letter per token."""

    special_ids = frozenset()

    def stream(self, *, skip_special=True):
        return self

    def push(self, token_id):
        return chr(ord("a") + token_id)

    def finish(self):
        return ""


def core_on(device, *, num_pages=65, page_size=4, seqs=4, budget=16, length=64):
    """An engine over a device."""
    pool = PagePool(num_pages, page_size)
    scheduler = Scheduler(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=length,
        pool=pool,
        prefix=PrefixCache(pool, b"late"),
    )
    return Core(scheduler, device, Limits(VOCAB, 5, (EOS,)), Letters())
