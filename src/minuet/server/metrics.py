"""Every metric, once. Names are vLLM's with ``minuet:`` in front, so its dashboards work unchanged.

Seconds and bytes are the units. Counters of the engine process are read from its heartbeat; they
stay monotonic when the process is replaced.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter as _now

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from minuet.engine.client import EngineClient
from minuet.engine.ipc import Ready, Stats

_FINE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_GAP_S = (*_FINE_S, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY_S = (*_GAP_S, 160.0, 640.0, 2560.0)
_TOKENS = tuple(float(scale * 10**power) for power in range(7) for scale in (1, 2, 5))
_WINDOW_S = 60.0

# counters that the engine process keeps: metric name -> (field of Stats, help)
_ENGINE_COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Requests whose pages were taken to make room."),
    "engine_steps": ("num_steps", "Steps that ran."),
    "engine_failed_steps": ("failed_steps", "Steps that raised; their requests got an error."),
    "nonfinite_logits": ("nonfinite", "Requests ended because their logits were not finite."),
    "compilations_after_ready": ("compilations", "Kernels compiled after start-up: should stay 0."),
}

# gauges read at scrape time: metric name -> help
_GAUGES = {
    "num_requests_running": "Requests in the batch.",
    "num_requests_waiting": "Requests in the queue.",
    "kv_cache_usage_perc": "Share of KV pages held by requests, 0 to 1.",
    "kv_cache_pages": "KV pages that requests can use.",
    "kv_cache_cached_pages": "KV pages kept for their content alone.",
    "kv_cache_bytes": "Bytes of the KV pool.",
    "workspace_bytes": "Bytes of the attention workspace.",
    "memory_growth_after_ready_bytes": "Device memory taken after start-up: should stay 0.",
    "achieved_bandwidth_bytes_per_second": "What the last decode step must at least have moved.",
    "bandwidth_limit_bytes_per_second": "What the arch can move; 0 where the table does not say.",
    "engine_up": "1 while the engine serves, else 0.",
    "engine_step_age_seconds": "How long the step under way has been running.",
    "engine_heartbeat_age_seconds": "Since the engine's last sign of life.",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that ended, as the histograms see it; times are ``perf_counter`` seconds."""

    prompt_tokens: int
    output_tokens: int
    received_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    reason: str


