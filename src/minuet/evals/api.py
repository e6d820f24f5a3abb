"""An OpenAI-compatible server as an evaluation sees it: one request in, one answer out.

Nothing here is Minuet's own but :meth:`Server.settings`, which other servers do not have.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from minuet.errors import ConfigError, MinuetError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_CONNECT_S = 10.0
_BUSY = frozenset((408, 429, 502, 503, 504))
_PATIENCE_S = 120.0  # how long a busy server is asked again
_LONGEST_PAUSE_S = 10.0


class ServerError(MinuetError):
    """The server could not be reached, or refused a request."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back.

    Attributes:
        text: the answer without its reasoning; tool calls as JSON.
        reasoning: the reasoning set apart from it, where the server does that.
        finish_reason: why it ended.
        prompt_tokens: of the request.
        completion_tokens: of the answer, reasoning included.
        cached_tokens: prompt tokens that the server had in its prefix cache.
        seconds: from sending to the last byte.
    """

    text: str
    reasoning: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


@dataclass
class Server:
    """A connection pool; may be used from several threads at once.

    Args:
        base_url: ``http://host:port``; a ``/v1`` at the end is dropped.
        api_key: bearer token, where the server wants one.
        timeout_s: for one answer.
        connections: requests in flight at most.
        weights: names the content of the checkpoint that it serves, where that is known.
        wanted: name of the model to ask; empty: the first that is served.
    """

    base_url: str
    api_key: str = ""
    timeout_s: float = 1800.0
    connections: int = 64
    weights: str = ""
    wanted: str = ""
    _http: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/").removesuffix("/v1")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                "bad value for --base-url",
                got=self.base_url,
                expected="http://HOST:PORT",
            )
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._http = httpx.Client(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(self.timeout_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=self.connections),
            verify=self.base_url.startswith("https://"),  # else certificates are read for nothing
        )

    def close(self) -> None:
        """Close the connections; requests in flight fail."""
        self._http.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def model(self) -> str:
        """The name to ask for.

        Raises:
            ServerError: nothing there, or it serves no such model.
        """
        names = [str(item["id"]) for item in self.get("/v1/models").get("data", [])]
        if not names or self.wanted not in ("", *names):
            served = ", ".join(names) or "no model"
            raise ServerError(f"{self.base_url} serves {served}, not {self.wanted or 'any'}")
        return self.wanted or names[0]

    def settings(self) -> dict[str, str]:
        """The settings a Minuet server resolved, by name; empty for servers of others."""
        try:
            plan = self.get("/explain")
        except ServerError:
            return {}
        return {row["name"]: str(row["value"]) for row in plan.get("settings", [])}

    def ask(self, route: str, body: Mapping[str, Any]) -> Reply:
        """Send a request that is not streamed and read its first choice.

        Args:
            route: :data:`CHAT` or :data:`COMPLETIONS`.
            body: the request, model included.

        Raises:
            ServerError: refused, or unreachable for two minutes.
        """
        began = time.perf_counter()
        answer = self.post(route, body)
        seconds = time.perf_counter() - began
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            said = choice["message"] if route == CHAT else {"content": choice["text"]}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return Reply(
                text=_calls(said["tool_calls"])
                if said.get("tool_calls")
                else said["content"] or "",
                reasoning=said.get("reasoning") or said.get("reasoning_content") or "",
                finish_reason=choice.get("finish_reason") or "",
                prompt_tokens=usage.get("prompt_tokens", 0),
                completion_tokens=usage.get("completion_tokens", 0),
                cached_tokens=cached,
                seconds=seconds,
            )
        except (KeyError, IndexError, TypeError) as problem:
            raise ServerError(f"{route} answered in another shape: {problem!r}") from None

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path.

        Raises:
            ServerError: refused, or unreachable.
        """
        return self._send("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that a body is answered with; a busy server is asked again.

        Raises:
            ServerError: refused, or unreachable for two minutes.
        """
        return self._send("POST", path, body)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        until, pause = time.monotonic() + _PATIENCE_S, 0.25
        while True:
            try:
                answer = self._http.request(method, path, json=body)
            except httpx.HTTPError as problem:
                raise ServerError(
                    f"no answer from {self.base_url}{path}: {type(problem).__name__} {problem}"
                ) from None
            if answer.status_code not in _BUSY or time.monotonic() > until:
                return _object(answer, path)
            asked = answer.headers.get("retry-after", "")
            pause = float(asked) if asked.isdecimal() else min(2 * pause, _LONGEST_PAUSE_S)
            time.sleep(min(pause, _LONGEST_PAUSE_S))


def _object(answer: httpx.Response, path: str) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError:
        value = None
    if answer.status_code >= 400:
        error = value.get("error", value) if isinstance(value, dict) else None
        said = error.get("message") if isinstance(error, dict) else answer.text[:300]
        raise ServerError(f"{path} answered {answer.status_code}: {said}")
    if not isinstance(value, dict):
        raise ServerError(f"{path} answered {answer.text[:80]!r}, no JSON object")
    return value


def _calls(calls: list[dict[str, Any]]) -> str:
    """Tool calls as JSON: one as an object, several as a list."""
    found = []
    for call in calls:
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):  # what is no JSON is graded as the text that it is
            arguments = json.loads(arguments)
        found.append({"name": call["function"]["name"], "arguments": arguments})
    return json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False)
