"""Runs entries of the catalog and says whether they pass."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from minuet.errors import ConfigError, MinuetError
from minuet.evals import questions
from minuet.evals.api import Server
from minuet.evals.catalog import FOLDER, Accuracy, Benchmark, Entry, Logits, Paired, accuracy
from minuet.evals.compare import Comparison, compare
from minuet.evals.logits import TOP, Divergence, as_run, divergence, score_all
from minuet.evals.questions import Task
from minuet.evals.records import Records, Scored
from minuet.evals.run import Report, Sampling, ask_all, describe
from minuet.evals.serving import serving, weights_of


@dataclass(frozen=True, slots=True)
class Means:
    """What entries are run with.

    Attributes:
        out: where answers are kept.
        announce: receives what servers log while they start.
        base_url: a server that runs already; empty: one is started for each set of flags.
        api_key: bearer token for it.
        words: flags of ``minuet serve`` after the entry's own, which they replace.
        model: instead of the entry's; empty: the entry's, or the first that a running server has.
        data: of tasks that need a file.
        fewshot_data: likewise, for the examples.
        limit: ask the first questions only; None: all.
        concurrency: requests in flight.
        progress: show a bar.
    """

    out: Path
    announce: Callable[[str], None]
    base_url: str = ""
    api_key: str = ""
    words: Sequence[str] = ()
    model: str = ""
    data: Path | None = None
    fewshot_data: Path | None = None
    limit: int | None = None
    concurrency: int = 8
    progress: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an entry ended.

    Attributes:
        entry: which.
        passed: whether its threshold is met.
        said: the verdict in one line.
        detail: scores, a comparison, or what a benchmark recorded.
    """

    entry: Entry
    passed: bool
    said: str
    detail: Report | Comparison | Divergence | dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The verdict and what it rests on."""
        detail = self.detail
        return {
            "entry": self.entry.name,
            "passed": self.passed,
            "verdict": self.said,
            "result": detail if isinstance(detail, dict) else detail.as_json(),
        }


def run_entry(entry: Entry, means: Means, folder: Path = FOLDER) -> Outcome:
    """Run an entry.

    Args:
        entry: what to run.
        means: with what.
        folder: of the catalog that it is from; a pair names its other half there.

    Raises:
        ConfigError: a pair on one running server, or data that is not named.
        MinuetError: the server did not start or did not answer, or the benchmark failed.
    """
    if isinstance(entry, Benchmark):
        return judge_benchmark(entry, _benchmark(entry))
    if isinstance(entry, Accuracy):
        return judge_accuracy(entry, _ask(entry, entry.flags, means))
    if means.base_url:
        raise ConfigError(
            f"{entry.name} compares two servers",
            got="--base-url",
            expected="none: each server is started with its own flags",
        )
    if isinstance(entry, Logits):
        texts = (_score(entry, flags, means) for flags in (entry.flags, _changed(entry)))
        return judge_logits(entry, divergence(*texts))
    base = accuracy(entry.against, folder)
    first = _ask(base, base.flags, means)
    measure = judge_accuracy(base, first)
    if not measure.passed:  # nothing is lost against a run that gets nothing right
        said = f"the measure, {base.name}, did not pass: {measure.said}"
        return Outcome(entry, False, said, first)
    second = _ask(base, {**base.flags, **entry.flags}, means)
    return judge_paired(entry, compare(first.side, second.side))


def judge_accuracy(entry: Accuracy, report: Report) -> Outcome:
    """Whether a report reaches the entry's threshold; one without an answer never does."""
    score = report.score(entry.metric)
    low, high = score.interval
    said = f"{score.value:.4f} ({score.right}/{score.asked}, 95 % {low:.4f} to {high:.4f})"
    passed = score.value >= entry.at_least and not report.errors and score.asked > 0
    if report.errors:
        said += f", {len(report.errors)} without an answer"
    return Outcome(entry, passed, f"{said}, at least {entry.at_least}", report)


def judge_paired(entry: Paired, comparison: Comparison) -> Outcome:
    """Whether the second run is as the entry wants it: equal to the letter, or no worse."""
    counts = comparison.counts
    whole = comparison.unpaired == 0
    if entry.identical:
        said = f"{comparison.differing} of {counts.questions} answers differ, none may"
        passed = comparison.differing == 0
    else:
        assert entry.p_at_least is not None
        said = (
            f"lost {counts.only_first}, gained {counts.only_second} of {counts.questions}: "
            f"p {counts.p_loss:.4f}, at least {entry.p_at_least}"
        )
        passed = counts.p_loss >= entry.p_at_least
    if not whole:
        said += f"; {comparison.unpaired} questions were answered by one run only"
    return Outcome(entry, passed and whole, said, comparison)


