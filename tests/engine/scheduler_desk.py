"""A scheduler on a desk: the test plays the device and says what is drawn."""

from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.scheduler import Scheduler
from minuet.engine.types import Request, Sampled, SamplingParams

PAGE = 4
EOS = 99


class Desk:
    """A scheduler, and a device that draws what the test says."""

    def __init__(self, num_pages=33, *, prefix=True, seqs=4, budget=16, length=64, drafts=0):
        self.pool = PagePool(num_pages, PAGE)
        self.prefix = PrefixCache(self.pool, b"") if prefix else None
        self.scheduler = Scheduler(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=length,
            pool=self.pool,
            prefix=self.prefix,
            num_speculative_tokens=drafts,
        )
        self.arrivals = 0

    def add(self, num_prompt, max_tokens=4, *, name="", first=0, **params) -> Request:
        request = Request(
            name or f"r{self.arrivals}",
            tuple(range(first, first + num_prompt)),
            SamplingParams(max_tokens=max_tokens, **params),
            arrival=self.arrivals,
            eos_token_ids=(EOS,),
        )
        self.arrivals += 1
        self.scheduler.add(request)
        return request

    def step(self, **drawn):
        """One step; ``drawn`` by request id: a token, an error text, or a Sampled."""
        step = self.scheduler.schedule()
        self.scheduler.integrity()
        return step, self.commit(step, **drawn)

    def commit(self, step, **drawn):
        answers = []
        for share in step.scheduled:
            answer = drawn.get(share.request.request_id, 7 if share.samples else None)
            if not isinstance(answer, Sampled):
                is_text = isinstance(answer, str)
                answer = Sampled(None, error=answer) if is_text else Sampled(answer)
            answers.append(answer)
        ended = self.scheduler.commit(step, answers)
        self.scheduler.integrity()
        return ended


def shares(step):
    return [(s.request.request_id, s.start, s.num_tokens, s.samples) for s in step.scheduled]
