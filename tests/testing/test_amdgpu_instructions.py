"""Every modelled instruction, each against something that is not the simulator.

Sources of lane operations: "AMD Instinct MI300 ISA" and "RDNA4 ISA", sections DPP, DS_SWIZZLE_B32,
DS_BPERMUTE_B32, V_PERMLANE*; of the rest: the LLVM language reference and the AMDGPU user guide.
"""

import math

import numpy as np
import pytest
import torch
from tests.testing.snippets import covers, one, run, same_bits

from minuet.testing.amdgpu import SimulationError, parse
from minuet.testing.amdgpu.intrinsics import MODELS
from minuet.testing.amdgpu.ir import BINARY, CASTS

pytestmark = pytest.mark.sim

LANE = np.arange(64, dtype=np.uint32)
VALUES = LANE * 10 + 7


# --- between lanes -------------------------------------------------------------------------------

DPP = {
    0xB1: lambda lane: lane ^ 1,  # quad_perm [1, 0, 3, 2]
    0x1B: lambda lane: lane ^ 3,  # quad_perm [3, 2, 1, 0]
    0x101: lambda lane: lane + 1 if lane % 16 < 15 else None,  # row_shl 1
    0x114: lambda lane: lane - 4 if lane % 16 >= 4 else None,  # row_shr 4
    0x121: lambda lane: lane // 16 * 16 + (lane - 1) % 16,  # row_ror 1
    0x140: lambda lane: lane // 16 * 16 + 15 - lane % 16,  # row_mirror
    0x141: lambda lane: lane // 8 * 8 + 7 - lane % 8,  # row_half_mirror
    0x138: lambda lane: lane - 1 if lane else None,  # wave_shr 1
    0x142: lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,  # row_bcast 15
    0x143: lambda lane: 31 if lane >= 32 else None,  # row_bcast 31
}
DPP_WAVE32 = {
    0x153: lambda lane: lane // 16 * 16 + 3,  # row_share 3
    0x165: lambda lane: lane // 16 * 16 + (lane % 16 ^ 5),  # row_xmask 5
}


@covers("llvm.amdgcn.update.dpp")
@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize(
    ("control", "arch"), [(c, "gfx950") for c in DPP] + [(c, "gfx1250") for c in DPP_WAVE32]
)
def test_update_dpp(control, arch, bound):
    source, lanes = {**DPP, **DPP_WAVE32}[control], 64 if arch == "gfx950" else 32
    old = 1000 + LANE[:lanes]
    call = f"i32 %old, i32 %v, i32 {control}, i32 15, i32 15, i1 {bound}"
    got = one(
        f"i32 @llvm.amdgcn.update.dpp.i32({call})",
        {"old": ("i32", old), "v": ("i32", VALUES[:lanes])},
        "i32",
        arch=arch,
    )
    for lane in range(lanes):
        other = source(lane)
        outside = 0 if bound else old[lane]
        assert got[lane] == (outside if other is None else VALUES[other])


def test_dpp_masks_leave_rows_and_banks_at_their_old_value():
    call = "i32 @llvm.amdgcn.update.dpp.i32(i32 0, i32 %v, i32 177, i32 5, i32 3, i1 1)"
    got = one(call, {"v": ("i32", VALUES)}, "i32")
    for lane in range(64):
        enabled = lane // 16 in (0, 2) and lane % 16 // 4 in (0, 1)
        assert got[lane] == (VALUES[lane ^ 1] if enabled else 0)


