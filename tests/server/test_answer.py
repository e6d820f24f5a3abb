"""However the engine cuts an answer into reports, the stream folds to the same whole."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from minuet.engine.ipc import Delta
from minuet.models.m3.parsers import M3Parser
from minuet.server.chat import Answer, event_delta
from tests.server.test_chat import folded
from tests.server.test_m3_parser import PIECES, TOOLS


def delta(text, *, reason=None, stop=None):
    ids = [1] * len(text)
    return Delta("r", ids, text, None, None, reason, stop, "", 0, 0.0, None, None, None)


def answered(pieces, *, reason, stop, one_call, in_reasoning):
    """(the whole, what folding the stream gives)."""
    parser = M3Parser(in_reasoning=in_reasoning, reasoning=True, tools=TOOLS)
    answer, parts = Answer(0, parser, one_call), []
    reports = [delta(piece) for piece in pieces] + [delta("", reason=reason, stop=stop)]
    for report in reports:
        if answer.done:
            break
        for event in answer.take(report, show_stop=True):
            if event.kind.value != "call_end":
                shown = {"index": 0, "delta": event_delta(answer, event), "finish_reason": None}
                parts.append({"choices": [shown]})
    parts.append({"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]})
    calls = {
        i: {"name": call.name, "arguments": call.arguments} for i, call in enumerate(answer.calls)
    }
    whole = {
        "content": answer.content,
        "reasoning": answer.reasoning,
        "calls": calls,
        "finish_reason": answer.finish_reason,
    }
    return whole, folded(parts)[0]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=25),
    cuts=st.lists(st.integers(0, 200), max_size=30),
    reason=st.sampled_from(["stop", "length"]),
    stop=st.sampled_from([None, "END", 7]),
    one_call=st.booleans(),
    in_reasoning=st.booleans(),
)
def test_any_cut_of_an_answer_gives_the_same_stream_and_the_same_whole(
    pieces, cuts, reason, stop, one_call, in_reasoning
):
    text = "".join(pieces)
    how = {"reason": reason, "stop": stop, "one_call": one_call, "in_reasoning": in_reasoning}
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    cut_up = [text[a:b] for a, b in pairwise(places)]
    at_once, folded_at_once = answered([text], **how)
    in_parts, folded_parts = answered(cut_up, **how)
    assert at_once == in_parts == folded_at_once == folded_parts
    assert answered(list(text), **how)[0] == at_once
