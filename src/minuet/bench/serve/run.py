"""``minuet bench serve`` without its flags: ask a server, make a record."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from minuet.bench import record
from minuet.bench.serve import load, metrics, prompts
from minuet.bench.serve.client import Endpoint, Outcome, session
from minuet.bench.serve.metrics import Wanted
from minuet.bench.serve.prompts import Prompt, RandomLengths
from minuet.bench.serve.server import Server
from minuet.errors import ConfigError

# backend -> (route, whether it takes messages, fields beyond OpenAI's)
BACKENDS: Mapping[str, tuple[str, bool, Mapping[str, Any]]] = {
    "minuet": ("/v1/completions", False, {"return_token_ids": True}),
    "minuet-chat": ("/v1/chat/completions", True, {"return_token_ids": True}),
    "openai": ("/v1/completions", False, {}),
    "openai-chat": ("/v1/chat/completions", True, {}),
}
DATASETS = ("random", "sharegpt", "custom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to ask, of whom, how fast. Names are those of the flags.

    Attributes:
        base_url: of the server.
        backend: a key of :data:`BACKENDS`.
        endpoint: another route than the backend's; empty: the backend's.
        model: as the server calls it; empty: the first it serves.
        dataset: one of :data:`DATASETS`.
        dataset_path: of ``sharegpt`` and ``custom``.
        num_prompts: requests that are measured.
        num_warmups: requests before them, other ones.
        lengths: of random prompts.
        output_len: of the other data sets; None: what the file says.
        vocab_size: of random prompts; None: what the server says.
        request_rate: requests per second; inf: all at once.
        burstiness: see :func:`minuet.bench.serve.load.arrivals`.
        max_concurrency: requests in flight; None: no limit.
        ignore_eos: answers run to the length asked for.
        temperature: of sampling.
        extra_body: fields added to every request.
        headers: of every request.
        seed: of prompts and arrivals.
        ready_timeout_s: how long to wait for the server.
        progress: show a bar.
    """

    base_url: str
    backend: str
    endpoint: str
    model: str
    dataset: str
    dataset_path: Path | None
    num_prompts: int
    num_warmups: int
    lengths: RandomLengths
    output_len: int | None
    vocab_size: int | None
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    ignore_eos: bool
    temperature: float
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    ready_timeout_s: float = 60.0
    progress: bool = True

    def __post_init__(self) -> None:
        checks = (
            ("--num-prompts", self.num_prompts >= 1, self.num_prompts, "at least 1"),
            ("--request-rate", self.request_rate > 0.0, self.request_rate, "> 0, or inf"),
            ("--burstiness", self.burstiness > 0.0, self.burstiness, "> 0"),
            ("--max-concurrency", self.max_concurrency != 0, self.max_concurrency, "at least 1"),
            (
                "--dataset-path",
                self.dataset == "random" or self.dataset_path is not None,
                None,
                f"a file: --dataset-name {self.dataset} reads one",
            ),
        )
        for flag, holds, got, expected in checks:
            if not holds:
                raise ConfigError(f"bad value for {flag}", got=got, expected=expected)


async def run(asked: Load, wanted: Wanted) -> tuple[dict[str, Any], list[Outcome]]:
    """Warm up, send the load, gather the result.

    Args:
        asked: the load.
        wanted: what to report.

    Returns:
        The result by vLLM's names, with ``environment`` and ``server`` added; and the outcomes.

    Raises:
        ConfigError: no server, a data set that does not fit, or a warm-up that failed.
    """
    async with session() as http:
        server = Server(http, asked.base_url, asked.headers)
        card = await server.until_ready(asked.ready_timeout_s)
        model = asked.model or str(card["id"])
        about = await server.about()
        questions = await _prompts(asked, server, about)
    endpoint = _endpoint(asked, model)
    warm, measured = questions[: asked.num_warmups], questions[asked.num_warmups :]
    await _warm_up(endpoint, warm)
    times_s = load.arrivals(len(measured), asked.request_rate, asked.burstiness, asked.seed)
    date = time.strftime("%Y%m%d-%H%M%S")
    with tqdm(total=len(measured), unit="req", disable=not asked.progress) as bar:
        seen = _Progress(bar)
        outcomes, duration_s = await load.run(
            endpoint, measured, times_s, asked.max_concurrency, seen.took
        )
    async with session() as http:
        after = await Server(http, asked.base_url, asked.headers).about()
    result = {
        "date": date,
        "backend": asked.backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": model,  # token counts are the server's
        "num_prompts": asked.num_prompts,
        "request_rate": "inf" if math.isinf(asked.request_rate) else asked.request_rate,
        "burstiness": asked.burstiness,
        "max_concurrency": asked.max_concurrency,
        **metrics.figures(outcomes, duration_s, wanted),
        "load": _described(asked),
        "environment": _environment(asked.base_url),
        "server": after,
    }
    return result, outcomes


