"""M3's answers taken apart: ``<mm:think>`` sections and namespaced, XML-like tool calls.

An answer is: reasoning between its two markers (the prompt may have opened it already, and a bare
closing marker means there is none), text, then tool calls in this form, where ``NS`` is a marker
token in front of every tag::

    NS<tool_call>
    NS<invoke name="f">NS<city>ParisNS</city>NS<days>NS<item>1NS</item>NS</days>NS</invoke>
    NS</tool_call>

The text of a value is typed by the tool's JSON schema; without one it is JSON if it parses, else a
string. Arguments are given out one finished top-level parameter at a time.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minuet.errors import RequestError
from minuet.models.parsing import Event, Kind

NS = "]<]minimax[>["
THINK, END_THINK = "<mm:think>", "</mm:think>"
_CALLS, _END_CALLS, _INVOKE, _END_INVOKE = "<tool_call>", "</tool_call>", "<invoke ", "</invoke>"
_MAX_TAG = 256  # characters; a longer one is no tag
_MAX_HELD = 128  # characters held back because they may become markers
_MAX_DEPTH = 64  # nested values; deeper ones are dropped


class _State(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALLS = "calls"  # between the tags of a tool_call section
    PARAMETERS = "parameters"  # between the parameters of a call
    VALUE = "value"


@dataclass(slots=True)
class _Frame:
    """An open value."""

    tag: str
    text: str = ""
    children: list[tuple[str, "_Frame"]] = field(default_factory=list)


class M3Parser:
    """See :class:`minuet.models.parsing.OutputParser`.

    Args:
        in_reasoning: the prompt ended inside a reasoning section.
        reasoning: set reasoning apart; else only drop its markers.
        tools: parameter schemas by function name; None: calls are ordinary text.
    """

    def __init__(self, *, in_reasoning: bool, reasoning: bool, tools: Mapping[str, Any] | None):
        self._reasoning, self._tools = reasoning, tools
        self._state = _State.REASONING if in_reasoning and reasoning else _State.CONTENT
        self._buffer = ""
        self._space = ""  # white space that opens a section: given out only if text follows
        self._section_began = False
        self._num_calls = 0
        self._schema: Any = None
        self._seen: list[str] = []  # parameters of the open call
        self._frames: list[_Frame] = []
        self._out: list[Event] = []

    def push(self, text: str) -> list[Event]:
        """Take more text; returns what became certain with it."""
        self._buffer += text
        while self._advance():
            pass
        return self._take()

    def finish(self, *, truncated: bool) -> list[Event]:
        """The end; an open call is closed unless the text was cut by a limit."""
        rest, self._buffer = self._buffer, ""
        rest = rest.partition(NS)[0]  # a tag that never ended
        if self._state in (_State.REASONING, _State.CONTENT):
            self._say(rest)
        if self._state in (_State.PARAMETERS, _State.VALUE) and not truncated:
            if self._frames:
                self._text(rest)
                self._close_frames(len(self._frames))
            self._end_call()
        return self._take()

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    # --- one move --------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Consume something from the buffer; False when more text is needed."""
        markers = self._markers()
        at, marker = _first(self._buffer, markers)
        if marker is None:
            held = _held(self._buffer, markers)
            text, self._buffer = _cut(self._buffer, len(self._buffer) - held)
            self._text(text)
            return False
        # what a dropped marker leaves on both sides must not join to a marker again
        tail = _held(self._buffer[:at], markers)
        if at > tail:
            text, self._buffer = _cut(self._buffer, at - tail)
            self._text(text)
            return True
        if marker == NS:
            return self._tag(at)
        before, rest = self._buffer[:at], self._buffer[at + len(marker) :]
        state = _State.REASONING if marker == THINK else _State.CONTENT
        if self._reasoning and state is not self._state:
            self._text(before)
            self._enter(state)
            before = ""
        self._buffer = before + rest
        return True

    def _markers(self) -> tuple[str, ...]:
        # inside a call only tags count: an argument may well speak of reasoning markers
        in_text = self._state in (_State.REASONING, _State.CONTENT)
        return (THINK, END_THINK, NS) if in_text else (NS,)

    def _enter(self, state: _State) -> None:
        if self._state is not state:
            self._state, self._space, self._section_began = state, "", False

    def _text(self, text: str) -> None:
        if self._state in (_State.REASONING, _State.CONTENT):
            self._say(text)
        elif self._state is _State.VALUE and len(self._frames) <= _MAX_DEPTH:
            self._frames[-1].text += text

    def _say(self, text: str) -> None:
        if not self._section_began:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            self._section_began, self._space = True, ""
        if text:
            is_thought = self._state is _State.REASONING
            self._out.append(Event(Kind.REASONING if is_thought else Kind.CONTENT, text))

    # --- tags ------------------------------------------------------------------------------------

    def _tag(self, at: int) -> bool:
        """NS stands at ``at``: act on the tag behind it, or wait for the tag's end."""
        before, rest = self._buffer[:at], self._buffer[at + len(NS) :]
        if not rest:
            return False
        end = rest.find(">")
        if rest[0] == "<" and end < 0 and len(rest) <= _MAX_TAG and NS not in rest:
            return False
        tag = rest[: end + 1] if rest[0] == "<" and 0 < end < _MAX_TAG else ""
        if NS in tag or not self._accepts(tag):
            # not a tag of the format: the marker is dropped, what follows is text
            self._buffer = before + rest
            return True
        self._text(before)
        self._buffer = rest[len(tag) :]
        self._act(tag)
        return True

    def _accepts(self, tag: str) -> bool:
        if self._state not in (_State.REASONING, _State.CONTENT):
            return bool(tag)
        return self._tools is not None and (tag == _CALLS or _name_of(tag) is not None)

    def _act(self, tag: str) -> None:
        if self._state in (_State.REASONING, _State.CONTENT):
            if tag == _CALLS:
                self._enter(_State.CALLS)
            else:
                self._begin_call(tag)
        elif self._state is _State.CALLS:
            self._in_section(tag)
        elif self._state is _State.PARAMETERS:
            self._in_call(tag)
        else:
            self._in_value(tag)

    def _in_section(self, tag: str) -> None:
        # anything else between calls stands for nothing
        if tag == _END_CALLS:
            self._enter(_State.CONTENT)
        elif _name_of(tag):
            self._begin_call(tag)

    def _begin_call(self, tag: str) -> None:
        name = _name_of(tag)
        assert name is not None
        assert self._tools is not None
        self._schema, self._seen = self._tools.get(name), []
        self._out.append(Event(Kind.CALL_BEGIN, name, self._num_calls))
        self._state = _State.PARAMETERS

    def _in_call(self, tag: str) -> None:
        if tag == _END_INVOKE:
            self._end_call()
        elif tag == _END_CALLS:
            self._end_call()
            self._enter(_State.CONTENT)
        elif _name_of(tag):
            self._end_call()
            self._begin_call(tag)
        elif not tag.startswith("</"):
            self._frames = [_Frame(tag[1:-1].strip())]
            self._state = _State.VALUE

    def _end_call(self) -> None:
        closing = "}" if self._seen else "{}"
        self._out.append(Event(Kind.CALL_ARGUMENTS, closing, self._num_calls))
        self._out.append(Event(Kind.CALL_END, "", self._num_calls))
        self._num_calls += 1
        self._state = _State.CALLS

    def _in_value(self, tag: str) -> None:
        if not tag.startswith("</"):
            self._frames.append(_Frame(tag[1:-1].strip()))
            return
        name = tag[2:-1].strip()
        open_tags = [frame.tag for frame in self._frames]
        if name in open_tags:
            last = len(open_tags) - 1 - open_tags[::-1].index(name)
            self._close_frames(len(open_tags) - last)
        elif tag in (_END_INVOKE, _END_CALLS):
            # the parameter was not closed: the end of the call closes it
            self._close_frames(len(open_tags))
            self._in_call(tag)

    def _close_frames(self, count: int) -> None:
        for _ in range(count):
            frame = self._frames.pop()
            if self._frames:
                if len(self._frames) < _MAX_DEPTH:
                    self._frames[-1].children.append((frame.tag, frame))
                continue
            self._state = _State.PARAMETERS
            self._emit(frame)

    def _emit(self, frame: _Frame) -> None:
        if frame.tag in self._seen:
            return  # JSON objects have each key once; the first is out already
        schema = _property(_resolve(self._schema, self._schema), frame.tag)
        value = _typed(frame, schema, self._schema)
        lead = ", " if self._seen else "{"
        text = f"{lead}{json.dumps(frame.tag, ensure_ascii=False)}: {_json(value)}"
        self._seen.append(frame.tag)
        self._out.append(Event(Kind.CALL_ARGUMENTS, text, self._num_calls))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _name_of(tag: str) -> str | None:
    """The function name in ``<invoke name="f">``; None for any other tag."""
    if not tag.startswith(_INVOKE):
        return None
    inside = tag[len(_INVOKE) : -1].strip()
    if not inside.startswith("name="):
        return None
    name = inside[len("name=") :].strip()
    if len(name) >= 2 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    return name or None


