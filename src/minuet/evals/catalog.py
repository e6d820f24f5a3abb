"""The catalog: what is to be evaluated, and the only home of thresholds.

``catalog/*.json`` hold lists of entries, of four kinds:

* :class:`Accuracy`: a task on a model, and the score it must reach;
* :class:`Paired`: the same questions again under other flags, which must lose nothing that chance
  does not explain, or change no answer at all;
* :class:`Logits`: the same tokens under other flags, whose distributions must stay close;
* :class:`Benchmark`: a command of ``minuet bench`` and the figure it must reach.

The folder is part of the package, so that an installed wheel has it. :func:`check` holds every
entry to the tasks, settings and archs that exist; the pre-check runs it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from minuet.errors import ConfigError, MinuetError
from minuet.evals import gsm8k, tasks
from minuet.evals.questions import CORRECT, generated
from minuet.platform import arch as arch_table
from minuet.settings import BY_NAME

FOLDER = Path(__file__).parent / "catalog"
ANY = "any"


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A score to be near, and who measured it.

    Attributes:
        value: of the entry's metric.
        source: a file of this repository, or a publication, that has the figure.
    """

    value: float
    source: str


class Accuracy(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accuracy", kw_only=True
):
    """A task and the score a model must reach.

    Attributes:
        name: how ``--entry`` finds it; unique.
        summary: what it shows, in one sentence.
        model: what ``minuet serve`` is given.
        task: what is asked.
        count: questions; 0: all that the data has.
        at_least: the lowest score that passes.
        flags: of ``minuet serve``, without the dashes.
        archs: where it is meant to run.
        card: of these archs, where only one card's memory holds the model.
        options: of the task.
        max_tokens: of an answer; None: the task's own limit.
        metric: the score that counts.
        damaged_at_most: the highest score of a checkpoint whose selection was damaged; a score
            above says that the task does not depend on the selection.
        baseline: a score to be near.
    """

    name: str
    summary: str
    model: str
    task: str
    count: int
    at_least: float
    flags: dict[str, str | int | bool] = {}
    archs: tuple[str, ...] = (ANY,)
    card: str = ANY
    options: dict[str, Any] = {}
    max_tokens: int | None = None
    metric: str = CORRECT
    damaged_at_most: float | None = None
    baseline: Baseline | None = None


class Paired(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="paired", kw_only=True):
    """The questions of another entry under other flags.

    Attributes:
        name: how ``--entry`` finds it; unique.
        summary: what it shows, in one sentence.
        against: name of an :class:`Accuracy` entry, run as it stands.
        flags: on top of that entry's.
        p_at_least: passes while the one-sided exact McNemar test gives at least this; None where
            ``identical`` says more.
        identical: every answer must be the same text.
        archs: where it is meant to run.
    """

    name: str
    summary: str
    against: str
    flags: dict[str, str | int | bool]
    p_at_least: float | None = None
    identical: bool = False
    archs: tuple[str, ...] = (ANY,)


class Logits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="logits", kw_only=True):
    """The distributions over the tokens of a task's texts, under two sets of flags.

    Attributes:
        name: how ``--entry`` finds it; unique.
        summary: what it shows, in one sentence.
        model: what ``minuet serve`` is given.
        task: whose questions with their right answers are the texts.
        count: texts.
        change: flags of the second server, on top of ``flags``.
        kl_mean_at_most: nats per token; see :mod:`minuet.evals.logits`.
        same_top_at_least: share of tokens with the same most likely successor.
        flags: of ``minuet serve``, without the dashes.
        options: of the task.
        archs: where it is meant to run.
    """

    name: str
    summary: str
    model: str
    task: str
    count: int
    change: dict[str, str | int | bool]
    kl_mean_at_most: float
    same_top_at_least: float
    flags: dict[str, str | int | bool] = {}
    options: dict[str, Any] = {}
    archs: tuple[str, ...] = (ANY,)


class Benchmark(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="benchmark", kw_only=True
):
    """A command of ``minuet bench`` and the figure it must reach.

    Attributes:
        name: how ``--entry`` finds it; unique.
        summary: what it shows, in one sentence.
        command: words after ``minuet bench``; in them ``{out}`` stands for the file that the
            command is to write its JSON to.
        figure: where the figure stands in that JSON: names and indices between dots.
        unit: of the figure.
        archs: where it is meant to run.
        card: whose figure it is.
        at_least: the lowest figure that passes; None: no lower bound.
        at_most: the highest figure that passes; None: no upper bound.
        baseline: a figure to be near.
    """

    name: str
    summary: str
    command: tuple[str, ...]
    figure: str
    unit: str
    archs: tuple[str, ...]
    card: str
    at_least: float | None = None
    at_most: float | None = None
    baseline: Baseline | None = None


Entry = Accuracy | Paired | Logits | Benchmark


