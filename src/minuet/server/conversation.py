"""A conversation, from messages as clients send them to the prompt the model reads."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minuet.errors import RequestError
from minuet.server.protocol import ChatRequest, Message, NamedTool, Tool
from minuet.server.service import Service, check_text
from minuet.server.template import Rendered


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation ready to be answered.

    Attributes:
        prompt: the rendered prompt.
        tools: parameter schemas by name; None: no tools are offered.
        keep_one_call: at most one tool call.
    """

    prompt: Rendered
    tools: Mapping[str, Any] | None
    keep_one_call: bool


async def converse(service: Service, request: ChatRequest) -> Conversation:
    """Render a conversation.

    Raises:
        RequestError: a field that cannot be honoured.
    """
    if service.template is None:
        raise RequestError(
            "this model has no chat template",
            param="messages",
            expected="/v1/completions",
            remedy="start the server with --chat-template",
        )
    _check_flow(request)
    offered = _tools(service, request)
    kwargs = dict(service.template_kwargs)
    if request.reasoning_effort is not None:
        if service.reasoning is None:
            raise RequestError("reasoning is off", param="reasoning_effort", expected="none")
        kwargs |= service.reasoning.template_kwargs(request.reasoning_effort)
    kwargs |= request.chat_template_kwargs or {}
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in kwargs:
            raise RequestError(
                f"{name} is a field of its own", param="chat_template_kwargs", got=name
            )
    messages = [template_message(message, i) for i, message in enumerate(request.messages)]
    tools = [tool.model_dump(exclude_none=True) for tool in offered] if offered else None
    check_text(json.dumps([messages, tools, kwargs], ensure_ascii=False), "messages")
    render = service.template.render
    rendered = await asyncio.to_thread(
        render,
        messages,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt is not False
        and not request.continue_final_message,
        continue_final_message=bool(request.continue_final_message),
        kwargs=kwargs,
    )
    schemas = {t.function.name: t.function.parameters or {} for t in offered} if offered else None
    return Conversation(rendered, schemas, request.parallel_tool_calls is False)


def _check_flow(request: ChatRequest) -> None:
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "a message is either continued or begun",
            param="continue_final_message",
            got=True,
            expected="false with add_generation_prompt",
        )
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise RequestError(
            "only the assistant's message can be continued",
            param="continue_final_message",
            got=request.messages[-1].role,
            expected="an assistant message at the end",
        )


def _tools(service: Service, request: ChatRequest) -> list[Tool]:
    """The tools on offer: none if the choice is none."""
    choice, tools = request.tool_choice, request.tools or []
    if isinstance(choice, NamedTool) or choice == "required":
        raise RequestError(
            "the model cannot be made to call a tool",
            param="tool_choice",
            got="required" if choice == "required" else choice.function.name,
            expected="auto or none",
        )
    if choice == "none" or not tools:
        if choice == "auto" and not tools:
            raise RequestError("no tools to choose from", param="tool_choice", got="auto")
        return []
    if not service.options["enable_auto_tool_choice"] or service.tools is None:
        raise RequestError(
            "tools are off on this server",
            param="tools",
            got=[tool.function.name for tool in tools][:5],
            expected="none",
            remedy="start it with --enable-auto-tool-choice and --tool-call-parser model",
        )
    strict = [tool.function.name for tool in tools if tool.function.strict]
    if strict:
        raise RequestError(
            "arguments are typed by their schema, but not forced to it",
            param="tools",
            got=f"strict for {strict[:5]}",
            expected="strict false",
        )
    return tools


def template_message(message: Message, number: int) -> dict[str, Any]:
    """A message as templates want it.

    Raises:
        RequestError: a tool call whose arguments are no JSON object.
    """
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message.content, list):
        shown["content"] = [{"type": "text", "text": part.text} for part in message.content]
    elif message.content is None and message.role != "assistant":
        raise RequestError(
            "a message without content", param=f"messages.{number}.content", expected="text"
        )
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            shown[name] = getattr(message, name)
    if thought := message.reasoning or message.reasoning_content:
        shown["reasoning_content"] = thought
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, number),
                },
            }
            for call in message.tool_calls
        ]
    return shown


def _arguments(text: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(
            "arguments of an earlier tool call are not a JSON object",
            param=f"messages.{number}.tool_calls",
            got=text[:100],
            expected="a JSON object as text",
        )
    return value