def _cut(text: str, at: int) -> tuple[str, str]:
    return text[:at], text[at:]


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    """The earliest marker and where it is."""
    found = ((text.find(marker), marker) for marker in markers)
    return min(((at, marker) for at, marker in found if at >= 0), default=(-1, None))


def _held(text: str, markers: tuple[str, ...]) -> int:
    """Length of the tail that may still become part of a marker.

    That is a beginning of a marker, and before it another, and so on: if the last one becomes a
    marker and is dropped, the one before it meets what follows.
    """
    text, held = text[-_MAX_HELD:], 0
    while size := _partial(text[: len(text) - held], markers):
        held += size
    return held


def _partial(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest tail that is a beginning of a marker."""
    for size in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


# --- values by schema ----------------------------------------------------------------------------


def _resolve(schema: Any, root: Any, depth: int = 0) -> Any:
    """Follow local references; anything else stays as it is."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/") or depth > 16:
        return schema
    found = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if _is_map(found) else None
    return _resolve(found, root, depth + 1)


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _property(schema: Any, name: str) -> Any:
    if not _is_map(schema):
        return None
    properties = schema.get("properties")
    if _is_map(properties) and name in properties:
        return properties[name]
    extra = schema.get("additionalProperties")
    return extra if _is_map(extra) else None


