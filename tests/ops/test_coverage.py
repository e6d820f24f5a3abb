"""What the table ``triton`` refuses is refused where the plan looks, before anything is loaded."""

from dataclasses import replace

import pytest

from minuet.dtypes import DType
from minuet.errors import RefusedError
from minuet.ops.triton import spec
from tests.planning.helpers import plan, tiny


def test_m3_and_its_successor_are_covered():
    assert spec.covers(DType.BF16, 6144, 128, 4) == ()
    assert spec.covers(DType.FP16, 6144, 128, 8) == ()


def test_every_limit_is_named():
    found = spec.covers(DType.FP32, spec.MAX_HIDDEN + 1, spec.MAX_EXPERTS + 1, spec.MAX_TOP_K + 1)
    assert [r.field for r in found] == [
        "dtype",
        "hidden_size",
        "num_local_experts",
        "num_experts_per_tok",
    ]


def test_a_model_with_too_many_experts_is_refused_on_a_gpu_and_runs_on_the_cpu():
    facts = tiny()
    crowded = replace(facts, experts=replace(facts.experts, count=spec.MAX_EXPERTS + 1))
    on_gpu = plan("sm90", crowded, enforce_eager=True)
    with pytest.raises(RefusedError, match="num_local_experts"):
        on_gpu.require_runnable()
    assert not plan("cpu", crowded, memory=None).obstacles()
