"""``/v1/responses``: the part of that API that is about text and functions. Nothing is stored.

A request becomes a chat request, and its events are told in this route's words.
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minuet.errors import RequestError
from minuet.models.parsing import Event, Kind
from minuet.server import errors, sse
from minuet.server import logprobs as shapes
from minuet.server.chat import Answer, Chat
from minuet.server.protocol import (
    ChatRequest,
    Function,
    FunctionCall,
    InputCall,
    InputCallOutput,
    InputMessage,
    JsonSchema,
    Message,
    NamedFunction,
    ResponseFormat,
    ResponsesRequest,
    Tool,
    ToolCall,
)
from minuet.server.service import Service

_TEMPLATE_FIELD = {"messages": "input", "max_tokens": "max_output_tokens"}


class Responses:
    """One request.

    Args:
        service: the served model.
        request: as it came.

    Raises:
        RequestError: a field outside the supported part.
        UnknownModelError: another model.
    """

    def __init__(self, service: Service, request: ResponsesRequest):
        self._service, self._request = service, request
        _check(request)
        self._chat = Chat(service, _as_chat(request))
        self._model = service.check_model(request.model)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sequence = 0

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        jobs, answers, _ = await self._chat.prepare()
        async with self._service.generate(jobs, "resp") as generation:
            telling = _Telling(self._logprobs)
            async for answer, events in self._chat.run(generation, answers):
                for _ in telling.tell(answer, events):
                    pass
            for _ in telling.close():
                pass
        return self._object(answers[0], telling.items)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as events; the first is empty and says that the request was accepted."""
        jobs, answers, _ = await self._chat.prepare()
        async with self._service.generate(jobs, "resp") as generation:
            yield b""
            begun = self._object(None, [])
            yield self._event("response.created", {"response": begun})
            yield self._event("response.in_progress", {"response": begun})
            telling = _Telling(self._logprobs)
            async for answer, events in self._chat.run(generation, answers):
                for name, content in telling.tell(answer, events):
                    yield self._event(name, content)
            for name, content in telling.close():
                yield self._event(name, content)
            done = self._object(answers[0], telling.items)
            yield self._event(f"response.{done['status']}", {"response": done})

    def error_event(self, problem: Exception) -> bytes:
        """An error within the stream, in this route's words."""
        status, param = errors.status_of(problem)
        known = status != 500 or isinstance(problem, errors.GenerationError)
        if not known:
            errors.log.error("stream failed", exc_info=problem)
        message = str(problem) if known else "internal error"
        content = {"code": str(status), "message": message, "param": param}
        return self._event("error", content)

    def _event(self, name: str, content: dict[str, Any]) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return sse.named(name, {"type": name, "sequence_number": number, **content})

    def _logprobs(self, answer: Answer) -> list[dict[str, Any]]:
        top = self._request.top_logprobs
        if top is None:
            return []
        return shapes.chat_logprobs(self._service.tokenizer, answer.reports, top)

    def _object(self, answer: Answer | None, items: list[dict[str, Any]]) -> dict[str, Any]:
        request = self._request
        status, details = "in_progress", None
        if answer is not None:
            cut = answer.finish_reason == "length"
            status = "incomplete" if cut else "completed"
            details = {"reason": "max_output_tokens"} if cut else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": request.reasoning.effort if request.reasoning else None,
                "summary": None,
            },
            "store": False,
            "temperature": request.temperature,
            "text": {"format": _format_shown(request)},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._usage(answer) if answer else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def _usage(self, answer: Answer) -> dict[str, Any]:
        counted = self._chat.usage([answer])
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
        }


def _format_shown(request: ResponsesRequest) -> dict[str, Any]:
    wanted = request.text.format if request.text else None
    return wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}


def _check(request: ResponsesRequest) -> None:
    refused = (
        ("previous_response_id", request.previous_response_id, None, "none: nothing is stored"),
        ("background", request.background or None, None, "false"),
        ("store", request.store or None, None, "false: nothing is stored"),
        ("truncation", request.truncation, "disabled", "disabled"),
        ("service_tier", request.service_tier, "auto", "auto"),
        ("include", request.include or None, None, "nothing"),
    )
    for name, got, accepted, expected in refused:
        if got is not None and got != accepted:
            raise RequestError(f"{name} cannot be honoured", param=name, got=got, expected=expected)
    if isinstance(request.tool_choice, NamedFunction) or request.tool_choice == "required":
        raise RequestError(
            "the model cannot be made to call a tool",
            param="tool_choice",
            got="required",
            expected="auto or none",
        )


