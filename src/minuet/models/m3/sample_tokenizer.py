"""A small real tokenizer for generated checkpoints: byte-level BPE, with M3's markers.

It is trained on ``corpus.txt``, two pages written for this purpose, in milliseconds. All
256 bytes are tokens, so any text survives encoding and decoding.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from minuet.errors import ConfigError

_HERE = Path(__file__).parent

PAD, TURN, EOS, UNKNOWN, BOS = "]!p~[", "]~b]", "[e~[", "]!d~[", "]~!b["
IMAGE, VIDEO = "]<]image[>[", "]<]video[>["

# In the order of the released ids. Turn markers and placeholders are "special": decoding leaves
# them out. What the model writes as part of an answer is not: the parsers of reasoning and tool
# calls read it from the text.
MARKERS: tuple[tuple[str, bool], ...] = (
    (PAD, True),
    (TURN, True),
    (EOS, True),
    (UNKNOWN, True),
    (IMAGE, True),
    (VIDEO, True),
    ("]<]start of image[>[", True),
    ("]<]end of image[>[", True),
    (BOS, True),
    ("<mm:think>", False),
    ("</mm:think>", False),
    ("]<]minimax[>[", False),
)
MIN_VOCAB = 256 + len(MARKERS)


@cache
def train(vocab_size: int) -> Tokenizer:
    """A tokenizer with at most ``vocab_size`` tokens.

    The markers come last. The corpus yields some 1,600 tokens; a larger vocabulary has unused rows,
    as the released model's has.

    Raises:
        ConfigError: no room for the bytes and the markers.
    """
    if vocab_size < MIN_VOCAB:
        raise ConfigError(
            "vocabulary too small for a byte-level tokenizer",
            got=vocab_size,
            expected=f"at least {MIN_VOCAB}: 256 bytes and {len(MARKERS)} markers",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (_HERE / "corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return add_markers(tokenizer)


def add_markers(tokenizer: Tokenizer) -> Tokenizer:
    """Give a byte-level tokenizer M3's markers, as its last ids; returns it."""
    tokenizer.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in MARKERS]
    )
    return tokenizer


def marker_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Id of each marker, by its text."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    return {text: vocab[text] for text, _ in MARKERS}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_positions: int) -> None:
    """Write ``tokenizer.json``, its two companions for other libraries, and the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNKNOWN}
    _write_json(folder / "special_tokens_map.json", named)
    ids = marker_ids(tokenizer)
    added = {
        str(ids[text]): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for text, special in MARKERS
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_positions,
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
        },
    )
    (folder / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")


def chat_template() -> str:
    """The template of generated checkpoints: M3's turn layout, our prose."""
    return (_HERE / "chat_template.jinja").read_text(encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
