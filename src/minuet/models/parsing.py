"""What a model writes, taken apart: reasoning, answer, tool calls. Models implement it.

A parser is a state machine over text that arrives in pieces of any size. Two promises, which tests
hold for every dialect: the cut between pieces does not change the result, and no marker of the
format appears in what is given out.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from minuet.errors import ConfigError

# name (as in --tool-call-parser) -> module with a DIALECT
_DIALECTS: Mapping[str, str] = MappingProxyType({"minimax_m3": "minuet.models.m3.parsers"})


class Kind(Enum):
    """What a piece of output is."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL_BEGIN = "call_begin"
    CALL_ARGUMENTS = "call_arguments"
    CALL_END = "call_end"


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of output.

    Attributes:
        kind: what it is.
        text: reasoning or answer text; a fragment of a call's JSON arguments; a function's name at
            CALL_BEGIN.
        index: number of the tool call, from 0.
    """

    kind: Kind
    text: str = ""
    index: int = 0


class OutputParser(Protocol):
    """Takes one answer apart."""

    def push(self, text: str) -> list[Event]:
        """Take more text; returns what became certain with it."""
        ...

    def finish(self, *, truncated: bool) -> list[Event]:
        """The end of the text.

        Args:
            truncated: it was cut by a limit: an open tool call then stays open.
        """
        ...


class Dialect(Protocol):
    """One model family's way of writing."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the parser even if the tokenizer calls them special."""
        ...

    @property
    def reasoning_end(self) -> str:
        """The marker that ends reasoning; a grammar applies only after it."""
        ...

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether an answer to this rendered prompt begins inside a reasoning section."""
        ...

    def template_kwargs(self, effort: str) -> Mapping[str, Any]:
        """Chat template variables for OpenAI's ``reasoning_effort``.

        Raises:
            RequestError: a level the model does not have.
        """
        ...

    def parser(
        self, *, in_reasoning: bool, reasoning: bool, tools: Mapping[str, Any] | None
    ) -> OutputParser:
        """A parser for one answer.

        Args:
            in_reasoning: see :meth:`starts_in_reasoning`.
            reasoning: whether reasoning is set apart; else only its markers are dropped.
            tools: parameter schemas by function name; None: tool calls are ordinary text.
        """
        ...


def dialect_names() -> tuple[str, ...]:
    """Every known dialect."""
    return tuple(_DIALECTS)


def dialect(name: str) -> Dialect:
    """A dialect by name; hyphens and underscores are the same.

    Raises:
        ConfigError: no such dialect.
    """
    module = _DIALECTS.get(name.replace("-", "_"))
    if module is None:
        raise ConfigError("no such parser", got=name, expected=", ".join(_DIALECTS))
    found: Dialect = importlib.import_module(module).DIALECT
    return found


def dialect_of(package: str) -> str | None:
    """Name of the dialect that a model's package brings, None if it brings none."""
    return next((name for name, module in _DIALECTS.items() if module.startswith(package)), None)
