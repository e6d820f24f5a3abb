"""What a prepared engine says about itself: the first report, and gauges while it runs."""

import os
from collections.abc import Callable
from typing import Any

from minuet.engine import ipc
from minuet.engine.start import Engine
from minuet.planning import explain, roofline

_REPORT_CONTEXT = 8192  # tokens per request in the roofline that the report shows


def ready_report(engine: Engine) -> ipc.Ready:
    """What the server needs to know before the first request."""
    plan = engine.plan
    config, pool = plan.config, engine.core.scheduler.pool
    context = min(_REPORT_CONTEXT, config.max_model_len)
    report = explain.report(plan, batch=min(16, config.max_num_seqs), context=context)
    return ipc.Ready(
        pid=os.getpid(),
        # the last token drawn is never written to a page
        max_model_len=min(config.max_model_len, pool.capacity * pool.page_size + 1),
        vocab_size=plan.facts.vocab,
        num_pages=pool.capacity,
        settings=config.describe(),
        report=ipc.plain(report),
        timings_s=engine.timings_s,
    )


def gauges_of(engine: Engine) -> Callable[[], dict[str, Any]]:
    """A function that reads the gauges; cheap enough to call after every step."""
    bandwidth = _Bandwidth(engine)

    def gauges() -> dict[str, Any]:
        counters = engine.seal.counters()
        return {
            "compilations": counters.compilations,
            "growth_bytes": counters.growth_bytes,
            "bandwidth": bandwidth(),
        }

    return gauges


class _Bandwidth:
    """Bytes/s that the last decode step must at least have moved, by the plan's own account."""

    def __init__(self, engine: Engine):
        self._core, plan = engine.core, engine.plan
        self._facts = plan.facts
        self._storage = roofline.storage_of(plan.config)
        self._bytes: dict[tuple[int, int], float] = {}
        self._value = 0.0

    def __call__(self) -> float:
        core = self._core
        batch, tokens, seconds = core.last_decode
        if batch and seconds > 0.0:
            # whole pages: few different keys, and the account of each is made once
            context = max(1, tokens // batch // 128 * 128)
            key = (batch, context)
            if key not in self._bytes:
                if len(self._bytes) > 4096:
                    self._bytes.clear()
                step = roofline.decode(self._facts, self._storage, batch=batch, context=context)
                self._bytes[key] = step.bytes
            self._value = self._bytes[key] / seconds
        return self._value
