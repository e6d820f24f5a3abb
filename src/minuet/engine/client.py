"""The server's end of the engine process: starts it, talks to it, notices when it dies or hangs.

All on one asyncio loop. Whatever happens to the engine, every request that was submitted gets an
end: the answer's last part, a refusal, or an error.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import zmq
import zmq.asyncio

from minuet.config import Options
from minuet.engine import ipc
from minuet.errors import ConfigError, MinuetError, RequestError
from minuet.log import get_logger

log = get_logger(__name__)

DEFAULT_FACTORY = "minuet.engine.process:prepare"
_WATCH_S = 0.2
_OWN_PAUSE_S = 1.0
_STOP_S = 5.0
_RESTART_WINDOW_S = 600.0


class EngineError(MinuetError):
    """The engine died, hangs, or is not ready: no request can be served now."""


class State(Enum):
    """What the engine does."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    STUCK = "stuck"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Patience:
    """When to give up on an engine.

    Attributes:
        step_s: a step under way for longer is stuck.
        silence_s: no heartbeat for longer means stuck, whatever the last one said.
        restarts: new processes within ten minutes before giving up for good.
    """

    step_s: float = 4.0
    silence_s: float = 3.0
    restarts: int = 3


class Inbox:
    """Reports of a group of requests, as they come, for one reader.

    What a slow reader leaves unread never exceeds the answers.

    Attributes:
        open: ids of requests that have not ended.
    """

    def __init__(self, request_ids: Iterable[str]):
        self.open = set(request_ids)
        self._unconfirmed = set(self.open)
        self._parts: list[ipc.Delta] = []
        self._news = asyncio.Event()
        self._problem: Exception | None = None

    async def accepted(self) -> None:
        """Wait until the engine has taken all of them.

        Raises:
            RequestError: it refused one.
            EngineError: it died.
        """
        while self._unconfirmed:
            await self._wait()

    async def next(self) -> list[ipc.Delta]:
        """What is new; empty when all have ended and everything was read.

        Raises:
            EngineError: the engine died before the end.
        """
        while not self._parts and self.open:
            await self._wait()
        parts, self._parts = self._parts, []
        return parts

    async def _wait(self) -> None:
        if self._problem is not None:
            raise self._problem
        self._news.clear()
        await self._news.wait()

    def accept(self, request_id: str) -> None:
        """The engine has taken it."""
        self._unconfirmed.discard(request_id)
        self._news.set()

    def push(self, delta: ipc.Delta) -> None:
        """More of an answer."""
        if delta.finish_reason is not None:
            self.open.discard(delta.request_id)
        self._parts.append(delta)
        self._news.set()

    def close(self, request_id: str) -> None:
        """Nothing more is wanted of it."""
        self.open.discard(request_id)
        self._unconfirmed.discard(request_id)
        self._news.set()

    def fail(self, problem: Exception) -> None:
        """No more will come."""
        self._problem = problem
        self._news.set()


@dataclass(slots=True)
class _Life:
    """One engine process."""

    process: subprocess.Popen[bytes]
    directory: Path
    to_engine: zmq.asyncio.Socket
    from_engine: zmq.asyncio.Socket
    ready: ipc.Ready | None = None
    reader: asyncio.Task[None] | None = None
    problem: MinuetError | None = None
    heartbeat: ipc.Heartbeat = field(default_factory=lambda: ipc.Heartbeat(0.0, False, ipc.Stats()))
    heard_s: float = 0.0

    def close(self) -> None:
        """End the process, however it is doing, and everything that belonged to it."""
        if self.reader is not None:
            self.reader.cancel()
        self.process.kill()
        self.process.wait()
        for socket in (self.to_engine, self.from_engine):
            socket.close(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)