def load(folder: Path = FOLDER) -> dict[str, Entry]:
    """Every entry by name, in the order of the files.

    Raises:
        ConfigError: a file that is not a list of entries, or two entries of one name.
    """
    found: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            entries = msgspec.json.decode(path.read_bytes(), type=list[Entry])
        except (OSError, msgspec.MsgspecError) as problem:
            raise ConfigError(f"{path}", got=str(problem), expected="a list of entries") from None
        for entry in entries:
            if entry.name in found:
                raise ConfigError(f"{path}", got=entry.name, expected="one entry of a name")
            found[entry.name] = entry
    return found


def find(name: str, folder: Path = FOLDER) -> Entry:
    """The entry of a name.

    Raises:
        ConfigError: there is none, or the catalog is not valid.
    """
    entries = load(folder)
    if name not in entries:
        raise ConfigError(f"no entry {name!r}", remedy="`minuet eval --list` shows them")
    return entries[name]


def accuracy(name: str, folder: Path = FOLDER) -> Accuracy:
    """The accuracy entry of a name.

    Raises:
        ConfigError: there is none, or it is of another kind.
    """
    entry = find(name, folder)
    if not isinstance(entry, Accuracy):
        raise ConfigError("not an accuracy entry", got=name, expected="a task and a threshold")
    return entry


def schema() -> str:
    """The JSON schema of a catalog file, for editors."""
    return json.dumps(msgspec.json.schema(list[Entry]), indent=2)


def check(folder: Path = FOLDER) -> dict[str, list[str]]:
    """What is wrong with each entry, by name; entries without a fault are left out.

    Raises:
        ConfigError: a file that is not a list of entries at all.
    """
    entries = load(folder)
    found = {name: list(_faults(entry, entries)) for name, entry in entries.items()}
    return {name: faults for name, faults in found.items() if faults}


def _faults(entry: Entry, entries: Mapping[str, Entry]) -> Iterator[str]:
    if not entry.summary:
        yield "summary is empty"
    for name in entry.archs:
        if name != ANY and name not in arch_table.ARCHS:
            yield f"no arch {name!r}"
    if isinstance(entry, Benchmark):
        yield from _benchmark_faults(entry)
        return
    yield from _flag_faults(entry.flags)
    if isinstance(entry, Paired):
        yield from _paired_faults(entry, entries)
    elif isinstance(entry, Logits):
        yield from _logits_faults(entry)
    else:
        yield from _accuracy_faults(entry)


def _flag_faults(flags: Mapping[str, object]) -> Iterator[str]:
    for flag, value in flags.items():
        setting = BY_NAME.get(flag.replace("-", "_"))
        if setting is None:
            yield f"no flag --{flag}"
            continue
        try:
            setting.checked(value)
        except MinuetError as problem:
            yield str(problem)


def _accuracy_faults(entry: Accuracy) -> Iterator[str]:
    if not 0.0 < entry.at_least <= 1.0:
        yield f"at_least {entry.at_least} is no score that can be missed"
    if entry.damaged_at_most is not None and not 0.0 <= entry.damaged_at_most < entry.at_least:
        yield "damaged_at_most must be below at_least"
    yield from _baseline_faults(entry.baseline)
    if entry.task == "gsm8k":
        if entry.metric not in gsm8k.grade("", ""):
            yield f"no metric {entry.metric!r}"
        return
    yield from _task_faults(entry)
    if entry.metric != CORRECT:
        yield f"no metric {entry.metric!r}"


def _task_faults(entry: Accuracy | Logits) -> Iterator[str]:
    if entry.task not in tasks.TASKS:
        yield f"no task {entry.task!r}"
        return
    if entry.count < 1:
        yield "asks nothing"
    try:
        # makes them all: a task may run out of held-out problems
        generated(entry.task, count=entry.count, **{"seed": 0, **entry.options})
    except MinuetError as problem:
        yield str(problem)


def _logits_faults(entry: Logits) -> Iterator[str]:
    yield from _task_faults(entry)
    yield from _flag_faults(entry.change)
    if not entry.change:
        yield "no change: the two servers would be the same"
    if not 0.0 < entry.same_top_at_least <= 1.0:
        yield f"same_top_at_least {entry.same_top_at_least} is no share that can be missed"
    if entry.kl_mean_at_most <= 0.0:
        yield "kl_mean_at_most must be above 0"


def _paired_faults(entry: Paired, entries: Mapping[str, Entry]) -> Iterator[str]:
    if not isinstance(entries.get(entry.against), Accuracy):
        yield f"against {entry.against!r}, which is no accuracy entry"
    if not entry.flags:
        yield "no flags: the two runs would be the same"
    if entry.identical == (entry.p_at_least is not None):
        yield "needs either p_at_least or identical"
    elif entry.p_at_least is not None and not 0.0 < entry.p_at_least < 1.0:
        yield f"p_at_least {entry.p_at_least} is no probability that can be missed"


def _benchmark_faults(entry: Benchmark) -> Iterator[str]:
    if "{out}" not in entry.command:
        yield "the command writes no {out}"
    if entry.at_least is None and entry.at_most is None:
        yield "no threshold"
    yield from _baseline_faults(entry.baseline)


def _baseline_faults(baseline: Baseline | None) -> Iterator[str]:
    if baseline is not None and not baseline.source.strip():
        yield "a baseline without its source"
