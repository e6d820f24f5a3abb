"""What the device is told that rows want: counts and bias by hand, modes, pending tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minuet.engine import rows as row_data
from minuet.engine.rows import Row, parameters, rows_of, wants_of
from minuet.engine.types import Request, SamplingParams, ScheduledRequest
from minuet.ops.sampling import columns

TOKENS = st.lists(st.integers(0, 12), max_size=12)


def request(prompt=(1,), output=(), arrival=0, eos=(), **params) -> Request:
    fields = SamplingParams(**{"max_tokens": 64, **params})
    return Request(
        "r", tuple(prompt), fields, arrival, output_token_ids=list(output), eos_token_ids=eos
    )


@settings(max_examples=150, deadline=None)
@given(
    TOKENS.filter(len),
    TOKENS,
    st.sampled_from([1.0, 1.5]),
    st.sampled_from([0.0, 0.5]),
    st.dictionaries(st.integers(0, 12), st.sampled_from([-1.0, 2.0]), max_size=4),
    st.integers(0, 14),
)
def test_entries_count_what_stands_in_prompt_and_output(
    prompt, output, repetition, presence, bias, min_tokens
):
    row = Row(
        request(
            prompt, output, eos=(3, 12), repetition_penalty=repetition,
            presence_penalty=presence, logit_bias=bias, min_tokens=min_tokens,
        )
    )  # fmt: skip
    want = {}
    for token in range(13):
        occurrences = output.count(token) if presence else 0
        seen = repetition != 1.0 and token in {*prompt, *output}
        amount = bias.get(token, 0.0)
        if len(output) < min_tokens and token in (3, 12):
            amount = float("-inf")
        if occurrences or seen or token in bias or amount:
            want[token] = (2 * occurrences + seen, amount)
    made = row_data.entries([Row(request()), row])
    got = {
        int(token): (int(counts), float(np.array(bits, np.int32).view(np.float32)))
        for _, token, counts, bits in made
    }
    assert got == want
    assert len(made) == len(want)
    assert not len(made) or set(made[:, 0].tolist()) == {1}


def test_the_same_parameters_are_worked_out_once_and_others_never_mistaken_for_them():
    made = []
    memo = row_data._Memo(lambda thing: made.append(thing) or len(made), 3)
    things = [object() for _ in range(5)]
    assert [memo(thing) for thing in things[:3]] == [1, 2, 3]
    assert [memo(thing) for thing in things[:3]] == [1, 2, 3]
    assert memo(things[3]) == 4, "the fourth takes the place of the first"
    assert memo(things[0]) == 5
    assert memo(things[3]) == 4


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"temperature": 0.0}, columns.KEEP),
        ({"temperature": 0.0, "logprobs": 1}, columns.KEEP),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, columns.LARGEST),
        ({"temperature": 0.0, "min_tokens": 1}, columns.LARGEST),
        ({}, columns.DRAW),
        ({"top_k": 3}, columns.FILTERED),
        ({"top_p": 0.5}, columns.FILTERED),
        ({"min_p": 0.5}, columns.FILTERED),
    ],
)
def test_a_row_is_drawn_in_the_cheapest_way_that_it_allows(fields, mode):
    row = Row(request(**fields))
    assert row.mode == mode
    assert wants_of(row.params).plain == (fields == {"temperature": 0.0})


def test_parameters_tell_rows_apart_by_seed_place_and_number():
    rows = [
        Row(request(seed=2**40 + 5)),
        Row(request(arrival=7)),
        Row(request(arrival=7), num_pending=1),
        Row(request(output=[4, 4])),
        Row(request(seed=-1)),
    ]
    made = parameters(rows, [row.mode for row in rows], engine_seed=2**33 + 9).view(np.uint32)
    keys = made[:, [columns.KEY_LOW, columns.KEY_HIGH, columns.POSITION, columns.STREAM]].tolist()
    assert keys == [
        [5, 256, 0, 0], [9, 2, 0, 7], [9, 2, 1, 7], [9, 2, 2, 0], [2**32 - 1, 2**32 - 1, 0, 0],
    ]  # fmt: skip
    assert made[:, columns.DOMAIN].tolist() == [0, 1, 1, 1, 0]


def test_a_share_whose_token_is_still_to_be_drawn_counts_it():
    drawing = request(prompt=(1, 2), output=[5])
    assert rows_of(ScheduledRequest(drawing, 2, 1, True)) == [Row(drawing, 0, 0)]
    assert rows_of(ScheduledRequest(drawing, 3, 1, True, follows=0)) == [Row(drawing, 0, 1)]
    drawing.draft_token_ids = [8, 9]
    assert [row.num_output for row in rows_of(ScheduledRequest(drawing, 2, 3, True))] == [1, 2, 3]