@covers("llvm.amdgcn.ds.swizzle")
@pytest.mark.parametrize(
    ("offset", "source"),
    [
        (0x8000 | 0b00011011, lambda lane: lane // 4 * 4 + 3 - lane % 4),
        (16 << 10 | 0x1F, lambda lane: lane ^ 16),
        (0b11100, lambda lane: lane // 4 * 4),  # and mask
        (0b11 << 5 | 0b11100, lambda lane: lane // 4 * 4 + 3),  # and or
    ],
)
def test_ds_swizzle(offset, source):
    got = one(f"i32 @llvm.amdgcn.ds.swizzle(i32 %v, i32 {offset})", {"v": ("i32", VALUES)}, "i32")
    assert got.tolist() == [VALUES[source(lane)] for lane in range(64)]


@covers("llvm.amdgcn.ds.bpermute")
def test_ds_bpermute_takes_byte_addresses_modulo_the_wave():
    picks = np.random.default_rng(0).integers(0, 200, 64).astype(np.uint32)
    inputs = {"i": ("i32", picks * 4), "v": ("i32", VALUES)}
    got = one("i32 @llvm.amdgcn.ds.bpermute(i32 %i, i32 %v)", inputs, "i32")
    assert got.tolist() == VALUES[picks % 64].tolist()


@covers("llvm.amdgcn.permlane16", "llvm.amdgcn.permlanex16")
@pytest.mark.parametrize("cross", [False, True])
def test_permlane16_picks_within_a_row_or_from_the_other_row(cross):
    name = "permlanex16" if cross else "permlane16"
    low, high = 0x76543210 ^ 0x11111111, 0xFEDCBA98
    call = f"i32 @llvm.amdgcn.{name}.i32(i32 0, i32 %v, i32 {low}, i32 {high}, i1 0, i1 0)"
    got = one(call, {"v": ("i32", VALUES[:32])}, "i32", arch="gfx1250")
    for lane in range(32):
        inside = lane % 16
        pick = inside ^ 1 if inside < 8 else inside
        row = (lane // 16) ^ (1 if cross else 0)
        assert got[lane] == VALUES[16 * row + pick]


@covers("llvm.amdgcn.permlane16.swap", "llvm.amdgcn.permlane32.swap")
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("index", [0, 1])
def test_permlane_swap_exchanges_odd_groups_with_even_ones(width, index):
    body = f"""
    %s = call {{ i32, i32 }} @llvm.amdgcn.permlane{width}.swap(i32 %a, i32 %b, i1 false, i1 false)
    %r = extractvalue {{ i32, i32 }} %s, {index}
    """
    other = VALUES + 5000
    got = run(body, {"a": ("i32", VALUES), "b": ("i32", other)}, "i32")
    a, b = VALUES.copy(), other.copy()
    for lane in range(64):
        if lane // width % 2:
            a[lane], b[lane - width] = b[lane - width], a[lane]
    assert got.tolist() == (a, b)[index].tolist()


@covers("llvm.amdgcn.readfirstlane", "llvm.amdgcn.readlane", "llvm.amdgcn.ballot")
def test_readlane_readfirstlane_and_ballot():
    two = np.concatenate([VALUES, VALUES + 1])
    inputs = {"v": ("i32", two)}
    got = one("i32 @llvm.amdgcn.readfirstlane.i32(i32 %v)", inputs, "i32", lanes=128)
    assert got.tolist() == [7] * 64 + [8] * 64
    got = one("i32 @llvm.amdgcn.readlane.i32(i32 %v, i32 5)", inputs, "i32", lanes=128)
    assert got.tolist() == [57] * 64 + [58] * 64
    body = "%odd = trunc i32 %v to i1\n%r = call i64 @llvm.amdgcn.ballot.i64(i1 %odd)"
    got = run(body, {"v": ("i32", LANE // 3)}, "i64")
    assert set(got.tolist()) == {sum(1 << lane for lane in range(64) if lane // 3 % 2)}


@covers("llvm.amdgcn.mbcnt.lo", "llvm.amdgcn.mbcnt.hi", "llvm.amdgcn.wave.id")
@covers(*(f"llvm.amdgcn.work{kind}.id.{a}" for kind in ("group", "item") for a in "xyz"))
def test_identity():
    body = """
    %lo = call i32 @llvm.amdgcn.mbcnt.lo(i32 -1, i32 0)
    %lane = call i32 @llvm.amdgcn.mbcnt.hi(i32 -1, i32 %lo)
    %wave = call i32 @llvm.amdgcn.wave.id()
    %x = call i32 @llvm.amdgcn.workgroup.id.x()
    %y = call i32 @llvm.amdgcn.workgroup.id.y()
    %z = call i32 @llvm.amdgcn.workgroup.id.z()
    %ty = call i32 @llvm.amdgcn.workitem.id.y()
    %tz = call i32 @llvm.amdgcn.workitem.id.z()
    %s = add i32 %x, %y
    %u = add i32 %z, %ty
    %t = add i32 %u, %tz
    %w = mul i32 %wave, 1000
    %v = add i32 %lane, %w
    %q = add i32 %s, %t
    %r = add i32 %v, %q
    """
    got = run(body, {}, "i32", lanes=128)
    assert got.tolist() == [*range(64), *range(1000, 1064)]


# --- arithmetic intrinsics -----------------------------------------------------------------------

FLOATS = np.concatenate([np.linspace(-9, 9, 60), [np.inf, -np.inf, np.nan, -0.0]]).astype(
    np.float32
)
UNARY = {
    "llvm.fabs": abs,
    "llvm.sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "llvm.exp2": lambda x: 2.0**x,
    "llvm.log2": lambda x: math.log2(x) if x > 0 else (-math.inf if x == 0 else math.nan),
    "llvm.rint": lambda x: round(x) if math.isfinite(x) else x,
    "llvm.roundeven": lambda x: round(x) if math.isfinite(x) else x,
    "llvm.floor": lambda x: math.floor(x) if math.isfinite(x) else x,
    "llvm.ceil": lambda x: math.ceil(x) if math.isfinite(x) else x,
    "llvm.amdgcn.exp2": lambda x: 2.0**x,
    "llvm.amdgcn.log": lambda x: math.log2(x) if x > 0 else (-math.inf if x == 0 else math.nan),
    "llvm.amdgcn.rcp": lambda x: 1 / x if x else math.copysign(math.inf, x),
    "llvm.amdgcn.sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "llvm.amdgcn.rsq": lambda x: 1 / math.sqrt(x) if x > 0 else (-math.inf if not x else math.nan),
}


@covers(*UNARY)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_float(name):
    got = one(f"float @{name}.f32(float %x)", {"x": ("float", FLOATS)}, "float")
    want = np.array([UNARY[name](float(x)) for x in FLOATS], np.float32)
    np.testing.assert_allclose(got, want, rtol=2e-7)


def _nan_loses(pick):
    return lambda a, b: b if a != a else a if b != b else pick(a, b)


def _nan_wins(pick):
    return lambda a, b: math.nan if a != a or b != b else pick(a, b)


BINARY_FLOAT = {
    "llvm.minnum": _nan_loses(min),
    "llvm.maxnum": _nan_loses(max),
    "llvm.minimumnum": _nan_loses(min),
    "llvm.maximumnum": _nan_loses(max),
    "llvm.minimum": _nan_wins(min),
    "llvm.maximum": _nan_wins(max),
    "llvm.copysign": math.copysign,
}


@covers(*BINARY_FLOAT, "llvm.fma", "llvm.fmuladd")
@pytest.mark.parametrize("name", BINARY_FLOAT)
def test_functions_of_two_floats(name):
    other = np.roll(FLOATS, 5)
    inputs = {"x": ("float", FLOATS), "y": ("float", other)}
    got = one(f"float @{name}.f32(float %x, float %y)", inputs, "float")
    pairs = zip(FLOATS.tolist(), other.tolist(), strict=True)
    np.testing.assert_array_equal(got, np.array([BINARY_FLOAT[name](a, b) for a, b in pairs], "f4"))


def test_fma_rounds_once():
    a = np.full(64, 1 + 2**-12, np.float32)
    inputs = {"a": ("float", a), "c": ("float", np.full(64, -1 - 2**-11, np.float32))}
    for name in ("llvm.fma", "llvm.fmuladd"):
        got = one(f"float @{name}.f32(float %a, float %a, float %c)", inputs, "float")
        assert set(got.tolist()) == {2.0**-24}


def signed(x, bits=32):
    return x - (1 << bits) if x >> (bits - 1) else x


INTEGERS = np.random.default_rng(4).integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
INTEGER_CALLS = {
    "llvm.smax": lambda a, b: max(signed(a), signed(b)) & 0xFFFFFFFF,
    "llvm.smin": lambda a, b: min(signed(a), signed(b)) & 0xFFFFFFFF,
    "llvm.umax": max,
    "llvm.umin": min,
    "llvm.usub.sat": lambda a, b: max(a - b, 0),
}


@covers(*INTEGER_CALLS, "llvm.abs", "llvm.ctpop", "llvm.ctlz", "llvm.fshl", "llvm.fshr")
def test_integer_functions():
    other = np.roll(INTEGERS, 9)
    inputs = {"x": ("i32", INTEGERS), "y": ("i32", other)}
    pairs = list(zip(INTEGERS.tolist(), other.tolist(), strict=True))
    for name, function in INTEGER_CALLS.items():
        got = one(f"i32 @{name}.i32(i32 %x, i32 %y)", inputs, "i32")
        assert got.tolist() == [function(a, b) for a, b in pairs], name
    got = one("i32 @llvm.abs.i32(i32 %x, i1 false)", inputs, "i32")
    assert got.tolist() == [abs(signed(a)) for a, _ in pairs]
    got = one("i32 @llvm.ctpop.i32(i32 %x)", inputs, "i32")
    assert got.tolist() == [a.bit_count() for a, _ in pairs]
    small = {"x": ("i32", INTEGERS >> (LANE % 32))}
    got = one("i32 @llvm.ctlz.i32(i32 %x, i1 false)", small, "i32")
    assert got.tolist() == [32 - int(x).bit_length() for x in small["x"][1]]
    for name, left in (("fshl", True), ("fshr", False)):
        for amount in (0, 5, 31):
            got = one(f"i32 @llvm.{name}.i32(i32 %x, i32 %y, i32 {amount})", inputs, "i32")
            shift = amount if left else 32 - amount
            want = [((a << 32 | b) << shift >> 32) & 0xFFFFFFFF for a, b in pairs]
            assert got.tolist() == want, (name, amount)


# --- the language --------------------------------------------------------------------------------


def wrap(x):
    return x & 0xFFFFFFFF


def divided(a, b):
    return math.trunc(signed(a) / signed(b))


INTEGER_BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "udiv": lambda a, b: a // b,
    "urem": lambda a, b: a % b,
    "sdiv": divided,
    "srem": lambda a, b: signed(a) - divided(a, b) * signed(b),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << (b % 32),
    "lshr": lambda a, b: a >> (b % 32),
    "ashr": lambda a, b: signed(a) >> (b % 32),
}
FLOAT_BINARY = {
    "fadd": lambda a, b: a + b,
    "fsub": lambda a, b: a - b,
    "fmul": lambda a, b: a * b,
    "fdiv": lambda a, b: a / b,
    "frem": math.fmod,
}


@pytest.mark.parametrize("op", INTEGER_BINARY)
def test_integer_arithmetic_wraps(op):
    b = INTEGERS[::-1] % 32 if op in ("shl", "lshr", "ashr") else INTEGERS[::-1]
    got = run(f"%r = {op} i32 %a, %b", {"a": ("i32", INTEGERS), "b": ("i32", b)}, "i32")
    pairs = zip(INTEGERS.tolist(), b.tolist(), strict=True)
    assert got.tolist() == [wrap(INTEGER_BINARY[op](x, y)) for x, y in pairs]


@pytest.mark.parametrize("op", FLOAT_BINARY)
def test_float_arithmetic_in_float_and_bfloat(op):
    a, b = np.linspace(-5, 5, 64, dtype=np.float32), np.linspace(3, 9, 64, dtype=np.float32)
    got = run(f"%r = {op} contract float %a, %b", {"a": ("float", a), "b": ("float", b)}, "float")
    want = np.array([FLOAT_BINARY[op](float(x), float(y)) for x, y in zip(a, b, strict=True)], "f4")
    np.testing.assert_array_equal(got, want)
    narrow = [torch.from_numpy(x).to(torch.bfloat16) for x in (a, b)]
    inputs = {
        n: ("bfloat", t.view(torch.uint16).numpy()) for n, t in zip("ab", narrow, strict=True)
    }
    got = run(f"%r = {op} bfloat %a, %b", inputs, "bfloat")
    wide = [FLOAT_BINARY[op](*(float(t[i]) for t in narrow)) for i in range(64)]
    same_bits(got, torch.tensor(wide).to(torch.bfloat16))


def test_the_two_tables_are_the_whole_of_binary():
    assert {*INTEGER_BINARY, *FLOAT_BINARY} == BINARY


CAST_CASES = [
    ("trunc i32 %v to i8", "i32", 0x1FF, "i8", 0xFF),
    ("trunc i32 %v to i1\n%r = zext i1 %t to i8", "i32", 3, "i8", 1),
    ("zext i8 %v to i32", "i8", 0xF0, "i32", 0xF0),
    ("sext i8 %v to i32", "i8", 0xF0, "i32", 0xFFFFFFF0),
    ("fptrunc float %v to half", "float", 1.0009765625, "half", 1.0009765625),
    ("fptrunc float %v to bfloat", "float", 1.00390625, "bfloat", 0x3F80),  # a tie, to even
    ("fpext half %v to float", "half", 0.333251953125, "float", 0.333251953125),
    ("fpext bfloat %v to float", "bfloat", 0x3FC0, "float", 1.5),
    ("fptoui float %v to i32", "float", 3.99, "i32", 3),
    ("fptosi float %v to i32", "float", -3.99, "i32", 0xFFFFFFFD),
    ("uitofp i32 %v to float", "i32", 0xFFFFFFFF, "float", 4294967296.0),
    ("sitofp i32 %v to float", "i32", 0xFFFFFFFF, "float", -1.0),
    ("ptrtoint ptr addrspace(1) %q to i64", "i64", 77, "i64", 77),
    ("inttoptr i64 %v to ptr addrspace(1)", "i64", 77, "i64", 77),
    ("addrspacecast ptr addrspace(1) %q to ptr", "i64", 77, "i64", 77),
    ("bitcast float %v to i32", "float", 1.0, "i32", 0x3F800000),
    ("bitcast <2 x i16> %w to i32", "i32", 0x12345678, "i32", 0x12345678),
    ("freeze i32 %v", "i32", 5, "i32", 5),
]


@pytest.mark.parametrize("case", CAST_CASES, ids=lambda c: c[0].split("\n")[0])
def test_casts(case):
    text, kind, value, result, want = case
    body = f"%r = {text}"
    if "\n" in text:
        body = f"%t = {text}"
    if "%q" in text:
        body = f"%q = inttoptr i64 %v to ptr addrspace(1)\n{body}"
    if text == "inttoptr i64 %v to ptr addrspace(1)" or text.startswith("addrspacecast"):
        space = "" if text.startswith("addrspacecast") else " addrspace(1)"
        body = body.replace("%r =", "%t =") + f"\n%r = ptrtoint ptr{space} %t to i64"
    if "%w" in text:
        body = f"%w = bitcast i32 %v to <2 x i16>\n{body}"
    numpy_kind = {"half": np.float16, "float": np.float32, "bfloat": np.uint16}.get(kind)
    data = np.full(64, value, numpy_kind or f"u{int(kind[1:]) // 8}")
    got = run(body, {"v": (kind, data)}, result)
    assert got[0] == np.asarray(want).astype(got.dtype)


def test_the_casts_are_all_tried():
    assert {case[0].split()[0] for case in CAST_CASES} - {"freeze"} == CASTS


@pytest.mark.parametrize(
    "predicate", ["eq", "ne", "ugt", "uge", "ult", "ule", "sgt", "sge", "slt", "sle"]
)
def test_integer_compares(predicate):
    b = np.where(LANE % 3 == 0, INTEGERS, INTEGERS[::-1])
    body = f"%c = icmp {predicate} i32 %a, %b\n%r = select i1 %c, i32 1, i32 0"
    got = run(body, {"a": ("i32", INTEGERS), "b": ("i32", b)}, "i32")
    view = signed if predicate[0] == "s" else int
    compare = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    sign = compare[predicate if predicate in ("eq", "ne") else predicate[1:]]
    pairs = zip(INTEGERS.tolist(), b.tolist(), strict=True)
    assert got.tolist() == [eval(f"{view(x)} {sign} {view(y)}") for x, y in pairs]


@pytest.mark.parametrize(
    "predicate", [o + p for o in "ou" for p in ("eq", "ne", "lt", "ge")] + ["ord", "uno"]
)
def test_float_compares_with_nan(predicate):
    other = np.where(LANE % 3 == 0, FLOATS, np.roll(FLOATS, 3))
    body = f"%c = fcmp {predicate} float %a, %b\n%r = select i1 %c, i32 1, i32 0"
    got = run(body, {"a": ("float", FLOATS), "b": ("float", other)}, "i32")
    signs = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "ge": "__ge__"}
    for lane, (x, y) in enumerate(zip(FLOATS.tolist(), other.tolist(), strict=True)):
        nan = x != x or y != y
        if predicate in ("ord", "uno"):
            want = nan == (predicate == "uno")
        else:
            want = predicate[0] == "u" if nan else getattr(x, signs[predicate[1:]])(y)
        assert got[lane] == want


def test_vectors_and_aggregates():
    body = """
    %p = insertelement <4 x i32> zeroinitializer, i32 %v, i64 2
    %c = add <4 x i32> <i32 9, i32 8, i32 7, i32 6>, zeroinitializer
    %q = shufflevector <4 x i32> %p, <4 x i32> %c, <4 x i32> <i32 2, i32 4, i32 7, i32 0>
    %i = and i32 %v, 3
    %e = extractelement <4 x i32> %q, i32 %i
    %f = insertelement <4 x i32> %q, i32 77, i32 %i
    %s = insertvalue { i32, <4 x i32> } poison, <4 x i32> %f, 1
    %t = extractvalue { i32, <4 x i32> } %s, 1
    %u = add <4 x i32> %t, splat (i32 1)
    %r = insertelement <4 x i32> %u, i32 %e, i32 3
    """
    got = run(body, {"v": ("i32", LANE)}, "<4 x i32>")
    for lane in range(64):
        q = [lane, 9, 6, 0]
        f = q.copy()
        f[lane % 4] = 77
        assert got[lane].tolist() == [f[0] + 1, f[1] + 1, f[2] + 1, q[lane % 4]]


def test_negation_flips_the_sign_of_zero_and_of_bfloat():
    got = run("%r = fneg float %x", {"x": ("float", np.zeros(64, np.float32))}, "float")
    assert np.signbit(got).all()
    got = run("%r = fneg bfloat %x", {"x": ("bfloat", np.full(64, 0x3F80, np.uint16))}, "bfloat")
    assert set(got.tolist()) == {0xBF80}


def test_loops_of_different_length_and_switches_meet_again():
    body = """
    br label %head
    head:
    %n = phi i32 [ 0, %entry ], [ %m, %body ]
    %sum = phi i32 [ 0, %entry ], [ %more, %body ]
    %go = icmp ult i32 %n, %v
    br i1 %go, label %body, label %out
    body:
    %more = add i32 %sum, %n
    %m = add i32 %n, 1
    br label %head
    out:
    %k = and i32 %tid, 3
    switch i32 %k, label %other [ i32 0, label %zero
      i32 2, label %two ]
    zero:
    br label %meet
    two:
    br label %meet
    other:
    br label %meet
    meet:
    %add = phi i32 [ 100, %zero ], [ 200, %two ], [ 300, %other ]
    %r = add i32 %sum, %add
    """
    body = "br label %entry\nentry:\n" + body.strip()
    got = run(body, {"v": ("i32", LANE % 7)}, "i32")
    for lane in range(64):
        n = lane % 7
        assert got[lane] == n * (n - 1) // 2 + {0: 100, 2: 200}.get(lane % 4, 300)


def test_what_is_not_modelled_is_an_error_when_the_kernel_is_loaded():
    with pytest.raises(SimulationError, match=r"llvm.amdgcn.fdot2 is not modelled"):
        one("float @llvm.amdgcn.fdot2(i32 0)", {}, "float")
    with pytest.raises(SimulationError, match=r"'va_arg' is not modelled"):
        run("%r = va_arg i32 %tid", {}, "i32")
    with pytest.raises(SimulationError, match="cannot read"):
        parse("define amdgpu_kernel void @k() {\n  §\n}")


NOTHING = [name for name, m in MODELS.items() if "scheduling and waiting" in m.source]


@covers(*NOTHING)
def test_hints_have_no_effect():
    calls = "\n".join(f"call void @{name}()" for name in NOTHING if name != "asm")
    wait = 'call void asm sideeffect "s_wait_loadcnt 0", ""()'
    assert run(f"{calls}\n{wait}\n%r = add i32 %tid, 0", {}, "i32").tolist() == LANE.tolist()
    with pytest.raises(SimulationError, match="assembly"):
        run('%r = call i32 asm "v_mov_b32 $0, 1", "=v"()', {}, "i32")


@covers("llvm.amdgcn.s.setreg")
def test_saturating_conversions_are_the_only_mode_that_can_be_set():
    # register 1 (MODE) in bits 0-5, offset in bits 6-10, width less one in bits 11-15
    saturate = 1 | 23 << 6 | 0 << 11
    run(f"call void @llvm.amdgcn.s.setreg(i32 {saturate}, i32 1)\n%r = add i32 %tid, 0", {}, "i32")
    for word, value in ((saturate, 0), (1 | 4 << 6 | 3 << 11, 15), (2 | 23 << 6, 1)):
        with pytest.raises(SimulationError, match="mode"):
            run(
                f"call void @llvm.amdgcn.s.setreg(i32 {word}, i32 {value})\n%r = add i32 %tid, 0",
                {},
                "i32",
            )
