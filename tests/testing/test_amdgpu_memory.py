"""Memory, LDS, barriers: what works, and every fault that must be called one."""

import numpy as np
import pytest
from tests.testing import (
    test_amdgpu_conversions,
    test_amdgpu_instructions,
    test_amdgpu_matrix,
    test_amdgpu_transposed,
)
from tests.testing.snippets import TESTED, covers, run

from minuet.testing.amdgpu import Geometry, Memory, SimulationError, launch, parse
from minuet.testing.amdgpu.intrinsics import MODELS

pytestmark = pytest.mark.sim

LANE = np.arange(128, dtype=np.uint32)
WITH_TESTS = (test_amdgpu_conversions, test_amdgpu_instructions, test_amdgpu_transposed)
SHARED = "@s = internal addrspace(3) global [512 x i8] undef, align 16"
ADDRESS = "%at = getelementptr i32, ptr addrspace(3) @s, i32 %tid"
REVERSED = """
    %back = sub i32 127, %tid
    %other = getelementptr i32, ptr addrspace(3) @s, i32 %back
"""
BARRIER = "call void @llvm.amdgcn.s.barrier()"


def exchange(barrier, order=None):
    body = f"""
    {ADDRESS}
    {REVERSED}
    store i32 %v, ptr addrspace(3) %at, align 4
    {barrier}
    %r = load i32, ptr addrspace(3) %other, align 4
    """
    return run(body, {"v": ("i32", LANE * 3)}, "i32", lanes=128, lds=SHARED, order=order)


@pytest.mark.parametrize("order", [None, 0, 1])
def test_lds_carries_values_over_a_barrier(order):
    assert exchange(BARRIER, order).tolist() == (LANE[::-1] * 3).tolist()


@pytest.mark.parametrize("order", [None, 0, 1])
def test_without_the_barrier_it_is_a_fault(order):
    with pytest.raises(SimulationError, match=r"race|never written"):
        exchange("", order)


def test_two_waves_that_write_one_byte_race_and_one_wave_does_not():
    one = "store i32 %v, ptr addrspace(3) @s, align 4\n%r = add i32 %v, 0"
    with pytest.raises(SimulationError, match="race"):
        run(one, {"v": ("i32", LANE)}, "i32", lanes=128, lds=SHARED)
    assert len(run(one, {"v": ("i32", LANE[:64])}, "i32", lanes=64, lds=SHARED)) == 64


@pytest.mark.parametrize("order", [None, 0, 1])
def test_two_waves_may_write_one_byte_with_one_value(order):
    """Compilers let several waves store what they all hold; a reader still needs the barrier."""
    body = f"""
    %low = and i32 %tid, 63
    %at = getelementptr i32, ptr addrspace(3) @s, i32 %low
    store i32 %v, ptr addrspace(3) %at, align 4
    {BARRIER}
    %r = load i32, ptr addrspace(3) %at, align 4
    """
    twice = np.tile(LANE[:64] + 5, 2)
    got = run(body, {"v": ("i32", twice)}, "i32", lanes=128, lds=SHARED, order=order)
    assert got.tolist() == twice.tolist()
    bare = body.replace(BARRIER, "")
    with pytest.raises(SimulationError, match="race"):
        run(bare, {"v": ("i32", twice)}, "i32", lanes=128, lds=SHARED, order=order)
    twice[100] += 1
    with pytest.raises(SimulationError, match="race"):
        run(body, {"v": ("i32", twice)}, "i32", lanes=128, lds=SHARED, order=order)


def test_reading_before_another_wave_overwrites_needs_a_barrier():
    body = f"""
    {ADDRESS}
    {REVERSED}
    store i32 %v, ptr addrspace(3) %at, align 4
    {BARRIER}
    %r = load i32, ptr addrspace(3) %other, align 4
    store i32 0, ptr addrspace(3) %at, align 4
    """
    for order in (None, 5):
        with pytest.raises(SimulationError, match="race"):
            run(body, {"v": ("i32", LANE)}, "i32", lanes=128, lds=SHARED, order=order)


def test_a_barrier_in_divergent_control_flow_or_missed_by_a_wave_is_an_error():
    body = """
    br label %start
    start:
    %few = icmp ult i32 %tid, LIMIT
    br i1 %few, label %some, label %end
    some:
    call void @llvm.amdgcn.s.barrier()
    br label %end
    end:
    %r = add i32 %tid, 0
    """
    with pytest.raises(SimulationError, match="divergent"):
        run(body.replace("LIMIT", "3"), {}, "i32", lanes=128)
    # waves that have ended no longer count, as on the hardware
    run(body.replace("LIMIT", "64"), {}, "i32", lanes=128)


