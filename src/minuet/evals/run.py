"""Asks the questions of a task, several at a time, and keeps every answer as it comes."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tqdm import tqdm

from minuet.evals.api import Reply, Server, ServerError
from minuet.evals.questions import Question, Task
from minuet.evals.records import Answer, Records, Run, key_of
from minuet.evals.stats import wilson

_SHARED_CHARS = 1024

# settings of a server that name the machine or the port and not the answers
_PLACE = frozenset(
    ("host", "port", "kv_cache_memory", "gpu_memory_utilization", "served_model_name")
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn; what is None is left to the server.

    Attributes:
        temperature: 0 takes the most likely token.
        max_tokens: of an answer; None: the task's own limit.
        seed: of the draw.
        chat_template_kwargs: variables of the chat template, for chats.
    """

    temperature: float = 0.0
    max_tokens: int | None = None
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, task: Task) -> dict[str, Any]:
        """As the API takes them."""
        found: dict[str, Any] = {
            "temperature": self.temperature,
            "max_tokens": task.max_tokens if self.max_tokens is None else self.max_tokens,
            "seed": self.seed,
        }
        if self.chat_template_kwargs:
            found["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return found


@dataclass(frozen=True, slots=True)
class Score:
    """A share of right answers.

    Attributes:
        right: questions answered rightly.
        asked: questions; one without an answer counts as wrong.
    """

    right: int
    asked: int

    @property
    def value(self) -> float:
        """Between 0 and 1; 0 without questions."""
        return self.right / self.asked if self.asked else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson, 95 %."""
        return wilson(self.right, self.asked)

    def as_json(self) -> dict[str, Any]:
        """Counts, share, and the two ends of the interval."""
        low, high = self.interval
        return {
            "right": self.right,
            "asked": self.asked,
            "value": round(self.value, 6),
            "interval_95": [round(low, 6), round(high, 6)],
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a run.

    Attributes:
        run: what was asked, with which settings.
        answers: one per question, in the order of the task.
        resumed: of them, how many were there already.
    """

    run: Run
    answers: tuple[Answer, ...]
    resumed: int = 0

    def score(self, metric: str = "", group: str | None = None) -> Score:
        """The share of right answers by a metric, the run's own if none is named."""
        chosen = [a for a in self.answers if group in (None, a.group)]
        right = sum(a.scores.get(metric or self.run.metric, False) for a in chosen)
        return Score(right, len(chosen))

    @property
    def side(self) -> tuple[Run, dict[str, Answer]]:
        """What :func:`minuet.evals.compare.compare` takes."""
        return self.run, {a.question: a for a in self.answers if not a.error}

    @property
    def metrics(self) -> list[str]:
        """Every metric, the one that counts first."""
        named = dict.fromkeys([self.run.metric])
        for answer in self.answers:
            named |= dict.fromkeys(answer.scores)
        return list(named)

    @property
    def groups(self) -> list[str]:
        """What the answers are broken down by, sorted; empty where there is one group or none."""
        found = sorted({a.group for a in self.answers})
        return found if len(found) > 1 else []

    @property
    def errors(self) -> list[Answer]:
        """Questions without an answer."""
        return [a for a in self.answers if a.error]

    def as_json(self) -> dict[str, Any]:
        """The summary: scores, groups, counts, settings."""
        return {
            "task": self.run.task,
            "run": self.run.key,
            "metric": self.run.metric,
            "scores": {metric: self.score(metric).as_json() for metric in self.metrics},
            "groups": {group: self.score(group=group).as_json() for group in self.groups},
            "questions": len(self.answers),
            "resumed": self.resumed,
            "errors": len(self.errors),
            "cut_short": sum(a.finish_reason == "length" for a in self.answers),
            "prompt_tokens": sum(a.prompt_tokens for a in self.answers),
            "cached_tokens": sum(a.cached_tokens for a in self.answers),
            "completion_tokens": sum(a.completion_tokens for a in self.answers),
            "settings": self.run.settings,
        }


def describe(task: Task, server: Server, sampling: Sampling) -> Run:
    """The run that these settings make.

    Args:
        task: what is asked.
        server: whom.
        sampling: how.

    Raises:
        ServerError: nothing there.
    """
    served = {k: v for k, v in server.settings().items() if k not in _PLACE}
    settings: dict[str, Any] = {
        "model": server.model(),
        "task": task.name,
        "options": dict(task.options),
        "sampling": sampling.fields(task),
        "served": served,
    }
    if server.weights:
        settings["weights"] = server.weights
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Run(key_of(settings), task.name, task.metric, settings, started)


def ask_all(
    task: Task,
    server: Server,
    run: Run,
    records: Records,
    *,
    concurrency: int = 8,
    progress: bool = False,
) -> Report:
    """Ask what is not answered yet.

    Args:
        task: the questions.
        server: whom.
        run: their settings, from :func:`describe`.
        records: where answers are kept; those of the same run are not asked for again.
        concurrency: requests in flight.
        progress: show a bar on stderr.
    """
    records.start(run)
    known = dict(records.answered(run.key))
    # a question that stands twice in a task is asked once
    missing = {q.key: q for q in task.questions if q.key not in known}
    fields = {"model": run.settings["model"], **run.settings["sampling"]}
    bar = tqdm(
        total=len(task.questions),
        initial=len(task.questions) - len(missing),
        desc=task.name,
        disable=not progress,
        unit="q",
    )
    right = sum(a.scores.get(run.metric, False) for a in known.values())
    with bar, _Asking(server, run, fields, concurrency) as asking:
        for answer in asking.answers(_chains(list(missing.values()))):
            records.add(answer)
            known[answer.question] = answer
            right += answer.scores.get(run.metric, False)
            bar.set_postfix(right=right, refresh=False)
            bar.update()
    answers = tuple(known[question.key] for question in task.questions)
    return Report(run, answers, resumed=len(task.questions) - len(missing))


def _chains(questions: Sequence[Question]) -> list[list[Question]]:
    """Neighbours with a long common beginning, together.

    The first of a chain is asked alone: the others then find its text in the prefix cache, where
    asking all at once would compute it once for each.
    """
    chains: list[list[Question]] = []
    shared = ""
    for question in questions:
        begins = question.text[:_SHARED_CHARS]
        if chains and begins == shared and len(begins) == _SHARED_CHARS:
            chains[-1].append(question)
        else:
            chains.append([question])
        shared = begins
    return chains


class _Asking:
    """Requests in flight."""

    def __init__(self, server: Server, run: Run, fields: Mapping[str, Any], concurrency: int):
        self._server, self._run, self._fields = server, run, fields
        self._pool = ThreadPoolExecutor(concurrency)

    def __enter__(self) -> "_Asking":
        return self

    def __exit__(self, problem: type[BaseException] | None, *_: object) -> None:
        if problem is not None:
            self._server.close()  # after Ctrl-C: those in flight end, the others are not sent
        self._pool.shutdown(wait=True, cancel_futures=True)

    def answers(self, chains: Sequence[Sequence[Question]]) -> Iterator[Answer]:
        """Each as it comes."""
        followers = {self._submit(chain[0]): chain[1:] for chain in chains}
        while followers:
            done, _ = wait(followers, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
                for question in followers.pop(future):
                    followers[self._submit(question)] = ()

    def _submit(self, question: Question) -> Future[Answer]:
        return self._pool.submit(_ask, self._server, self._run, question, self._fields)


def _ask(server: Server, run: Run, question: Question, fields: Mapping[str, Any]) -> Answer:
    try:
        reply, error = server.ask(question.route, {**fields, **question.body}), ""
    except ServerError as problem:
        reply, error = Reply(""), str(problem)
    return Answer(
        run=run.key,
        question=question.key,
        id=question.id,
        group=question.group,
        expected=question.expected,
        output=reply.text,
        scores={} if error else question.grade(reply.text),
        reasoning=reply.reasoning,
        finish_reason=reply.finish_reason,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        seconds=round(reply.seconds, 4),
        error=error,
    )
