"""Generated chat problems with known answers: the one home of their wording. No torch.

Training and evaluation draw from the same generators, on two sides of a line that a hash draws
(:func:`minuet.evals.tasks.base.split_of`)::

    for problem in tasks.problems("arithmetic", "heldout", seed=0, count=200):
        right = tasks.score(problem, answer_to(problem.messages, problem.tools))
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from minuet.errors import ConfigError
from minuet.evals.tasks import arithmetic, lists, needle, toolcalls, wordproblems
from minuet.evals.tasks.base import Problem, Split, split_of
from minuet.evals.tasks.needle import Haystack, Needle, haystack

__all__ = [
    "TASKS",
    "Haystack",
    "Needle",
    "Problem",
    "Split",
    "haystack",
    "problems",
    "score",
    "split_of",
]

TASKS: Mapping[str, ModuleType] = MappingProxyType(
    {module.NAME: module for module in (arithmetic, needle, lists, wordproblems, toolcalls)}
)
"""Task name -> module with ``problems(split, seed, count, **options)`` and ``score``."""


def problems(task: str, split: Split, seed: int, count: int, **options: Any) -> Iterator[Problem]:
    """Problems of a task; the same arguments give the same problems in every process.

    Args:
        task: key of :data:`TASKS`.
        split: ``train`` or ``heldout``.
        seed: of the draw.
        count: how many.
        options: the task's own.

    Raises:
        ConfigError: no such task, or too few problems.
    """
    draw: Callable[..., Iterator[Problem]] = _module(task).problems
    return draw(split, seed, count, **options)


def score(problem: Problem, text: str) -> bool:
    """Whether an answer is right.

    Args:
        problem: what was asked.
        text: the answer without its reasoning; for ``toolcalls`` the call as JSON.
    """
    judge: Callable[[Problem, str], bool] = _module(problem.task).score
    return judge(problem, text)


def _module(task: str) -> ModuleType:
    if task not in TASKS:
        raise ConfigError("no such task", got=task, expected=", ".join(TASKS))
    return TASKS[task]
