"""The application: generation routes, errors, and the server that runs it until told to stop."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from minuet import __version__
from minuet.config import Options
from minuet.engine.client import DEFAULT_FACTORY, EngineClient, Patience
from minuet.engine.ipc import StepDone
from minuet.errors import ConfigError, MinuetError
from minuet.log import get_logger
from minuet.models import registry
from minuet.server import errors, ops, sse
from minuet.server.chat import Chat
from minuet.server.completions import Completions
from minuet.server.http import Edge, EdgeLimits, Protocol
from minuet.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest
from minuet.server.responses import Responses
from minuet.server.service import Service

log = get_logger(__name__)

_KEEP_ALIVE_S = 30
_BACKLOG = 2048
_STEP_S_ON_CPU = 60.0
_STEP_S = 4.0


def create_app(service: Service) -> ASGIApp:
    """The whole application over a service, edge included."""
    app = FastAPI(
        title="Minuet",
        version=__version__,
        description="An OpenAI-compatible server for one model.",
        docs_url=None,  # it would load scripts from elsewhere
        redoc_url=None,
    )
    for kind, handler in (
        (MinuetError, errors.on_problem),
        (TimeoutError, errors.on_problem),
        (sse.ClientGoneError, _on_gone),
        (RequestValidationError, errors.on_invalid),
        (HTTPException, errors.on_http),
        (Exception, errors.on_problem),
    ):
        app.add_exception_handler(kind, handler)
    _add_generation(app, service)
    ops.add_routes(app, service)
    options = service.options
    limits = EdgeLimits(options["api_key"], options["max_body_size"], options["body_timeout"])
    return Edge(app, limits, access_log=options["access_log"], on_refusal=service.metrics.refused)


async def _on_gone(_: Request, problem: Exception) -> Response:
    # nobody reads it; 499 is what proxies write into their logs
    return Response(status_code=499)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        work = Completions(service, body)
        _note_user(request, body.user)
        if body.stream:
            return await _stream(service, request, work.events(), sse.error_event)
        return await _whole(service, request, work.whole())

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        work = Chat(service, body)
        _note_user(request, body.user)
        if body.stream:
            return await _stream(service, request, work.events(), sse.error_event)
        return await _whole(service, request, work.whole())

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        work = Responses(service, body)
        _note_user(request, body.user)
        if body.stream:
            return await _stream(service, request, work.events(), work.error_event)
        return await _whole(service, request, work.whole())


def _note_user(request: Request, user: str | None) -> None:
    """The caller's name for who asked: written to the log beside our id, and used for nothing."""
    if user:
        log.info("%s is for user %r", request.scope["minuet_request_id"], user[:100])


async def _whole(service: Service, request: Request, work: Awaitable[dict[str, Any]]) -> Response:
    async with asyncio.timeout(service.options["request_timeout"] or None):
        return sse.json_response(await sse.while_connected(request.receive, work))


async def _stream(
    service: Service,
    request: Request,
    events: AsyncIterator[bytes],
    on_error: Callable[[Exception], bytes],
) -> Response:
    """A stream, once the engine has accepted the request: until then errors are plain answers."""
    loop, seconds = asyncio.get_running_loop(), service.options["request_timeout"]
    deadline = loop.time() + seconds if seconds else None
    async with asyncio.timeout_at(deadline):
        await sse.while_connected(request.receive, _first(events))
    timed = _until(events, deadline)
    return sse.EventStream(timed, service.options["write_timeout"] or 1e9, on_error)


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _until(events: AsyncIterator[bytes], deadline: float | None) -> AsyncIterator[bytes]:
    """The same events, and TimeoutError after the deadline."""
    loop = asyncio.get_running_loop()
    try:
        async for event in events:
            yield event
            if deadline is not None and loop.time() > deadline:
                raise TimeoutError("the request took longer than --request-timeout")
    finally:
        await events.aclose()  # type: ignore[attr-defined]  # a generator


# --- running it ----------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Says that it drains as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        """First signal: drain; second: stop at once."""
        if not self._service.draining:
            self._service.draining = True
            log.info("draining: %d requests in flight", self._service.client.num_live)
        # not the parent's way: it would raise the signal again at the end, before ours
        self.force_exit = self.should_exit
        self.should_exit = True


async def serve(options: Options, *, factory: str = DEFAULT_FACTORY) -> int:
    """Serve until a signal, or until the engine cannot be kept alive.

    Args:
        options: the settings.
        factory: makes the engine; for tests.

    Returns:
        The exit code.

    Raises:
        ConfigError: settings that cannot be served, or an address that cannot be listened on.
        EngineError: the engine did not start.
    """
    _raise_file_limit()
    listener = _listen(options["host"], options["port"])
    holder: list[Service] = []

    def on_step(report: StepDone) -> None:
        holder[0].step_done(report)

    client = EngineClient(options, _patience(options), factory=factory, on_step=on_step)
    try:
        service = Service(options, registry.find(options["model"]), client)
        holder.append(service)
        client.on_ready = service.metrics.engine_ready
        await client.start()
        client.watch()
        return await _run(service, listener)
    finally:
        listener.close()
        await client.stop()


async def _run(service: Service, listener: socket.socket) -> int:
    config = uvicorn.Config(
        create_app(service),
        http=Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(service.options["drain_timeout"])),
    )
    server = _Server(config, service)

    async def exit_when_given_up() -> None:
        await service.client.given_up.wait()
        server.should_exit = True

    giving_up = asyncio.create_task(exit_when_given_up())
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("serving %s on http://%s:%d", service.names[0], shown, port)
    try:
        await server.serve(sockets=[listener])
    finally:
        giving_up.cancel()
    return 1 if service.client.given_up.is_set() else 0


def _patience(options: Options) -> Patience:
    step_s = options["step_timeout"]
    if not step_s:
        # a step of the CPU reference may well take seconds; one of a GPU never does
        step_s = _STEP_S_ON_CPU if _is_cpu(options) else _STEP_S
    return Patience(step_s=step_s, restarts=options["engine_restarts"])


def _is_cpu(options: Options) -> bool:
    from minuet.platform import arch, detect

    found = detect.detect() if options["arch"] == "auto" else arch.get(options["arch"])
    return not found.is_gpu


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as problem:
        raise ConfigError(
            f"cannot listen on {host} port {port}",
            got=str(problem),
            expected="an address of this machine and a free port",
            remedy="choose others with --host and --port",
        ) from None
    listener.setblocking(False)
    return listener


def _raise_file_limit() -> None:
    """Allow as many connections as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
