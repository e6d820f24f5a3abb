"""Server-sent events, and the watch over clients that leave or stop reading."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minuet.server import errors

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on as they come
]
Result = TypeVar("Result")
to_json = msgspec.json.Encoder().encode


def chunk(content: Any) -> bytes:
    """One event."""
    return b"data: %b\n\n" % to_json(content)


def named(name: str, content: Any) -> bytes:
    """One event with a name, as ``/v1/responses`` has them."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(content))


def json_response(content: Any, status: int = 200) -> Response:
    """A body in JSON; numbers that JSON does not have become null."""
    return Response(to_json(content), status, media_type="application/json")


class EventStream(Response):
    """A stream of events that is given up when the client leaves or stops reading.

    Args:
        events: the events; closed in any case, so that what it holds is released.
        write_s: a client may take so long to read one event.
        on_error: how an exception looks within the stream; the stream ends after it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        write_s: float,
        on_error: Callable[[Exception], bytes],
    ):
        super().__init__()
        self._events, self._write_s, self._on_error = events, write_s, on_error
        self._writing_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until there is nobody to send to."""
        watchers = [
            asyncio.create_task(self._pump(send)),
            asyncio.create_task(disconnected(receive)),
            asyncio.create_task(self._stalled()),
        ]
        try:
            await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async for event in self._events:
                await self._write(send, event)
        except Exception as problem:  # noqa: BLE001  # said to the client; the log has it
            await self._write(send, self._on_error(problem))
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]  # a generator
        await send({"type": "http.response.body", "body": b""})

    async def _write(self, send: Send, event: bytes) -> None:
        self._writing_since = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._writing_since = None

    async def _stalled(self) -> None:
        """Return when one write has taken too long."""
        loop = asyncio.get_running_loop()
        while True:
            since = self._writing_since
            if since is not None and loop.time() - since > self._write_s:
                return
            await asyncio.sleep(min(1.0, self._write_s / 2))


def error_event(problem: Exception) -> bytes:
    """An error within a stream, as OpenAI's clients read it."""
    status, param = errors.status_of(problem)
    if status == 500 and not isinstance(problem, errors.GenerationError):
        errors.log.error("stream failed", exc_info=problem)
        return chunk(errors.body(500, "internal error")) + DONE
    return chunk(errors.body(status, str(problem), param)) + DONE


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGoneError(Exception):
    """The client left before its answer."""


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        ClientGoneError: it left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for watched in (task, gone):
            watched.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
