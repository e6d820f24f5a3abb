"""A measured step is the step that was asked for, and its figures follow from its time."""

import json

import pytest
import torch

from minuet.attention.contract import Phase
from minuet.bench.step.cell import Cell, settings_for
from minuet.bench.step.fill import fill
from minuet.bench.step.measure import distinct_experts, kernel_rows
from minuet.cli import main
from minuet.config import read_options
from minuet.dtypes import DType
from minuet.errors import ConfigError
from minuet.kv.cache import KVCache
from minuet.kv.layout import KVLayout, LaneName
from minuet.models.registry import find
from minuet.planning.roofline import decode, prefill, storage_of
from minuet.platform.profiling import KernelTime
from tests.engine import desk

DECODE, PREFILL = Phase.DECODE, Phase.PREFILL


def test_a_decode_step_has_one_known_token_per_request_and_its_drafts():
    step = Cell(DECODE, 3, 100, query_len=4).step(range(1, 50), 16, vocab=30)
    assert (step.num_decodes, step.num_tokens) == (3, 12)
    for share in step.scheduled:
        request = share.request
        assert (share.start, share.num_tokens, share.samples) == (96, 4, True)
        assert (request.num_tokens, len(request.draft_token_ids)) == (97, 3)
        assert len(request.output_token_ids) == 1
        assert len(request.tokens(96, 100)) == 4
        assert len(request.page_ids) == 7
        assert all(0 <= token < 30 for token in request.tokens(0, 100))
    pages = [page for share in step.scheduled for page in share.request.page_ids]
    assert len(set(pages)) == len(pages) == 21


def test_a_prefill_step_ends_at_the_end_of_its_prompts():
    step = Cell(PREFILL, 2, 40, query_len=10).step(range(1, 20), 16, vocab=30)
    assert (step.num_decodes, step.num_tokens) == (0, 20)
    for share in step.scheduled:
        assert (share.start, len(share.request.prompt_token_ids)) == (30, 40)
        assert share.request.output_token_ids == []


@pytest.mark.parametrize(
    ("cell", "flag"),
    [
        ((DECODE, 0, 8, 1), "--batch-size"),
        ((DECODE, 1, 8, 0), "--query-len"),
        ((DECODE, 1, 4, 4), "--context"),
        ((PREFILL, 1, 4, 5), "--context"),
    ],
)
def test_a_step_that_cannot_be_is_refused(cell, flag):
    with pytest.raises(ConfigError, match=flag):
        Cell(*cell)


def test_settings_are_what_the_steps_need_unless_asked_otherwise(checkpoint):
    cells = [Cell(DECODE, batch, 300) for batch in (1, 4)]
    source = find(str(checkpoint("tiny128")))
    options = settings_for(read_options({"model": source.name}), cells, source)
    assert options["max_num_seqs"] == 4
    assert options["cudagraph_capture_sizes"] == (1, 4)
    assert options["max_model_len"] == 384
    assert options["kv_cache_pages"] == 1 + 4 * 3 + 4
    assert options["load_format"] == "auto"
    asked = {"model": source.name, "max_num_seqs": 9, "kv_cache_memory": "1MiB"}
    options = settings_for(read_options(asked), cells, source)
    assert options["max_num_seqs"] == 9
    assert options["kv_cache_pages"] == "auto"
    preset = find("minimax-m3")
    options = settings_for(read_options({"model": "minimax-m3"}), cells, preset)
    assert options["load_format"] == "dummy"


def test_bytes_are_those_of_the_roofline_with_the_experts_that_were_visited(checkpoint):
    prepared = desk.engine(checkpoint("tiny128"), max_model_len=512)
    plan, storage = prepared.plan, storage_of(prepared.plan.config)
    found = Cell(DECODE, 2, 300).roofline(plan, distinct_experts=3.0)
    assert found == decode(plan.facts, storage, batch=2, context=300, distinct_experts=3.0)
    found = Cell(PREFILL, 2, 300, query_len=64).roofline(plan, distinct_experts=8.0)
    assert found == prefill(
        plan.facts, storage, tokens=64, context_before=236, requests=2, distinct_experts=8.0
    )


def test_experts_are_counted_and_the_engine_is_left_as_it_was(checkpoint):
    prepared = desk.engine(checkpoint("tiny128"), max_model_len=512)
    runner, facts = prepared.runner, prepared.plan.facts
    fill(runner.cache)
    one = Cell(DECODE, 1, 200).step(range(1, 9), 128, facts.vocab)
    many = Cell(PREFILL, 2, 200, query_len=200).step(range(20, 29), 128, facts.vocab)
    before = runner.execute(one)
    assert distinct_experts(runner, one) == [facts.experts.per_token] * facts.experts.layers
    counts = distinct_experts(runner, many)
    assert counts == [facts.experts.count] * facts.experts.layers  # 400 tokens miss none of eight
    assert runner.execute(one) == before


