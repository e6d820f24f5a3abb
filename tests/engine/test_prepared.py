"""Prepared steps through Triton's interpreter, which is chosen at import: in a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.sim
def test_prepared_steps_answer_as_eager_ones_and_the_self_test_catches_faults(checkpoint):
    folder = checkpoint(
        "small", layers=2, dense_layers=1, hidden=64, heads=2, kv_heads=1, head_dim=64, experts=4,
        expert_width=32, dense_width=64, shared_width=32, top_blocks=2, vocab=512, block=16,
    )  # fmt: skip
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.prepared_on_cpu", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("ok ") == 6
