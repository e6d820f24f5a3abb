"""What a record says of itself, and the time that its figures come from."""

import json
import subprocess

import pytest
import torch

from minuet.bench import record
from minuet.errors import ConfigError
from minuet.platform.profiling import added_us, kernel_times
from minuet.platform.timing import time_calls

CPU = torch.device("cpu")


def test_a_command_is_what_a_reader_would_type():
    words = ["/usr/lib/minuet/__main__.py", "bench", "step", "m3", "--json", "/x/y/step.json"]
    assert record.command(words) == "minuet bench step m3 --json step.json"
    assert record.command(["/somewhere/seal.py", "-n", "3"]) == "python benchmarks/seal.py -n 3"


def test_the_header_names_the_commit_and_the_machine():
    found = record.header()
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    assert found["commit"].rstrip("+") == head.stdout.strip()
    assert found["cores"] >= 1
    assert json.loads(json.dumps(found)) == found


def test_a_summary_is_of_its_samples():
    found = record.summary([0.003, 0.001, 0.002, 0.004], 1e3)
    assert found == {"median": 2.5, "p20": 1.6, "p80": 3.4, "min": 1.0, "max": 4.0, "samples": 4}


def test_metadata_are_pairs(tmp_path):
    assert record.metadata(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        record.metadata(["=1"])
    record.write({"a": 1}, tmp_path / "deep" / "r.json")
    assert json.loads((tmp_path / "deep" / "r.json").read_text()) == {"a": 1}


def test_gpus_are_as_the_driver_says_and_none_without_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.gpus() == []
    fake = tmp_path / "nvidia-smi"
    rows = ("0, Card, GPU-aa, 580.1", "1, Card, GPU-bb, 580.1")
    fake.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    fake.chmod(0o755)
    assert [gpu["uuid"] for gpu in record.gpus()] == ["GPU-aa", "GPU-bb"]
    assert [gpu["index"] for gpu in record.gpus("bb")] == ["1"]


def test_every_timed_call_has_its_time_and_warm_ups_have_none():
    calls = []
    seconds = time_calls(lambda: calls.append(1), CPU, iters=5, warmup=3)
    assert (len(seconds), len(calls)) == (5, 8)
    assert all(0.0 <= s < 0.1 for s in seconds)


def test_the_profiler_counts_launches_per_call():
    x = torch.ones(8, 8)
    found = {kernel.name: kernel for kernel in kernel_times(lambda: x @ x @ x, CPU, iters=4)}
    assert found["aten::mm"].launches == 2.0
    assert found["aten::mm"].seconds > 0.0
    assert found["aten::mm"].added_seconds == found["aten::mm"].seconds


def test_overlapping_kernels_add_what_they_move_the_end_by():
    spans = [("b", 8.0, 14.0), ("a", 0.0, 10.0), ("wait", 9.0, 13.0), ("a", 20.0, 25.0)]
    # b began early; wait is over before b; the idle 6 us before the second a are its own
    assert added_us(spans) == {"a": 10.0 + 11.0, "b": 4.0, "wait": 0.0}
    assert added_us([]) == {}