@pytest.mark.parametrize(
    ("start", "promised", "fault"), [(510, 2, "ends at"), (2, 4, "aligned"), (0, 4, "never")]
)
def test_bounds_alignment_and_unwritten_lds(start, promised, fault):
    body = f"""
    %p = getelementptr i8, ptr addrspace(3) @s, i32 {start}
    %r = load i32, ptr addrspace(3) %p, align {promised}
    """
    with pytest.raises(SimulationError, match=fault):
        run(body, {}, "i32", lds=SHARED)


COPY = """
define amdgpu_kernel void @k(ptr addrspace(1) %in, ptr addrspace(1) %out, i32 %shift) {
  %tid = call i32 @llvm.amdgcn.workitem.id.x()
  %group = call i32 @llvm.amdgcn.workgroup.id.x()
  %base = mul i32 %group, 64
  %id = add i32 %base, %tid
  %from = add i32 %id, %shift
  %p = getelementptr i32, ptr addrspace(1) %in, i32 %from
  %v = load i32, ptr addrspace(1) %p, align 4
  %q = getelementptr i32, ptr addrspace(1) %out, i32 %id
  store i32 %v, ptr addrspace(1) %q, align 4
  ret void
}
"""


def copy(shift, groups=3, **how):
    memory = Memory()
    source = memory.place("source", np.arange(192, dtype=np.int32), **how.pop("source", {}))
    target = memory.place("target", np.zeros(192, np.int32), **how.pop("target", {}))
    shape = Geometry((groups, 1, 1), (64, 1, 1))
    launch(parse(COPY), "k", (source, target, shift), memory, shape, arch="gfx950", **how)
    return memory.fetch(target)


def test_a_grid_of_workgroups_copies(monkeypatch):
    assert copy(0).tolist() == list(range(192))
    monkeypatch.setattr("minuet.testing.amdgpu.machine.MAX_LANES", 64)  # a batch per workgroup
    assert copy(0).tolist() == list(range(192))


@pytest.mark.parametrize("shift", [1, -1, 10**6])
def test_a_load_outside_every_array_is_an_error(shift):
    with pytest.raises(SimulationError, match="outside every array"):
        copy(shift)


def test_read_only_and_unwritten_arrays():
    with pytest.raises(SimulationError, match="read-only"):
        copy(0, target={"readonly": True})
    with pytest.raises(SimulationError, match="never written"):
        copy(0, source={"unwritten": True})
    assert copy(0, target={"unwritten": True}).tolist() == list(range(192))


def test_launch_mistakes_are_errors():
    with pytest.raises(SimulationError, match="parameters"):
        launch(parse(COPY), "k", (), Memory(), Geometry((1, 1, 1), (64, 1, 1)), arch="gfx950")
    with pytest.raises(SimulationError, match="whole waves"):
        launch(parse(COPY), "k", (), Memory(), Geometry((1, 1, 1), (48, 1, 1)), arch="gfx950")
    large = parse(COPY + SHARED.replace("512", "70000"))
    with pytest.raises(SimulationError, match="exceed"):
        launch(large, "k", (), Memory(), Geometry((1, 1, 1), (64, 1, 1)), arch="gfx942")


ATOMICS = {"add": 64 * 2, "sub": -64 * 2, "umax": 2, "and": 0, "or": 2, "xor": 0, "xchg": 2}
ATOMICS |= {"umin": 0, "max": 2, "min": 0}


@pytest.mark.parametrize("what", ATOMICS)
def test_atomics_of_all_lanes_on_one_word(what):
    text = f"""
define amdgpu_kernel void @k(ptr addrspace(1) %out) {{
  %old = atomicrmw {what} ptr addrspace(1) %out, i32 2 syncscope("agent") monotonic, align 4
  ret void
}}
"""
    memory = Memory()
    out = memory.place("out", np.zeros(1, np.int32))
    launch(parse(text), "k", (out,), memory, Geometry((1, 1, 1), (64, 1, 1)), arch="gfx950")
    assert memory.fetch(out).tolist() == [ATOMICS[what]]


@covers("llvm.amdgcn.make.buffer.rsrc", "llvm.amdgcn.raw.ptr.buffer.load")
@covers("llvm.amdgcn.raw.ptr.buffer.store")
def test_buffers_read_zero_and_drop_stores_beyond_their_records():
    text = """
define amdgpu_kernel void @k(ptr addrspace(1) %in, ptr addrspace(1) %out) {
  %tid = call i32 @llvm.amdgcn.workitem.id.x()
  %o = mul i32 %tid, 4
  %a = call ptr addrspace(8) @MAKE(ptr addrspace(1) %in, i16 0, i64 40, i32 0)
  %b = call ptr addrspace(8) @MAKE(ptr addrspace(1) %out, i16 0, i64 80, i32 0)
  %v = call i32 @RAW.load.i32(ptr addrspace(8) %a, i32 %o, i32 0, i32 0)
  call void @RAW.store.i32(i32 %v, ptr addrspace(8) %b, i32 %o, i32 0, i32 0)
  ret void
}
"""
    text = text.replace("MAKE", "llvm.amdgcn.make.buffer.rsrc.p8.p1")
    text = text.replace("RAW", "llvm.amdgcn.raw.ptr.buffer")
    memory = Memory()
    source = memory.place("in", np.arange(1, 11, dtype=np.int32))
    target = memory.place("out", np.full(24, -1, np.int32))
    shape = Geometry((1, 1, 1), (64, 1, 1))
    launch(parse(text), "k", (source, target), memory, shape, arch="gfx950")
    assert memory.fetch(target).tolist() == [*range(1, 11), *[0] * 10, *[-1] * 4]


