"""When requests are sent: at a rate, in bursts, and never more than so many at once."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from minuet.bench.serve.client import Endpoint, Outcome, ask, session
from minuet.bench.serve.prompts import Prompt


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is sent.

    Args:
        count: requests.
        rate: requests per second; ``inf`` sends all at once.
        burstiness: shape of the gamma distribution of the intervals, whose mean is ``1 / rate``:
            1 is a Poisson process, less comes in bursts, more comes evenly.
        seed: of the intervals.
    """
    if rate == float("inf"):
        return [0.0] * count
    draw = np.random.default_rng(seed)
    gaps = draw.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count)
    found: list[float] = (np.cumsum(gaps) - gaps[:1].sum()).tolist()
    return found


async def run(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    times_s: Sequence[float],
    max_concurrency: int | None,
    done: Callable[[Outcome], Any],
) -> tuple[list[Outcome], float]:
    """Send every prompt at its time; returns the outcomes in order, and the seconds it all took.

    Args:
        endpoint: where.
        prompts: what.
        times_s: when, from the start.
        max_concurrency: requests in flight at most; the clock of one that waits starts when it is
            sent.
        done: called with each outcome as it comes.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    async with session() as http:

        async def one(prompt: Prompt, at_s: float) -> Outcome:
            await asyncio.sleep(began + at_s - loop.time())
            async with AsyncExitStack() as held:
                if slots is not None:
                    await held.enter_async_context(slots)
                outcome = await ask(http, endpoint, prompt)
            done(outcome)
            return outcome

        began = loop.time()
        work = (one(prompt, at_s) for prompt, at_s in zip(prompts, times_s, strict=True))
        outcomes = await asyncio.gather(*work)
        return outcomes, loop.time() - began
