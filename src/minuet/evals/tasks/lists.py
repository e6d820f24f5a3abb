"""Short lists: written out again, or in order."""

from collections.abc import Callable, Iterator
from functools import partial

from minuet.evals.tasks.base import Problem, Split, ask, draw_problems, random_of
from minuet.evals.tasks.words import ADJECTIVES, ANIMALS, THINGS

NAME = "lists"
KINDS = ("copy words", "copy numbers", "sort numbers")
_FORMS = {"copy": "Repeat this list: {}", "sort": "Sort these numbers: {}"}
_WORDS = (*ADJECTIVES, *ANIMALS, *THINGS)


def problems(
    split: Split,
    seed: int,
    count: int,
    *,
    kinds: tuple[str, ...] = KINDS,
    longest: int = 6,
) -> Iterator[Problem]:
    """Problems of this task.

    Args:
        split: which side of the line.
        seed: of the draw.
        count: how many.
        kinds: drawn with equal probability.
        longest: items at most; 3 at least.
    """
    rng = random_of(NAME, split, seed)

    def draw() -> tuple[tuple[object, ...], Callable[[], Problem]]:
        kind, size = rng.choice(kinds), rng.randint(3, longest)
        if kind == "copy words":
            items = rng.sample(_WORDS, size)
        else:
            items = [str(n) for n in rng.sample(range(100), size)]
        return (NAME, kind, *items), partial(_problem, kind, items)

    return draw_problems(draw, split, count)


def score(problem: Problem, text: str) -> bool:
    """Whether every item is there in its place."""
    return text.replace(",", " ").split() == problem.answer.split(" ")


def _problem(kind: str, items: list[str]) -> Problem:
    wanted = sorted(items, key=int) if kind.startswith("sort") else items
    answer = " ".join(wanted)
    return Problem(
        task=NAME,
        messages=ask(_FORMS[kind[:4]].format(" ".join(items))),
        answer=answer,
        reply={"role": "assistant", "content": answer},
        meta={"kind": kind, "items": len(items)},
    )
