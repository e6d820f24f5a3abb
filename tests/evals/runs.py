"""Entries of the catalog asked of servers with other flags, each configuration once."""

from dataclasses import dataclass, field
from pathlib import Path

from minuet.evals import catalog, entries
from minuet.evals.api import Server
from minuet.evals.compare import Comparison, compare
from minuet.evals.entries import Means
from minuet.evals.records import Records
from minuet.evals.run import Report, Sampling, ask_all, describe

MODEL = "minuet-tiny"
NEEDLE, FEW, ARITHMETIC = "tiny-needle-4k", "tiny-needle-4k-few", "tiny-arithmetic"


@dataclass
class Runs:
    """Answers by entry, model and flags; a server is started where they are not there yet."""

    folder: Path
    words: tuple[str, ...] = ("--kv-cache-pages", "320", "--max-num-seqs", "64")
    done: dict[str, Report] = field(default_factory=dict)

    @property
    def records(self) -> Records:
        return Records(self.folder / "answers.jsonl")

    def ask(self, *names: str, model: str = MODEL, limit: int | None = None, **flags) -> Report:
        """The report of the last of the entries; all are asked of one server."""
        changes = {name.replace("_", "-"): value for name, value in flags.items()}
        keys = [repr((name, model, limit, sorted(changes.items()))) for name in names]
        if keys[-1] not in self.done:
            given = [word for word in self.words if not self._replaced(word, changes)]
            means = Means(
                self.folder / "answers.jsonl", lambda line: None, words=given, limit=limit
            )
            base = catalog.accuracy(names[0])
            with entries.server_for(means, model, {**base.flags, **changes}) as server:
                for name, key in zip(names, keys, strict=True):
                    self.done[key] = self._one(name, means, server)
        return self.done[keys[-1]]

    def _replaced(self, word: str, changes: dict[str, object]) -> bool:
        place = self.words.index(word)
        flag = word if word.startswith("--") else self.words[place - 1]
        return flag.removeprefix("--") in changes

    def _one(self, name: str, means: Means, server: Server) -> Report:
        entry = catalog.accuracy(name)
        assert entry.flags == catalog.accuracy(NEEDLE).flags, "asked of a server of other flags"
        task = entries.task_of(entry, means)
        sampling = Sampling(max_tokens=entry.max_tokens)
        records = self.records
        run = describe(task, server, sampling)
        return ask_all(task, server, run, records, concurrency=64)

    def compare(self, first: Report, second: Report) -> Comparison:
        records = self.records
        return compare((records, first.run), (records, second.run))
