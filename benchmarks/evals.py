"""What minuet-tiny answers on this machine: entries of the evaluation catalog, into one record.

    python benchmarks/evals.py --output benchmarks/results/h200/evals.json

Without names: every entry of the model that is meant for the arch. Servers are started one after
the other; every verdict is that of the catalog's threshold, and all are kept, passed or not.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from minuet.bench import record  # noqa: E402
from minuet.errors import MinuetError  # noqa: E402
from minuet.evals import catalog, entries  # noqa: E402
from minuet.evals.catalog import ANY, Accuracy, Logits, Paired  # noqa: E402
from minuet.platform.detect import detect  # noqa: E402

MODEL = "minuet-tiny"
WORDS = ("--max-num-seqs", "64", "--kv-cache-pages", "1024")  # less to prepare, enough for all


def meant_for(arch: str) -> list[str]:
    """Names of the model's entries that run on an arch."""
    found = catalog.load()

    def model(name: str) -> str:
        entry = found[name]
        if isinstance(entry, Paired):
            return model(entry.against)
        return entry.model if isinstance(entry, Accuracy | Logits) else ""

    return [
        name
        for name, entry in found.items()
        if model(name) == MODEL and {ANY, arch} & set(entry.archs)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="ENTRY", help="of the catalog")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the record here")
    args = parser.parse_args()
    arch = detect()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="minuet-") as scratch:
        out = Path(scratch) / "answers.jsonl"
        means = entries.Means(out, lambda line: None, words=WORDS, concurrency=64)
        for name in args.names or meant_for(arch.name):
            try:
                found = entries.run_entry(catalog.find(name), means).as_json()
            except MinuetError as problem:
                found = {"entry": name, "passed": False, "verdict": str(problem)}
            print("passed" if found["passed"] else "FAILED", name, found["verdict"], flush=True)
            outcomes.append(found)
            if args.output:  # after each: a run that is cut short keeps what it has
                written = {
                    **record.header(),
                    "kind": "minuet eval",
                    "arch": arch.name,
                    "gpus": record.gpus() if arch.is_gpu else [],
                    "outcomes": outcomes,
                }
                record.write(written, args.output)
    return 0 if all(outcome["passed"] for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
