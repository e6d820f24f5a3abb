"""Requests that call for one of the tools on offer.

The answer is the call as JSON, ``{"name": ..., "arguments": {...}}``: what a client has after the
server has parsed the model's own form.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from minuet.evals.tasks.base import Problem, Split, ask, draw_problems, random_of
from minuet.evals.tasks.words import CITIES, ITEMS, NAMES, PLACES

NAME = "toolcalls"

_NUMBERS = tuple(range(2, 60))


@dataclass(frozen=True, slots=True)
class _Tool:
    """A function on offer.

    Attributes:
        description: for the model.
        values: what each parameter is drawn from; its type is that of the first.
        requests: ways to ask for it, with the parameters in braces.
    """

    description: str
    values: Mapping[str, tuple[str, ...] | tuple[int, ...]]
    requests: tuple[str, ...]


_TOOLS: Mapping[str, _Tool] = {
    "get_weather": _Tool(
        "Weather in a city",
        {"city": CITIES},
        ("What is the weather in {city}?", "How is the weather in {city} today?"),
    ),
    "get_time": _Tool("Local time in a city", {"city": CITIES}, ("What time is it in {city}?",)),
    "set_timer": _Tool(
        "Start a timer", {"minutes": _NUMBERS}, ("Set a timer for {minutes} minutes.",)
    ),
    "find_train": _Tool(
        "Trains between two cities",
        {"start": CITIES, "end": CITIES},
        ("Find a train from {start} to {end}.", "How do I get from {start} to {end} by train?"),
    ),
    "order": _Tool(
        "Order things from the shop",
        {"item": ITEMS, "count": _NUMBERS},
        ("Order {count} {item}.", "Please buy {count} {item} for me."),
    ),
    "book_table": _Tool(
        "Reserve a table",
        {"name": NAMES, "guests": _NUMBERS},
        ("Book a table for {guests} guests under the name {name}.",),
    ),
    "call": _Tool("Telephone a person", {"name": NAMES}, ("Call {name}.", "Please ring {name}.")),
    "show_map": _Tool(
        "Map of a place near a city",
        {"place": PLACES, "city": CITIES},
        ("Show me a {place} near {city}.", "Is there a {place} in {city}?"),
    ),
}


def problems(split: Split, seed: int, count: int, *, most_tools: int = 3) -> Iterator[Problem]:
    """Problems of this task.

    Args:
        split: which side of the line.
        seed: of the draw.
        count: how many.
        most_tools: tools on offer, one at least.

    Raises:
        ConfigError: fewer held-out problems than ``count``.
    """
    rng = random_of(NAME, split, seed)

    def draw() -> tuple[tuple[object, ...], Callable[[], Problem]]:
        offered = rng.sample(list(_TOOLS), rng.randint(1, most_tools))
        name = rng.choice(offered)
        tool = _TOOLS[name]
        arguments = _arguments(rng, tool)
        request = rng.choice(tool.requests).format(**arguments)
        content = (NAME, name, *arguments.values())
        return content, partial(_problem, offered, name, arguments, request)

    return draw_problems(draw, split, count)


def score(problem: Problem, text: str) -> bool:
    """Whether the text is the expected call as JSON, or a list with only that."""
    try:
        got = json.loads(text)
    except ValueError:
        return False
    if isinstance(got, list) and len(got) == 1:
        got = got[0]
    return bool(got == json.loads(problem.answer))


def _arguments(rng: random.Random, tool: _Tool) -> dict[str, Any]:
    while True:
        arguments = {key: rng.choice(values) for key, values in tool.values.items()}
        if len(set(arguments.values())) == len(arguments):  # nobody takes a train to where he is
            return arguments


def _problem(offered: list[str], name: str, arguments: dict[str, Any], request: str) -> Problem:
    call = {"name": name, "arguments": arguments}
    return Problem(
        task=NAME,
        messages=ask(request),
        answer=json.dumps(call),
        reply={
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        tools=tuple(_schema(tool) for tool in offered),
        meta={"tool": name, "offered": len(offered)},
    )


def _schema(name: str) -> dict[str, Any]:
    tool = _TOOLS[name]
    types = {key: "integer" if type(v[0]) is int else "string" for key, v in tool.values.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in types.items()},
                "required": list(types),
            },
        },
    }
