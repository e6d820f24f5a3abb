"""minuet-tiny's evaluations on the GPU: as good as the catalog asks, and as on the CPU."""

import json
import os
from pathlib import Path

import pytest
import torch

from minuet.evals import catalog, entries
from minuet.evals.entries import Means
from minuet.evals.run import Report
from tests.evals.runs import ARITHMETIC, MODEL, NEEDLE, Runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can see"),
]

LANES = [{}, {"kv_cache_dtype": "fp8"}, {"index_kv_cache_dtype": "fp8"}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("evals"))


@pytest.fixture(scope="module")
def on_cpu(runs: Runs) -> dict[str, Report]:
    """What the CPU engine answers, all from one server."""
    runs.ask(ARITHMETIC, NEEDLE, arch="cpu")
    return {
        ARITHMETIC: runs.ask(ARITHMETIC, arch="cpu"),
        NEEDLE: runs.ask(ARITHMETIC, NEEDLE, arch="cpu"),
    }


def note(name: str, found: dict) -> None:
    """Keep a result where $OUT says, beside the verdict of the test."""
    folder = os.environ.get("OUT")
    if folder:
        (Path(folder) / f"{name}.json").write_text(json.dumps(found, indent=1))


@pytest.mark.parametrize("flags", LANES, ids=lambda flags: "-".join(flags) or "bf16")
def test_the_gpu_reaches_the_thresholds(runs, flags):
    runs.ask(ARITHMETIC, NEEDLE, **flags)
    for names in ((ARITHMETIC,), (ARITHMETIC, NEEDLE)):
        report = runs.ask(*names, **flags)
        note("-".join([names[-1], "sm90", *flags.values()]), report.as_json())
        assert report.run.settings["served"]["arch"] != "cpu"
        outcome = entries.judge_accuracy(catalog.accuracy(names[-1]), report)
        assert outcome.passed, outcome.said


@pytest.mark.parametrize("flags", LANES, ids=lambda flags: "-".join(flags) or "bf16")
@pytest.mark.parametrize("name", [ARITHMETIC, NEEDLE])
def test_the_cpu_answers_no_worse_and_no_better(runs, on_cpu, name, flags):
    """BF16 on one side, FP32 on the other: near-ties may fall apart, evenly."""
    gpu = runs.ask(*([ARITHMETIC] if name == ARITHMETIC else [ARITHMETIC, NEEDLE]), **flags)
    found = runs.compare(on_cpu[name], gpu)
    note("-".join(["paired", name, *flags.values()]), found.as_json())
    outcome = entries.judge_paired(catalog.find(f"{name}-cpu"), found)
    assert outcome.passed, outcome.said
    assert found.counts.p_value >= catalog.find(f"{name}-cpu").p_at_least


@pytest.mark.parametrize("name", ["tiny-logits-cpu", "tiny-logits-kv-fp8"])
def test_distributions_stay_as_close_as_the_catalog_asks(name, tmp_path):
    means = Means(tmp_path / "logits.jsonl", lambda line: None, model=MODEL)
    outcome = entries.run_entry(catalog.find(name), means)
    note(name, outcome.as_json())
    assert outcome.passed, outcome.said
