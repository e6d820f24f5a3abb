"""What an evaluation keeps: a JSONL file of runs and of the answer to every question.

A line is a :class:`Run` (the settings), an :class:`Answer` or a :class:`Scored` text. Files only
grow, one whole line at a time, so an interrupted evaluation goes on where it stopped: a question
that has an answer under the same settings is not asked again. A last line that was cut short is
dropped.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from minuet.errors import ConfigError


class Run(msgspec.Struct, frozen=True, tag="run", tag_field="line"):
    """The settings of answers.

    Attributes:
        key: :func:`key_of` the settings.
        task: what was asked.
        metric: the score that counts.
        settings: all that may change an answer: questions, sampling, the server's own settings.
        started: when, in UTC.
    """

    key: str
    task: str
    metric: str
    settings: dict[str, Any]
    started: str


class Answer(msgspec.Struct, frozen=True, tag="answer", tag_field="line", omit_defaults=True):
    """The answer to one question.

    Attributes:
        run: key of its run.
        question: :func:`key_of` the question as sent.
        id: the question's place in its task.
        group: what results are broken down by.
        expected: the right answer.
        output: what the model answered.
        scores: right or wrong, by metric; empty where there was no answer.
        reasoning: what the model thought, where the server sets it apart.
        finish_reason: why it ended.
        prompt_tokens: of the question.
        completion_tokens: of the answer.
        cached_tokens: prompt tokens found in the prefix cache.
        seconds: until the whole answer was there.
        error: why there is none.
    """

    run: str
    question: str
    id: str
    group: str
    expected: str
    output: str
    scores: dict[str, bool]
    reasoning: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    error: str = ""


class Scored(msgspec.Struct, frozen=True, tag="scored", tag_field="line", omit_defaults=True):
    """Log-probabilities of the tokens of one text.

    Attributes:
        run: key of its run.
        question: names the text.
        id: its place in its task.
        token_ids: the text.
        answer_at: index in ``token_ids`` where the right answer begins.
        logprobs: of each token after the first, given those before it.
        top: the most likely tokens there as (id, log-probability), most likely first.
        error: why there are none.
    """

    run: str
    question: str
    id: str
    token_ids: list[int]
    answer_at: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    error: str = ""


Line = Run | Answer | Scored


def key_of(value: object) -> str:
    """A short name for a JSON value: equal values have equal names, in every process."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Records:
    """A file of runs and answers, read once and appended to.

    Args:
        path: JSONL; need not exist.

    Raises:
        ConfigError: a line that is neither, or a file that cannot be read.

    Attributes:
        runs: by key, in the order of the file.
        answers: by run, then by question; the last line of a question counts.
        scored: likewise.
    """

    def __init__(self, path: Path):
        self.path = path
        self.runs: dict[str, Run] = {}
        self.answers: dict[str, dict[str, Answer]] = {}
        self.scored: dict[str, dict[str, Scored]] = {}
        self._whole_bytes = 0
        for line in self._lines():
            self._take(line)

    def _lines(self) -> Iterable[Line]:
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
        except OSError as problem:
            raise ConfigError(
                f"cannot read {self.path}", got=str(problem), expected="a file of results"
            ) from None
        self._whole_bytes = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._whole_bytes].split(b"\n")[:-1], 1):
            try:
                yield msgspec.json.decode(line, type=Line)
            except msgspec.MsgspecError as problem:
                raise ConfigError(
                    f"{self.path}:{number}",
                    got=str(problem),
                    expected="a line that `minuet eval` wrote",
                    remedy="name another file with --out",
                ) from None

    def _take(self, line: Line) -> None:
        if isinstance(line, Run):
            self.runs.pop(line.key, None)  # the run that was started last stands last
            self.runs[line.key] = line
        elif isinstance(line, Answer):
            self.answers.setdefault(line.run, {})[line.question] = line
        else:
            self.scored.setdefault(line.run, {})[line.question] = line

    def add(self, line: Line) -> None:
        """Append a line, and have it on disk before returning."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            if file.tell() > self._whole_bytes:
                file.truncate(self._whole_bytes)  # a line that was cut short
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            self._whole_bytes = file.tell()
        self._take(line)

    def answered(self, run: str) -> Mapping[str, Answer]:
        """The questions of a run that need not be asked again: those that have an answer."""
        return {key: a for key, a in self.answers.get(run, {}).items() if not a.error}

    def texts(self, run: str) -> Mapping[str, Scored]:
        """The texts of a run that need not be scored again."""
        return {key: s for key, s in self.scored.get(run, {}).items() if not s.error}

    def start(self, run: Run) -> None:
        """Note that a run begins, or goes on."""
        if not self.runs or list(self.runs)[-1] != run.key:
            self.add(run)

    def find(self, prefix: str = "") -> Run:
        """The run whose key begins so; of several, the one that was started last.

        Raises:
            ConfigError: the file has none.
        """
        found = [run for key, run in self.runs.items() if key.startswith(prefix)]
        if not found:
            raise ConfigError(
                f"{self.path} holds no such run",
                got=prefix or "no run at all",
                expected=", ".join(self.runs) or "a file of results",
                remedy="`minuet eval TASK --out FILE` writes one",
            )
        return found[-1]
