"""T2a: each cell is refused, or every reachable step is accepted. T4c: a label is what ran."""

from itertools import product

import pytest

from minuet.docs import defaults
from minuet.planning.execution import plan_or_refuse
from minuet.planning.kernels import PLAIN, Features
from minuet.platform.arch import ARCHS, get
from tests.planning.helpers import PLENTY, preset
from tests.planning.matrix import FakeEngine, assert_accepted, reachable_steps

FEATURES = {"plain": PLAIN, "sinks": Features(sinks=True), "window": Features(window=4096)}
CELLS = list(
    product(
        ("auto", "cpu", "triton", "flydsl"),  # forced in the environment, or not
        ("fp8", "bfloat16"),
        (1, 2, 4, 8),
        (8192, 32768, 65536),
        (16, 64, 128, 256),
        FEATURES,
    )
)


def cell_options(backend, kv, ranks, tokens, page):
    return defaults(
        attention_backend=backend,
        dtype="bfloat16",
        kv_cache_dtype=kv,
        tensor_parallel_size=ranks,
        max_num_batched_tokens=tokens,
        block_size=page,
        max_model_len=2048,
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_every_cell_is_refused_or_runs_every_reachable_step(arch):
    outcomes = {"served": 0, "refused": 0}
    for backend, kv, ranks, tokens, page, feature in CELLS:
        options = cell_options(backend, kv, ranks, tokens, page)
        plan, refusals = plan_or_refuse(
            options, preset(), get(arch), device_bytes=PLENTY, features=FEATURES[feature]
        )
        assert (plan is None) == bool(refusals)
        outcomes["served" if plan else "refused"] += 1
        if plan is None:
            assert page != 128 or feature != "plain" or any(r.remedy for r in refusals)
            continue
        assert (page, feature) == (128, "plain")
        assert_accepted(plan)
    assert outcomes["refused"] >= len(CELLS) * 11 // 12
    assert outcomes["served"] > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_the_label_of_a_call_is_the_kernel_that_runs(arch):
    for backend, kv, ranks in product(("auto", "cpu"), ("fp8", "bfloat16"), (1, 4)):
        options = cell_options(backend, kv, ranks, 8192, 128)
        plan, _ = plan_or_refuse(options, preset(), get(arch), device_bytes=PLENTY)
        if plan is None:
            continue
        engine = FakeEngine(plan)
        for shape in reachable_steps(plan):
            engine.step(shape)
        assert engine.trace
        assert all(label == ran for label, ran in engine.trace)
        assert {label for label, _ in engine.trace} == {
            choice.kernel.name for choice in plan.choices.values()
        }


@pytest.mark.parametrize("arch", ARCHS)
def test_a_backend_forced_in_the_environment_is_the_one_that_runs_or_a_refusal(arch):
    from minuet import env
    from minuet.config import Source, read_options

    for backend in ("cpu", "triton", "flydsl"):
        with env.override(MINUET_FORCE_BACKEND=backend, MINUET_ARCH=arch):
            options = read_options({"dtype": "bfloat16", "max_model_len": "2048"})
        assert options.sources["attention_backend"] is Source.ENV
        plan, refusals = plan_or_refuse(options, preset(), get(arch), device_bytes=PLENTY)
        if plan:
            assert plan.backend == backend
            assert {c.kernel.backend for c in plan.choices.values()} == {backend}
        else:
            assert any(r.flag == "--attention-backend" for r in refusals)
