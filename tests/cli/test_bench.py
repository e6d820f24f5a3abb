"""``minuet bench`` as a command: sub-commands, slices, and flags that are wrong."""

import json

from minuet.cli import main
from tests.cli.test_main import error


def test_a_slice_is_a_config_that_explain_takes(tmp_path, capsys):
    path = tmp_path / "slice.json"
    words = ["--rank-of", "4", "--layers", "12", "-o", str(path)]
    assert main(["bench", "slice", "minimax-m3", *words]) == 0
    assert json.loads(path.read_text())["num_attention_heads"] == 16
    capsys.readouterr()
    assert main(["explain", str(path), "--arch", "sm90", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["layers"] == {"dense": 3, "sparse": 9}


def test_mistakes_are_one_line_with_the_way_out(capsys):
    assert "choose from" in error(capsys, "bench", "stepp")
    assert "WHAT" in error(capsys, "bench")
    assert "did you mean --kv-cache-dtype?" in error(capsys, "bench", "step", "--kv-cahce-dtype")
    assert "did you mean --request-rate?" in error(capsys, "bench", "serve", "--request-rte", "1")
    assert "'many' is no count" in error(capsys, "bench", "step", "x", "--batch-size", "many")
    assert "--num-iters" in error(capsys, "bench", "step", "minimax-m3", "--num-iters", "0")
    assert "KEY=VALUE" in error(capsys, "bench", "step", "minimax-m3", "--metadata", "x")
    refused = error(capsys, "bench", "slice", "minimax-m3", "--rank-of", "3", "-o", "x")
    assert "query heads 64" in refused


def test_loads_that_cannot_be_are_refused_before_anything_is_asked(capsys):
    def refused(*words):
        return error(capsys, "bench", "serve", "--base-url", "http://127.0.0.1:9", *words)

    assert "--num-prompts" in refused("--num-prompts", "0")
    assert "--request-rate" in refused("--request-rate", "0")
    assert "--burstiness" in refused("--burstiness", "-1")
    assert "--max-concurrency" in refused("--max-concurrency", "0")
    assert "--dataset-path" in refused("--dataset-name", "custom")
    assert "--extra-body" in refused("--extra-body", "[]")
    assert "--goodput" in refused("--goodput", "itl:1")
    assert "--metric-percentiles" in refused("--metric-percentiles", "high")
