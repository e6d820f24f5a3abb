"""Sums: ``+``, ``-`` and ``*`` of numbers below 100, and ``+`` of three digits.

The reply thinks in writing, column by column from the ones, as one does on paper::

    17 * 23    17*3=0051 17*20=0340 0051+0340: 1+0+0=01 5+4+0=09 0+3+0=03 0+0+0=00 =0391
    23 - 57    -0057-0023: 7-3-0=04 5-2-0=03 0-0-0=00 0-0-0=00 =0034

A column is ``a+b+carry=`` followed by the next carry and the digit (``a-b-borrow=`` likewise).
"""

from collections.abc import Callable, Iterator
from functools import partial

from minuet.evals.tasks.base import Problem, Split, ask, draw_problems, random_of

NAME = "arithmetic"
OPERATORS = ("+", "-", "*", "+++")
"""Kinds of problems; ``+++`` is the sum of two three-digit numbers."""

_FORMS = ("{}", "{} =", "What is {}?")
_COLUMNS = 4


def problems(
    split: Split,
    seed: int,
    count: int,
    *,
    operators: tuple[str, ...] = OPERATORS,
) -> Iterator[Problem]:
    """Problems of this task.

    Args:
        split: which side of the line.
        seed: of the draw.
        count: how many.
        operators: kinds, drawn with equal probability.

    Raises:
        ConfigError: fewer held-out problems than ``count``.
    """
    rng = random_of(NAME, split, seed)

    def draw() -> tuple[tuple[object, ...], Callable[[], Problem]]:
        kind = rng.choice(operators)
        low, high = (100, 999) if kind == "+++" else (0, 99)
        a, b, form = rng.randint(low, high), rng.randint(low, high), rng.choice(_FORMS)
        # 23 * 17 must not be learned where 17 * 23 is held out
        operands = (a, b) if kind == "-" else sorted((a, b))
        return (NAME, kind[0], *operands), partial(_problem, kind, a, b, form)

    return draw_problems(draw, split, count)


def score(problem: Problem, text: str) -> bool:
    """Whether the answer is the number and nothing else."""
    return text.strip().removesuffix(".") == problem.answer


def _problem(kind: str, a: int, b: int, form: str) -> Problem:
    operator = kind[0]
    answer, thought = _WORKED[operator](a, b)
    return Problem(
        task=NAME,
        messages=ask(form.format(f"{a} {operator} {b}")),
        answer=str(answer),
        reply={"role": "assistant", "reasoning_content": thought, "content": str(answer)},
        meta={"operator": kind, "a": a, "b": b},
    )


def _plus(a: int, b: int) -> tuple[int, str]:
    steps, carry = [], 0
    for power in range(_COLUMNS):
        x, y = a // 10**power % 10, b // 10**power % 10
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total:02}")
        carry = total // 10
    return a + b, f"{a:04}+{b:04}: {' '.join(steps)} ={a + b:04}"


def _minus(a: int, b: int) -> tuple[int, str]:
    larger, smaller = max(a, b), min(a, b)
    steps, borrow = [], 0
    for power in range(_COLUMNS):
        x, y = larger // 10**power % 10, smaller // 10**power % 10
        rest = x - y - borrow
        steps.append(f"{x}-{y}-{borrow}={int(rest < 0)}{rest % 10}")
        borrow = int(rest < 0)
    sign = "-" if a < b else ""
    worked = f"{larger:04}-{smaller:04}: {' '.join(steps)} ={larger - smaller:04}"
    return a - b, sign + worked


def _times(a: int, b: int) -> tuple[int, str]:
    ones, tens = b % 10, b // 10 * 10
    _, worked = _plus(a * ones, a * tens)
    return a * b, f"{a}*{ones}={a * ones:04} {a}*{tens}={a * tens:04} {worked}"


_WORKED: dict[str, Callable[[int, int], tuple[int, str]]] = {
    "+": _plus,
    "-": _minus,
    "*": _times,
}
