"""The engine in a process of its own: ``python -m minuet.engine.process DIRECTORY``.

Two threads. The loop takes messages in between steps and sends out what each step brought. The
heartbeat says, whatever the loop does, how long the step under way has been running: so the server
can tell a slow step from a stuck one, and both from an idle engine.
"""

import gc
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import zmq

from minuet.config import Options
from minuet.engine import ipc
from minuet.engine.core import Core, RequestOutput
from minuet.errors import ConfigError, ContractError, MinuetError, RefusedError, RequestError
from minuet.log import get_logger

log = get_logger(__name__)

HEARTBEAT_S = 0.25
_STATS_S = 0.1
_NO_GRAMMARS = (
    "structured output needs a tokenizer in the checkpoint and xgrammar on the server; "
    "install minuet[grammar]"
)
_IDLE_POLL_MS = 100
_COMPILING_POLL_MS = 2


@dataclass(frozen=True, slots=True)
class Served:
    """What a factory makes: an engine, and what the server is told of it.

    Attributes:
        core: takes requests and runs steps.
        ready: the first report.
        grammars: compiles grammars; None: no tokenizer, or no xgrammar.
        gauges: figures beyond the scheduler's, by the names of :class:`ipc.Stats`.
    """

    core: Core
    ready: ipc.Ready
    grammars: Any = None
    gauges: Callable[[], dict[str, Any]] = dict


def prepare(options: Options) -> Served:
    """The real engine; see :func:`minuet.engine.start.start` for what it raises."""
    from minuet.engine.start import start
    from minuet.engine.telemetry import gauges_of, ready_report

    engine = start(options)
    grammars = None
    if engine.tokenizer is not None and importlib.util.find_spec("xgrammar") is not None:
        from minuet.engine.grammar import Grammars

        texts = engine.tokenizer.added_texts
        markers = [i for t in texts if (i := engine.tokenizer.token_id(t)) is not None]
        grammars = Grammars(
            engine.tokenizer, engine.plan.facts.vocab, engine.core.eos_token_ids, markers
        )
    return Served(engine.core, ready_report(engine), grammars, gauges_of(engine))


class Loop:
    """Messages in, steps, reports out; :meth:`run` returns when told to stop.

    Args:
        served: the engine.
        receive: waits at most so many milliseconds for a message; None if there is none.
        send: hands a report over.
    """

    def __init__(
        self,
        served: Served,
        receive: Callable[[int], bytes | None],
        send: Callable[[bytes], None],
    ) -> None:
        self._core, self._served = served.core, served
        self._receive, self._send = receive, send
        self._outputs: dict[str, _Sent] = {}
        self._compiling: dict[str, tuple[ipc.Submit, Future[Any]]] = {}
        self._compilers = ThreadPoolExecutor(1, "grammar")
        self._running = True
        self._num_steps = self._failed_steps = 0
        self.step_began_s: float | None = None
        self.stats, self._stats_s = ipc.Stats(), 0.0

    @property
    def busy(self) -> bool:
        """Whether there is a request to serve."""
        return self._core.has_work or bool(self._compiling)

    def run(self) -> None:
        """Serve until told to stop."""
        self._update_stats()
        while self._running:
            self._take_messages()
            self._take_compiled()
            if self._core.has_work:
                self._step()
                self._update_stats()

    # --- messages --------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        waiting = _COMPILING_POLL_MS if self._compiling else _IDLE_POLL_MS
        message = self._receive(0 if self._core.has_work else waiting)
        if message is None and not self._core.has_work:
            self._update_stats()
        while message is not None:
            self._handle(ipc.decode_request(message))
            message = self._receive(0)

    def _handle(self, message: ipc.type_of_request) -> None:
        match message:
            case ipc.Submit():
                self._submit(message)
            case ipc.Abort():
                self._abort(message.request_ids)
            case ipc.ResetPrefixCache():
                self._reset(message.call_id)
            case ipc.Stop():
                self._running = False
            case ipc.Configure():
                raise ContractError("configured twice")

    def _submit(self, message: ipc.Submit) -> None:
        if message.grammar is None:
            self._add(message, None)
        elif self._served.grammars is None:
            self._reject(message, _NO_GRAMMARS, message.grammar.param)
        else:
            job = self._compilers.submit(self._served.grammars.compile, message.grammar)
            self._compiling[message.request_id] = (message, job)

    def _take_compiled(self) -> None:
        for request_id, (message, job) in list(self._compiling.items()):
            if not job.done():
                continue
            del self._compiling[request_id]
            try:
                grammar = job.result()
            except RequestError as problem:
                self._reject(message, str(problem), problem.param)
            else:
                self._add(message, grammar)

    def _add(self, message: ipc.Submit, grammar: Any) -> None:
        codec = self._core.codec
        shown = frozenset(message.keep_token_ids)
        if codec is not None:
            shown = shown & codec.special_ids if message.skip_special_tokens else codec.special_ids
        try:
            output = self._core.add(
                message.request_id,
                message.prompt_token_ids,
                message.params,
                grammar=grammar,
                shown_specials=shown,
            )
        except RequestError as problem:
            self._reject(message, str(problem), problem.param)
            return
        self._outputs[message.request_id] = _Sent(output)
        self._send(ipc.encode(ipc.Accepted(message.request_id)))

    def _reject(self, message: ipc.Submit, text: str, param: str) -> None:
        self._send(ipc.encode(ipc.Rejected(message.request_id, text, param)))

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)
            self._outputs.pop(request_id, None)
            if entry := self._compiling.pop(request_id, None):
                entry[1].cancel()

    def _reset(self, call_id: int) -> None:
        prefix = self._core.scheduler.prefix
        if prefix is not None:
            prefix.reset()
        error = "" if prefix is not None else "prefix caching is off"
        self._send(ipc.encode(ipc.Done(call_id, error)))
        self._update_stats()

    # --- steps -----------------------------------------------------------------------------------

    def _step(self) -> None:
        self.step_began_s = time.perf_counter()
        try:
            changed = self._core.step()
        except MinuetError:
            raise  # our own book-keeping is wrong: nothing that follows can be trusted
        except Exception:
            # the requests of the step have ended with an error; the others go on
            log.exception("a step failed")
            self._failed_steps += 1
            changed = [s.output for s in self._outputs.values() if s.output.finish_reason]
        finally:
            self.step_began_s = None
        self._num_steps += 1
        deltas = [d for output in changed if (d := self._delta(output)) is not None]
        self._send(ipc.encode(ipc.StepDone(deltas, self._core.last_step_tokens)))

    def _delta(self, output: RequestOutput) -> ipc.Delta | None:
        sent = self._outputs.get(output.request_id)
        if sent is None or sent.output is not output:
            return None
        if output.finish_reason is not None:
            del self._outputs[output.request_id]
        return sent.delta()

    def _update_stats(self) -> None:
        now = time.perf_counter()
        if self._core.has_work and now - self._stats_s < _STATS_S:
            return  # nobody sees them between two heartbeats
        self._stats_s = now
        scheduler = self._core.scheduler
        pool, prefix = scheduler.pool, scheduler.prefix
        self.stats = ipc.Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            used_pages=pool.capacity - pool.usable,
            cached_pages=pool.num_cached,
            num_pages=pool.capacity,
            prefix_queries=prefix.stats.queries if prefix else 0,
            prefix_hits=prefix.stats.hits if prefix else 0,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            nonfinite=self._core.num_nonfinite,
            failed_steps=self._failed_steps,
            **self._served.gauges(),
        )


