"""What every task shares: the problem, its side of the train/held-out line, seeded draws. No torch.

A problem belongs to ``heldout`` or to ``train`` by a hash of its content alone, so a held-out
problem can occur in no training set, whatever the seeds, counts and options of the two.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minuet.errors import ConfigError

Split = Literal["train", "heldout"]
HELD_OUT_SHARE = 0.125
"""Part of every task's problems that training never sees."""

_MOST_MISSES = 20_000  # draws in a row that give no new problem: the task has no more


@dataclass(frozen=True, slots=True)
class Problem:
    """A chat problem with a known answer.

    Attributes:
        task: name of the task, a key of :data:`minuet.evals.tasks.TASKS`.
        messages: the conversation up to the assistant's turn, as the chat API takes it.
        answer: what :func:`minuet.evals.tasks.score` looks for.
        reply: the assistant's message in full, what training teaches: ``content``, and where the
            task has them ``reasoning_content`` and ``tool_calls`` (arguments are objects).
        tools: function tools on offer, as the chat API takes them; None: none.
        meta: facts to group results by (operator, depth, length).
    """

    task: str
    messages: tuple[Mapping[str, Any], ...]
    answer: str
    reply: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


def split_of(*content: object) -> Split:
    """The side of the line that this content is on.

    Args:
        content: JSON values that say what the problem is, and nothing of how it is put.
    """
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64 else "train"


def random_of(*seeds: object) -> random.Random:
    """A generator that depends on the seeds' text alone, the same in every process."""
    return random.Random("/".join(map(str, seeds)))


def draw_problems(
    draw: Callable[[], tuple[tuple[object, ...], Callable[[], Problem]]], split: Split, count: int
) -> Iterator[Problem]:
    """Draw until ``count`` problems are on the wanted side; held-out ones are all different.

    Args:
        draw: returns a problem's content, as :func:`split_of` takes it, and what builds it.
        split: the wanted side.
        count: how many.

    Raises:
        ConfigError: the task has fewer held-out problems than that.
    """
    seen: set[tuple[object, ...]] = set()
    misses = 0
    while count > 0:
        content, build = draw()
        if split_of(*content) != split or content in seen:
            misses += 1
            if misses > _MOST_MISSES:
                raise ConfigError(
                    "too few problems in this task", got=len(seen), expected=f"{count} more"
                )
            continue
        if split == "heldout":
            seen.add(content)
        misses, count = 0, count - 1
        yield build()


def ask(text: str) -> tuple[Mapping[str, Any], ...]:
    """A conversation of one question."""
    return ({"role": "user", "content": text},)


def units(text: str) -> int:
    """Words, digits and marks: the length of a text in tokens where each of these is one token."""
    return len(re.findall(r"\d|[^\W\d]+|[^\w\s]", text))
