"""Sampling and the invariant product compile for every arch at M3's sizes, without spills."""

import pytest
import torch

pytest.importorskip("triton")

from minuet.ops.sampling import columns
from minuet.ops.sampling.reference import Report
from minuet.ops.triton import linear, sampling
from minuet.platform.arch import get
from minuet.platform.triton import Launch
from tests.attention.triton_compile import compile_launch

pytestmark = pytest.mark.compile

VOCAB, ROWS = 200_064, 64
EVERY = (
    "greedy_parts", "greedy_rows", "draw_parts", "draw_rows", "group_maxima", "choose_pivot",
    "collect_candidates", "draw_listed", "draw_searched", "mask_rows", "shape_entries",
    "report_chunks", "report_rows", "linear_split", "linear_both", "linear_whole", "add_splits",
)  # fmt: skip


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(arch: str) -> dict[str, Launch]:
    """Every launch, by kernel."""
    tuning = sampling.TUNINGS.get(arch, sampling.Tuning())
    logits = _empty(ROWS, VOCAB, dtype=torch.float32)
    params, wanted = _empty(ROWS, columns.WIDTH), _empty(ROWS)
    tokens, flags = _empty(ROWS, dtype=torch.int64), _empty(ROWS, dtype=torch.bool)
    top = _empty(ROWS, 20), _empty(ROWS, 20, dtype=torch.float32)
    report = Report(_empty(ROWS, dtype=torch.float32), wanted, *top)
    made = [
        *sampling.greedy_launches(logits, tokens, flags, tuning),
        *sampling.draw_launches(logits, params, tokens, flags, tuning),
        *sampling.filter_launches(logits, params, tokens, flags, tuning),
        sampling.mask_launch(logits, wanted, _empty(ROWS, VOCAB // 32)),
        sampling.shape_launch(logits, params, _empty(300, 4)),
        *sampling.report_launches(logits, tokens, wanted, report, tuning),
    ]
    named = {one.kernel.__name__: one for one in made}
    for name, rows in (("linear_split", 64), ("linear_both", 128), ("linear_whole", 200)):
        x, weight, out = (
            _empty(*shape, dtype=torch.bfloat16)
            for shape in ((rows, 6144), (2560, 6144), (rows, 2560))
        )
        first, *rest = linear.linear_launches(x, weight, out, arch)
        named[name] = first
        named |= {one.kernel.__name__: one for one in rest}
    return named


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *(("sm90", name) for name in EVERY),
        *(("gfx942", name) for name in ("draw_listed", "draw_searched", "collect_candidates")),
        *(
            (arch, name)
            for arch in ("gfx942", "gfx950", "gfx1250")
            for name in ("draw_parts", "linear_split", "linear_whole")
        ),
    ],
)
def test_a_kernel_compiles_within_its_limits(arch, name):
    found = compile_launch(launches(arch)[name], arch).resources
    assert found["stack_bytes"] == 0, "spills to memory"
    assert found["local"] == 0, "local memory"
    assert found["shared_bytes"] <= get(arch).shared_memory_bytes
    if name.startswith("linear"):
        assert found["matrix"] > 0, "no matrix instructions"
    if arch == "sm90" and name == "draw_searched":
        assert found["registers"] <= 128, "two programs of 256 threads do not fit into a unit"
    if arch == "sm90" and name.startswith("linear"):
        assert found["async_copies"] > 0, "weights do not come through the pipeline"


def test_the_tests_name_every_kernel():
    assert set(launches("sm90")) == set(EVERY)