class _Progress:
    """A bar that says how many failed."""

    def __init__(self, bar: Any):
        self._bar, self._failed = bar, 0

    def took(self, outcome: Outcome) -> None:
        self._failed += not outcome.ok
        if self._failed:
            self._bar.set_postfix(failed=self._failed, refresh=False)
        self._bar.update()


def _endpoint(asked: Load, model: str) -> Endpoint:
    route, chat, extra = BACKENDS[asked.backend]
    fields: dict[str, Any] = {"model": model, "temperature": asked.temperature, **extra}
    if asked.ignore_eos:
        fields["ignore_eos"] = True
    fields |= asked.extra_body
    return Endpoint(asked.base_url + (asked.endpoint or route), chat, fields, asked.headers)


async def _prompts(asked: Load, server: Server, about: Mapping[str, Any]) -> list[Prompt]:
    count, path = asked.num_prompts + asked.num_warmups, asked.dataset_path
    if asked.dataset == "random":
        vocab = asked.vocab_size or about.get("model", {}).get("vocab")
        if not vocab:
            raise ConfigError(
                "the server does not say how many tokens its vocabulary has",
                remedy="pass --vocab-size",
            )
        found = prompts.random_prompts(count, asked.lengths, vocab, asked.seed)
    elif asked.dataset == "custom":
        assert path is not None
        found = prompts.custom_prompts(path, count, asked.output_len or asked.lengths.output_len)
    else:
        assert path is not None
        found = await prompts.sharegpt_prompts(
            path, count, asked.output_len, server.count_tokens, asked.seed
        )
    if BACKENDS[asked.backend][1]:
        return [await _as_text(prompt, server) for prompt in found]
    return found


async def _as_text(prompt: Prompt, server: Server) -> Prompt:
    """Messages are text; its tokens need not be those it was made from."""
    if isinstance(prompt.content, str):
        return prompt
    return replace(prompt, content=await server.text_of(prompt.content))


async def _warm_up(endpoint: Endpoint, questions: Sequence[Prompt]) -> None:
    if not questions:
        return
    outcomes, _ = await load.run(
        endpoint, questions, [0.0] * len(questions), None, lambda outcome: None
    )
    for line in metrics.failures(outcomes):
        raise ConfigError(f"the warm-up failed: {line}", remedy="see the server's log")


def _described(asked: Load) -> dict[str, Any]:
    """What makes the load repeatable; headers may hold keys and stay out."""
    return {
        "dataset": asked.dataset,
        "dataset_path": str(asked.dataset_path) if asked.dataset_path else None,
        "num_warmups": asked.num_warmups,
        "random_input_len": asked.lengths.input_len,
        "random_output_len": asked.lengths.output_len,
        "random_range_ratio": asked.lengths.range_ratio,
        "random_prefix_len": asked.lengths.prefix_len,
        "ignore_eos": asked.ignore_eos,
        "temperature": asked.temperature,
        "extra_body": dict(asked.extra_body),
        "seed": asked.seed,
    }


def _environment(base_url: str) -> dict[str, Any]:
    """This machine; its GPUs only if the server is on it too."""
    found = record.header()
    if _is_here(urlsplit(base_url).hostname or ""):
        found["gpus"] = record.gpus()
    return found


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def main(asked: Load, wanted: Wanted) -> tuple[dict[str, Any], list[Outcome]]:
    """:func:`run` with an event loop."""
    return asyncio.run(run(asked, wanted))
