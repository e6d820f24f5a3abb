"""From outcomes to the figures that the field reads: vLLM's names, definitions and block of text.

====  ============================================================================
ttft  from sending a request to its first event
tpot  (latency - ttft) / (output tokens - 1), one value per request of two tokens
itl   between two events, one value per gap
e2el  from sending a request to its last event
====  ============================================================================

Only requests that were answered to the end count; the others are counted apart.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minuet.bench.serve.client import Outcome
from minuet.errors import ConfigError

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_GOODPUT = ("ttft", "tpot", "e2el")  # per request; an ITL is not
_ALWAYS = (20.0, 80.0)  # how wide a run spread, beside what was asked for


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to report.

    Attributes:
        metrics: keys of :data:`METRICS`, in the order of the block.
        percentiles: of each, beside mean, median and standard deviation.
        goodput_ms: metric to the value a good request stays within; empty: no goodput.
    """

    metrics: tuple[str, ...] = tuple(METRICS)
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if wrong := [name for name in self.metrics if name not in METRICS]:
            raise ConfigError(
                "bad value for --percentile-metrics", got=wrong, expected=", ".join(METRICS)
            )
        outside = [p for p in self.percentiles if not 0.0 < p < 100.0]
        if outside:
            raise ConfigError(
                "bad value for --metric-percentiles", got=outside, expected="numbers from 0 to 100"
            )


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """``ttft:500 tpot:50`` as milliseconds by metric.

    Raises:
        ConfigError: another metric, or no number.
    """
    found = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if name not in _GOODPUT:
            raise ConfigError(
                "bad value for --goodput", got=word, expected=f"NAME:MS with {', '.join(_GOODPUT)}"
            )
    return found


def figures(outcomes: Sequence[Outcome], duration_s: float, wanted: Wanted) -> dict[str, Any]:
    """The result by vLLM's names.

    Args:
        outcomes: of every request.
        duration_s: from the first request to the end of the last.
        wanted: what to report.
    """
    good = [outcome for outcome in outcomes if outcome.ok]
    inputs, outputs = (
        sum(outcome.input_tokens for outcome in good),
        sum(outcome.output_tokens for outcome in good),
    )
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        "max_output_tokens_per_s": _most_tokens_in_a_second(good),
        "max_concurrent_requests": _most_at_once(good),
    }
    if wanted.goodput_ms:
        kept = sum(_is_good(outcome, wanted.goodput_ms) for outcome in good)
        found["request_goodput"] = kept / duration_s
    for name, values in _samples(good).items():
        if name in wanted.metrics:
            found |= _spread(name, values, wanted.percentiles)
    return found


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Lists with an entry per request, in the order in which they were sent."""
    return {
        "input_lens": [outcome.input_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "start_times": [outcome.start_s for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def _samples(good: Sequence[Outcome]) -> dict[str, list[float]]:
    return {
        "ttft": [outcome.ttft_s for outcome in good],
        "tpot": [tpot for outcome in good if (tpot := outcome.tpot_s) is not None],
        "itl": [gap for outcome in good for gap in outcome.itls_s],
        "e2el": [outcome.latency_s for outcome in good],
    }


def _spread(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Milliseconds; zeros where there is no sample, as vLLM has them."""
    ms = np.asarray(values_s or [0.0]) * 1e3
    figures = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    for p in sorted({*percentiles, *_ALWAYS}):
        figures[_label(p)] = np.percentile(ms, p)
    return {f"{figure}_{name}_ms": float(value) for figure, value in figures.items()}


def _label(p: float) -> str:
    return f"p{int(p) if p == int(p) else p}"


def _is_good(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    seen_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.latency_s}
    return all(seen_s[name] * 1e3 <= limit for name, limit in limits_ms.items())


def _most_tokens_in_a_second(good: Sequence[Outcome]) -> float:
    """Tokens of the fullest second, seconds counted from the first request."""
    if not good:
        return 0.0
    began = min(outcome.start_s for outcome in good)
    seconds: Counter[int] = Counter()
    for outcome in good:
        at = outcome.start_s + outcome.ttft_s - began
        for tokens, gap in zip(outcome.events, [*outcome.itls_s, 0.0], strict=True):
            seconds[int(at)] += tokens
            at += gap
    return float(max(seconds.values(), default=0))


def _most_at_once(good: Sequence[Outcome]) -> int:
    """Requests in flight at the fullest moment."""
    changes = [(outcome.start_s, 1) for outcome in good]
    changes += [(outcome.start_s + outcome.latency_s, -1) for outcome in good]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


# --- the block -----------------------------------------------------------------------------------


def block(result: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    """The result as vLLM prints it, with the 20th and 80th percentile beside the others."""
    yield f"{' Serving Benchmark Result ':=^50}"
    yield _row("Successful requests:", result["completed"])
    yield _row("Failed requests:", result["failed"])
    if result.get("max_concurrency") is not None:
        yield _row("Maximum request concurrency:", result["max_concurrency"])
    if result.get("request_rate") not in (None, "inf"):
        yield _row("Request rate configured (RPS):", result["request_rate"])
    yield _row("Benchmark duration (s):", result["duration"])
    yield _row("Total input tokens:", result["total_input_tokens"])
    yield _row("Total generated tokens:", result["total_output_tokens"])
    yield _row("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _row("Request goodput (req/s):", result["request_goodput"])
    yield _row("Output token throughput (tok/s):", result["output_throughput"])
    yield _row("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _row("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _row("Total token throughput (tok/s):", result["total_token_throughput"])
    for name in wanted.metrics:
        yield f"{METRICS[name]:-^50}"
        short = name.upper()
        yield _row(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
        yield _row(f"Median {short} (ms):", result[f"median_{name}_ms"])
        for p in sorted({*wanted.percentiles, *_ALWAYS}):
            yield _row(f"{_label(p).upper()} {short} (ms):", result[f"{_label(p)}_{name}_ms"])
    yield "=" * 50


def _row(label: str, value: float | int) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"


def failures(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What went wrong, the most frequent first, with how often."""
    for error, count in Counter(o.error for o in outcomes if not o.ok).most_common():
        yield f"{count} failed: {error}"