class EngineClient:
    """One engine, restarted if it dies.

    Args:
        options: what to start.
        patience: when to give up.
        factory: ``module:function`` that makes the engine; for tests.
        on_step: called with every step's report.
    """

    def __init__(
        self,
        options: Options,
        patience: Patience | None = None,
        *,
        factory: str = DEFAULT_FACTORY,
        on_step: Callable[[ipc.StepDone], None] | None = None,
    ):
        self._options, self._patience = options, patience or Patience()
        self._factory, self._on_step = factory, on_step
        self.on_ready: Callable[[ipc.Ready], None] | None = None
        self._context = zmq.asyncio.Context()
        self._life: _Life | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._deaths: deque[float] = deque()
        self._stopping = False
        self._stuck = False
        self._last_ready: ipc.Ready | None = None
        self.given_up = asyncio.Event()
        self.restarts = 0
        self.death_reason = ""

    # --- what it is doing ------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What the engine does, as far as it can be told from here."""
        life = self._life
        if life is None or life.process.poll() is not None:
            return State.DEAD
        if life.ready is None:
            return State.STARTING
        if self._stuck or self._silence() > self._patience.silence_s or self._is_late():
            return State.STUCK
        return State.BUSY if life.heartbeat.busy or self._inboxes else State.IDLE

    @property
    def ready(self) -> ipc.Ready:
        """The newest start-up report; that of the last life while a new one starts.

        Raises:
            EngineError: it never was ready.
        """
        if self._last_ready is None:
            raise EngineError("the engine is not ready yet")
        return self._last_ready

    @property
    def has_been_ready(self) -> bool:
        """Whether :attr:`ready` can be asked."""
        return self._last_ready is not None

    @property
    def serves(self) -> bool:
        """Whether a request could be handed over now."""
        return self.state in (State.IDLE, State.BUSY)

    @property
    def stats(self) -> ipc.Stats:
        """Counters of the engine process; they start again with it."""
        return self._life.heartbeat.stats if self._life else ipc.Stats()

    @property
    def step_age_s(self) -> float:
        """How long the step under way has been running, 0 between steps."""
        if self._life is None:
            return 0.0
        age = self._life.heartbeat.step_age_s
        return age + self._silence() if age else 0.0

    @property
    def heartbeat_age_s(self) -> float:
        """Since the last sign of life."""
        return self._silence()

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return self._life.process.pid if self._life else None

    @property
    def num_live(self) -> int:
        """Requests submitted and not ended."""
        return len(self._inboxes)

    def _silence(self) -> float:
        return time.perf_counter() - self._life.heard_s if self._life and self._life.ready else 0.0

    def _is_late(self) -> bool:
        return self.step_age_s > self._patience.step_s

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> ipc.Ready:
        """Start the process and wait until it is ready.

        Raises:
            ConfigError: it refused the options, in its own words.
            EngineError: it died instead.
        """
        life = self._life = self._spawn()
        self._stuck = False
        life.reader = asyncio.create_task(self._read(life))
        while life.ready is None:
            if life.problem is not None:
                raise life.problem
            if life.process.poll() is not None:
                await asyncio.sleep(0.2)  # its last words may still be on their way
                raise self._last_words(life)
            await asyncio.sleep(0.02)
        self._last_ready = life.ready
        if self.on_ready is not None:
            self.on_ready(life.ready)
        return life.ready

    def _last_words(self, life: _Life) -> MinuetError:
        code = life.process.returncode
        return life.problem or EngineError(f"the engine ended with code {code}")

    def watch(self) -> None:
        """From now on fail requests when the engine dies or hangs, and start it again."""
        self._tasks.append(asyncio.create_task(self._watch()))

    async def stop(self) -> None:
        """End the process; requests still live get an error."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()  # first: it might start another process
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(EngineError("the server is shutting down"))
        life = self._life
        if life is not None and life.process.poll() is None:
            # an engine that has just refused to start is about to end by itself and reads no more
            with contextlib.suppress(zmq.ZMQError, TimeoutError):
                await asyncio.wait_for(life.to_engine.send(ipc.encode(ipc.Stop())), 1.0)
            deadline = time.perf_counter() + _STOP_S
            while life.process.poll() is None and time.perf_counter() < deadline:
                await asyncio.sleep(0.02)
        if life is not None:
            life.close()
        self._context.destroy(linger=0)

    def _spawn(self) -> _Life:
        directory = Path(tempfile.mkdtemp(prefix="minuet-"))  # for this user's eyes only
        to_engine = self._context.socket(zmq.PUSH)
        from_engine = self._context.socket(zmq.PULL)
        for socket, name in ((to_engine, "in"), (from_engine, "out")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{directory}/{name}")
        command = [sys.executable, "-m", "minuet.engine.process"]
        command += [str(directory), str(os.getpid())]
        # a session of its own: Ctrl-C is for the server, which then drains
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        life = _Life(process, directory, to_engine, from_engine)
        self._send(life, ipc.Configure.of(self._options, self._factory))
        return life

    async def _read(self, life: _Life) -> None:
        while True:
            report = ipc.decode_report(await life.from_engine.recv())
            life.heard_s = time.perf_counter()
            if life is self._life:
                self._take(life, report)

    def _take(self, life: _Life, report: ipc.type_of_report) -> None:
        match report:
            case ipc.StepDone():
                for delta in report.deltas:
                    if inbox := self._inboxes.get(delta.request_id):
                        inbox.push(delta)
                        if delta.finish_reason is not None:
                            del self._inboxes[delta.request_id]
                if self._on_step is not None:
                    self._on_step(report)
            case ipc.Heartbeat():
                life.heartbeat = report
            case ipc.Accepted():
                if inbox := self._inboxes.get(report.request_id):
                    inbox.accept(report.request_id)
            case ipc.Rejected():
                if inbox := self._inboxes.pop(report.request_id, None):
                    inbox.fail(RequestError(report.message, param=report.param))
            case ipc.Done():
                if call := self._calls.pop(report.call_id, None):
                    call.set_result(report.error)
            case ipc.Ready():
                life.ready = report
            case ipc.Failed():
                kind = ConfigError if report.exit_code == 2 else EngineError
                life.problem = kind(report.message)

    async def _watch(self) -> None:
        while not self._stopping:
            began = time.perf_counter()
            await asyncio.sleep(_WATCH_S)
            if time.perf_counter() - began > _WATCH_S + _OWN_PAUSE_S and self._life is not None:
                # it was this process that paused: what the engine said meanwhile is yet unread
                self._life.heard_s = time.perf_counter()
                continue
            state = self.state
            if state is State.STUCK:
                self._stuck = True
                age, silence = self.step_age_s, self.heartbeat_age_s
                await self._died(f"stuck: step {age:.1f} s old, silent for {silence:.1f} s")
            elif state is State.DEAD:
                code = self._life.process.returncode if self._life else None
                await self._died(f"ended with code {code}")

    async def _died(self, reason: str) -> None:
        log.error("engine %s; %d requests fail", reason, len(self._inboxes))
        self.death_reason = reason
        self._fail_all(EngineError(f"the engine {reason}"))
        if self._life is not None:
            self._life.close()
        self._life = None
        now = time.perf_counter()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > _RESTART_WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) > self._patience.restarts:
            log.error("engine died %d times; giving up", len(self._deaths))
            self.given_up.set()
            await asyncio.Event().wait()
        try:
            await self.start()
        except MinuetError as problem:
            log.error("engine does not start again: %s", problem)
        else:
            self.restarts += 1
            log.info("engine is serving again")

    def _fail_all(self, problem: EngineError) -> None:
        inboxes, self._inboxes = list(self._inboxes.values()), {}
        for inbox in inboxes:
            inbox.fail(problem)
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.set_exception(problem)

    # --- requests --------------------------------------------------------------------------------

    def submit(self, messages: Sequence[ipc.Submit]) -> Inbox:
        """Hand requests over; :meth:`Inbox.accepted` says whether they were taken.

        Raises:
            EngineError: there is no engine to hand them to.
        """
        life = self._life
        if life is None or not self.serves:
            raise EngineError(f"the engine is {self.state.value}")
        inbox = Inbox(message.request_id for message in messages)
        for message in messages:
            self._inboxes[message.request_id] = inbox
            self._send(life, message)
        return inbox

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests that nobody waits for; returns those that had not ended by themselves."""
        live = []
        for request_id in request_ids:
            if inbox := self._inboxes.pop(request_id, None):
                inbox.close(request_id)
                live.append(request_id)
        if live and self._life is not None:
            self._send(self._life, ipc.Abort(live))
        return live

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix.

        Raises:
            EngineError: there is no engine, or it has no prefix cache.
        """
        life = self._life
        if life is None or life.ready is None:
            raise EngineError(f"the engine is {self.state.value}")
        call_id = id(call := asyncio.get_running_loop().create_future())
        self._calls[call_id] = call
        self._send(life, ipc.ResetPrefixCache(call_id))
        if error := await call:
            raise EngineError(error)

    def _send(self, life: _Life, message: ipc.type_of_request) -> None:
        # without a limit on the queue a send never waits, so its future needs no one
        life.to_engine.send(ipc.encode(message))
