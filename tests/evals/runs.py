"""Entries of the catalog asked of servers with other flags; the plain model is asked once for all.

Test processes share a folder: the first that needs the plain model's answers computes them, the
others wait for the lock and read them.
"""

import fcntl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from minuet.evals import catalog, entries
from minuet.evals.api import Server
from minuet.evals.compare import Comparison, compare
from minuet.evals.entries import Means
from minuet.evals.records import Answer, Records, Run
from minuet.evals.run import Report, Sampling, ask_all, describe

MODEL = "minuet-tiny"
NEEDLE, FEW, ARITHMETIC = "tiny-needle-4k", "tiny-needle-4k-few", "tiny-arithmetic"
SHARED = (ARITHMETIC, FEW, NEEDLE)

Flags = Mapping[str, str | int | bool]


class Kept(msgspec.Struct):
    """A report on disk."""

    run: Run
    answers: list[Answer]


@dataclass(frozen=True)
class Runs:
    """Where answers go.

    Attributes:
        folder: of this process.
        shared: of all test processes of a session.
        words: flags of every server, unless a test sets them.
    """

    folder: Path
    shared: Path
    words: tuple[tuple[str, str], ...] = (("kv-cache-pages", "320"), ("max-num-seqs", "64"))

    def base(self, name: str, **flags: str | int | bool) -> Report:
        """The answers to an entry of :data:`SHARED`, all of which one server is asked for."""
        label = "-".join(f"{flag}-{value}" for flag, value in flags.items()) or "plain"
        folder = self.shared / label
        folder.mkdir(parents=True, exist_ok=True)
        # one lock for all: one server computes at a time, the others would only slow it down
        with (self.shared / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / f"{SHARED[-1]}.json").exists():
                for shared, report in self._ask(SHARED, MODEL, None, flags).items():
                    kept = Kept(report.run, list(report.answers))
                    (folder / f"{shared}.json").write_bytes(msgspec.json.encode(kept))
        kept = msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=Kept)
        return Report(kept.run, tuple(kept.answers))

    def ask(
        self, name: str, *, model: str = MODEL, limit: int | None = None, **flags: str | int | bool
    ) -> Report:
        """Ask an entry's questions of a server with other flags, started for it."""
        return self._ask((name,), model, limit, flags)[name]

    def _ask(
        self, names: Sequence[str], model: str, limit: int | None, flags: Flags
    ) -> dict[str, Report]:
        means = Means(self.folder / "answers.jsonl", lambda line: None, limit=limit)
        found = [catalog.accuracy(name) for name in names]
        assert all(entry.flags == found[0].flags for entry in found), "of servers of other flags"
        changes = {flag.replace("_", "-"): value for flag, value in flags.items()}
        given = {**dict(self.words), **found[0].flags, **changes}
        with entries.server_for(means, model, given) as server:
            return {entry.name: self._all(entry, means, server) for entry in found}

    def _all(self, entry: catalog.Accuracy, means: Means, server: Server) -> Report:
        task, records = entries.task_of(entry, means), Records(means.out)
        run = describe(task, server, Sampling(max_tokens=entry.max_tokens))
        return ask_all(task, server, run, records, concurrency=64)


def against(first: Report, second: Report) -> Comparison:
    """The second judged by the first, over the questions that both were asked."""
    return compare(first.side, second.side)
