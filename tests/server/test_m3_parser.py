"""The M3 parser: examples of the format, and the promises that hold for any text and any cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minuet.errors import RequestError
from minuet.models.m3.parsers import DIALECT, END_THINK, NS, THINK, M3Parser
from minuet.models.parsing import Event, Kind, dialect

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "options": {
                "type": "object",
                "properties": {"metric": {"type": "boolean"}, "zip": {"type": "string"}},
            },
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/place"},
        },
        "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
    },
    "ping": {},
}


def tag(name, *inside):
    return f"{NS}<{name}>" + "".join(inside) + f"{NS}</{name}>"


def call(name, *params):
    return f'{NS}<invoke name="{name}">' + "".join(params) + f"{NS}</invoke>\n"


def calls(*inside):
    return f"{NS}<tool_call>\n" + "".join(inside) + f"{NS}</tool_call>"


def parse(text, sizes=(), *, in_reasoning=False, reasoning=True, tools=TOOLS, truncated=False):
    parser = M3Parser(in_reasoning=in_reasoning, reasoning=reasoning, tools=tools)
    events, rest = [], text
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        events += parser.push(piece)
    events += parser.push(rest)
    return merged([*events, *parser.finish(truncated=truncated)])


def merged(events):
    """Neighbouring text of one kind joined: what a client sees of a stream."""
    out: list[Event] = []
    for event in events:
        joins = event.kind in (Kind.REASONING, Kind.CONTENT, Kind.CALL_ARGUMENTS)
        if joins and out and (out[-1].kind, out[-1].index) == (event.kind, event.index):
            out[-1] = Event(event.kind, out[-1].text + event.text, event.index)
        else:
            out.append(event)
    return out


def text_of(events, kind):
    return "".join(e.text for e in events if e.kind is kind)


def arguments(events, index=0):
    return json.loads(
        "".join(e.text for e in events if e.kind is Kind.CALL_ARGUMENTS and e.index == index)
    )


def test_reasoning_opened_by_the_prompt_ends_at_the_marker():
    events = parse(f"let me see{END_THINK}Paris", in_reasoning=True)
    assert events == [Event(Kind.REASONING, "let me see"), Event(Kind.CONTENT, "Paris")]


def test_reasoning_opened_by_the_model():
    events = parse(f"{THINK}hm{END_THINK}\n\nParis")
    assert text_of(events, Kind.REASONING) == "hm"
    assert text_of(events, Kind.CONTENT) == "\n\nParis"


def test_a_stray_closing_marker_is_dropped():
    assert parse(f"{END_THINK}Paris") == [Event(Kind.CONTENT, "Paris")]


def test_without_a_reasoning_parser_markers_are_dropped_and_all_is_content():
    assert parse(f"{THINK}a{END_THINK}b", reasoning=False) == [Event(Kind.CONTENT, "ab")]


def test_values_are_typed_by_schema():
    events = parse(
        calls(
            call(
                "weather",
                tag("city", "12"),
                tag("days", tag("item", "1"), tag("item", "2")),
                tag("options", tag("metric", "true"), tag("zip", "00123")),
                tag("limit", "7"),
                tag("place", tag("lat", "1.50")),
            )
        )
    )
    assert arguments(events) == {
        "city": "12",
        "days": [1, 2],
        "options": {"metric": True, "zip": "00123"},
        "limit": 7,
        "place": {"lat": 1.5},
    }


def test_values_without_schema_are_json_or_text():
    events = parse(calls(call("ping", tag("a", "1"), tag("b", "x y"), tag("c", '{"k": [null]}'))))
    assert arguments(events) == {"a": 1, "b": "x y", "c": {"k": [None]}}


def test_several_calls_are_numbered():
    events = parse("Look:" + calls(call("ping"), call("weather", tag("city", "Oslo"))))
    begins = [(e.text, e.index) for e in events if e.kind is Kind.CALL_BEGIN]
    assert begins == [("ping", 0), ("weather", 1)]
    assert arguments(events, 0) == {}
    assert arguments(events, 1) == {"city": "Oslo"}
    assert text_of(events, Kind.CONTENT) == "Look:"


def test_a_value_may_speak_of_the_markers_of_reasoning():
    events = parse(calls(call("weather", tag("city", f"{THINK} <b>x</b>"))))
    assert arguments(events) == {"city": f"{THINK} <b>x</b>"}


def test_a_call_that_the_model_did_not_close_is_closed():
    events = parse(f'{NS}<tool_call>\n{NS}<invoke name="weather">{NS}<city>Oslo')
    assert arguments(events) == {"city": "Oslo"}


def test_a_call_cut_by_a_limit_stays_open():
    events = parse(f'{NS}<invoke name="weather">{NS}<city>Os', truncated=True)
    assert [e.kind for e in events] == [Kind.CALL_BEGIN]


def test_without_tools_a_call_is_text_without_its_markers():
    events = parse(calls(call("ping")), tools=None)
    assert [e.kind for e in events] == [Kind.CONTENT]
    assert NS not in events[0].text


def test_a_marker_is_not_put_together_from_what_a_dropped_one_leaves():
    events = parse(f"<mm:{NS}think>x", tools=None)
    assert THINK not in text_of(events, Kind.CONTENT)


def test_deep_nesting_ends():
    deep = f"{NS}<a>" * 3000 + f"{NS}</a>" * 3000
    assert parse(calls(call("ping", deep)))[-1].kind is Kind.CALL_END


def test_only_the_prompts_last_marker_opens_reasoning():
    assert DIALECT.starts_in_reasoning(f"]~b]ai\n{THINK}")
    assert not DIALECT.starts_in_reasoning(f"{THINK} said the user[e~[\n]~b]ai\n")


def test_an_unknown_effort_is_refused_by_name():
    assert dialect("minimax-m3").template_kwargs("none") == {"thinking_mode": "disabled"}
    with pytest.raises(RequestError, match="none or high"):
        DIALECT.template_kwargs("medium")


PIECES = st.sampled_from(
    [
        THINK, END_THINK, NS, "<tool_call>", "</tool_call>", '<invoke name="weather">', "</invoke>",
        "<city>", "</city>", "<days>", "</days>", "<item>", "</item>", "1", "true", "x", " ", "\n",
        "<", ">", "]<]", "<mm:", "think>", "é", "}", '"', "\x00",
        calls(call("ping", tag("a", "1"))),
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=30),
    sizes=st.lists(st.integers(1, 9), max_size=60),
    in_reasoning=st.booleans(),
    reasoning=st.booleans(),
    with_tools=st.booleans(),
    truncated=st.booleans(),
)
def test_any_cut_gives_the_same_and_nothing_leaks(
    pieces, sizes, in_reasoning, reasoning, with_tools, truncated
):
    text = "".join(pieces)
    how = {
        "in_reasoning": in_reasoning,
        "reasoning": reasoning,
        "tools": TOOLS if with_tools else None,
        "truncated": truncated,
    }
    whole = parse(text, **how)
    assert parse(text, sizes, **how) == whole
    assert parse(text, [1] * len(text), **how) == whole
    said = text_of(whole, Kind.CONTENT), text_of(whole, Kind.REASONING)
    assert not any(marker in part for part in said for marker in (THINK, END_THINK, NS))
    ended = [e.index for e in whole if e.kind is Kind.CALL_END]
    for index in ended:
        assert isinstance(arguments(whole, index), dict)
