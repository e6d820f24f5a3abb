"""Bytes and operations against figures published for the model, within their printed rounding."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.planning.model import Shard
from minuet.planning.roofline import (
    WEIGHT_BYTES,
    Storage,
    decode,
    expected_distinct_experts,
    prefill,
)
from minuet.platform.arch import ARCHS, get
from tests.planning.helpers import preset, tiny, with_shard

K = 1024
GB, GFLOP = 1e9, 1e9
FP8 = DType.FP8_E4M3FN

# --- published weight formats --------------------------------------------------------------------

MXFP4_EXPERTS = {"experts": "mxfp4", "shared_experts": "mxfp4"}
LINEARS = ("attention_qo", "attention_kv", "index_q", "index_k", "dense_mlp")
FP8_LINEARS = dict.fromkeys(LINEARS, "fp8")
NORMS_BF16 = {"norms": "bfloat16"}
FORMATS = {
    "bf16": NORMS_BF16,
    "mxfp8": NORMS_BF16 | dict.fromkeys((*LINEARS, "experts", "shared_experts"), "mxfp8"),
    "mxfp4": NORMS_BF16 | MXFP4_EXPERTS,
    "mxfp4+fp8": NORMS_BF16 | MXFP4_EXPERTS | FP8_LINEARS,
}


def stored(kv: DType = DType.BF16, formats: str = "bf16", **changes) -> Storage:
    return Storage(kv_dtype=kv, index_dtype=kv, overrides=FORMATS[formats], **changes)


def kv_gb(step) -> tuple[float, float, float]:
    return tuple(step.part(name).bytes / GB for name in ("kv dense", "kv sparse", "index keys"))


def weight_gb(step) -> float:
    return step.bytes / GB - sum(kv_gb(step))


# --- parameters and formats ----------------------------------------------------------------------


def test_parameters_sum_to_the_published_count():
    assert preset().params == 426_174_572_928


@pytest.mark.parametrize(("form", "mb"), [("bfloat16", 113.25), ("mxfp8", 58.39), ("mxfp4", 30.08)])
def test_one_expert_in_each_format(form, mb):
    assert round(preset().experts.params * float(WEIGHT_BYTES[form]) / 1e6, 2) == mb


@pytest.mark.parametrize(
    ("batch", "experts"),
    [(1, 4.0), (2, 7.88), (4, 15.27), (8, 28.71), (16, 50.98), (32, 81.66), (64, 111.22)],
)
def test_expected_distinct_experts(batch, experts):
    assert round(expected_distinct_experts(128, 4, batch), 2) == experts


@given(st.integers(1, 512), st.integers(1, 16), st.integers(1, 4096))
def test_distinct_experts_are_between_one_token_and_all(count, per_token, tokens):
    per_token = min(per_token, count)
    found = expected_distinct_experts(count, per_token, tokens)
    assert per_token - 1e-9 <= found <= min(count, per_token * tokens) + 1e-9


# --- KV reads of one request (all ranks) ---------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "context", "dense", "sparse", "index", "total"),
    [
        (DType.BF16, 8 * K, 0.050, 0.239, 0.120, 0.409),
        (DType.BF16, 128 * K, 0.805, 0.239, 1.913, 2.957),
        (DType.BF16, K * K, 6.44, 0.239, 15.30, 21.98),
        (FP8, 8 * K, 0.026, 0.123, 0.060, 0.209),
        (FP8, 128 * K, 0.415, 0.123, 0.956, 1.495),
        (FP8, K * K, 3.32, 0.123, 7.65, 11.10),
    ],
)
def test_kv_bytes_read_by_a_decode_step(kv, context, dense, sparse, index, total):
    found = kv_gb(decode(preset(), stored(kv), batch=1, context=context))
    for value, printed in zip((*found, sum(found)), (dense, sparse, index, total), strict=True):
        digits = 3 if printed < 3 else 2
        assert value == pytest.approx(printed, abs=0.5 * 10**-digits + 1e-9)


def test_tensor_parallel_ranks_read_the_whole_index_and_their_own_heads():
    one, four, eight = (
        kv_gb(decode(preset(), stored(ranks=ranks), batch=1, context=8 * K)) for ranks in (1, 4, 8)
    )
    assert four[2] == one[2]
    assert four[0] == one[0] / 4
    assert eight == four  # KV heads are replicated beyond their number


# --- weights read by a decode step (all ranks) ---------------------------------------------------

WEIGHTS_READ = {
    "bf16": (49.56, 122.28, 352.82, 741.67),
    "mxfp8": (26.83, 64.33, 183.20, 383.70),
    "mxfp4": (25.85, 45.17, 106.41, 209.70),
    "mxfp4+fp8": (18.53, 37.85, 99.09, 202.38),
}


@pytest.mark.parametrize("formats", FORMATS)
def test_weight_bytes_read_by_a_decode_step(formats):
    for batch, printed in zip((1, 4, 16, 64), WEIGHTS_READ[formats], strict=True):
        step = decode(preset(), stored(formats=formats), batch=batch, context=1)
        assert weight_gb(step) == pytest.approx(printed, abs=0.005 + 1e-9)


@pytest.mark.parametrize(
    ("formats", "printed"),
    [("bf16", 23.74), ("mxfp8", 13.52), ("mxfp4", 19.0), ("mxfp4+fp8", 11.68)],
)
def test_weight_bytes_that_every_step_reads(formats, printed):
    step = decode(preset(), stored(formats=formats), batch=1, context=1, distinct_experts=0)
    # 11.6748 is printed as 11.68: rounded to 11.675, then again
    assert weight_gb(step) == pytest.approx(printed, abs=0.0055)


# --- operations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "dense", "sparse", "index", "total"),
    [
        (8 * K, 0.805, 3.825, 0.478, 54.6),
        (128 * K, 12.9, 3.825, 7.65, 73.8),
        (K * K, 103.1, 3.825, 61.2, 217.6),
    ],
)
def test_operations_of_one_token(context, dense, sparse, index, total):
    step = decode(preset(), stored(), batch=1, context=context)
    found = [step.part(name).flops / GFLOP for name in ("kv dense", "kv sparse", "index keys")]
    assert step.flops / GFLOP == pytest.approx(total, abs=0.05)
    assert (step.flops / GFLOP - sum(found)) == pytest.approx(49.47, abs=0.006)
    for value, printed in zip(found, (dense, sparse, index), strict=True):
        digits = 3 if printed < 4 else 2 if printed < 10 else 1
        assert value == pytest.approx(printed, abs=0.5 * 10**-digits)


COMBINED = [  # batch, context, w4+fp8 with FP8 KV, mxfp8 with BF16 KV, all BF16, GFLOP
    (1, 8 * K, 18.7, 27.2, 50.0, 55),
    (1, 128 * K, 20.0, 29.8, 52.5, 74),
    (1, K * K, 29.6, 48.8, 71.5, 218),
    (4, 8 * K, 38.7, 66.0, 123.9, 218),
    (4, 128 * K, 43.8, 76.2, 134.1, 295),
    (4, K * K, 82.2, 152.3, 210.2, 870),
    (16, 8 * K, 102.4, 189.7, 359.4, 873),
    (16, 128 * K, 123.0, 230.5, 400.1, 1181),
    (16, K * K, 276.6, 534.9, 704.5, 3481),
    (64, 8 * K, 215.8, 409.9, 767.8, 3493),
    (64, 128 * K, 298.0, 573.0, 930.9, 4725),
    (64, K * K, 912.5, 1790.6, 2148.5, 13925),
]


@pytest.mark.parametrize(("batch", "context", "w4", "w8", "bf16", "gflop"), COMBINED)
def test_the_combined_decode_step(batch, context, w4, w8, bf16, gflop):
    for kv, formats, printed in (
        (FP8, "mxfp4+fp8", w4),
        (DType.BF16, "mxfp8", w8),
        (DType.BF16, "bf16", bf16),
    ):
        step = decode(preset(), stored(kv, formats), batch=batch, context=context)
        assert step.bytes / GB == pytest.approx(printed, abs=0.06)
        assert step.flops / GFLOP == pytest.approx(gflop, abs=0.6)


# --- the reference point: 4 ranks, 4 requests, context 8704 --------------------------------------

C4 = {"batch": 4, "context": 8704}


def c4(kv: DType, linears: str, facts=None):
    """As published: linears FP8 or BF16, router in BF16."""
    formats = NORMS_BF16 | MXFP4_EXPERTS | dict.fromkeys(LINEARS, linears) | {"router": "bfloat16"}
    storage = Storage(kv_dtype=kv, index_dtype=kv, overrides=formats, ranks=4)
    return decode(facts or preset(), storage, **C4)


def as_published():
    """The published account divides the index-key projection too, and has no norms."""
    facts = with_shard(preset(), "index_k", Shard.SPLIT)
    return replace(facts, weights=tuple(g for g in facts.weights if g.name != "norms"))


@pytest.mark.parametrize(
    ("kv", "linears", "printed"),
    [
        (FP8, "fp8", 9.91),
        (FP8, "bfloat16", 11.74),
        (DType.BF16, "fp8", 10.31),
        (DType.BF16, "bfloat16", 12.14),
    ],
)
def test_bytes_of_the_reference_point(kv, linears, printed):
    step = c4(kv, linears, as_published())
    assert step.bytes / GB == pytest.approx(printed, abs=0.0075)  # a sum of rounded parts
    experts = step.part("experts").bytes + step.part("shared_experts").bytes
    assert experts / GB == pytest.approx(6.97, abs=0.005)
    index_gb = 0.254 if kv is FP8 else 0.508
    assert step.part("index keys").bytes / GB == pytest.approx(index_gb, abs=5e-4)


def test_our_account_of_the_reference_point_adds_what_every_rank_holds():
    """The index-key projection is replicated: three quarters of it come on top; and the norms."""
    ours, published = c4(FP8, "fp8"), c4(FP8, "fp8", as_published())
    index_k = next(g for g in preset().weights if g.name == "index_k").params
    norms = next(g for g in preset().weights if g.name == "norms").params
    assert ours.bytes - published.bytes == pytest.approx(index_k * 0.75 + norms * 2)


@pytest.mark.parametrize(
    ("kv", "linears", "t_roof_ms"),
    [(FP8, "fp8", 0.506), (FP8, "bfloat16", 0.599), (DType.BF16, "fp8", 0.526)],
)
@pytest.mark.parametrize(("tb_per_s", "printed_share"), [(19.6, 1.0), (23.347, 19.6 / 23.347)])
def test_time_limit_of_the_reference_point(kv, linears, t_roof_ms, tb_per_s, printed_share):
    arch = replace(get("gfx1250"), bandwidth_bytes_per_s=int(tb_per_s * 1e12))
    limit = c4(kv, linears, as_published()).limit(arch)
    assert limit.bound_by == "memory"
    assert limit.seconds * 1e3 == pytest.approx(t_roof_ms * printed_share, abs=0.0012)


def test_an_arch_without_a_bandwidth_has_no_limit():
    step = decode(tiny(), stored(), batch=1, context=1)
    for arch in ARCHS.values():
        assert (step.limit(arch) is None) == (arch.bandwidth_bytes_per_s is None)


# --- prefill and general laws --------------------------------------------------------------------


def test_a_long_prefill_is_bound_by_compute_and_counts_its_operations():
    step = prefill(preset(), stored(ranks=4), tokens=8192)
    arch = replace(get("sm90"), bf16_flops_per_s=int(989e12))
    assert step.limit(arch).bound_by == "compute"
    # 2 x 24.7 B x 8192 = 405 TFLOP, less the head (one row), plus attention
    linear = sum(p.flops for p in step.parts if not p.name.startswith(("kv", "index keys")))
    replicated = (
        2 * 8192 * 0.75 * sum(g.params for g in preset().weights if g.shard is Shard.REPLICATED)
    )
    assert (linear - replicated) * 4 == pytest.approx(405e12 - 2 * 1.2292e9 * 8191, rel=2e-3)


@given(st.integers(1, 3000), st.integers(0, 5000))
def test_prefill_operations_are_those_of_its_rows_one_by_one(tokens, before):
    """Closed sums equal the sum over rows: row i sees before + i + 1 tokens."""
    facts, storage = tiny(), stored()
    limit = facts.index.top_blocks * facts.index.block
    step = prefill(facts, storage, tokens=tokens, context_before=before)
    seen = [before + i + 1 for i in range(tokens)]
    per_token = 4 * facts.num_q_heads * facts.head_dim
    assert step.part("kv dense").flops == sum(seen) * per_token
    assert step.part("kv sparse").flops == sum(min(c, limit) for c in seen) * per_token
    assert step.part("index keys").flops == sum(seen) * 2 * facts.index.heads * facts.index.dim


def test_prompts_of_several_requests_share_weights_and_nothing_else():
    one = prefill(preset(), stored(ranks=4), tokens=512, context_before=4096)
    three = prefill(preset(), stored(ranks=4), tokens=512, context_before=4096, requests=3)
    for name in ("kv dense", "kv sparse", "index keys"):
        assert three.part(name).bytes == 3 * one.part(name).bytes
    assert three.part("attention_qo").bytes == one.part("attention_qo").bytes
    assert three.flops == pytest.approx(3 * one.flops)


@given(st.integers(1, 64), st.integers(1, 9000), st.integers(1, 8))
def test_verification_reads_each_token_at_most_once(batch, context, query_len):
    context = max(context, query_len)
    step = decode(tiny(), stored(), batch=batch, context=context, query_len=query_len)
    single = decode(tiny(), stored(), batch=batch, context=context)
    assert step.part("kv dense").bytes == single.part("kv dense").bytes
    assert step.part("index keys").bytes == single.part("index keys").bytes
    assert (
        single.part("kv sparse").bytes
        <= step.part("kv sparse").bytes
        <= min(query_len * single.part("kv sparse").bytes, step.part("kv dense").bytes)
    )


def test_measured_experts_replace_the_estimate():
    measured = decode(preset(), stored(), **C4, distinct_experts=10.0)
    assert measured.distinct_experts == 10.0
    assert measured.part("experts").bytes == 57 * 10 * preset().experts.params * 2


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ContractError, match="context"):
        decode(tiny(), stored(), batch=1, context=3, query_len=4)
    with pytest.raises(ContractError, match="tokens"):
        prefill(tiny(), stored(), tokens=0)
    with pytest.raises(ContractError, match="weight format"):
        stored(weights="int3")
