"""What a server says of itself: its model, its tokenizer, its configuration."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from minuet.errors import ConfigError

_POLL_S = 0.5
_OF_PLAN = ("model", "arch", "backend", "timings_s")
_OF_STATS = ("after_ready", "prefix", "preemptions")


class Server:
    """The routes beside generation. Those that are ours alone may be missing.

    Args:
        http: the connections.
        base_url: without a trailing slash.
        headers: of every request.
    """

    def __init__(self, http: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str]):
        self._http, self._base, self._headers = http, base_url, headers

    async def until_ready(self, seconds: float) -> dict[str, Any]:
        """The first served model, as soon as the server answers.

        Raises:
            ConfigError: it did not answer in time.
        """
        loop = asyncio.get_running_loop()
        end, problem = loop.time() + seconds, ""
        while True:
            try:
                models = await self._get("/v1/models")
                if models is not None:
                    card: dict[str, Any] = models["data"][0]
                    return card
                problem = "it has no /v1/models"
            except (aiohttp.ClientError, OSError) as refused:
                problem = str(refused)
            if loop.time() >= end:
                raise ConfigError(
                    f"no server at {self._base}",
                    got=problem,
                    expected=f"an answer within {seconds:g} s",
                    remedy="start one, or name it with --base-url",
                )
            await asyncio.sleep(_POLL_S)

    async def about(self) -> dict[str, Any]:
        """Version, resolved settings and counters, as far as the server tells them."""
        version, plan, stats = [
            await self._get(path) for path in ("/version", "/explain", "/stats")
        ]
        found: dict[str, Any] = {"base_url": self._base, **(version or {})}
        for said, wanted in ((plan or {}, _OF_PLAN), (stats or {}, _OF_STATS)):
            found |= {name: said[name] for name in wanted if name in said}
        if plan and "settings" in plan:
            found["config"] = {row["name"]: row["value"] for row in plan["settings"]}
        return found

    async def count_tokens(self, text: str) -> int:
        """Tokens of a text.

        Raises:
            ConfigError: the server does not tokenise.
        """
        return int((await self._post("/tokenize", {"prompt": text}))["count"])

    async def text_of(self, token_ids: list[int]) -> str:
        """The text of token ids.

        Raises:
            ConfigError: the server does not detokenise.
        """
        return str((await self._post("/detokenize", {"tokens": token_ids}))["prompt"])

    async def _get(self, path: str) -> dict[str, Any] | None:
        """None where the server has no such route."""
        async with self._http.get(self._base + path, headers=self._headers) as response:
            if response.status != 200:
                return None
            try:
                found: dict[str, Any] = await response.json()
            except (aiohttp.ContentTypeError, ValueError):
                return None
            return found

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = self._http.post(self._base + path, json=body, headers=self._headers)
        async with request as response:
            if response.status != 200:
                raise ConfigError(
                    f"{self._base}{path} is needed for this data set",
                    got=f"{response.status} {(await response.text())[:200]}",
                    expected="a server with a tokenizer",
                    remedy="use --backend minuet with --dataset-name random: it sends token ids",
                )
            found: dict[str, Any] = await response.json()
            return found
