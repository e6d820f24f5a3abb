"""What the GPU tests share: the device, planners over poisoned scratch, a count of compilations."""

from contextlib import contextmanager

import pytest
import torch

triton = pytest.importorskip("triton")

from minuet.attention.backends.triton import launch  # noqa: E402
from minuet.attention.backends.triton.step import StepShape  # noqa: E402
from minuet.platform.arch import get  # noqa: E402
from tests.attention.conformance import Backend, Case  # noqa: E402

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCRATCH_BYTES = {
    "partial_out": 64 << 20,
    "partial_lse": 1 << 20,
    "scores": 16 << 20,
    "blocks": 1 << 20,
    "pages": 1 << 20,
}


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def fp8():
    return get(launch.arch_name(device())).fp8


def poisoned_scratch() -> dict[str, torch.Tensor]:
    """Bytes of all ones: NaN as a float, -1 as an integer."""
    return {
        name: torch.full((size,), 0xFF, dtype=torch.uint8, device=device())
        for name, size in SCRATCH_BYTES.items()
    }


def step_shape(case: Case, **more) -> StepShape:
    lens = set(case.query_lens)
    query_len = lens.pop() if len(lens) == 1 and max(case.query_lens) <= 8 else 0
    sizes = {
        "page_size": case.page,
        "num_kv_heads": case.kv_heads,
        "group": case.group,
        "max_seqs": len(case.lens) + 3,
        "max_tokens": sum(case.query_lens) + 3 * max(1, query_len),
        "max_length": max(case.lens) + 1000,
        "query_len": query_len,
        "kv_fp8": case.kv_dtype.is_fp8,
        "compute_units": torch.cuda.get_device_properties(device()).multi_processor_count,
    }
    return StepShape(**(sizes | more))


def backend(**more) -> Backend:
    """Steps are planned as in serving: a planner of a larger batch, over poisoned workspace."""
    scratch = poisoned_scratch()

    def plan(batch, case):
        return launch.planner(step_shape(case, **more), device(), scratch).plan(batch, case.page)

    return Backend(launch, device(), plan)


@contextmanager
def counted_compilations():
    """How many kernels were compiled inside, as a list that grows."""
    compiled: list[str] = []

    def hook(*args, **kwargs):
        compiled.append(str(kwargs.get("repr", args)))
        return None

    knobs = triton.knobs.runtime
    before, knobs.jit_post_compile_hook = knobs.jit_post_compile_hook, hook
    try:
        yield compiled
    finally:
        knobs.jit_post_compile_hook = before
