"""minuet-tiny's evaluations on the GPU: as good as the catalog asks, and as on the CPU."""

import json
import os
from pathlib import Path

import pytest
import torch

from minuet.evals import catalog, entries
from minuet.evals.entries import Means
from tests.evals.runs import ARITHMETIC, MODEL, NEEDLE, Runs, against

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can see"),
]

LANES = [{}, {"kv_cache_dtype": "fp8"}, {"index_kv_cache_dtype": "fp8"}]


def label(flags: dict[str, str]) -> str:
    return "-".join(f"{name}-{value}" for name, value in flags.items()) or "bf16"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("evals")
    return Runs(folder, folder / "shared")


def note(name: str, found: dict) -> None:
    """Keep a result where $OUT says, beside the verdict of the test."""
    folder = os.environ.get("OUT")
    if folder:
        (Path(folder) / f"{name}.json").write_text(json.dumps(found, indent=1))


@pytest.mark.parametrize("flags", LANES, ids=label)
@pytest.mark.parametrize("name", [ARITHMETIC, NEEDLE])
def test_the_gpu_reaches_the_threshold(runs, name, flags):
    report = runs.base(name, **flags)
    note("-".join([name, label(flags)]), report.as_json())
    assert report.run.settings["served"]["arch"] != "cpu"
    outcome = entries.judge_accuracy(catalog.accuracy(name), report)
    assert outcome.passed, outcome.said


@pytest.mark.parametrize("flags", LANES, ids=label)
@pytest.mark.parametrize("name", [ARITHMETIC, NEEDLE])
def test_the_gpu_answers_no_worse_and_no_better_than_the_cpu(runs, name, flags):
    """BF16 on one side, FP32 on the other: near-ties may fall apart, but evenly."""
    entry = catalog.find(f"{name}-cpu")
    found = against(runs.base(name, arch="cpu"), runs.base(name, **flags))
    note("-".join(["paired", name, label(flags)]), found.as_json())
    assert found.unpaired == 0
    assert found.counts.p_value >= entry.p_at_least, found.counts


@pytest.mark.parametrize("name", ["tiny-logits-cpu", "tiny-logits-kv-fp8-sm90"])
def test_distributions_stay_as_close_as_the_catalog_asks(name, tmp_path):
    means = Means(tmp_path / "logits.jsonl", lambda line: None, model=MODEL)
    outcome = entries.run_entry(catalog.find(name), means)
    note(name, outcome.as_json())
    assert outcome.passed, outcome.said
