"""Tasks as questions: the request to send, the right answer, and how an answer is graded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minuet.errors import ConfigError
from minuet.evals import gsm8k, tasks
from minuet.evals.api import CHAT, COMPLETIONS
from minuet.evals.records import key_of

CORRECT = "correct"
"""The metric of the generated tasks."""

_ROUND = 4  # groups by a number: to a quarter of its range


@dataclass(frozen=True, slots=True)
class Question:
    """One request and how its answer is graded.

    Attributes:
        id: place in the task, as people refer to it.
        group: what results are broken down by; empty: nothing.
        route: where it is sent.
        body: the request without model and sampling.
        expected: the right answer.
        grade: output -> right or wrong, by metric.
    """

    id: str
    group: str
    route: str
    body: Mapping[str, Any]
    expected: str
    grade: Callable[[str], dict[str, bool]]

    @property
    def key(self) -> str:
        """Names the request and its answer: the same in every run that asks the same."""
        return key_of([self.route, self.body, self.expected])

    @property
    def text(self) -> str:
        """What the model reads, but for the template."""
        if self.route == COMPLETIONS:
            return str(self.body["prompt"])
        return "\n".join(str(message["content"]) for message in self.body["messages"])


@dataclass(frozen=True, slots=True)
class Task:
    """Questions and what they are asked with.

    Attributes:
        name: of the task.
        metric: the score that counts.
        questions: in order.
        options: what they were made from; not how many, so that a longer run goes on from a
            shorter one.
        max_tokens: of an answer, where the caller does not say.
    """

    name: str
    metric: str
    questions: tuple[Question, ...]
    options: Mapping[str, Any]
    max_tokens: int


def generated(name: str, *, seed: int, count: int, split: str = "heldout", **options: Any) -> Task:
    """A task of :mod:`minuet.evals.tasks`, asked as chat.

    Args:
        name: key of :data:`minuet.evals.tasks.TASKS`.
        seed: of the draw.
        count: questions.
        split: ``heldout``, which training never sees, or ``train``.
        options: the task's own.

    Raises:
        ConfigError: no such task or option, or fewer problems than asked for.
    """
    try:
        drawn = list(tasks.problems(name, split, seed, count, **options))  # type: ignore[arg-type]
    except TypeError as problem:
        raise ConfigError(f"options of {name}", got=options, expected=str(problem)) from None
    questions = tuple(
        Question(
            id=f"{name}/{number}",
            group=_group(problem),
            route=CHAT,
            body=_chat(problem),
            expected=problem.answer,
            grade=partial(_grade, problem),
        )
        for number, problem in enumerate(drawn)
    )
    made_from = {"split": split, "seed": seed, **options}
    return Task(name, CORRECT, questions, made_from, max_tokens=512)


def _grade(problem: tasks.Problem, output: str) -> dict[str, bool]:
    return {CORRECT: tasks.score(problem, output)}


def _chat(problem: tasks.Problem) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [dict(message) for message in problem.messages]}
    if problem.tools:
        body["tools"] = [dict(tool) for tool in problem.tools]
    return body


def _group(problem: tasks.Problem) -> str:
    """By the task's first fact; a depth by the quarter of the text."""
    if "depth" in problem.meta:
        quarter = min(_ROUND - 1, int(problem.meta["depth"] * _ROUND))
        return f"depth {quarter / _ROUND:.2f}-{(quarter + 1) / _ROUND:.2f}"
    name, value = next(iter(problem.meta.items()), ("", ""))
    return f"{name} {value}".strip()


def gsm8k_task(
    data: Path,
    *,
    fewshot_data: Path | None = None,
    fewshot: int = gsm8k.FEWSHOT,
    chat: bool = False,
    limit: int | None = None,
    metric: str = "flexible-extract",
) -> Task:
    """GSM8K from a local file in the public format; see :mod:`minuet.evals.gsm8k`.

    Args:
        data: the questions.
        fewshot_data: where examples come from; None takes them from ``data``.
        fewshot: examples before each question.
        chat: ask as a chat with a turn for each example, else as a text to continue.
        limit: the first questions only.
        metric: ``flexible-extract`` or ``strict-match``; both are recorded.

    Raises:
        ConfigError: a file that cannot be read or is too small.
    """
    documents = gsm8k.read(data)
    pool = None if fewshot_data is None else gsm8k.read(fewshot_data)
    shown = gsm8k.examples(documents, pool, fewshot)
    questions = tuple(
        Question(
            id=f"gsm8k/{number}",
            group="",
            route=CHAT if chat else COMPLETIONS,
            body=_gsm8k_body(document, examples, chat=chat),
            expected=document.answer.rpartition("#### ")[2],
            grade=partial(gsm8k.grade, answer=document.answer),
        )
        for number, (document, examples) in enumerate(zip(documents, shown, strict=True))
        if limit is None or number < limit
    )
    # what the files hold is in the questions' keys; their names say nothing
    options = {"fewshot": fewshot, "chat": chat, "own_examples": pool is None}
    return Task("gsm8k", metric, questions, options, gsm8k.MAX_TOKENS)


def _gsm8k_body(
    document: gsm8k.Document, shown: Sequence[gsm8k.Document], *, chat: bool
) -> dict[str, Any]:
    stop = list(gsm8k.STOP)
    if chat:
        return {"messages": gsm8k.messages(document, shown), "stop": stop}
    return {"prompt": gsm8k.prompt(document, shown), "stop": stop}
