"""Any text survives, streams add up, and what ends a sequence is known."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from minuet.errors import CheckpointError, ConfigError
from minuet.models.m3 import sample_tokenizer
from minuet.models.tokenizer import GenerationDefaults, Tokenizer, read_generation_defaults

INNER = sample_tokenizer.train(640)
TOKENIZER = Tokenizer(INNER)
# ids of every kind: bytes, merges, markers, and rows that have no token
IDS = st.lists(st.integers(0, 660), max_size=60)
# a shared machine may pause a process for longer than Hypothesis allows an example
PATIENT = settings(deadline=None, max_examples=60)


@PATIENT
@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special=False) == text


@PATIENT
@given(IDS, st.booleans())
def test_decode_is_that_of_the_library(ids: list[int], skip_special: bool) -> None:
    theirs = INNER.decode(ids, skip_special_tokens=skip_special)
    assert TOKENIZER.decode(ids, skip_special=skip_special) == theirs


@PATIENT
@given(IDS, st.booleans())
def test_stream_adds_up_to_decode(ids: list[int], skip_special: bool) -> None:
    stream = TOKENIZER.stream(skip_special=skip_special)
    parts = [stream.push(token_id) for token_id in ids] + [stream.finish()]
    assert "".join(parts) == TOKENIZER.decode(ids, skip_special=skip_special)


@PATIENT
@given(st.text())
def test_stream_never_takes_back(text: str) -> None:
    """Valid text is never shown as U+FFFD first, and every character comes with its last byte."""
    stream = TOKENIZER.stream(skip_special=False)
    shown, sent = "", b""
    for token_id in TOKENIZER.encode(text):
        shown += stream.push(token_id)
        sent += TOKENIZER.token_bytes(token_id)
        assert shown == sent.decode("utf-8", errors="ignore")
    assert stream.finish() == ""


def test_character_over_several_tokens() -> None:
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(256)}
    ids = [by_byte[bytes([byte])] for byte in "🎻".encode()]
    stream = TOKENIZER.stream()
    assert [stream.push(i) for i in ids] == ["", "", "", "🎻"]


def test_cut_character_is_shown_at_the_end() -> None:
    by_byte = {TOKENIZER.token_bytes(i): i for i in range(256)}
    stream = TOKENIZER.stream()
    assert stream.push(by_byte[b"\xf0"]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(by_byte[b"a"]) == "a"


def test_markers_are_one_token_and_special_ones_are_skipped() -> None:
    text = "]~b]ai\n<mm:think>why</mm:think>because]<]minimax[>[<tool_call>[e~["
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.token_id("[e~[") == ids[-1]
    assert TOKENIZER.decode(ids, skip_special=False) == text
    # what the model says stays readable for the parsers, turn markers go
    assert TOKENIZER.decode(ids) == "ai\n<mm:think>why</mm:think>because]<]minimax[>[<tool_call>"


def test_nothing_is_added_to_a_prompt() -> None:
    assert TOKENIZER.encode("") == []
    assert TOKENIZER.encode("a") == [TOKENIZER.token_id("a")]


def test_ids_without_a_token_stand_for_nothing() -> None:
    assert TOKENIZER.vocab_size == 640
    assert TOKENIZER.token_bytes(640) == b""


def test_added_token_with_a_space_is_text() -> None:
    inner = tokenizers.Tokenizer.from_str(INNER.to_str())
    inner.add_tokens(["]<]start of\tworld é[>["])
    ours = Tokenizer(inner)
    assert ours.decode([640]) == inner.decode([640]) == "]<]start of\tworld é[>["


def test_truncation_in_the_file_cuts_no_prompt(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(INNER.to_str())
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("xyz xyz xyz xyz")) > 8


# --- loading -------------------------------------------------------------------------------------


def test_written_tokenizer_is_read(checkpoint: Callable[..., Path]) -> None:
    loaded = Tokenizer.load(checkpoint("tiny"))
    assert loaded.encode("A minuet is danced") == TOKENIZER.encode("A minuet is danced")
    assert loaded.special_ids == TOKENIZER.special_ids


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff\xfe"])
def test_unreadable_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot read"):
        Tokenizer.load(tmp_path)


def test_tokenizer_that_is_not_byte_level(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="ByteLevel"):
        Tokenizer.load(tmp_path)


# --- the sample tokenizer ------------------------------------------------------------------------


def test_training_is_reproducible() -> None:
    sample_tokenizer.train.cache_clear()
    assert sample_tokenizer.train(640).to_str() == INNER.to_str()


def test_large_vocabulary_has_unused_rows() -> None:
    inner = sample_tokenizer.train(5000)
    assert inner.get_vocab_size() < 2000
    assert max(sample_tokenizer.marker_ids(inner).values()) == inner.get_vocab_size() - 1


def test_vocabulary_needs_room_for_bytes_and_markers() -> None:
    smallest = sample_tokenizer.train(sample_tokenizer.MIN_VOCAB)
    assert Tokenizer(smallest).decode(Tokenizer(smallest).encode("ünï🎻")) == "ünï🎻"
    with pytest.raises(ConfigError, match="268"):
        sample_tokenizer.train(sample_tokenizer.MIN_VOCAB - 1)


# --- generation defaults -------------------------------------------------------------------------


def test_defaults_of_a_written_folder(checkpoint: Callable[..., Path]) -> None:
    eos = TOKENIZER.token_id("[e~[")
    assert eos is not None
    assert read_generation_defaults(checkpoint("tiny"), (0,)) == GenerationDefaults(
        (eos,), temperature=1.0, top_p=0.95, top_k=40
    )


@pytest.mark.parametrize(("stated", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, (9,))])
def test_generation_config_wins_over_config(
    tmp_path: Path, stated: object, expected: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    assert read_generation_defaults(tmp_path, (9,)).eos_token_ids == expected


def test_without_generation_config(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        assert read_generation_defaults(folder, (9,)) == GenerationDefaults((9,))


def test_without_any_stop_id(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="end-of-sequence"):
        read_generation_defaults(tmp_path, ())


def test_broken_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(CheckpointError, match="generation_config"):
        read_generation_defaults(tmp_path, (9,))
