"""Small word problems from templates, answered in the form of GSM8K.

The reply works in sentences, one calculation each, and ends with a line ``#### 42``.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

from minuet.evals.tasks.base import Problem, Split, ask, draw_problems, random_of
from minuet.evals.tasks.words import BOXES, ITEMS, NAMES

NAME = "wordproblems"

Template = Callable[[random.Random], tuple[tuple[int, ...], str, str, int]]


def problems(split: Split, seed: int, count: int) -> Iterator[Problem]:
    """Problems of this task.

    Args:
        split: which side of the line.
        seed: of the draw.
        count: how many.

    Raises:
        ConfigError: fewer held-out problems than ``count``.
    """
    rng = random_of(NAME, split, seed)

    def draw() -> tuple[tuple[object, ...], Callable[[], Problem]]:
        kind = rng.randrange(len(_TEMPLATES))
        numbers, question, worked, result = _TEMPLATES[kind](rng)
        # names and things do not make another problem of the same numbers
        return (NAME, kind, *numbers), partial(_problem, kind, question, worked, result)

    return draw_problems(draw, split, count)


def score(problem: Problem, text: str) -> bool:
    """Whether the number after the last ``####`` is the answer."""
    _, mark, end = text.rpartition("####")
    return bool(mark) and end.strip().removesuffix(".").replace(",", "") == problem.answer


def _problem(kind: int, question: str, worked: str, result: int) -> Problem:
    return Problem(
        task=NAME,
        messages=ask(question),
        answer=str(result),
        reply={"role": "assistant", "content": f"{worked}\n#### {result}"},
        meta={"template": kind},
    )


def _buy_and_give(rng: random.Random) -> tuple[tuple[int, ...], str, str, int]:
    who, what = rng.choice(NAMES), rng.choice(ITEMS)
    a, b = rng.randint(2, 49), rng.randint(2, 49)
    c = rng.randint(1, a + b - 1)
    return (
        (a, b, c),
        f"{who} has {a} {what}. {who} buys {b} more and gives away {c}. "
        f"How many {what} does {who} have now?",
        f"After buying, {who} has {a} + {b} = {a + b} {what}. "
        f"After giving away {c}, there are {a + b} - {c} = {a + b - c} {what}.",
        a + b - c,
    )


def _boxes(rng: random.Random) -> tuple[tuple[int, ...], str, str, int]:
    who, what, box = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(BOXES)
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 49)
    return (
        (a, b, c),
        f"{who} has {a} {box} with {b} {what} in each. {who} finds {c} more {what}. "
        f"How many {what} are there in all?",
        f"There are {a} * {b} = {a * b} {what} in the {box}. "
        f"With the others there are {a * b} + {c} = {a * b + c} {what}.",
        a * b + c,
    )


def _compare(rng: random.Random) -> tuple[tuple[int, ...], str, str, int]:
    (who, other), what = rng.sample(NAMES, 2), rng.choice(ITEMS)
    a, b = rng.randint(2, 49), rng.randint(1, 49)
    return (
        (a, b),
        f"{who} has {a} {what}. {other} has {b} more {what} than {who}. "
        f"How many {what} do they have together?",
        f"{other} has {a} + {b} = {a + b} {what}. "
        f"Together they have {a} + {a + b} = {2 * a + b} {what}.",
        2 * a + b,
    )


def _share(rng: random.Random) -> tuple[tuple[int, ...], str, str, int]:
    who, what, box = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(BOXES)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    c = rng.randint(1, a * b - 1)
    return (
        (a, b, c),
        f"{who} fills {a} {box} with {b} {what} each and then takes out {c} {what}. "
        f"How many {what} are left?",
        f"There are {a} * {b} = {a * b} {what}. "
        f"After taking out {c}, there are {a * b} - {c} = {a * b - c} {what}.",
        a * b - c,
    )


_TEMPLATES: tuple[Template, ...] = (_buy_and_give, _boxes, _compare, _share)
