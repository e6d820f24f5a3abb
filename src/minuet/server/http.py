"""The edge: what is checked before a request is understood. Keys, sizes and patience.

:class:`Edge` wraps the application; :class:`Protocol` is the connection, for what happens before
there is a request at all: headers that never end, and connections that say nothing.
"""

import asyncio
import hmac
import uuid
from asyncio.events import TimerHandle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minuet.log import get_logger
from minuet.server import errors
from minuet.settings import Secret

log = get_logger(__name__)

HEADER_BYTES = 64 * 1024
HEADER_S = 15.0  # to send a complete head after connecting
_GRACE_S = 1.0  # between deciding that a connection is idle and closing it
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
OPEN_PREFIX = "/page/"


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """What a request may be before it is read.

    Attributes:
        keys: bearer tokens; empty: everyone may come in.
        max_body_bytes: largest body.
        body_s: time to send it.
    """

    keys: Sequence[Secret]
    max_body_bytes: int
    body_s: float


class _TooLarge(Exception):  # never leaves this module
    pass


class Edge:
    """ASGI middleware: authentication, then the whole body within its limits, then the app.

    Args:
        app: the application.
        limits: what is checked.
        access_log: one line per request.
        on_refusal: told the status of every answer from 400 on.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: EdgeLimits,
        *,
        access_log: bool = False,
        on_refusal: Callable[[int], None] | None = None,
    ):
        self._app, self._limits, self._access_log = app, limits, access_log
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        # an id of ours, whatever the client sends: two clients may well send the same
        request_id = scope["minuet_request_id"] = uuid.uuid4().hex
        send = self._tagged(scope, request_id, send)
        if not self._may_enter(scope):
            headers = {"www-authenticate": "Bearer"}
            refusal = errors.response(401, "missing or wrong API key", headers=headers)
            await refusal(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._limits.body_s):
                body = await self._read(scope, receive)
        except _TooLarge:
            await self._close(413, f"the body exceeds {self._limits.max_body_bytes} bytes", send)
            return
        except TimeoutError:
            await self._close(408, f"the body took more than {self._limits.body_s:g} s", send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _tagged(self, scope: Scope, request_id: str, send: Send) -> Send:
        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                message["headers"] = [*headers, (b"x-request-id", request_id.encode())]
                if message["status"] >= 400 and self._on_refusal is not None:
                    self._on_refusal(message["status"])
                if self._access_log:
                    method, path = scope["method"], scope["path"]
                    log.info("%s %s %s %d", request_id, method, path, message["status"])
            await send(message)

        return tagged

    def _may_enter(self, scope: Scope) -> bool:
        path = scope["path"]
        if not self._limits.keys or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return True
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, token = value.partition(b" ")
                given = token.strip() if kind.lower() == b"bearer" else b""
        # every key is compared, each in constant time: the time taken tells nothing
        found = [hmac.compare_digest(given, key.reveal()) for key in self._limits.keys]
        return any(found)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None when the client left before its end."""
        limit = self._limits.max_body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise _TooLarge
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _TooLarge
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _close(self, status: int, message: str, send: Send) -> None:
        """Answer and close the connection: the rest of the body is not read."""
        refusal = errors.response(status, message, headers={"connection": "close"})
        headers = refusal.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive channel that gives the body once, then what happens to the connection."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


class Protocol(HttpToolsProtocol):
    """A connection with a limit on its head, in bytes and in time."""

    _head_bytes = 0
    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEADER_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head, then parse."""
        cycle: Any = self.cycle  # None before the first request, whatever its type says
        in_body = cycle is not None and cycle.more_body
        self._head_bytes = 0 if in_body else self._head_bytes + len(data)
        super().data_received(data)
        if self._head_bytes > HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, "the request's head exceeds 64 KiB")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEADER_S, self._too_slow)

    def on_headers_complete(self) -> None:
        """A head is complete; what follows is body, and the application's to limit."""
        self._stop_clock()
        self._head_bytes = 0
        super().on_headers_complete()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection may go; but a request that has just arrived comes first.

        A loop runs timers before it looks at sockets: closing at once would drop a request that
        lies unread, and the client would see its connection break.
        """
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_GRACE_S, close)

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"no complete request head within {HEADER_S:g} s")

    def _refuse(self, status: int, message: str) -> None:
        content = errors.response(status, message).body
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + bytes(content))
        self.transport.close()
