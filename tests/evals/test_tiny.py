"""minuet-tiny through the server: what it can do, what must not hurt it, and what must.

Thresholds are those of the catalog. Each configuration is a server of its own, asked once; the
questions of a text share its pages, so that a server computes it once. The tests are in an order in
which two processes that take a half each seldom wait for each other.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from minuet.cli import main
from minuet.engine.llm import LLM
from minuet.engine.types import SamplingParams
from minuet.evals import catalog, entries, gsm8k, tasks
from minuet.evals.records import Records
from minuet.evals.run import Report
from minuet.evals.stats import wilson
from minuet.models import registry
from minuet.server import template
from tests.evals import damage
from tests.evals.runs import ARITHMETIC, FEW, MODEL, NEEDLE, Runs, against

TEXT = 32  # questions of one text: what a comparison needs at least, for a third of the time

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("evals")
    within = tmp_path_factory.getbasetemp()
    shared = (within.parent if "PYTEST_XDIST_WORKER" in os.environ else within) / "evals-shared"
    with pytest.MonkeyPatch.context() as patch:
        # the servers too: test processes fill the cores already
        patch.setenv("OMP_NUM_THREADS", "1")
        yield Runs(folder, shared)


@pytest.mark.parametrize("name", [ARITHMETIC, NEEDLE])
def test_it_reaches_the_threshold_of_the_catalog(runs, name):
    report = runs.base(name)
    outcome = entries.judge_accuracy(catalog.accuracy(name), report)
    wrong = [(a.id, a.expected, a.output) for a in report.answers if not a.scores.get("correct")]
    assert outcome.passed, (outcome.said, wrong[:10])


def test_needles_are_found_at_every_depth(runs):
    report = runs.base(NEEDLE)
    assert len(report.groups) == 4
    for group in report.groups:
        score = report.score(group=group)
        # not worse than the threshold allows, given how few a group has
        assert wilson(score.right, score.asked)[1] >= catalog.accuracy(NEEDLE).at_least, group


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tiny-needle-4k-kv-fp8", {"kv_cache_dtype": "fp8"}),
        ("tiny-needle-4k-index-fp8", {"index_kv_cache_dtype": "fp8"}),
    ],
)
def test_narrow_lanes_lose_nothing_that_chance_does_not_explain(runs, name, flags):
    entry = catalog.find(name)
    assert {k.replace("-", "_"): v for k, v in entry.flags.items()} == flags
    narrow = runs.ask(NEEDLE, limit=TEXT, **flags)
    found = against(runs.base(NEEDLE), narrow)
    assert found.counts.questions == TEXT
    assert found.counts.p_loss >= entry.p_at_least, found.counts


def identical(name: str, first: Report, second: Report) -> None:
    entry = catalog.find(name)
    pairs = zip(first.answers, second.answers, strict=True)
    assert [(a.id, a.output, b.output) for a, b in pairs if a.output != b.output] == []
    outcome = entries.judge_paired(entry, against(first, second))
    assert entry.identical
    assert outcome.passed, outcome.said


def test_answers_are_the_same_in_other_chunks(runs):
    second = runs.ask(FEW, max_num_batched_tokens=384)
    identical("tiny-needle-4k-chunks", runs.base(FEW), second)


def test_answers_are_the_same_after_preemption():
    """Page by page: answers go on past their end, into a second page more than the prompt has."""
    folder = registry.find(MODEL).folder
    settings = {"max_model_len": 512, "enable_prefix_caching": False}
    problems = list(tasks.problems("arithmetic", "heldout", 1, 6))
    params = SamplingParams(max_tokens=220, temperature=0.0, ignore_eos=True)
    found = []
    for pages in (64, 9):
        llm = LLM(folder, kv_cache_pages=pages, announce=lambda line: None, **settings)
        encode, markers = llm.engine.tokenizer.encode, llm.engine.tokenizer.added_texts
        chat = template.load(folder, "", markers, encode)
        prompts = [chat.render(problem.messages).token_ids for problem in problems]
        outputs = llm.generate(prompts, params)
        assert (llm.engine.core.scheduler.num_preemptions > 0) is (pages == 9)
        found.append([output.token_ids for output in outputs])
        for problem, output in zip(problems, outputs, strict=True):
            assert f"</mm:think>{problem.answer}" in output.text
    assert found[0] == found[1]


def test_gsm8k_runs_from_end_to_end(runs, tmp_path, capsys):
    """The score is what it is: a model of seven million parameters was not made for it."""
    record = json.loads((Path(__file__).parent / "gsm8k_lm_eval.json").read_text())
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in record["docs"]))
    words = ["eval", "gsm8k", MODEL, "--data", str(data), "--limit", "3", "--out", str(out)]
    assert main([*words, "--max-tokens", "48", "--kv-cache-pages", "160", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["questions"], found["errors"], found["resumed"]) == (3, 0, 0)
    assert list(found["scores"]) == ["flexible-extract", "strict-match"]
    for answer in Records(out).answers[found["run"]].values():
        assert answer.output
        doc = record["docs"][int(answer.id.removeprefix("gsm8k/"))]
        assert answer.scores == gsm8k.grade(answer.output, doc["answer"])


def test_its_indexer_finds_more_than_the_newest_blocks_hold(tmp_path, capsys):
    picture = tmp_path / "selection.svg"
    words = [
        "eval",
        "selection",
        MODEL,
        "--length",
        "2048",
        "--limit",
        "1",
        "--kv-cache-pages",
        "64",
    ]
    assert main([*words, "--plot", str(picture), "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert picture.read_text().startswith("<svg")
    for head in found["heads"]:
        assert head["differing"] == 0
        assert head["window_mean"] < head["recall_mean"] <= head["best_mean"]


@pytest.mark.parametrize("broken", [damage.choose_one_block, damage.shuffle_index_keys])
def test_a_broken_selection_finds_no_needles(runs, broken, tmp_path):
    """The evaluation can fail: the sound model does not pass by some other way."""
    entry = catalog.accuracy(NEEDLE)
    assert entry.damaged_at_most is not None
    folder = broken(registry.find(MODEL).folder, tmp_path / "broken")
    report = runs.ask(NEEDLE, model=str(folder), limit=TEXT)
    assert not report.errors
    assert report.score().value <= entry.damaged_at_most
    comparison = against(runs.base(NEEDLE), report)
    assert comparison.counts.questions == TEXT
    assert comparison.is_significant_loss


def test_answers_are_the_same_without_the_prefix_cache(runs):
    second = runs.ask(FEW, enable_prefix_caching=False)
    assert [a.cached_tokens for a in second.answers] == [0] * len(second.answers)
    first = runs.base(FEW)
    assert sum(a.cached_tokens > 4000 for a in first.answers) == len(first.answers) - 1
    identical("tiny-needle-4k-no-prefix-cache", first, second)