def _typed(frame: _Frame, schema: Any, root: Any) -> Any:
    """The value of a closed element."""
    options = _options(schema, root, 0)
    if not frame.children:
        return _scalar(frame.text, options)
    for option in options:
        if _kind(option) == "array":
            items = option.get("items")
            return [_typed(child, items, root) for _, child in frame.children]
        if _kind(option) == "object" or _is_map(option.get("properties")):
            return {
                tag: _typed(child, _resolve(_property(option, tag), root), root)
                for tag, child in frame.children
            }
    if all(tag == "item" for tag, _ in frame.children):
        return [_typed(child, None, root) for _, child in frame.children]
    return {tag: _typed(child, None, root) for tag, child in frame.children}


def _options(schema: Any, root: Any, depth: int) -> list[Mapping[str, Any]]:
    """The alternatives of a schema, each with at most one type."""
    schema = _resolve(schema, root)
    if not _is_map(schema) or depth > 8:
        return []
    for word in ("anyOf", "oneOf", "allOf"):
        members = schema.get(word)
        if isinstance(members, list):
            return [o for member in members for o in _options(member, root, depth + 1)]
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _kind(option: Mapping[str, Any]) -> str | None:
    kind = option.get("type")
    return kind if isinstance(kind, str) else None


def _integer(text: str) -> int:
    value = float(text)
    if value != int(value):
        raise ValueError(text)
    return int(text) if text.lstrip("+-").isdigit() else int(value)


def _number(text: str) -> float:
    value = json.loads(text)
    if isinstance(value, bool) or not isinstance(value, int | float) or value in _INFINITE:
        raise ValueError(text)
    return value


_INFINITE = (float("inf"), float("-inf"))


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError(text)


def _container(kind: type, text: str) -> Any:
    value = _loads(text) if text else kind()
    if not isinstance(value, kind):
        raise TypeError(text)
    return value


def _loads(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(word)

    value = json.loads(text, parse_constant=refuse)
    _json(value)  # 1e999 reads as infinity, which is not JSON again
    return value


# the narrow types first: a string accepts everything
_READERS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("null", _null),
    ("boolean", _boolean),
    ("integer", _integer),
    ("number", _number),
    ("object", lambda text: _container(dict, text)),
    ("array", lambda text: _container(list, text)),
)


def _scalar(text: str, options: list[Mapping[str, Any]]) -> Any:
    kinds = {_kind(option) for option in options}
    for option in options:
        listed = option.get("enum") if isinstance(option.get("enum"), list) else []
        for value in [*(listed or []), *([option["const"]] if "const" in option else [])]:
            if text == value or text.strip() == _json(value):
                return value
    stripped = text.strip()
    for kind, read in _READERS:
        if kind in kinds:
            try:
                return read(stripped)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
    if kinds - {None}:
        return text
    try:
        return _loads(stripped)
    except (ValueError, RecursionError):
        return text


class M3Dialect:
    """See :class:`minuet.models.parsing.Dialect`."""

    markers = (THINK, END_THINK, NS)
    reasoning_end = END_THINK

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether the rendered prompt ends with an open reasoning section."""
        return prompt.rstrip("\n").endswith(THINK)

    def template_kwargs(self, effort: str) -> Mapping[str, Any]:
        """The model thinks or does not; it has no levels between.

        Raises:
            RequestError: another level.
        """
        modes = {"none": "disabled", "high": "enabled"}
        if effort not in modes:
            raise RequestError(
                "this model has no such reasoning effort",
                param="reasoning_effort",
                got=effort,
                expected="none or high",
                remedy="or set thinking_mode in chat_template_kwargs",
            )
        return {"thinking_mode": modes[effort]}

    def parser(
        self, *, in_reasoning: bool, reasoning: bool, tools: Mapping[str, Any] | None
    ) -> M3Parser:
        """A parser for one answer."""
        return M3Parser(in_reasoning=in_reasoning, reasoning=reasoning, tools=tools)


DIALECT = M3Dialect()