class _Sent:
    """How much of an output the server knows."""

    def __init__(self, output: RequestOutput):
        self.output = output
        self._tokens = self._chars = 0
        self._prompt_sent = output.prompt_logprobs is None

    def delta(self) -> ipc.Delta:
        """What it does not know yet; it does after this."""
        output, first = self.output, self._tokens
        prompt = None
        if not self._prompt_sent and (output.token_ids or output.finish_reason):
            prompt, self._prompt_sent = output.prompt_logprobs, True
        delta = ipc.Delta(
            request_id=output.request_id,
            token_ids=output.token_ids[first:],
            text=output.text[self._chars :],
            logprobs=None if output.logprobs is None else output.logprobs[first:],
            prompt_logprobs=prompt,
            finish_reason=output.finish_reason.value if output.finish_reason else None,
            stop_reason=output.stop_reason,
            error=output.error,
            num_cached_tokens=output.num_cached_tokens,
            arrived_s=output.arrived_s,
            scheduled_s=output.scheduled_s,
            first_token_s=output.first_token_s,
            finished_s=output.finished_s,
        )
        self._tokens, self._chars = len(output.token_ids), max(self._chars, len(output.text))
        return delta


def main(directory: str, parent: int) -> int:
    """Serve over the pipes in a directory that the server made; returns the exit code.

    Args:
        directory: of the pipes.
        parent: process id of the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when to stop
    threading.Thread(target=_end_with, args=(parent,), name="orphan", daemon=True).start()
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.connect(f"ipc://{directory}/in")
    outbox = _outbox(context, directory)
    configure = ipc.decode_request(inbox.recv())
    assert isinstance(configure, ipc.Configure)
    try:
        module, _, function = configure.factory.partition(":")
        served = getattr(importlib.import_module(module), function)(configure.options())
    except MinuetError as problem:
        code = 2 if isinstance(problem, ConfigError | ContractError | RefusedError) else 1
        outbox.send(ipc.encode(ipc.Failed(str(problem), code)))
        return _close(context, code)

    def receive(wait_ms: int) -> bytes | None:
        return inbox.recv() if inbox.poll(wait_ms) else None

    loop = Loop(served, receive, outbox.send)
    gc.collect()
    gc.freeze()  # what start-up made stays: no collection between two steps walks over it again
    outbox.send(ipc.encode(served.ready))
    beating = threading.Thread(
        target=_beat, args=(context, directory, loop), name="heartbeat", daemon=True
    )
    beating.start()
    loop.run()
    os._exit(0)  # the heartbeat's socket would keep the context from closing


def _outbox(context: zmq.Context[zmq.Socket[bytes]], directory: str) -> zmq.Socket[bytes]:
    # no limit on what is queued: admission bounds requests, and each has a length
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(f"ipc://{directory}/out")
    return socket


def _close(context: zmq.Context[zmq.Socket[bytes]], code: int) -> int:
    context.destroy(linger=1000)
    return code


def _end_with(parent: int) -> None:
    """End when the server is gone, also in the midst of start-up: nobody is left to answer to."""
    while os.getppid() == parent:
        time.sleep(HEARTBEAT_S)
    os._exit(1)


def _beat(context: zmq.Context[zmq.Socket[bytes]], directory: str, loop: Loop) -> None:
    socket = _outbox(context, directory)
    while True:
        began = loop.step_began_s
        age = 0.0 if began is None else time.perf_counter() - began
        socket.send(ipc.encode(ipc.Heartbeat(age, loop.busy, loop.stats)))
        time.sleep(HEARTBEAT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
