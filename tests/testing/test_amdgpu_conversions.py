"""Narrow numbers: every conversion against torch's own FP8; bytes; integers of odd width.

Sources of the operands: "AMD Instinct MI300 ISA", "AMD Instinct CDNA4 ISA", MLIR's ROCDL dialect.
"""

import numpy as np
import pytest
import torch
from tests.testing.snippets import covers, one, run, same_bits

from minuet.testing.amdgpu import SimulationError

pytestmark = pytest.mark.sim

CODES = np.arange(256, dtype=np.uint8)
TORCH_FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
FLAVOURS = ("gfx942", "gfx950")


def decoded(arch):
    return torch.from_numpy(CODES.copy()).view(TORCH_FP8[arch]).float().numpy()


def in_range(arch, seed):
    """Numbers an FP8 holds or rounds to: exact ones, ties, and others; 640 of them."""
    top = torch.finfo(TORCH_FP8[arch]).max
    chance = np.random.default_rng(seed)
    table = decoded(arch)
    finite = np.sort(np.abs(table[np.isfinite(table)]))
    middles = (finite[1:] + finite[:-1]) / 2
    pool = np.concatenate([finite, middles, -middles, chance.normal(0, top / 3, 500)])
    return chance.choice(np.clip(pool, -top, top), 640).astype(np.float32)


def codes_of(values, arch):
    return torch.from_numpy(values).to(TORCH_FP8[arch]).view(torch.uint8).numpy()


@covers("llvm.amdgcn.cvt.pk.f32.fp8", "llvm.amdgcn.cvt.f32.fp8")
@pytest.mark.parametrize("arch", FLAVOURS)
def test_fp8_codes_decode_as_in_torch(arch):
    words = CODES.view(np.uint32)
    call = "<2 x float> @llvm.amdgcn.cvt.pk.f32.fp8(i32 %v, i1 {})"
    pairs = [one(call.format(h), {"v": ("i32", words)}, "<2 x float>", arch=arch) for h in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(pairs, axis=1).ravel(), decoded(arch))
    for byte in range(4):
        call = f"float @llvm.amdgcn.cvt.f32.fp8(i32 %v, i32 {byte})"
        got = one(call, {"v": ("i32", words)}, "float", arch=arch)
        np.testing.assert_array_equal(got, decoded(arch)[byte::4])


@covers("llvm.amdgcn.cvt.pk.fp8.f32")
@pytest.mark.parametrize("arch", FLAVOURS)
@pytest.mark.parametrize("high", [0, 1])
def test_fp8_encoding_rounds_as_torch_does_within_range(arch, high):
    a, b = in_range(arch, high), in_range(arch, high + 2)
    old = np.full(640, 0x11223344, np.uint32)
    call = f"i32 @llvm.amdgcn.cvt.pk.fp8.f32(float %a, float %b, i32 %old, i1 {high})"
    inputs = {"a": ("float", a), "b": ("float", b), "old": ("i32", old)}
    got = one(call, inputs, "i32", arch=arch, lanes=640).view(np.uint8).reshape(-1, 4)
    codes = codes_of(np.stack([a, b], axis=1), arch)
    np.testing.assert_array_equal(got[:, 2 * high : 2 * high + 2], codes)
    rest = old.view(np.uint8).reshape(-1, 4)
    np.testing.assert_array_equal(
        got[:, 2 - 2 * high : 4 - 2 * high], rest[:, 2 - 2 * high :][:, :2]
    )


@covers("llvm.amdgcn.cvt.scalef32.pk.bf16.fp8", "llvm.amdgcn.cvt.scale.pk8.bf16.fp8")
def test_scaled_conversions_to_bf16_multiply_by_a_power_of_two():
    words = CODES.view(np.uint32)
    call = "<2 x bfloat> @llvm.amdgcn.cvt.scalef32.pk.bf16.fp8(i32 %v, float 4.0, i1 1)"
    got = one(call, {"v": ("i32", words)}, "<2 x bfloat>")
    want = torch.from_numpy(decoded("gfx950").reshape(-1, 4)[:, 2:] * 4).to(torch.bfloat16)
    same_bits(got, want)
    name = "llvm.amdgcn.cvt.scale.pk8.bf16.fp8.v8bf16.v2i32"
    call = f"<8 x bfloat> @{name}(<2 x i32> %v, i32 126, i32 0)"
    pairs = words.reshape(-1, 2)
    got = one(call, {"v": ("<2 x i32>", pairs)}, "<8 x bfloat>", arch="gfx1250")
    same_bits(got, torch.from_numpy(decoded("gfx950").reshape(-1, 8) / 2).to(torch.bfloat16))


