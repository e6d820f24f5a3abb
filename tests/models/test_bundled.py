"""The model in the box: found by name, whole, small, made by training/, and it answers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from training.train import PLANS

from minuet.config import read_options
from minuet.engine.llm import LLM
from minuet.engine.types import SamplingParams
from minuet.evals import tasks
from minuet.models import registry
from minuet.models.m3.parsers import M3Parser
from minuet.models.parsing import Kind
from minuet.models.tokenizer import Tokenizer
from minuet.server import template
from minuet.settings import DEFAULT_MODEL
from tests import oracle
from tests.engine.desk import engine, row_logits
from training import tokenizer as training_tokenizer

CARD = Path(__file__).parents[2] / "docs" / "minuet-tiny.md"
RUNS = Path(__file__).parents[2] / "training" / "runs"


@pytest.fixture(scope="module")
def folder() -> Path:
    found = registry.find(DEFAULT_MODEL).folder
    assert found is not None
    return found


def test_no_model_named_means_the_bundled_one():
    assert read_options({})["model"] == DEFAULT_MODEL
    assert DEFAULT_MODEL in registry.bundled_names()


def test_all_of_it_is_smaller_than_16_megabytes(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16_000_000


def test_config_and_tokenizer_are_those_of_the_training_script(folder):
    shape, spec = PLANS["full"].shape, registry.find(DEFAULT_MODEL).spec
    assert (spec.hidden_size, spec.num_layers, spec.num_q_heads, spec.num_kv_heads) == (
        shape.hidden, shape.layers, shape.heads, shape.kv_heads,
    )  # fmt: skip
    assert (spec.block, spec.top_blocks, spec.head_dim) == (128, 4, 128)
    trained = training_tokenizer.train().to_str(pretty=True)
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(trained)


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RUNS / name).read_text())
    return found


@pytest.mark.parametrize("run", ["shipped", "again"])
def test_the_recorded_runs_finished_the_scripts_plan(run):
    found = recorded(f"{run}/run.json")
    assert found["plan"] == json.loads(json.dumps(PLANS["full"], default=vars))
    assert found["accuracy"]["finished"]


def test_the_card_states_what_was_measured():
    shipped = recorded("shipped/accuracy.json")["accuracy"]
    again = recorded("again/run.json")["accuracy"]
    rows = re.findall(r"^\| ([^|]+?) \| ([\d.]+) % \|(?: ([\d.]+) %)? \|$", CARD.read_text(), re.M)
    assert {name for name, _, _ in rows} == set(shipped)
    for name, first, second in rows:
        assert float(first) == pytest.approx(100 * shipped[name], abs=0.051), name
        assert bool(second) == (name in again), name
        if second:
            assert float(second) == pytest.approx(100 * again[name], abs=0.051), name


def test_it_answers_a_product_finds_a_code_and_calls_a_tool(folder):
    tokenizer = Tokenizer.load(folder)
    chat = template.load(folder, "", tokenizer.added_texts, tokenizer.encode)
    assert chat is not None
    needle = next(tasks.problems("needle", "heldout", 0, 1, length=1500, depth=0.1))
    call = next(tasks.problems("toolcalls", "heldout", 0, 1))
    prompts = [
        chat.render([{"role": "user", "content": "17 * 23"}]),
        chat.render(needle.messages),
        chat.render(call.messages, tools=call.tools),
    ]
    llm = LLM(DEFAULT_MODEL, kv_cache_memory="64MiB")
    product, code, request = (
        output.text.rpartition("</mm:think>")[2]
        for output in llm.generate(
            [prompt.token_ids for prompt in prompts], SamplingParams(max_tokens=100, temperature=0)
        )
    )
    assert product == "391"
    assert tasks.score(needle, code)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in call.tools}
    parser = M3Parser(in_reasoning=False, reasoning=True, tools=schemas)
    events = [*parser.push(request), *parser.finish(truncated=False)]
    names = [event.text for event in events if event.kind is Kind.CALL_BEGIN]
    arguments = "".join(event.text for event in events if event.kind is Kind.CALL_ARGUMENTS)
    assert len(names) == 1
    assert tasks.score(call, f'{{"name": "{names[0]}", "arguments": {arguments}}}')


def test_transformers_computes_the_same_logits_where_blocks_are_chosen(folder):
    tokenizer = Tokenizer.load(folder)
    chat = template.load(folder, "", tokenizer.added_texts, tokenizer.encode)
    assert chat is not None
    needle = next(tasks.problems("needle", "heldout", 1, 1, length=900, depth=0.0))
    ids = chat.render(needle.messages).token_ids + tokenizer.encode("</mm:think>" + needle.answer)
    ours = row_logits(engine(folder, kv_cache_memory="64MiB"), ids, [len(ids)])
    theirs = oracle.logits(oracle.load(folder), ids)
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
    said = ours[-6:-1].argmax(-1).tolist()
    assert tokenizer.decode(said) == "</mm:think>" + needle.answer
