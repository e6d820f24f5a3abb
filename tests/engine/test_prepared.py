"""Prepared steps in Triton's interpreter."""

import pytest

from tests import interpreted

pytest.importorskip("triton")


@pytest.mark.sim
def test_prepared_steps_answer_as_eager_ones_and_the_self_test_catches_faults(checkpoint):
    folder = checkpoint(
        "small", layers=2, dense_layers=1, hidden=64, heads=2, kv_heads=1, head_dim=64, experts=4,
        expert_width=32, dense_width=64, shared_width=32, top_blocks=2, vocab=512, block=16,
    )  # fmt: skip
    assert interpreted.run("tests.engine.prepared_on_cpu", str(folder)) == 6
