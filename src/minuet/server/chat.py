"""``/v1/chat/completions``, and what ``/v1/responses`` has in common with it."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minuet.engine.ipc import Delta, Submit
from minuet.engine.types import TokenLogprobs
from minuet.errors import RequestError
from minuet.models.parsing import Event, Kind, OutputParser
from minuet.server import logprobs as shapes
from minuet.server import sampling, sse
from minuet.server.completions import usage
from minuet.server.conversation import Conversation, converse
from minuet.server.errors import GenerationError
from minuet.server.protocol import ChatRequest
from minuet.server.service import Generation, Job, Service


class PlainParser:
    """No reasoning, no tools: all is answer."""

    def push(self, text: str) -> list[Event]:
        """The text as it is."""
        return [Event(Kind.CONTENT, text)] if text else []

    def finish(self, *, truncated: bool) -> list[Event]:
        """Nothing is held back."""
        return []


@dataclass(slots=True)
class Call:
    """One tool call of an answer.

    Attributes:
        name: of the function.
        call_id: ours.
        arguments: JSON so far.
    """

    name: str
    call_id: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """One choice so far.

    Attributes:
        parser: takes its text apart.
        keep_one_call: it ends after its first tool call.
        done: nothing more of it is wanted.
    """

    index: int
    parser: OutputParser
    keep_one_call: bool
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reports: list[TokenLogprobs] = field(default_factory=list)
    prompt_reports: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    done: bool = False
    _thinks: bool = False

    def take(self, delta: Delta, *, show_stop: bool) -> list[Event]:
        """Add what is new; returns it, taken apart.

        Raises:
            GenerationError: the engine gave this sequence up.
        """
        if delta.finish_reason == "error":
            raise GenerationError(delta.error)
        self.token_ids += delta.token_ids
        self.reports += delta.logprobs or ()
        self.prompt_reports = delta.prompt_logprobs or self.prompt_reports
        self.cached_tokens = delta.num_cached_tokens
        text = delta.text
        if show_stop and isinstance(delta.stop_reason, str):
            text += delta.stop_reason
        events = self.parser.push(text)
        if delta.finish_reason is not None:
            events += self.parser.finish(truncated=delta.finish_reason != "stop")
        events = self._keep(events)
        if any(event.kind is not Kind.REASONING for event in events):
            self._thinks = False
        elif events:
            self._thinks = True
        self.reasoning_tokens += len(delta.token_ids) if self._thinks else 0
        if self.done:
            self.finish_reason = "tool_calls"
        elif delta.finish_reason is not None:
            called = bool(self.calls) and delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called else delta.finish_reason
            self.stop_reason, self.done = delta.stop_reason, True
        return events

    def _keep(self, events: list[Event]) -> list[Event]:
        kept = []
        for event in events:
            if self.done:
                break
            kept.append(event)
            match event.kind:
                case Kind.CONTENT:
                    self.content += event.text
                case Kind.REASONING:
                    self.reasoning += event.text
                case Kind.CALL_BEGIN:
                    self.calls.append(Call(event.text, f"call_{uuid.uuid4().hex[:24]}"))
                case Kind.CALL_ARGUMENTS:
                    self.calls[event.index].arguments += event.text
                case Kind.CALL_END:
                    self.done = self.keep_one_call
        return kept


class Chat:
    """One request.

    Args:
        service: the served model.
        request: as it came.

    Raises:
        RequestError: a field that cannot be honoured.
        UnknownModelError: another model.
    """

    def __init__(self, service: Service, request: ChatRequest):
        self._service, self._request = service, request
        self._model = service.check_model(request.model)
        sampling.check_unsupported(request)
        self._check()
        self._n = request.n or 1
        self._created = int(time.time())
        self._prompt: list[int] = []

    def _check(self) -> None:
        request = self._request
        if request.store:
            _refuse("store", True, "false: nothing is stored")
        if request.metadata is not None:
            _refuse("metadata", request.metadata, "none: nothing is stored")
        if request.echo:
            _refuse("echo", True, "false: only /v1/completions echoes")
        if request.modalities not in (None, ["text"]):
            _refuse("modalities", request.modalities, "['text']")
        if request.top_logprobs is not None and not request.logprobs:
            _refuse("top_logprobs", request.top_logprobs, "only with logprobs: true")
        older, newer = request.max_tokens, request.max_completion_tokens
        if older is not None and newer is not None and older != newer:
            _refuse("max_tokens", older, "the same as max_completion_tokens, or only one of them")

    async def prepare(self) -> tuple[list[Job], list[Answer], Conversation]:
        """What to generate.

        Raises:
            RequestError: a conversation or a field that cannot be honoured.
        """
        service, request = self._service, self._request
        talk = await converse(service, request)
        self._prompt = talk.prompt.token_ids
        most = request.max_completion_tokens
        most = request.max_tokens if most is None else most
        if most is None:
            most = max(1, service.client.ready.max_model_len - len(self._prompt))
        params = sampling.params_of(
            request,
            service.defaults,
            max_tokens=most,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )
        dialect = service.reasoning or service.tools
        thinks = dialect is not None and dialect.starts_in_reasoning(talk.prompt.text)
        submit = Submit(
            "",
            [],
            params,
            sampling.grammar_of(request, self._grammar_start(thinks)),
            request.skip_special_tokens is not False,
            self._markers(),
        )
        jobs, answers = [], []
        for number in range(self._n):
            own = sampling.seeded(params, number)
            jobs.append(Job(self._prompt, sampling.with_params(submit, own)))
            answers.append(Answer(number, self._parser(talk, thinks), talk.keep_one_call))
        return jobs, answers, talk

    def _markers(self) -> tuple[int, ...]:
        """Tokens that the parsers must see even where the tokenizer calls them special."""
        dialects = [d for d in (self._service.reasoning, self._service.tools) if d]
        tokenizer = self._service.tokenizer
        found = [tokenizer.token_id(m) for d in dialects for m in d.markers] if tokenizer else []
        return tuple({i for i in found if i is not None})

    def _grammar_start(self, thinks: bool) -> int | None:
        """A grammar applies to the answer: after the reasoning, if the prompt has begun one."""
        dialect, tokenizer = self._service.reasoning, self._service.tokenizer
        if not thinks or dialect is None or tokenizer is None:
            return None
        return tokenizer.token_id(dialect.reasoning_end)

    def _parser(self, talk: Conversation, thinks: bool) -> OutputParser:
        service = self._service
        dialect = service.reasoning or service.tools
        if dialect is None:
            return PlainParser()
        return dialect.parser(
            in_reasoning=thinks, reasoning=service.reasoning is not None, tools=talk.tools
        )

    # --- answers ---------------------------------------------------------------------------------

    async def run(
        self, generation: Generation, answers: Sequence[Answer]
    ) -> AsyncIterator[tuple[Answer, list[Event]]]:
        """(choice, what is new of it), until all have ended.

        Raises:
            GenerationError: the engine gave one up.
            EngineError: the engine died.
        """
        show_stop = bool(self._request.include_stop_str_in_output)
        async for batch in generation.batches():
            for number, delta in batch:
                answer = answers[number]
                if answer.done:
                    continue
                events = answer.take(delta, show_stop=show_stop)
                if delta.finish_reason is None and answer.finish_reason is not None:
                    generation.stop(number)  # enough of it is known
                yield answer, events

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        jobs, answers, _ = await self.prepare()
        async with self._service.generate(jobs, "chatcmpl") as generation:
            async for _ in self.run(generation, answers):
                pass
        found = {
            **self._head(generation, "chat.completion"),
            "choices": [self._choice(answer) for answer in answers],
            "usage": self.usage(answers),
        }
        if self._request.prompt_logprobs is not None and answers[0].prompt_reports is not None:
            tokenizer = self._service.tokenizer
            found["prompt_logprobs"] = shapes.prompt_logprobs(tokenizer, answers[0].prompt_reports)
        if self._request.return_token_ids:
            found["prompt_token_ids"] = self._prompt
        return found

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as events; the first is empty and says that the request was accepted."""
        jobs, answers, _ = await self.prepare()
        async with self._service.generate(jobs, "chatcmpl") as generation:
            yield b""
            head = self._head(generation, "chat.completion.chunk")
            for answer in answers:
                yield sse.chunk({**head, "choices": [_part(answer, {"role": "assistant"})]})
            options, sent = self._request.stream_options, [0] * self._n
            async for answer, events in self.run(generation, answers):
                parts = self._parts(answer, events, sent)
                for part in parts:
                    content = {**head, "choices": [part]}
                    if options and options.continuous_usage_stats:
                        content["usage"] = self.usage(answers)
                    yield sse.chunk(content)
            if options and options.include_usage:
                yield sse.chunk({**head, "choices": [], "usage": self.usage(answers)})
            yield sse.DONE

    def _head(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {
            "id": generation.request_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _parts(self, answer: Answer, events: list[Event], sent: list[int]) -> list[dict[str, Any]]:
        """What a stream says of one step; ``sent`` counts tokens already given out."""
        hidden = self._request.include_reasoning is False
        deltas = [
            event_delta(answer, event)
            for event in events
            if event.kind is not Kind.CALL_END and not (hidden and event.kind is Kind.REASONING)
        ]
        ended, first = answer.done, sent[answer.index]
        has_tokens = len(answer.token_ids) > first
        wants_tokens = self._request.logprobs or self._request.return_token_ids
        if not deltas and (ended or (wants_tokens and has_tokens)):
            deltas = [{}]
        parts = [_part(answer, delta) for delta in deltas]
        if parts and wants_tokens:
            sent[answer.index] = len(answer.token_ids)
            if self._request.logprobs:
                parts[-1]["logprobs"] = self._logprobs(answer, first)
            if self._request.return_token_ids:
                parts[-1]["token_ids"] = answer.token_ids[first:]
        if ended:
            parts[-1] |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        return parts

    def _choice(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
        if not answer.calls:
            message["content"] = answer.content
        if answer.reasoning and self._request.include_reasoning is not False:
            # vLLM's name, and the older one that many clients still read
            message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        found = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer, 0) if self._request.logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._request.return_token_ids:
            found["token_ids"] = answer.token_ids
        return found

    def _logprobs(self, answer: Answer, first: int) -> dict[str, Any]:
        top = self._request.top_logprobs or 0
        reports = answer.reports[first:]
        return {"content": shapes.chat_logprobs(self._service.tokenizer, reports, top)}

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Token counts so far."""
        return usage(
            prompt=len(self._prompt),
            cached=answers[0].cached_tokens,
            completion=sum(len(answer.token_ids) for answer in answers),
            reasoning=sum(answer.reasoning_tokens for answer in answers),
        )


def _refuse(param: str, got: object, expected: str) -> None:
    raise RequestError(f"{param} cannot be honoured", param=param, got=got, expected=expected)


def _part(answer: Answer, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}


def event_delta(answer: Answer, event: Event) -> dict[str, Any]:
    """What a stream says of one event."""
    if event.kind is Kind.CONTENT:
        return {"content": event.text}
    if event.kind is Kind.REASONING:
        return {"reasoning": event.text, "reasoning_content": event.text}
    call: dict[str, Any] = {"index": event.index, "function": {"arguments": event.text}}
    if event.kind is Kind.CALL_BEGIN:
        call_id = answer.calls[event.index].call_id
        function = {"name": event.text, "arguments": ""}
        call |= {"id": call_id, "type": "function", "function": function}
    return {"tool_calls": [call]}
