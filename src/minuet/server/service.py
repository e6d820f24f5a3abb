"""What all routes share: who may queue, what is in flight, and the way to the engine."""

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from minuet.config import Options
from minuet.engine import ipc
from minuet.engine.client import EngineClient, Inbox
from minuet.errors import RequestError
from minuet.models.parsing import Dialect, dialect, dialect_of
from minuet.models.registry import ModelSource
from minuet.models.tokenizer import GenerationDefaults, Tokenizer, read_generation_defaults
from minuet.server import template
from minuet.server.errors import OverloadError, UnknownModelError
from minuet.server.metrics import Finished, Metrics

_LONG_TEXT = 2048  # characters; longer ones are encoded in a thread, so that streams go on
_SURROGATES = range(0xD800, 0xE000)


@dataclass(slots=True)
class _Track:
    """What the metrics want to know of a request in flight."""

    prompt_tokens: int
    received_s: float
    output_tokens: int = 0
    last_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate, before it has an id.

    Attributes:
        prompt: token ids.
        submit: everything else the engine needs; its id and prompt are replaced.
    """

    prompt: list[int]
    submit: ipc.Submit


class Service:
    """One served model.

    Args:
        options: the settings.
        source: the model.
        client: the engine.
    """

    def __init__(self, options: Options, source: ModelSource, client: EngineClient):
        self.options, self.source, self.client = options, source, client
        self.names: tuple[str, ...] = options["served_model_name"] or (options["model"],)
        self.tokenizer = _tokenizer(source)
        markers = self.tokenizer.added_texts if self.tokenizer else ()
        self.template = None
        if self.tokenizer is not None:
            self.template = template.load(
                source.folder, options["chat_template"], markers, self.tokenizer.encode
            )
        self.defaults = _defaults(options, source)
        self.template_kwargs: dict[str, Any] = json.loads(options["default_chat_template_kwargs"])
        self.reasoning = _dialect(options["reasoning_parser"], source)
        self.tools = _dialect(options["tool_call_parser"], source)
        self.metrics = Metrics(self.names[0], client)
        self.started_s = int(time.time())
        self._tracks: dict[str, _Track] = {}
        self._queued_tokens = 0
        self.draining = False

    # --- what requests name ----------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            UnknownModelError: another model.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise UnknownModelError(
                f"no model {name!r} here; this server has {', '.join(self.names)}"
            )
        return name

    def require_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            RequestError: the model has none.
        """
        if self.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer", param=param, got="text", expected="token ids"
            )
        return self.tokenizer

    async def encode(self, text: str, param: str) -> list[int]:
        """Token ids of a text; long ones are encoded beside the loop.

        Raises:
            RequestError: no tokenizer, or no Unicode.
        """
        tokenizer = self.require_tokenizer(param)
        check_text(text, param)
        if len(text) < _LONG_TEXT:
            return tokenizer.encode(text)
        return await asyncio.to_thread(tokenizer.encode, text)

    # --- the way to the engine -------------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, jobs: Sequence[Job], prefix: str) -> AsyncIterator["Generation"]:
        """Submit jobs as one group; leaving the block aborts what has not ended.

        Args:
            jobs: what to generate.
            prefix: of the ids, as ``cmpl``.

        Raises:
            OverloadError: the queue is full.
            RequestError: the engine refuses one; none of them runs then.
            EngineError: there is no engine.
        """
        ready = self.client.ready
        self._admit(jobs)
        group = f"{prefix}-{uuid.uuid4().hex}"
        received_s = time.perf_counter()
        messages = []
        for number, job in enumerate(jobs):
            self._check_prompt(job.prompt, ready.max_model_len)
            messages.append(_with_id(job, f"{group}-{number}"))
        inbox = self.client.submit(messages)
        ids = [message.request_id for message in messages]
        for message in messages:
            size = len(message.prompt_token_ids)
            self._tracks[message.request_id] = _Track(size, received_s)
            self._queued_tokens += size
        try:
            await inbox.accepted()
            for message in messages:
                self.metrics.begun(len(message.prompt_token_ids))
            yield Generation(group, ids, inbox, self)
        finally:
            self.abort(ids)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End what has not ended; whatever it is doing."""
        now = time.perf_counter()
        self.client.abort(request_ids)
        for request_id in request_ids:
            if track := self._tracks.pop(request_id, None):
                if not track.output_tokens:
                    self._queued_tokens -= track.prompt_tokens
                self.metrics.finished(_end(track, None, "abort", now))

    def step_done(self, report: ipc.StepDone) -> None:
        """Count what a step brought."""
        now = time.perf_counter()
        self.metrics.step_done(report.num_tokens)
        for delta in report.deltas:
            track = self._tracks.get(delta.request_id)
            if track is None:
                continue
            if delta.token_ids:
                self._count(track, len(delta.token_ids), now)
            if delta.finish_reason is not None:
                del self._tracks[delta.request_id]
                if not track.output_tokens:
                    self._queued_tokens -= track.prompt_tokens
                self.metrics.finished(_end(track, delta, delta.finish_reason, now))

    def _count(self, track: _Track, count: int, now: float) -> None:
        if track.output_tokens == 0:
            self._queued_tokens -= track.prompt_tokens
            self.metrics.first_token(now - track.received_s)
            self.metrics.tokens(count, None)
        else:
            self.metrics.tokens(count, now - track.last_s)
        track.output_tokens += count
        track.last_s = now

    def _admit(self, jobs: Sequence[Job]) -> None:
        options = self.options
        most = options["max_num_seqs"] + options["max_num_queued_reqs"]
        tokens = sum(len(job.prompt) for job in jobs)
        if len(jobs) > most:
            raise RequestError(
                "one request asks for too many sequences",
                param="n",
                got=len(jobs),
                expected=f"at most {most} prompts times n",
            )
        full = len(self._tracks) + len(jobs) > most
        most_tokens = options["max_num_queued_tokens"]
        # an empty queue takes any one request: what is too long for it is too long for the model
        if full or (self._queued_tokens and self._queued_tokens + tokens > most_tokens):
            raise OverloadError(
                f"the queue is full: {len(self._tracks)} requests with "
                f"{self._queued_tokens} waiting prompt tokens",
                self._retry_after_s(),
            )

    def _retry_after_s(self) -> int:
        """A guess: half of what requests took lately, a second at least, a minute at most."""
        lately = self.metrics.window.percentiles("e2e")
        return min(60, max(1, math.ceil(lately["p50"] / 2))) if lately else 1

    def _check_prompt(self, prompt: Sequence[int], max_model_len: int) -> None:
        if len(prompt) >= max_model_len:
            raise RequestError(
                "the prompt does not fit the model length",
                param="prompt",
                got=len(prompt),
                expected=f"at most {max_model_len - 1} tokens",
            )


class Generation:
    """A group of sequences that run.

    Attributes:
        request_id: of the group, as clients see it.
    """

    def __init__(self, request_id: str, ids: Sequence[str], inbox: Inbox, service: Service):
        self.request_id = request_id
        self._index = {sequence: number for number, sequence in enumerate(ids)}
        self._ids, self._inbox, self._service = ids, inbox, service

    async def batches(self) -> AsyncIterator[list[tuple[int, ipc.Delta]]]:
        """(number of the sequence, what is new of it), until all have ended.

        Raises:
            EngineError: the engine died.
        """
        while parts := await self._inbox.next():
            yield [(self._index[part.request_id], part) for part in parts]

    def stop(self, number: int) -> None:
        """End one sequence: enough of it is known."""
        self._service.abort([self._ids[number]])


def check_text(text: str, param: str) -> None:
    """A text that can be encoded as UTF-8.

    Raises:
        RequestError: it has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RequestError(
            "not Unicode text",
            param=param,
            got=hex(ord(text[problem.start])),
            expected="no halves of surrogate pairs",
        ) from None


def _with_id(job: Job, request_id: str) -> ipc.Submit:
    return msgspec.structs.replace(job.submit, request_id=request_id, prompt_token_ids=job.prompt)


def _end(track: _Track, delta: ipc.Delta | None, reason: str, now: float) -> Finished:
    return Finished(
        track.prompt_tokens,
        track.output_tokens,
        track.received_s,
        delta.scheduled_s if delta else None,
        delta.first_token_s if delta else None,
        delta.finished_s if delta and delta.finished_s else now,
        reason,
    )


def _tokenizer(source: ModelSource) -> Tokenizer | None:
    if source.folder is None or not (source.folder / "tokenizer.json").is_file():
        return None
    return Tokenizer.load(source.folder)


def _defaults(options: Options, source: ModelSource) -> GenerationDefaults:
    found = read_generation_defaults(source.folder, source.spec.eos_token_ids)
    if options["generation_config"] == "model":
        return found
    return GenerationDefaults(found.eos_token_ids)


def _dialect(name: str, source: ModelSource) -> Dialect | None:
    if name == "model":
        brought = dialect_of(source.package)
        return dialect(brought) if brought else None
    return None if name in ("none", "") else dialect(name)
