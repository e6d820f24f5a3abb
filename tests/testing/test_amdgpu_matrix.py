"""Matrix instructions: every element is where the sources say it is.

The layouts are written out here once more, lane by lane, from "AMD Instinct MI300 ISA" (matrix
arithmetic instructions) and FlyDSL's ``CDNA3/MmaAtom.cpp`` and ``GFX1250/MmaAtom.cpp``, and not
taken from the simulator. Operands differ in every element, so a permutation of k that A and B do
not share shows.
"""

import numpy as np
import pytest
import torch
from tests.testing.snippets import run

from minuet.testing.amdgpu import SimulationError
from minuet.testing.amdgpu.intrinsics import MODELS

pytestmark = pytest.mark.sim

FP8 = {"gfx942": torch.float8_e4m3fnuz}
# name: (size, k, operand element, an arch that has it)
MFMA = {
    "llvm.amdgcn.mfma.f32.16x16x16f16": (16, 16, "half", "gfx942"),
    "llvm.amdgcn.mfma.f32.16x16x16bf16.1k": (16, 16, "i16", "gfx942"),
    "llvm.amdgcn.mfma.f32.16x16x32.f16": (16, 32, "half", "gfx950"),
    "llvm.amdgcn.mfma.f32.16x16x32.bf16": (16, 32, "bfloat", "gfx950"),
    "llvm.amdgcn.mfma.f32.16x16x32.fp8.fp8": (16, 32, "i64", "gfx942"),
    "llvm.amdgcn.mfma.f32.32x32x8f16": (32, 8, "half", "gfx942"),
    "llvm.amdgcn.mfma.f32.32x32x8bf16.1k": (32, 8, "i16", "gfx942"),
    "llvm.amdgcn.mfma.f32.32x32x16.f16": (32, 16, "half", "gfx950"),
    "llvm.amdgcn.mfma.f32.32x32x16.bf16": (32, 16, "bfloat", "gfx950"),
    "llvm.amdgcn.mfma.f32.32x32x16.fp8.fp8": (32, 16, "i64", "gfx950"),
}
WMMA = {
    "llvm.amdgcn.wmma.f32.16x16x32.bf16": (32, "bfloat"),
    "llvm.amdgcn.wmma.f32.16x16x32.f16": (32, "half"),
    "llvm.amdgcn.wmma.f32.16x16x64.fp8.fp8": (64, "i32"),
    "llvm.amdgcn.wmma.f32.16x16x128.fp8.fp8": (128, "i32"),
}


def encode(values: np.ndarray, kind: str, arch: str) -> np.ndarray:
    """[lanes, elements] numbers as an operand's memory."""
    numbers = torch.from_numpy(values.astype(np.float32))
    if kind == "half":
        return values.astype(np.float16)
    if kind in ("bfloat", "i16"):
        return numbers.to(torch.bfloat16).view(torch.uint16).numpy()
    codes = numbers.to(FP8.get(arch, torch.float8_e4m3fn)).view(torch.uint8).numpy()
    return codes.view(np.uint64 if kind == "i64" else np.uint32)


def check(name, arch, size, k, kind, k_of, row_of, call):
    wave = 32 if arch == "gfx1250" else 64
    chance = np.random.default_rng(k)
    a, b = (chance.integers(-7, 8, (size, k)) for _ in range(2))
    c = chance.integers(-50, 50, (size, size))
    per_lane, registers = size * k // wave, size * size // wave
    lanes = range(wave)
    a_lanes = np.array([[a[lane % size, k_of(lane, i)] for i in range(per_lane)] for lane in lanes])
    b_lanes = np.array([[b[lane % size, k_of(lane, i)] for i in range(per_lane)] for lane in lanes])
    c_lanes = [[c[row_of(lane, r), lane % size] for r in range(registers)] for lane in lanes]
    stored = encode(a_lanes, kind, arch)
    operand = kind if kind == "i64" else f"<{stored.shape[1]} x {kind}>"
    acc = f"<{registers} x float>"
    got = run(
        call.format(name=name, t=operand, acc=acc),
        {
            "a": (operand, stored),
            "b": (operand, encode(b_lanes, kind, arch)),
            "c": (acc, np.array(c_lanes, np.float32)),
        },
        acc,
        arch=arch,
    )
    product = a @ b.T + c
    want = [[product[row_of(lane, r), lane % size] for r in range(registers)] for lane in lanes]
    np.testing.assert_array_equal(got, np.array(want, np.float32))


@pytest.mark.parametrize("name", MFMA)
def test_mfma(name):
    size, k, kind, arch = MFMA[name]
    each, groups = k // (64 // size), 64 // size

    def row_of(lane, register):
        return register % 4 + 4 * (lane // size) + 4 * groups * (register // 4)

    call = "%r = call {acc} @{name}({t} %a, {t} %b, {acc} %c, i32 0, i32 0, i32 0)"
    check(name, arch, size, k, kind, lambda lane, i: lane // size * each + i, row_of, call)


@pytest.mark.parametrize("name", WMMA)
def test_wmma_of_gfx1250(name):
    k, kind = WMMA[name]
    check(
        name,
        "gfx1250",
        16,
        k,
        kind,
        lambda lane, i: 16 * (i // 8) + 8 * (lane // 16) + i % 8,
        lambda lane, r: 8 * (lane // 16) + r,
        "%r = call {acc} @{name}({t} %a, {t} %b, i16 0, {acc} %c, i1 0, i1 0)",
    )


def test_every_matrix_model_is_tested():
    assert {name for name in MODELS if "mma." in name or "mfma" in name} == {*MFMA, *WMMA}


def test_a_modifier_that_is_not_modelled_is_an_error():
    zeros = np.zeros((32, 16), np.uint16)
    inputs = {"a": ("<16 x bfloat>", zeros), "c": ("<8 x float>", np.zeros((32, 8), np.float32))}
    call = "%r = call <8 x float> @llvm.amdgcn.wmma.f32.16x16x32.bf16(<16 x bfloat> %a, "
    call += "<16 x bfloat> %a, i16 1, <8 x float> %c, i1 0, i1 0)"
    with pytest.raises(SimulationError, match="modifier"):
        run(call, inputs, "<8 x float>", arch="gfx1250")


def test_a_matrix_instruction_of_part_of_a_wave_is_an_error():
    body = """
    br label %start
    start:
    %lower = icmp ult i32 %tid, 8
    br i1 %lower, label %some, label %end
    some:
    %m = call <4 x float> @NAME(<4 x half> %a, <4 x half> %a, <4 x float> zeroinitializer, i32 0)
    br label %end
    end:
    %r = phi <4 x float> [ %m, %some ], [ zeroinitializer, %start ]
    """
    body = body.replace("NAME", "llvm.amdgcn.mfma.f32.16x16x16f16")
    with pytest.raises(SimulationError, match="divergent"):
        run(body, {"a": ("<4 x half>", np.zeros((64, 4), np.float16))}, "<4 x float>")