class Metrics:
    """All metrics of one server.

    Args:
        model_name: label of every one.
        client: the engine, asked at scrape time.
    """

    def __init__(self, model_name: str, client: EngineClient):
        self.registry = CollectorRegistry()
        self._model = self.model_name = model_name
        self._client = client
        self.window = Window()
        self._gauges = {
            name: Gauge(f"minuet:{name}", text, ["model_name"], registry=self.registry)
            for name, text in _GAUGES.items()
        }
        self._past = self._last = Stats()
        self._restarts = 0
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that were begun.")
        self._output = self._counter("generation_tokens", "Tokens drawn.")
        self._success = self._counter("request_success", "Requests that ended.", "finished_reason")
        self._refused = self._counter("request_refused", "Requests refused at once.", "status")
        self._engine_deaths = self._counter("engine_restarts", "Engine processes replaced.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Until the first token.")
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens.", _GAP_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean after the first token.", _GAP_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Whole requests.")
        self._queue = self._histogram("request_queue_time_seconds", "Until the first step.")
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First step to first token."
        )
        self._decode = self._histogram("request_decode_time_seconds", "First token to the end.")
        self._prompts = self._histogram("request_prompt_tokens", "Prompt lengths.", _TOKENS)
        self._outputs = self._histogram("request_generation_tokens", "Output lengths.", _TOKENS)
        self._iteration = self._histogram("iteration_tokens_total", "Tokens of a step.", _TOKENS)
        self._config = Info(
            "minuet:cache_config", "The settings as resolved.", registry=self.registry
        )
        self._backends = Gauge(
            "minuet:attention_backend_info",
            "The kernel chosen per layer kind and operation; always 1.",
            ["model_name", "layer_kind", "op", "backend", "kernel", "arch", "kv_dtype"],
            registry=self.registry,
        )
        self.registry.register(_EngineCounters(self))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        metric = Counter(f"minuet:{name}", text, ["model_name", *labels], registry=self.registry)
        if not labels:
            metric.labels(self._model)  # shown from the start, as 0
        return metric

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S
    ) -> Histogram:
        metric = Histogram(
            f"minuet:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
        )
        metric.labels(self._model)
        return metric

    # --- what happens ----------------------------------------------------------------------------

    def engine_ready(self, ready: Ready) -> None:
        """The engine started: its facts are constant from here on."""
        self._config.info({"model_name": self._model} | {n: v for n, v, _ in ready.settings})
        settings = {name: value for name, value, _ in ready.settings}
        for call in ready.report.get("calls", ()):
            if call["kernel"] and call["phase"] == "decode":
                self._backends.labels(
                    self._model,
                    call["layer_kind"],
                    call["op"],
                    call["kernel"].partition(".")[0],
                    call["kernel"],
                    ready.report["arch"]["name"],
                    settings.get("kv_cache_dtype", ""),
                ).set(1)

    def step_done(self, num_tokens: int) -> None:
        """A step ran."""
        if num_tokens:
            self._iteration.labels(self._model).observe(num_tokens)

    def refused(self, status: int) -> None:
        """A request was turned away."""
        self._refused.labels(self._model, str(status)).inc()

    def begun(self, prompt_tokens: int) -> None:
        """A request was accepted by the engine."""
        self._prompt.labels(self._model).inc(prompt_tokens)

    def tokens(self, count: int, since_last_s: float | None) -> None:
        """Tokens arrived; ``since_last_s`` is None for a request's first."""
        self._output.labels(self._model).inc(count)
        self.window.add("tokens", float(count))
        if since_last_s is not None:
            self._gap.labels(self._model).observe(since_last_s)
            self.window.add("itl", since_last_s)

    def first_token(self, seconds: float) -> None:
        """A request's first token arrived so long after the request."""
        self._ttft.labels(self._model).observe(seconds)
        self.window.add("ttft", seconds)

    def finished(self, end: Finished) -> None:
        """A request ended."""
        label = self._model
        self._success.labels(label, end.reason).inc()
        self._prompts.labels(label).observe(end.prompt_tokens)
        self._outputs.labels(label).observe(end.output_tokens)
        self._e2e.labels(label).observe(end.finished_s - end.received_s)
        self.window.add("e2e", end.finished_s - end.received_s)
        if end.scheduled_s is not None:
            self._queue.labels(label).observe(max(0.0, end.scheduled_s - end.received_s))
        if end.first_token_s is not None:
            if end.scheduled_s is not None:
                self._prefill.labels(label).observe(end.first_token_s - end.scheduled_s)
            decode_s = end.finished_s - end.first_token_s
            self._decode.labels(label).observe(decode_s)
            if end.output_tokens > 1:
                self._tpot.labels(label).observe(decode_s / (end.output_tokens - 1))

    # --- when asked ------------------------------------------------------------------------------

    def totals(self) -> Stats:
        """The engine's counters over all its lives."""
        stats = self._client.stats
        if self._client.restarts != self._restarts:
            self._engine_deaths.labels(self._model).inc(self._client.restarts - self._restarts)
            self._restarts, self._past = self._client.restarts, self._last
        self._last = _sum(self._past, stats)
        return self._last

    def refresh(self) -> None:
        """Read the gauges; before every scrape."""
        stats, client = self._client.stats, self._client
        report = client.ready.report if client.has_been_ready else {}
        memory, arch = report.get("memory", {}), report.get("arch", {})
        self.totals()
        values = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": stats.used_pages / stats.num_pages if stats.num_pages else 0.0,
            "kv_cache_pages": stats.num_pages,
            "kv_cache_cached_pages": stats.cached_pages,
            "kv_cache_bytes": memory.get("kv_bytes") or 0,
            "workspace_bytes": memory.get("workspace_bytes") or 0,
            "memory_growth_after_ready_bytes": stats.growth_bytes,
            "achieved_bandwidth_bytes_per_second": stats.bandwidth,
            "bandwidth_limit_bytes_per_second": arch.get("bandwidth_bytes_per_s") or 0,
            "engine_up": float(client.serves),
            "engine_step_age_seconds": client.step_age_s,
            "engine_heartbeat_age_seconds": client.heartbeat_age_s,
        }
        for name, value in values.items():
            self._gauges[name].labels(self._model).set(value)


def _sum(past: Stats, now: Stats) -> Stats:
    return Stats(*(getattr(past, f) + getattr(now, f) for f in Stats.__struct_fields__))


class _EngineCounters(Collector):
    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return list(self._families(Stats()))

    def collect(self) -> Iterator[Metric]:
        yield from self._families(self._metrics.totals())

    def _families(self, stats: Stats) -> Iterator[CounterMetricFamily]:
        for name, (attribute, text) in _ENGINE_COUNTERS.items():
            family = CounterMetricFamily(f"minuet:{name}", text, labels=["model_name"])
            family.add_metric([self._metrics.model_name], getattr(stats, attribute))
            yield family


class Window:
    """The last minute of each quantity, for the built-in page."""

    _MOST = 20_000  # per quantity: the newest, if a minute holds more

    def __init__(self) -> None:
        self._values: dict[str, deque[tuple[float, float]]] = {}

    def add(self, name: str, value: float) -> None:
        """One observation, now."""
        self._values.setdefault(name, deque(maxlen=self._MOST)).append((_now(), value))

    def percentiles(self, name: str) -> dict[str, float] | None:
        """p50, p90 and p99 of the last minute; None without observations."""
        values = sorted(value for _, value in self._recent(name, _WINDOW_S))
        if not values:
            return None
        last = len(values) - 1
        return {f"p{p}": values[round(last * p / 100)] for p in (50, 90, 99)}

    def rate(self, name: str, seconds: float) -> float:
        """Sum per second over the last ``seconds``."""
        return sum(value for _, value in self._recent(name, seconds)) / seconds

    def _recent(self, name: str, seconds: float) -> list[tuple[float, float]]:
        since = _now() - seconds
        return [item for item in self._values.get(name, ()) if item[0] >= since]