@pytest.mark.parametrize("kv_dtype", [DType.BF16, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ])
def test_a_filled_cache_is_finite_everywhere_and_reads_as_normal_values(kv_dtype):
    layout = KVLayout(16, 2, 32, kv_dtype, index_dim=8, index_dtype=kv_dtype)
    cache = KVCache([layout, layout], 70, fill=float("nan"))
    fill(cache, seed=3)
    for layer in cache.layers:
        for name, scale in ((LaneName.K, LaneName.K_SCALE), (LaneName.V, LaneName.V_SCALE)):
            values = layer.lanes[name].float()
            if scale in layer.lanes:
                values = values * layer.lanes[scale][..., None]
            assert torch.isfinite(values).all()
            assert values.std() == pytest.approx(1.0, abs=0.02)
            assert not torch.equal(values[0], values[1])
        assert torch.isfinite(layer.index_k.float()).all()
        assert layer.index_k.float().std() == pytest.approx(1.0, abs=0.05)


def test_what_kernels_add_and_the_rest_make_up_the_step():
    kernels = [KernelTime("gemm", 3.0, 80e-6, 60e-6), KernelTime("norm", 2.0, 15e-6, 15e-6)]
    found = kernel_rows(kernels, step_ms=0.1)
    assert (found["launches"], found["sum_us"], found["rest_us"]) == (5.0, 75.0, 25.0)
    assert [row["share"] for row in found["rows"]] == [0.6, 0.15]
    assert [row["us"] for row in found["rows"]] == [80.0, 15.0]


def test_the_command_measures_a_slice_and_writes_a_record(checkpoint, tmp_path, capsys):
    path = tmp_path / "step.json"
    words = [str(checkpoint("tiny128")), "--rank-of", "2", "--layers", "2", "--arch", "cpu"]
    step = ["--batch-size", "1", "3", "--context", "200", "--num-iters", "3", "--warmup", "0"]
    more = ["--json", str(path), "--metadata", "run=1", "--kv-cache-dtype", "fp8"]
    assert main(["bench", "step", *words, *step, *more]) == 0
    found = json.loads(path.read_text())
    assert (found["kind"], found["run"]) == ("minuet bench step", "1")
    assert found["model"]["rank_of"] == 2
    assert found["config"]["kv_cache_dtype"] == "fp8_e4m3fn"
    assert [cell["batch_size"] for cell in found["cells"]] == [1, 3]
    for cell in found["cells"]:
        step_s, limit_s = cell["step_ms"]["median"] / 1e3, cell["limit_ms"]["plain_read"] / 1e3
        read = found["device"]["plain_read_bytes_per_s"]
        assert sum(cell["bytes"].values()) == pytest.approx(cell["total_bytes"], abs=20)
        assert limit_s == pytest.approx(cell["total_bytes"] / read, rel=0.01, abs=1e-7)
        over_us = cell["overhead_us_per_layer"]["plain_read"]
        assert over_us == pytest.approx((step_s - limit_s) / 2 * 1e6, abs=1.0)
        assert cell["layers"] == {"dense": 1, "sparse": 1}
        assert cell["kernels"]["rows"][0]["us"] > 0
        assert "arch" not in cell["limit_ms"]  # no claim is made for a CPU
    assert found["cells"][0]["distinct_experts"]["mean"] == 2.0
    shown = capsys.readouterr().out
    assert "share of one of 2 ranks" in shown
    assert "decode 3 x 1 at 200" in shown


def test_a_pool_that_is_too_small_is_said_with_the_way_out(checkpoint, capsys):
    words = [str(checkpoint("tiny128")), "--arch", "cpu", "--kv-cache-pages", "4"]
    step = ["--batch-size", "2", "--context", "300", "--max-model-len", "384"]
    assert main(["bench", "step", *words, *step]) == 2
    assert "--kv-cache-pages" in capsys.readouterr().err


def test_a_prefill_step_is_measured_too(checkpoint, tmp_path):
    path = tmp_path / "prefill.json"
    words = [str(checkpoint("tiny128")), "--arch", "cpu", "--phase", "prefill", "--no-kernels"]
    step = ["--query-len", "64", "--context", "130", "--batch-size", "2", "--num-iters", "2"]
    assert main(["bench", "step", *words, *step, "--warmup", "0", "--json", str(path)]) == 0
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["tokens_per_s"] == pytest.approx(128 / cell["step_ms"]["median"] * 1e3, rel=0.01)
    assert "kernels" not in cell
