"""Any configuration is served or refused at start-up; there is no third outcome.

A refusal's remedy, applied, leads to service or removes that refusal. A plan keeps its promises:
within the budget, bounded scratch, a kernel that covers every reachable step.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from minuet.config import Options
from minuet.docs import defaults, dense_only
from minuet.errors import Refusal
from minuet.planning.execution import ExecutionPlan, plan_or_refuse
from minuet.planning.kernels import PLAIN, PREFILL_WORKSPACE_BYTES, Features
from minuet.planning.memory import DUMMY_PAGES
from minuet.planning.model import ModelFacts
from minuet.platform.arch import ARCHS, Arch
from minuet.settings import BY_NAME, SETTINGS
from tests.planning.helpers import preset, tiny
from tests.planning.matrix import assert_accepted

CONFIGURATIONS = 10_000
BATCHES = 4
NAME_OF = {flag: setting.name for setting in SETTINGS for flag in setting.flags}

MODELS = (
    preset(),
    preset(),
    tiny(),
    dense_only(tiny()),
    dense_only(preset()),
    replace(tiny(), num_q_heads=6, num_kv_heads=3, index=replace(tiny().index, heads=3)),
    replace(tiny(), head_dim=80),
    replace(tiny(), index=replace(tiny().index, top_blocks=32)),
    replace(tiny(), num_q_heads=64),
)
FEATURES = (PLAIN,) * 12 + (Features(window=1024), Features(sinks=True))

# What the choice of kernels depends on. Each is drawn in about one case of three.
KERNEL_SETTINGS: dict[str, tuple[object, ...]] = {
    "dtype": ("bfloat16", "float16", "float32", "bfloat16"),
    "kv_cache_dtype": ("fp8", "bfloat16", "float32", "fp8_e4m3fn", "fp8_e4m3fnuz", "float16"),
    "index_kv_cache_dtype": ("fp8", "bfloat16", "float32", "fp8_e4m3fnuz"),
    "attention_backend": ("cpu", "triton", "flydsl"),
    "tensor_parallel_size": (1, 2, 3, 4, 4, 8, 8, 8, 16, 64, 128),
    "block_size": (1, 16, 48, 64, 128, 128, 128, 256, 1024),
    "num_speculative_tokens": (0, 1, 3, 7, 8),
}
# What memory and shapes depend on besides.
OTHER_SETTINGS: dict[str, tuple[object, ...]] = {
    "max_model_len": (1, 100, 128, 2048, 8192, 131_072, 1_000_000, 2**20, 2**21),
    "max_num_batched_tokens": (16, 128, 1000, 8192, 65_536, 2**20),
    "max_num_seqs": (1, 3, 64, 300, 1024),
    "gpu_memory_utilization": (0.05, 0.5, 0.9, 1.0),
    "kv_cache_memory": (1, 2**24, 2**30, 2**36, 2**42),
    "kv_cache_pages": (1, 2, 100, 10_000, 10**7),
    "index_score_memory": (1, 4096, 2**20, 2**28),
    "cudagraph_capture_sizes": ("1", "1,2,3,5,8", "64,128,512", "4096"),
    "enforce_eager": (True,),
    "batch_invariant": (True,),
}


def some(rng: random.Random, settings: dict[str, tuple[object, ...]]) -> dict[str, object]:
    share = rng.choice((0.1, 0.3, 0.5))
    return {name: rng.choice(values) for name, values in settings.items() if rng.random() < share}


def cases(batch: int) -> Iterator[tuple[str, Options, tuple[ModelFacts, Arch, Features]]]:
    """Ten configurations each of many (model, arch, types, heads, page): they share kernels."""
    for number in range(CONFIGURATIONS // BATCHES // 10):
        rng = random.Random(f"{batch}/{number}")
        facts, arch = rng.choice(MODELS), rng.choice(tuple(ARCHS.values()))
        features, asked = rng.choice(FEATURES), some(rng, KERNEL_SETTINGS)
        for _ in range(10):
            everything = {**asked, **some(rng, OTHER_SETTINGS)}
            name = f"{everything} on {arch.name}, {facts.name}, {features}"
            yield name, defaults(**everything), (facts, arch, features)


def applied(options: Options, refusal: Refusal) -> Options:
    """The options with a remedy followed."""
    name = NAME_OF[refusal.flag]
    value = BY_NAME[name].checked(refusal.value or True)
    return Options({**options.values, name: value}, options.sources)


def check_promises(plan: ExecutionPlan) -> None:
    memory, config = plan.memory, plan.config
    if memory.budget_bytes is not None:
        parts = (
            memory.weight_bytes,
            memory.workspace_bytes,
            memory.graph_bytes,
            memory.activation_bytes,
            memory.kv_bytes,
        )
        assert sum(parts) == memory.used_bytes <= memory.budget_bytes
    assert memory.num_tokens >= config.max_model_len
    assert memory.num_pages > DUMMY_PAGES
    assert memory.workspace_bytes == plan.workspace.total_bytes
    for shape in plan.shapes.prefill_shapes:
        step = plan.step_of[shape]
        assert step.score_bytes <= config.index_score_memory
        assert step.workspace_bytes <= PREFILL_WORKSPACE_BYTES + config.index_score_memory
        assert step.workspace_bytes <= memory.workspace_bytes
    assert all(step.score_bytes <= config.index_score_memory for step in plan.steps)
    assert len(plan.shapes.buckets) <= 16
    assert_accepted(plan)


def check_remedies(
    options: Options, case: tuple[ModelFacts, Arch, Features], found: tuple, rng: random.Random
) -> None:
    facts, arch, features = case
    remedies = {(r.flag, r.value): r for r in found if r.flag}
    # a model that asks for what no kernel has cannot be helped by a flag
    hopeless = {"window", "sinks", "budget", "head_dim", "kv_pages"}
    assert remedies or any(r.field in hopeless for r in found), found
    # one of them each time, and all of them now and then: the seeds are fixed, so each is tried
    tried = list(remedies.values())
    if tried and rng.random() < 0.9:
        tried = [rng.choice(tried)]
    for refusal in tried:
        plan, left = plan_or_refuse(applied(options, refusal), facts, arch, features=features)
        assert (plan is None) == bool(left)
        assert refusal not in left, f"following {refusal.remedy!r} left {refusal}"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_configuration_is_served_or_refused(batch):
    outcomes: Counter[str] = Counter()
    rng = random.Random(batch)
    for name, options, (facts, arch, features) in cases(batch):
        print(name)  # pytest shows it if what follows fails
        plan, found = plan_or_refuse(options, facts, arch, features=features)
        assert (plan is None) == bool(found)
        if plan:
            check_promises(plan)
        else:
            check_remedies(options, (facts, arch, features), found, rng)
        outcomes["served" if plan else "refused"] += 1
    assert outcomes.total() == CONFIGURATIONS // BATCHES
    # a fuzz that only ever sees one side would prove nothing
    assert min(outcomes["served"], outcomes["refused"]) > outcomes.total() // 20, outcomes