def judge_logits(entry: Logits, found: Divergence) -> Outcome:
    """Whether two servers' distributions are as close as the entry wants."""
    passed = found.kl_mean <= entry.kl_mean_at_most and found.same_top >= entry.same_top_at_least
    said = (
        f"KL {found.kl_mean:.3e} nats, at most {entry.kl_mean_at_most:g}; "
        f"same top token {found.same_top:.4f}, at least {entry.same_top_at_least}"
    )
    return Outcome(entry, passed, said, found)


def judge_benchmark(entry: Benchmark, record: dict[str, Any]) -> Outcome:
    """Whether a benchmark's figure is within the entry's bounds.

    Raises:
        ConfigError: the record has no such figure.
    """
    value: Any = record
    for name in entry.figure.split("."):
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ConfigError(
                f"{entry.name}: the record has no {entry.figure}",
                got=sorted(value) if isinstance(value, dict) else repr(value)[:80],
                expected=name,
            ) from None
    low = -inf if entry.at_least is None else entry.at_least
    high = inf if entry.at_most is None else entry.at_most
    said = f"{value:.6g} {entry.unit}, wanted {low:g} to {high:g}"
    return Outcome(entry, bool(low <= value <= high), said, record)


def _benchmark(entry: Benchmark) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="minuet-") as scratch:
        out = Path(scratch) / "record.json"
        words = [str(out) if word == "{out}" else word for word in entry.command]
        done = subprocess.run(
            [sys.executable, "-m", "minuet", "bench", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not out.is_file():
            last = done.stderr.strip().splitlines()[-1:] or ["no record was written"]
            raise MinuetError(f"minuet bench ended with code {done.returncode}: {last[0]}")
        record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return record


def task_of(entry: Accuracy, means: Means) -> Task:
    """The questions of an entry.

    Raises:
        ConfigError: options that the task does not know, or data that is not named.
    """
    options = dict(entry.options)
    if entry.task == "gsm8k":
        if means.data is None:
            raise ConfigError(f"{entry.name} needs data", remedy="name a JSONL file with --data")
        return questions.gsm8k_task(
            means.data,
            fewshot_data=means.fewshot_data,
            limit=means.limit if entry.count == 0 else min(means.limit or entry.count, entry.count),
            metric=entry.metric,
            **options,
        )
    count = entry.count if means.limit is None else min(means.limit, entry.count)
    return questions.generated(entry.task, seed=options.pop("seed", 0), count=count, **options)


def flag_words(flags: Mapping[str, str | int | bool]) -> list[str]:
    """Flags as on the command line: ``{"port": 1, "x": False}`` -> ``--port 1 --no-x``."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


@contextmanager
def server_for(means: Means, model: str, flags: Mapping[str, str | int | bool]) -> Iterator[Server]:
    """The server that is named, or one of our own over a model.

    Raises:
        MinuetError: it does not start.
    """
    if means.base_url:
        if flags:
            means.announce(f"not applied to a running server: {' '.join(flag_words(flags))}")
        with Server(
            means.base_url, means.api_key, connections=means.concurrency, wanted=means.model
        ) as server:
            yield server
        return
    weights = weights_of(model)  # an unknown model is refused before a process is started
    with (
        serving([model, *flag_words(flags), *means.words], means.announce) as url,
        Server(url, means.api_key, connections=means.concurrency, weights=weights) as server,
    ):
        yield server


def _changed(entry: Logits) -> dict[str, str | int | bool]:
    return {**entry.flags, **entry.change}


def _score(entry: Logits, flags: Mapping[str, str | int | bool], means: Means) -> list[Scored]:
    options = dict(entry.options)
    count = entry.count if means.limit is None else min(means.limit, entry.count)
    task = questions.generated(entry.task, seed=options.pop("seed", 0), count=count, **options)
    records = Records(means.out)
    with server_for(means, means.model or entry.model, flags) as server:
        run = as_run(describe(task, server, Sampling()), TOP)
        found = score_all(task, server, run, records, top=TOP, progress=means.progress)
    for text in found:
        if text.error:
            raise MinuetError(f"{text.id} was not scored: {text.error}")
    return found


def _ask(entry: Accuracy, flags: Mapping[str, str | int | bool], means: Means) -> Report:
    task, records = task_of(entry, means), Records(means.out)
    sampling = Sampling(max_tokens=entry.max_tokens)
    with server_for(means, means.model or entry.model, flags) as server:
        return ask_all(
            task,
            server,
            describe(task, server, sampling),
            records,
            concurrency=means.concurrency,
            progress=means.progress,
        )