@covers("llvm.amdgcn.perm")
def test_perm_picks_bytes_of_two_words():
    call = "i32 @llvm.amdgcn.perm(i32 %a, i32 %b, i32 u0x070C0301)".replace(
        "u0x070C0301", str(0x070C0301)
    )
    a, b = np.full(64, 0xAABBCCDD, np.uint32), np.full(64, 0x11223344, np.uint32)
    got = one(call, {"a": ("i32", a), "b": ("i32", b)}, "i32")
    # selector bytes, low to high: 1, 3, 12 (zero), 7; bytes 0-3 are of b, 4-7 of a
    assert set(got.tolist()) == {0xAA001133}


@covers("llvm.amdgcn.cvt.scalef32.pk.fp8.f32")
@pytest.mark.parametrize("high", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 4.0, 0.5])
def test_scaled_encoding_of_a_pair_divides_and_keeps_the_other_half(high, scale):
    a, b = in_range("gfx950", 1), in_range("gfx950", 2)
    old = np.tile(np.array([0x1122, 0x3344], np.uint16), (640, 1))
    name = "llvm.amdgcn.cvt.scalef32.pk.fp8.f32"
    call = f"<2 x i16> @{name}(<2 x i16> %old, float %a, float %b, float {scale}, i1 {high})"
    inputs = {"old": ("<2 x i16>", old), "a": ("float", a * scale), "b": ("float", b * scale)}
    got = one(call, inputs, "<2 x i16>", lanes=640)
    want = codes_of(np.stack([a, b], axis=1), "gfx950").view(np.uint16)[:, 0]
    np.testing.assert_array_equal(got[:, high], want)
    np.testing.assert_array_equal(got[:, 1 - high], old[:, 1 - high])


@covers("llvm.amdgcn.cvt.scalef32.pk8.fp8.f32")
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_scaled_encoding_of_eight_divides(scale):
    values = in_range("gfx950", 3).reshape(-1, 8)[:64]
    call = f"<2 x i32> @llvm.amdgcn.cvt.scalef32.pk8.fp8.f32(<8 x float> %v, float {scale})"
    inputs = {"v": ("<8 x float>", values * np.float32(scale))}
    got = one(call, inputs, "<2 x i32>", arch="gfx1250", lanes=64)
    np.testing.assert_array_equal(got.view(np.uint8), codes_of(values, "gfx950"))


@covers("llvm.bitreverse")
@pytest.mark.parametrize("width", [4, 8, 13, 32])
def test_bitreverse_of_any_width(width):
    values = np.random.default_rng(5).integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    narrow, wide = (
        ("%a = add i32 %v, 0", "%r = add i32 %b, 0")
        if width == 32
        else (f"%a = trunc i32 %v to i{width}", f"%r = zext i{width} %b to i32")
    )
    body = f"{narrow}\n%b = call i{width} @llvm.bitreverse.i{width}(i{width} %a)\n{wide}"
    got = run(body, {"v": ("i32", values)}, "i32")
    want = [int(f"{int(v) % 2**width:0{width}b}"[::-1], 2) for v in values]
    assert got.tolist() == want


def test_integers_of_odd_width_lose_their_upper_bits_and_do_no_arithmetic():
    body = """
    %a = trunc i32 %v to i5
    %b = xor i5 %a, 9
    %c = or i5 %b, 16
    %d = and i5 %c, -2
    %r = zext i5 %d to i32
    """
    got = run(body, {"v": ("i32", np.arange(64, dtype=np.uint32))}, "i32")
    assert got.tolist() == [((v % 32 ^ 9) | 16) & 30 for v in range(64)]
    for line in ("%b = add i5 %a, 1", "%b = shl i5 %a, 1", "%b = ashr i5 %a, 1"):
        with pytest.raises(SimulationError, match="odd width"):
            run(f"%a = trunc i32 %tid to i5\n{line}\n%r = zext i5 %b to i32", {}, "i32")
