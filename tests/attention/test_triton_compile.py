"""Every kernel compiles for every arch that its spec claims, without spills to memory."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from minuet.attention.backends.triton import spec
from minuet.attention.capability import Level
from minuet.dtypes import DType
from minuet.platform.arch import get
from minuet.platform.triton import Launch
from tests.attention.triton_compile import (
    TARGETS,
    Shape,
    compile_launch,
    fp8_of,
    launches,
)

pytestmark = pytest.mark.compile

RECORD = Path(__file__).with_name("triton_resources.json")
MATRIX = (
    "attend_dense", "attend_blocks", "attend_rows", "attend_tiles", "attend_prefill",
    "score_blocks", "score_tiles",
)  # fmt: skip
# The FP8 prefill of gfx1250 takes the compiler over a minute.
SLOW = {("gfx1250", "fp8", name) for name in ("attend_prefill", "attend_tiles")}


def shapes(arch: str) -> dict[str, Shape]:
    fp8 = fp8_of(arch)
    return {
        "bf16": Shape(DType.BF16),
        "fp8": Shape(fp8, fp8),
        "fp8-q8": Shape(fp8, query_len=8),
        "bf16-q4": Shape(DType.BF16, query_len=4),
        "fp8-kv8-dim64-page64": Shape(fp8, heads=32, kv_heads=8, dim=64, page=64),
        "bf16-long": Shape(DType.BF16, seqs=4, length=1 << 20),  # every way of ranking
    }


# What stands for the rest in CI; all of it, or of some archs, is
# ``python -m tests.attention.test_triton_compile [ARCH ...]``.
CHOSEN = [
    *(("sm90", "fp8", name) for name in MATRIX),
    *(("sm90", "fp8", name) for name in ("merge_parts", "list_blocks", "unite_lists", "write")),
    ("sm90", "bf16", "write_sums"),
    *(
        ("sm90", "bf16", name)
        for name in ("attend_dense", "attend_blocks", "attend_tiles", "attend_prefill")
    ),
    ("sm90", "fp8-q8", "attend_dense"),
    ("sm90", "bf16-q4", "attend_dense"),
    *(("sm90", "bf16-long", name) for name in ("attend_blocks", "list_blocks")),
    ("sm90", "fp8-kv8-dim64-page64", "attend_dense"),
    *(
        (arch, label, name)
        for arch in ("gfx942", "gfx950", "gfx1250")
        for label, name in (
            ("bf16", "attend_dense"), ("fp8", "attend_blocks"), ("bf16", "attend_prefill"),
            ("bf16", "score_blocks"), ("fp8", "merge_parts"), ("fp8", "write"),
            ("bf16", "attend_tiles"),
        )
    ),
]  # fmt: skip


def check(arch: str, name: str, made: Launch, found: dict[str, int]) -> None:
    assert found["stack_bytes"] == 0, "spills to memory"
    assert found["local"] == 0, "local memory"
    assert found["shared_bytes"] <= get(arch).shared_memory_bytes
    if name in MATRIX:
        assert found["matrix"] > 0, "no matrix instructions"
    if arch == "sm90":
        assert found["shared_byte_loads"] == 0, "shared memory is read byte by byte"
        if name in MATRIX and made.args["STAGES"] > 1:
            assert found["async_copies"] > 0, "loads are not pipelined"


@pytest.mark.parametrize(("arch", "label", "name"), CHOSEN)
def test_a_kernel_compiles_within_its_limits(arch, label, name):
    made = launches(shapes(arch)[label], arch)[name]
    compiled = compile_launch(made, arch)
    found = compiled.resources
    check(arch, name, made, found)
    assert arch != "sm90" or compiled.waits_before_it_writes
    recorded = json.loads(RECORD.read_text())["kernels"][f"{arch}/{label}/{name}"]
    # other releases of the compiler allocate a little differently
    assert found["registers"] <= 1.25 * recorded["registers"] + 16
    assert found["shared_bytes"] <= 1.1 * recorded["shared_bytes"] + 1024


def test_every_compiled_level_is_recorded():
    kernels = json.loads(RECORD.read_text())["kernels"]
    for capability in spec.CAPABILITIES:
        for arch, level in capability.level.items():
            if level >= Level.COMPILED:
                assert any(key.startswith(f"{arch}/") for key in kernels), (capability.name, arch)


def test_element_types_that_the_interpreter_cannot_hold_are_compiled():
    """e4m3fnuz is covered by compilation only."""
    assert fp8_of("gfx942") is DType.FP8_E4M3FNUZ


if __name__ == "__main__":
    import triton

    chosen = sys.argv[1:] or list(TARGETS)
    table = json.loads(RECORD.read_text())["kernels"]
    for arch_name in chosen:
        table = {k: found for k, found in table.items() if not k.startswith(f"{arch_name}/")}
        for shape_name, shape in shapes(arch_name).items():
            for kernel, made in launches(shape, arch_name).items():
                if (arch_name, shape_name, kernel) in SLOW:
                    continue
                key = f"{arch_name}/{shape_name}/{kernel}"
                table[key] = compile_launch(made, arch_name).resources
                print(key, table[key], flush=True)
                check(arch_name, kernel, made, table[key])
        report = {"triton": triton.__version__, "kernels": dict(sorted(table.items()))}
        RECORD.write_text(json.dumps(report, indent=1) + "\n")
