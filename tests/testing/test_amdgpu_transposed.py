"""Transposed loads from LDS: which element of whose memory each lane receives.

Written out lane by lane from the sources: "AMD Instinct CDNA4 ISA", 11.4, and the comment in the
lowering of Triton's AMD backend for ds.read.tr16.b64; AMD, "A Deep Dive into LDS Optimizations on
AMD Instinct MI450 GPUs" (rocm.blogs.amd.com, 2026-08-28), figures 1 and 4, for gfx1250.
"""

import numpy as np
import pytest
from tests.testing.snippets import covers, run

from minuet.testing.amdgpu import SimulationError
from minuet.testing.amdgpu.lanes import TRANSPOSED

pytestmark = pytest.mark.sim

SHARED = "@s = internal addrspace(3) global [2048 x i8] undef, align 16"


def of_16_lanes(lane):
    """Lane i of 16 takes column i of 4 rows; a row is in four lanes of four elements."""
    row, column = lane // 16 * 16, lane % 16
    return [(row + 4 * e + column // 4, column % 4) for e in range(4)]


def of_8_lanes(lane):
    """D0 receives S0..S7:E0, D1 receives S0..S7:E1, D8 receives S8..S15:E0."""
    return [(lane // 8 * 8 + e, lane % 8) for e in range(8)]


def of_two_runs_of_four_lanes(lane):
    """D0..D7 draw from S0..S3 and S8..S11, D8..D15 from S4..S7 and S12..S15."""
    start = lane // 16 * 16 + (4 if lane % 16 >= 8 else 0)
    return [(start + e if e < 4 else start + 8 + e - 4, lane % 8) for e in range(8)]


# name: (arch, result in IR, elements of what type, who gives what)
LOADS = {
    "llvm.amdgcn.ds.read.tr16.b64": ("gfx950", "<4 x i16>", np.uint16, of_16_lanes),
    "llvm.amdgcn.ds.load.tr16.b128": ("gfx1250", "<8 x i16>", np.uint16, of_8_lanes),
    "llvm.amdgcn.ds.load.tr8.b64": ("gfx1250", "<2 x i32>", np.uint8, of_two_runs_of_four_lanes),
}
PREFIX = {"<4 x i16>": "v4i16", "<8 x i16>": "v8i16", "<2 x i32>": "v2i32"}


def transposed(name, addresses, data, body=""):
    """Each lane stores its row of ``data`` at its address, then loads it transposed."""
    arch, kind, _, _ = LOADS[name]
    size = data.shape[1] * data.itemsize
    text = f"""
    %p = getelementptr i8, ptr addrspace(3) @s, i32 %at
    store <{size} x i8> %v, ptr addrspace(3) %p, align 1
    {body}
    %r = call {kind} @{name}.{PREFIX[kind]}(ptr addrspace(3) %p)
    """
    inputs = {
        "at": ("i32", addresses.astype(np.uint32)),
        "v": (f"<{size} x i8>", data.view(np.uint8)),
    }
    return run(text, inputs, kind, arch=arch, lds=SHARED)


def rows(name):
    """Different numbers in every element of every lane, and addresses in no order."""
    arch, kind, element, _ = LOADS[name]
    wave, count = (64 if arch == "gfx950" else 32), 4 if kind == "<4 x i16>" else 8
    data = np.arange(wave * count).reshape(wave, count).astype(element)
    size = count * data.itemsize
    return data, np.random.default_rng(1).permutation(wave) * size


@covers(*LOADS)
@pytest.mark.parametrize("name", LOADS)
def test_lanes_exchange_what_they_read_wherever_they_read_it(name):
    data, addresses = rows(name)
    got = transposed(name, addresses, data).view(data.dtype)
    want = [[data[giver, e] for giver, e in LOADS[name][3](lane)] for lane in range(len(data))]
    np.testing.assert_array_equal(got, want)


def test_the_examples_of_the_sources():
    # lane 4 of gfx950 receives the first element of lanes 1, 5, 9 and 13
    assert of_16_lanes(4) == [(1, 0), (5, 0), (9, 0), (13, 0)]
    # D2 receives E2 from S0..S3 and S8..S11
    assert of_two_runs_of_four_lanes(2) == [(s, 2) for s in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert {*LOADS} == {*TRANSPOSED}


@pytest.mark.parametrize("name", LOADS)
def test_every_lane_gives_each_of_its_elements_once(name):
    data, _ = rows(name)
    given = [pair for lane in range(len(data)) for pair in LOADS[name][3](lane)]
    assert len(set(given)) == data.size


@pytest.mark.parametrize("name", LOADS)
def test_an_address_that_is_not_a_multiple_of_what_is_read_is_an_error(name):
    data, addresses = rows(name)
    with pytest.raises(SimulationError, match="aligned"):
        transposed(name, addresses + 2, data)


@pytest.mark.parametrize("name", LOADS)
def test_a_lane_that_is_masked_off_is_an_error(name):
    arch, kind, _, _ = LOADS[name]
    body = f"""
    br label %start
    start:
    %p = getelementptr i8, ptr addrspace(3) @s, i32 0
    %some = icmp ult i32 %tid, 8
    br i1 %some, label %few, label %end
    few:
    store <16 x i8> zeroinitializer, ptr addrspace(3) %p, align 16
    %m = call {kind} @{name}.{PREFIX[kind]}(ptr addrspace(3) %p)
    br label %end
    end:
    %r = phi {kind} [ %m, %few ], [ zeroinitializer, %start ]
    """
    with pytest.raises(SimulationError, match="divergent"):
        run(body, {}, kind, arch=arch, lds=SHARED)


def test_a_transposed_load_of_what_another_wave_wrote_needs_a_barrier():
    name = "llvm.amdgcn.ds.load.tr16.b128"
    body = f"""
    %own = mul i32 %tid, 16
    %p = getelementptr i8, ptr addrspace(3) @s, i32 %own
    store <16 x i8> zeroinitializer, ptr addrspace(3) %p, align 16
    %other = sub i32 1008, %own
    %q = getelementptr i8, ptr addrspace(3) @s, i32 %other
    %r = call <8 x i16> @{name}.v8i16(ptr addrspace(3) %q)
    """
    with pytest.raises(SimulationError, match="race"):
        run(body, {}, "<8 x i16>", arch="gfx1250", lanes=64, lds=SHARED)
    body = body.replace("%other =", "call void @llvm.amdgcn.s.barrier()\n%other =")
    assert not run(body, {}, "<8 x i16>", arch="gfx1250", lanes=64, lds=SHARED).any()
