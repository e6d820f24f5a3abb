"""One request over HTTP, its events timed as they come.

The times are vLLM's: from the sending of a request to its first event with a choice, between two
such events, and to the last one. With ``return_token_ids`` a server sends an event for each step,
also when the token has no text of its own yet, so that every token is timed.
"""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from minuet.bench.serve.prompts import Prompt

_HOURS_S = 6 * 3600.0
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Outcome:
    """What became of a request.

    Attributes:
        input_tokens: as the server counted them; 0 if it did not say.
        output_tokens: the same.
        start_s: when it was sent, on the clock of ``time.perf_counter``.
        ttft_s: until the first event.
        itls_s: between events, one fewer than there are.
        events: tokens each event brought; 1 where the server does not say.
        latency_s: until the last event.
        error: what went wrong; empty if it was answered to the end.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    start_s: float = 0.0
    ttft_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    latency_s: float = 0.0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was answered to the end."""
        return not self.error

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token, the first not counted; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
        url: of the route.
        chat: whether it takes messages.
        fields: added to every body: model, sampling, what else was asked for.
        headers: of every request.
    """

    url: str
    chat: bool
    fields: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request's body."""
        asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": prompt.content}]
            asked["max_completion_tokens"] = prompt.output_tokens
        else:
            asked["prompt"] = prompt.content
            asked["max_tokens"] = prompt.output_tokens
        return {**asked, **self.fields}


def session() -> aiohttp.ClientSession:
    """Connections without a limit of their own: how many are open is the load's decision."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_HOURS_S)
    )


async def ask(http: aiohttp.ClientSession, endpoint: Endpoint, prompt: Prompt) -> Outcome:
    """Send one request and read its answer; whatever goes wrong is part of the outcome."""
    body = msgspec.json.encode(endpoint.body(prompt))
    headers = {"content-type": "application/json", **endpoint.headers}
    outcome = Outcome(start_s=time.perf_counter())
    try:
        async with http.post(endpoint.url, data=body, headers=headers) as response:
            if response.status != 200:
                text = await response.text()
                outcome.error = f"{response.status} {response.reason}: {_message(text)}"
                return outcome
            await _read(response, outcome)
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as problem:
        outcome.error = f"{type(problem).__name__}: {problem}"
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    last_s = outcome.start_s
    async for data in _events(response):
        if data == b"[DONE]":
            if not outcome.events:
                outcome.error = "the stream brought no token"
            return
        event = _decode(data)
        if "error" in event:
            outcome.error = str(event["error"].get("message", event["error"]))
            return
        tokens = _tokens(event)
        if tokens is not None:
            now = time.perf_counter()
            if outcome.events:
                outcome.itls_s.append(now - last_s)
            else:
                outcome.ttft_s = now - outcome.start_s
            outcome.events.append(tokens)
            outcome.latency_s, last_s = now - outcome.start_s, now
        if usage := event.get("usage"):
            outcome.input_tokens = usage.get("prompt_tokens", 0)
            outcome.output_tokens = usage.get("completion_tokens", 0)
    outcome.error = "the stream ended before its end"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each event; comments and other fields are skipped."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _tokens(event: Mapping[str, Any]) -> int | None:
    """Tokens that an event brought; None: it opens the answer, or only counts tokens."""
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if (ids := choice.get("token_ids")) is not None:
        return len(ids) or None
    delta = choice.get("delta")
    if delta is not None and "role" in delta and not delta.get("content"):
        return None  # the role is announced before there is a token
    return 1


def _message(text: str) -> str:
    """The message of an error in OpenAI's form, or the beginning of whatever it is."""
    try:
        return str(_decode(text.encode())["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return text[:200]