def _as_chat(request: ResponsesRequest) -> ChatRequest:
    return ChatRequest(
        model=request.model,
        messages=list(_messages(request)),
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=None if request.top_logprobs is None else True,
        top_logprobs=request.top_logprobs,
        tools=[
            Tool(
                type="function",
                function=Function(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.parameters,
                    strict=tool.strict,
                ),
            )
            for tool in request.tools or ()
        ]
        or None,
        tool_choice="none" if request.tool_choice == "none" else None,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        response_format=_response_format(request),
        user=request.user,
    )


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = request.text.format if request.text else None
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        if wanted.schema_ is None:
            raise RequestError("no schema", param="text.format.schema", expected="a JSON schema")
        schema = JsonSchema(name=wanted.name or "answer", schema=wanted.schema_)
    return ResponseFormat(type=wanted.type, json_schema=schema)


def _messages(request: ResponsesRequest) -> Iterator[Message]:
    if request.instructions is not None:
        yield Message(role="developer", content=request.instructions)
    if isinstance(request.input, str):
        yield Message(role="user", content=request.input)
        return
    calls: list[ToolCall] = []
    for item in request.input:
        if not isinstance(item, InputCall) and calls:
            yield Message(role="assistant", content="", tool_calls=calls)
            calls = []
        match item:
            case InputMessage():
                yield Message(role=item.role, content=item.content)
            case InputCall():
                function = FunctionCall(name=item.name, arguments=item.arguments)
                calls.append(ToolCall(id=item.call_id, function=function))
            case InputCallOutput():
                yield Message(role="tool", content=item.output, tool_call_id=item.call_id)
    if calls:
        yield Message(role="assistant", content="", tool_calls=calls)


# --- telling -------------------------------------------------------------------------------------

Told = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class _Telling:
    """Turns events into this route's items, and says each change.

    Attributes:
        items: the output so far.
    """

    logprobs: Any
    items: list[dict[str, Any]] = field(default_factory=list)
    _kind: Kind | None = None
    _text: str = ""
    _answer: Answer | None = None

    def tell(self, answer: Answer, events: Sequence[Event]) -> Iterator[Told]:
        """What is new, as (event name, content)."""
        self._answer = answer
        for event in events:
            kind = Kind.CALL_BEGIN if event.kind is Kind.CALL_ARGUMENTS else event.kind
            if event.kind is Kind.CALL_END:
                yield from self.close()
                continue
            if kind is not self._kind or event.kind is Kind.CALL_BEGIN:
                yield from self.close()
                yield from self._open(answer, kind, event)
            if event.kind is Kind.CALL_BEGIN:
                continue
            self._text += event.text
            yield self._delta(kind, event.text)

    def _open(self, answer: Answer, kind: Kind, event: Event) -> Iterator[Told]:
        self._kind, self._text = kind, ""
        unique = uuid.uuid4().hex
        item: dict[str, Any]
        if kind is Kind.CONTENT:
            item = {"type": "message", "id": f"msg_{unique}", "role": "assistant", "content": []}
        elif kind is Kind.REASONING:
            item = {"type": "reasoning", "id": f"rs_{unique}", "summary": [], "content": []}
        else:
            call = answer.calls[event.index]
            item = {"type": "function_call", "id": f"fc_{unique}", "call_id": call.call_id}
            item |= {"name": call.name, "arguments": ""}
        item["status"] = "in_progress"
        self.items.append(item)
        yield "response.output_item.added", {"output_index": self._index, "item": dict(item)}
        if kind is not Kind.CALL_BEGIN:
            part = {**self._place, "part": self._part("")}
            yield "response.content_part.added", part

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    @property
    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": self._index}
        return place if self._kind is Kind.CALL_BEGIN else {**place, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": text}
        found = self.logprobs(self._answer) if text and self._answer else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}

    def _delta(self, kind: Kind, text: str) -> Told:
        name = {
            Kind.CONTENT: "response.output_text.delta",
            Kind.REASONING: "response.reasoning_text.delta",
            Kind.CALL_BEGIN: "response.function_call_arguments.delta",
        }[kind]
        content = {**self._place, "delta": text}
        return name, {**content, "logprobs": []} if kind is Kind.CONTENT else content

    def close(self) -> Iterator[Told]:
        """End the open item, if any."""
        if self._kind is None:
            return
        item, kind = self.items[-1], self._kind
        if kind is Kind.CALL_BEGIN:
            item["arguments"] = self._text
            arguments = {**self._place, "arguments": self._text, "name": item["name"]}
            yield "response.function_call_arguments.done", arguments
        else:
            part = self._part(self._text)
            item["content"] = [part]
            said = {**self._place, "text": self._text}
            if kind is Kind.CONTENT:
                yield "response.output_text.done", {**said, "logprobs": part["logprobs"]}
            else:
                yield "response.reasoning_text.done", said
            yield "response.content_part.done", {**self._place, "part": part}
        item["status"] = "completed"
        yield "response.output_item.done", {"output_index": self._index, "item": dict(item)}
        self._kind = None
