"""A code to be found in a long text: key-value retrieval at any depth.

The text is plain sentences with facts strewn in, ``The code of the amber falcon is 4821.``; every
key is a pair of words, and single words of it stand elsewhere as well. Several questions share one
text, so that a prefix cache makes asking cheap.

A fact is held out by itself, key and value: a held-out text has only held-out facts.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from minuet.errors import ConfigError
from minuet.evals.tasks.base import Problem, Split, ask, random_of, split_of, units
from minuet.evals.tasks.words import ADJECTIVES, ANIMALS, NAMES, PLACES, THINGS, VERBS

NAME = "needle"
FACT = "The code of the {} is {}."
QUESTION = "What is the code of the {}?"
UNITS_PER_FACT = 128
"""Length of text per fact where the caller does not say how many."""


@dataclass(frozen=True, slots=True)
class Needle:
    """A fact of a text.

    Attributes:
        key: two words.
        value: four digits.
        depth: where it stands: 0 the beginning of the text, 1 its end.
    """

    key: str
    value: str
    depth: float


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text and what may be asked of it.

    Attributes:
        text: sentences.
        length: of the text, in units (see :func:`minuet.evals.tasks.base.units`).
        needles: every fact in it, in order.
    """

    text: str
    length: int
    needles: tuple[Needle, ...]

    def problem(self, needle: Needle) -> Problem:
        """The question for one fact; questions of one text share all but their last line."""
        return Problem(
            task=NAME,
            messages=ask(f"{self.text}\n\n{QUESTION.format(needle.key)}"),
            answer=needle.value,
            reply={"role": "assistant", "content": needle.value},
            meta={"length": self.length, "depth": round(needle.depth, 4), "key": needle.key},
        )


def haystack(split: Split, seed: object, length: int, *, facts: int | None = None) -> Haystack:
    """A text with facts at even distances.

    Args:
        split: side of the line of every fact.
        seed: of the draw.
        length: of the text in units, within a sentence; for minuet-tiny a unit is a token.
        facts: how many; None: one in :data:`UNITS_PER_FACT`.

    Raises:
        ConfigError: no room for that many facts, or no more keys.
    """
    rng = random_of(NAME, split, seed, length)
    count = max(1, length // UNITS_PER_FACT) if facts is None else facts
    most = min(length // 24, len(ADJECTIVES) * len(ANIMALS) // 4)
    if not 1 <= count <= most:
        raise ConfigError("facts in a text", got=count, expected=f"1 to {most}")
    keys = rng.sample(range(len(ADJECTIVES) * len(ANIMALS)), count)
    parts: list[str] = []
    used = 0
    needles = []
    for number, key_id in enumerate(keys):
        # somewhere in its own share of the text
        start = (number + rng.random()) * (length - 16) / count
        used += _fill(rng, parts, start - used)
        key = f"{ADJECTIVES[key_id % len(ADJECTIVES)]} {ANIMALS[key_id // len(ADJECTIVES)]}"
        value = _value(rng, split, key)
        needles.append(Needle(key, value, used / length))
        parts.append(FACT.format(key, value))
        used += units(parts[-1])
    used += _fill(rng, parts, length - used)
    return Haystack(" ".join(parts), used, tuple(needles))


def problems(
    split: Split,
    seed: int,
    count: int,
    *,
    length: int = 4096,
    questions: int = 8,
    facts: int | None = None,
    depth: float | None = None,
) -> Iterator[Problem]:
    """Problems of this task; those of one text follow each other.

    Args:
        split: which side of the line.
        seed: of the draw.
        count: how many.
        length: of the text, in units.
        questions: asked of one text, at even depths from its beginning to its end.
        facts: in one text; None: one in :data:`UNITS_PER_FACT`, and one per question at least.
        depth: ask only for the fact nearest to this depth, of a new text each time; 0 to 1.
    """
    wanted = 1 if depth is not None else questions
    held = max(wanted, length // UNITS_PER_FACT) if facts is None else facts
    for number in range(count):
        text_number, question = divmod(number, wanted)
        if question == 0:
            stack = haystack(split, f"{seed}/{text_number}", length, facts=held)
        if depth is None:
            place = question * (held - 1) // max(1, wanted - 1)
        else:
            place = min(range(held), key=lambda n: abs(stack.needles[n].depth - depth))
        yield stack.problem(stack.needles[place])


def score(problem: Problem, text: str) -> bool:
    """Whether the answer is the code and nothing else."""
    return text.strip().removesuffix(".") == problem.answer


def _value(rng: random.Random, split: Split, key: str) -> str:
    while True:
        value = f"{rng.randrange(10_000):04}"
        if split_of(NAME, key, value) == split:
            return value


def _fill(rng: random.Random, parts: list[str], room: float) -> int:
    """Append sentences while they fit; the units appended."""
    used = 0
    while True:
        sentence = _sentence(rng)
        size = units(sentence)
        if used + size > room:
            return used
        parts.append(sentence)
        used += size


_DAYS = tuple(str(n) for n in range(2, 100))
_SENTENCES: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("The {} {} stood near the {}.", (ADJECTIVES, THINGS, PLACES)),
    ("{} {} the {} behind the {} {}.", (NAMES, VERBS, THINGS, ADJECTIVES, THINGS)),
    ("In the {}, {} {} a {} {}.", (PLACES, NAMES, VERBS, ADJECTIVES, THINGS)),
    ("The {} slept under the {} in the {}.", (ANIMALS, THINGS, PLACES)),
    ("{} {} the {} for {} days.", (NAMES, VERBS, ANIMALS, _DAYS)),
    ("On the way to the {} there was a {} {}.", (PLACES, ADJECTIVES, ANIMALS)),
)


def _sentence(rng: random.Random) -> str:
    form, words = rng.choice(_SENTENCES)
    return form.format(*map(rng.choice, words))
