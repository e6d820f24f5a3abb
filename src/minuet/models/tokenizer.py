"""Text to token ids and back (``tokenizer.json``), and what ends a sequence.

Detokenisation is by bytes: every token of a byte-level BPE stands for fixed bytes, and an
incremental UTF-8 decoder turns them into text. So a stream costs one table look-up per token, emits
a character as soon as its last byte is known, and its parts always add up to
:meth:`Tokenizer.decode` of the whole, also when a model writes bytes that are no UTF-8.
"""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from minuet.errors import CheckpointError


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        inner: a byte-level tokenizer.
    """

    def __init__(self, inner: tokenizers.Tokenizer):
        self._inner = inner
        # what the file may carry over from training; a prompt is never cut or filled up in silence
        inner.no_truncation()
        inner.no_padding()
        vocab = inner.get_vocab(with_added_tokens=True)
        self._bytes: list[bytes] = [b""] * (1 + max(vocab.values(), default=-1))
        for text, token_id in vocab.items():
            self._bytes[token_id] = _bytes_of(text)
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Read ``tokenizer.json``.

        Raises:
            CheckpointError: it is missing, unreadable, or not byte-level.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"no tokenizer in {folder}",
                got=sorted(p.name for p in path.parent.glob("*"))[:8],
                expected="tokenizer.json",
                remedy="download tokenizer.json of the checkpoint into the folder",
            )
        try:
            text = path.read_text(encoding="utf-8")
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as problem:  # noqa: BLE001  # the library raises Exception itself
            raise CheckpointError(
                f"cannot read {path}",
                got=str(problem)[:200],
                expected=f"a tokenizer that tokenizers {tokenizers.__version__} reads",
                remedy="download the file again, or update the tokenizers package",
            ) from None
        kinds = _decoder_kinds(json.loads(text).get("decoder"))
        if kinds != ["ByteLevel"]:
            raise CheckpointError(
                f"{path}: decoder", got=kinds or None, expected="ByteLevel: a byte-level BPE"
            )
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """Ids are below this; the model's logits may have more columns."""
        return len(self._bytes)

    @property
    def added_texts(self) -> tuple[str, ...]:
        """Tokens that are matched in a text before it is split: turn markers and the like."""
        return tuple(t.content for t in self._inner.get_added_tokens_decoder().values())

    def token_id(self, text: str) -> int | None:
        """Id of the token written exactly so, None if there is none."""
        found: int | None = self._inner.token_to_id(text)
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Markers in it become their ids; nothing is added in front or behind."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: an id without a token, which a padded vocabulary has, stands for nothing.
            skip_special: leave special tokens out.
        """
        parts = (self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, maybe part of a character."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def stream(self, *, skip_special: bool = True) -> "DecodeStream":
        """Decode ids that arrive one by one."""
        return DecodeStream(self, skip_special)


class DecodeStream:
    """Text of a growing sequence; the returned parts add up to ``decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_within = False  # a character: some of its bytes have come

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty within a character."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if not self._is_within and piece.isascii():  # most tokens, without the decoder's cost
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self._is_within = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """U+FFFD if the sequence ended within a character. The stream starts anew after this."""
        self._is_within = False
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What ``generation_config.json`` says; None where it does not.

    Attributes:
        eos_token_ids: ids that end a sequence, at least one.
        temperature: default sampling temperature.
        top_p: default nucleus.
        top_k: default number of candidates.
    """

    eos_token_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def read_generation_defaults(
    folder: Path | str | None, eos_of_config: tuple[int, ...]
) -> GenerationDefaults:
    """Read ``generation_config.json``; its stop ids win over those of ``config.json``.

    Args:
        folder: of the checkpoint; None for a model without one.
        eos_of_config: the stop ids of ``config.json``.

    Raises:
        CheckpointError: a file that is no JSON object, or no stop id in either file.
    """
    path = Path(folder) / "generation_config.json" if folder is not None else None
    values: dict[str, Any] = {}
    if path is not None and path.is_file():
        try:
            values = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as problem:
            raise CheckpointError(
                f"cannot read {path}", got=str(problem), expected="a JSON object"
            ) from None
    eos = values.get("eos_token_id")
    stated = eos if isinstance(eos, list) else [] if eos is None else [eos]
    eos_ids = tuple(int(i) for i in stated) or eos_of_config
    if not eos_ids:
        raise CheckpointError(
            "no end-of-sequence token",
            got=None,
            expected="eos_token_id in generation_config.json or config.json",
            remedy="add it; without it every answer runs to its length limit",
        )
    return GenerationDefaults(
        eos_ids, values.get("temperature"), values.get("top_p"), values.get("top_k")
    )


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_kinds(part)]
    return [decoder["type"]]


def _bytes_of(token: str) -> bytes:
    """Bytes of a token as the ByteLevel decoder sees them.

    A token is written with one printable character per byte; a token with any other character (an
    added one, with a space for instance) is taken as text.
    """
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes of Latin-1 are themselves, the others follow from U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in itself}
    others = [byte for byte in range(256) if byte not in set(itself)]
    return table | {chr(0x100 + n): byte for n, byte in enumerate(others)}
