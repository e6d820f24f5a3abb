"""Text as it arrives: nothing is lost, and stop strings are found wherever tokens cut them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from minuet.engine.detok import Detokenizer


class Pieces:
    """A stream whose tokens are indices of given pieces."""

    def __init__(self, pieces):
        self._pieces = pieces

    def push(self, token_id):
        return self._pieces[token_id]

    def finish(self):
        return ""


def feed(pieces, stop=()):
    detok = Detokenizer(Pieces(pieces), tuple(stop))
    shown = []
    for token in range(len(pieces)):
        found = detok.push(token)
        shown.append(detok.visible)
        if found is not None:
            return detok, found, shown
    detok.finish()
    return detok, None, shown


def test_a_stop_string_is_cut_wherever_tokens_split_it():
    for cut in range(1, 4):
        text = "abcSTOPdef"
        detok, found, _ = feed([text[: 3 + cut], text[3 + cut :]], ["STOP"])
        assert found == "STOP"
        assert detok.text == "abc"


def test_the_earliest_stop_string_wins():
    detok, found, _ = feed(["one two three"], ["three", "two"])
    assert (found, detok.text) == ("two", "one ")


def test_a_tail_that_may_become_a_stop_string_is_held_back_and_given_out_at_the_end():
    detok, found, shown = feed(["ab", "ST", "x", "ST"], ["STOP"])
    assert found is None
    assert shown == ["ab", "ab", "abSTx", "abSTx"]
    assert detok.visible == "abSTxST"


def test_a_stop_string_before_min_tokens_is_plain_text():
    detok = Detokenizer(Pieces(["STOP", " and ", "STOP"]), ("STOP",))
    assert detok.push(0, may_stop=False) is None
    assert detok.push(1) is None
    assert detok.push(2) == "STOP"
    assert detok.text == "STOP and "


@given(
    st.text("abS", max_size=30),
    st.lists(st.integers(1, 4), max_size=30),
    st.sampled_from(["S", "ab", "aSa", "bbb"]),
)
def test_any_chunking_gives_the_same_text_and_the_same_stop(text, sizes, stop):
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    pieces.append(rest)
    detok, found, shown = feed(pieces, [stop])
    head, mark, _ = text.partition(stop)
    assert (detok.text, found) == (head, mark or None)
    for earlier, later in pairwise(shown):
        assert later.startswith(earlier), "text that was shown was taken back"