ASYNC = """
@s = internal addrspace(3) global [512 x i8] undef, align 16
define amdgpu_kernel void @k(ptr addrspace(1) %in, ptr addrspace(1) %out) {
  %tid = call i32 @llvm.amdgcn.workitem.id.x()
  %p = getelementptr BITS, ptr addrspace(1) %in, i32 %tid
  %l = getelementptr BITS, ptr addrspace(3) @s, i32 %tid
  call void @LOAD.bWIDTH(ptr addrspace(1) %p, ptr addrspace(3) %l, i32 0, i32 0)
  call void @llvm.amdgcn.s.wait.asynccnt(i16 LEFT)
  %v = load BITS, ptr addrspace(3) %l, align 1
  %q = getelementptr BITS, ptr addrspace(1) %out, i32 %tid
  store BITS %v, ptr addrspace(1) %q, align 1
  ret void
}
"""


@covers(*(f"llvm.amdgcn.global.load.async.to.lds.b{bits}" for bits in (8, 32, 64, 128)))
@covers("llvm.amdgcn.s.wait.asynccnt")
@pytest.mark.parametrize("width", [8, 32, 64, 128])
@pytest.mark.parametrize("left", [0, 1])
def test_asynchronous_copies_arrive_at_the_wait_and_not_before(width, left):
    kind = "<4 x i32>" if width == 128 else f"i{width}"
    text = ASYNC.replace("BITS", kind).replace("WIDTH", str(width)).replace("LEFT", str(left))
    text = text.replace("LOAD", "llvm.amdgcn.global.load.async.to.lds")
    memory, data = Memory(), np.arange(32 * width // 8, dtype=np.uint8)
    source, target = memory.place("in", data), memory.place("out", np.zeros_like(data))

    def go():
        shape = Geometry((1, 1, 1), (32, 1, 1))
        launch(parse(text), "k", (source, target), memory, shape, arch="gfx1250")

    if left:
        with pytest.raises(SimulationError, match="never written"):
            go()
    else:
        go()
        assert memory.fetch(target).tolist() == data.tolist()


HIDDEN = """
define amdgpu_kernel void @k(ptr addrspace(1) %out) {
  %tid = call i32 @llvm.amdgcn.workitem.id.x()
  %h = call ptr addrspace(4) @llvm.amdgcn.implicitarg.ptr()
  %o = mul i32 %tid, 4
  %p = getelementptr i8, ptr addrspace(4) %h, i32 %o
  %v = load i32, ptr addrspace(4) %p, align 4
  %q = getelementptr i32, ptr addrspace(1) %out, i32 %tid
  store i32 %v, ptr addrspace(1) %q, align 4
  ret void
}
"""


@covers("llvm.amdgcn.implicitarg.ptr")
def test_hidden_arguments_hold_the_grid_and_the_size_of_a_workgroup():
    # code object V5: three counts of 32 bits, three sizes of 16, three remainders of 16
    memory, shape = Memory(), Geometry((2, 3, 5), (32, 2, 1))
    out = memory.place("out", np.zeros(6, np.uint32))
    first = HIDDEN.replace("%o = mul i32 %tid, 4", "%m = urem i32 %tid, 6\n  %o = mul i32 %m, 4")
    first = first.replace("ptr addrspace(1) %out, i32 %tid", "ptr addrspace(1) %out, i32 %m")
    for _ in range(2):
        launch(parse(first), "k", (out,), memory, shape, arch="gfx950")
        words = memory.fetch(out)
        assert words[:3].tolist() == [2, 3, 5]
        assert words[3:].view(np.uint16).tolist() == [32, 2, 1, 0, 0, 0]
    with pytest.raises(SimulationError, match="outside"):  # what comes after is not modelled
        launch(parse(HIDDEN), "k", (out,), memory, shape, arch="gfx950")


def test_every_model_has_its_test_and_its_source():
    matrices = {*test_amdgpu_matrix.MFMA, *test_amdgpu_matrix.WMMA}
    assert all(module.covers is covers for module in WITH_TESTS)
    assert {*TESTED, *matrices} == set(MODELS)
    assert all(m.source for m in MODELS.values())
