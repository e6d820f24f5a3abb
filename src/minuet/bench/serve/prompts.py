"""What is asked of a server: random prompts, or those of a file.

Lengths vary by default. A load of one length alone hides what the next length costs: a kernel that
is compiled for it, scratch that grows with it, a graph that is not there.
"""

import json
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minuet.errors import ConfigError

# A conversation outside these is left out, as vLLM's benchmark does: too short to time a token,
# too long for small servers.
_FEWEST_TOKENS, _MOST_PROMPT_TOKENS, _MOST_TOKENS = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's question.

    Attributes:
        content: text, or token ids.
        output_tokens: how many tokens to ask for.
    """

    content: str | list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Lengths of random prompts and answers, uniform around a mean.

    Attributes:
        input_len: mean prompt tokens, the shared prefix not counted.
        output_len: mean output tokens.
        range_ratio: r in [0, 1): lengths are uniform from ``(1 - r) * mean`` to ``(1 + r) * mean``.
        prefix_len: tokens that all prompts begin with.
    """

    input_len: int
    output_len: int
    range_ratio: float
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError(
                "bad value for --random-range-ratio", got=self.range_ratio, expected="0 to below 1"
            )
        for flag, value in (
            ("--random-input-len", self.input_len),
            ("--random-output-len", self.output_len),
        ):
            if value < 1:
                raise ConfigError(f"bad value for {flag}", got=value, expected="at least 1")


def random_prompts(count: int, lengths: RandomLengths, vocab: int, seed: int) -> list[Prompt]:
    """Prompts of random token ids.

    Args:
        count: how many.
        lengths: how long.
        vocab: ids are below it.
        seed: the same seed gives the same prompts.
    """
    draw = np.random.default_rng(seed)
    prefix = draw.integers(0, vocab, lengths.prefix_len).tolist()
    inputs = _lengths(draw, count, lengths.input_len, lengths.range_ratio)
    outputs = _lengths(draw, count, lengths.output_len, lengths.range_ratio)
    return [
        Prompt(prefix + draw.integers(0, vocab, tokens).tolist(), output)
        for tokens, output in zip(inputs, outputs, strict=True)
    ]


def _lengths(draw: np.random.Generator, count: int, mean: int, ratio: float) -> list[int]:
    low = max(1, math.floor(mean * (1.0 - ratio)))
    high = math.ceil(mean * (1.0 + ratio))
    found: list[int] = draw.integers(low, high + 1, count).tolist()
    return found


def custom_prompts(path: Path, count: int, output_len: int) -> list[Prompt]:
    """The first prompts of a JSONL file.

    A line has ``prompt``, a text or token ids, and may have ``output_tokens``.

    Args:
        path: the file.
        count: how many.
        output_len: output tokens where a line does not say.

    Raises:
        ConfigError: an unreadable file, a line without a prompt, or too few lines.
    """
    found = []
    for number, line in enumerate(_objects(path), 1):
        prompt = line.get("prompt")
        if not prompt or not isinstance(prompt, str | list):
            raise ConfigError(f"{path}, entry {number}", got=sorted(line), expected="a `prompt`")
        found.append(Prompt(prompt, int(line.get("output_tokens") or output_len)))
        if len(found) == count:
            return found
    raise _too_few(path, len(found), count)


async def sharegpt_prompts(
    path: Path,
    count: int,
    output_len: int | None,
    length: Callable[[str], Awaitable[int]],
    seed: int,
) -> list[Prompt]:
    """First turns of shuffled conversations in the ShareGPT format, a JSON list or JSONL.

    Args:
        path: the file; entries have ``conversations``, a list of ``value`` texts.
        count: how many.
        output_len: output tokens; None: as long as the recorded answer.
        length: tokens of a text.
        seed: of the shuffle.

    Raises:
        ConfigError: an unreadable file, or too few conversations of a useful length.
    """
    talks = [turns for entry in _objects(path) if len(turns := entry.get("conversations", [])) > 1]
    found: list[Prompt] = []
    for place in np.random.default_rng(seed).permutation(len(talks)):
        question, answer = (str(turn.get("value", "")) for turn in talks[place][:2])
        prompt_tokens = await length(question)
        tokens = output_len or await length(answer)
        if (
            min(prompt_tokens, tokens) >= _FEWEST_TOKENS
            and prompt_tokens <= _MOST_PROMPT_TOKENS
            and prompt_tokens + tokens <= _MOST_TOKENS
        ):
            found.append(Prompt(question, tokens))
        if len(found) == count:
            return found
    raise _too_few(path, len(found), count)


def _too_few(path: Path, there: int, wanted: int) -> ConfigError:
    # asking a prompt twice would measure the prefix cache
    return ConfigError(
        f"{path} has too few prompts",
        got=there,
        expected=f"--num-prompts {wanted} and the warm-ups",
        remedy=f"use --num-prompts {there} or fewer",
    )


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Entries of a JSON list, or of a file with one object per line."""
    try:
        text = path.read_text(encoding="utf-8")
        entries: Sequence[Any]
        if text.lstrip().startswith("["):
            entries = json.loads(text)
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"cannot read {path}", got=str(problem), expected="a JSON list or a JSONL file"
        ) from None
    for entry in entries:
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}", got=type(entry).__name__, expected="JSON objects")
        yield entry
