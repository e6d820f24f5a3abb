"""Refusals are complete and their advice is true: F-3, F-11a, F-11c."""

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minuet.attention import backends, dispatch
from minuet.attention.backends.triton import spec as triton_spec
from minuet.attention.capability import Accepted, Level, covers, missing_artefacts, one_of, up_to
from minuet.attention.contract import LayerKind, Op, Phase
from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.kv.layout import Form, KVLayout, LaneName
from minuet.platform.arch import ARCHS, get
from tests.attention.problems import DENSE, SELECT, SPARSE, with_flag

KERNELS = tuple(k for name in backends.NAMES for k in backends.capabilities(name))
FP8 = DType.FP8_E4M3FN
GFX1250_FP8 = replace(DENSE, kv_dtype=FP8, form=Form.SHUFFLE)


def kernel(name):
    return next(k for k in KERNELS if k.name == name)


def everything_said(choice):
    return "\n".join(map(str, choice.against()))


@st.composite
def problems(draw):
    base = draw(st.sampled_from((DENSE, SPARSE, SELECT, replace(SPARSE, op=Op.WRITE))))
    return replace(
        base,
        phase=draw(st.sampled_from(list(Phase))),
        num_q_heads=draw(st.sampled_from((1, 8, 16, 32, 64))),
        head_dim=draw(st.sampled_from((64, 96, 128, 256))),
        page_size=draw(st.sampled_from((4, 16, 48, 64, 128, 256, 1024))),
        q_dtype=draw(st.sampled_from((DType.FP32, DType.BF16, DType.FP16))),
        kv_dtype=draw(
            st.sampled_from((DType.FP32, DType.BF16, DType.FP16, FP8, DType.FP8_E4M3FNUZ))
        ),
        index_dtype=draw(st.sampled_from((DType.BF16, FP8, DType.FP8_E4M3FNUZ))),
        query_len=draw(st.sampled_from((1, 4, 8, 9))),
        form=draw(st.sampled_from(list(Form))),
        window=draw(st.sampled_from((0, 0, 0, 4096))),
        sinks=draw(st.sampled_from((False, False, False, True))),
    )


WANTS = st.sampled_from(("auto", *backends.NAMES))


# --- T3 ------------------------------------------------------------------------------------------


def test_a_backend_switched_off_is_the_one_thing_advised():
    choice = dispatch.choose(GFX1250_FP8, get("gfx1250"), "triton")
    assert choice.kernel is None
    said = everything_said(choice)
    assert "set --attention-backend flydsl" in said
    assert "scale" not in said


def test_an_unsupported_page_is_named_and_the_switch_not_advised():
    problem = replace(GFX1250_FP8, page_size=256)
    (flydsl,) = [
        r
        for n, r in dispatch.choose(problem, get("gfx1250"), "triton").refusals.items()
        if "flydsl" in n
    ]
    page = next(r for r in flydsl if r.field == "page_size")
    assert page.got == "256"
    assert page.accepts == str(one_of(16, 64, 128))
    assert not any(r.remedy for r in flydsl)


def test_sinks_and_windows_are_named_and_nothing_is_advised():
    problem = replace(GFX1250_FP8, sinks=True, window=4096)
    choice = dispatch.choose(problem, get("gfx1250"), "triton")
    assert {"sinks", "window"} <= {r.field for r in choice.against()}
    assert not any(r.remedy for r in choice.against())


def test_no_switch_is_needed_where_there_is_no_alternative():
    choice = dispatch.choose(GFX1250_FP8, get("gfx1250"))
    assert choice.kernel is not None
    assert choice.kernel.backend == "flydsl"


# --- completeness and truth of advice ------------------------------------------------------------


def test_every_violated_fact_is_refused_at_once():
    problem = replace(
        SPARSE, head_dim=96, page_size=48, num_q_heads=32, query_len=9, q_dtype=DType.FP32,
        kv_dtype=DType.FP8_E4M3FNUZ, top_blocks=17, form=Form.SHUFFLE, window=1, sinks=True,
    )  # fmt: skip
    fields = [r.field for r in covers(kernel("triton.attend"), problem, get("sm90"), "cpu")]
    assert sorted(fields) == sorted(
        ("attention_backend", "form", "q_dtype", "kv_dtype", "head_dim", "page_size", "group",
         "query_len", "top_blocks", "window", "sinks")
    )  # fmt: skip


@given(problems(), st.sampled_from(sorted(ARCHS)), st.sampled_from(KERNELS), WANTS)
def test_advice_followed_alone_makes_the_kernel_cover_the_problem(
    problem, arch_name, candidate, want
):
    arch = get(arch_name)
    for refusal in covers(candidate, problem, arch, want):
        assert bool(refusal.flag) == bool(refusal.remedy) == bool(refusal.value)
        if refusal.flag:
            assert refusal.flag in refusal.remedy
            changed = with_flag(problem, want, arch, refusal.flag, refusal.value)
            assert covers(candidate, changed[0], arch, changed[1]) == ()


@given(problems(), st.sampled_from(sorted(ARCHS)), st.sampled_from(KERNELS), WANTS)
def test_a_refusal_is_a_fact_outside_the_limits_and_nothing_else(
    problem, arch_name, candidate, want
):
    reasons = covers(candidate, problem, get(arch_name), want)
    fields = [r.field for r in reasons]
    assert len(set(fields)) == len(fields)
    assert all(r.got and r.accepts and r.got != r.accepts for r in reasons)
    assert ("page_size" in fields) == (problem.page_size not in candidate.page_sizes)
    assert ("arch" in fields) == (arch_name not in candidate.level)


def test_advice_keeps_fp8_where_the_arch_has_another_flavour():
    (refusal,) = covers(
        kernel("triton.attend"), replace(DENSE, kv_dtype=FP8), get("gfx942"), "triton"
    )
    assert (refusal.flag, refusal.value) == ("--kv-cache-dtype", DType.FP8_E4M3FNUZ.value)


def test_fp8_without_a_conversion_is_refused_with_what_is_left():
    (refusal,) = covers(kernel("triton.attend"), replace(DENSE, kv_dtype=FP8), get("sm80"))
    assert refusal.accepts == "bfloat16, float16"
    assert refusal.value == "bfloat16"


def test_the_page_of_a_sparse_layer_is_never_advised_away():
    problem = replace(SELECT, page_size=256)
    (refusal,) = covers(kernel("triton.select"), problem, get("sm90"))
    assert (refusal.field, refusal.flag) == ("page_size", "")
    (dense,) = covers(kernel("triton.attend"), replace(DENSE, page_size=48), get("sm90"))
    assert (dense.flag, dense.value) == ("--block-size", "32")


def test_the_cpu_backend_says_how_to_ask_for_it_on_a_gpu():
    (refusal,) = covers(kernel("cpu.attend"), DENSE, get("sm90"))
    assert refusal.remedy == "set --attention-backend cpu"
    assert covers(kernel("cpu.attend"), DENSE, get("cpu")) == ()


@given(
    st.integers(1, 5000),
    st.sampled_from((one_of(16, 64, 128), up_to(8), Accepted(low=3), Accepted())),
)
def test_the_nearest_accepted_value_is_accepted(value, accepted):
    assert accepted.nearest(value) in accepted
    if value in accepted:
        assert accepted.nearest(value) == value


# --- T11a, T11c ----------------------------------------------------------------------------------


def test_a_kernel_without_an_object_for_the_arch_is_never_chosen(monkeypatch):
    table = tuple(
        replace(k, level={a: lv for a, lv in k.level.items() if a != "sm90"})
        for k in triton_spec.CAPABILITIES
    )
    monkeypatch.setattr(triton_spec, "CAPABILITIES", table)
    dispatch.forget()
    try:
        choice = dispatch.choose(DENSE, get("sm90"))
        assert choice.kernel is None
        assert "arch" in {r.field for r in choice.refusals["triton.attend"]}
        assert dispatch.choose(DENSE, get("sm100")).kernel is not None
    finally:
        dispatch.forget()


def test_a_missing_module_or_package_is_reported_without_importing_anything():
    gone = replace(
        kernel("triton.attend"),
        target="minuet.attention.backends.triton.not_here:attend",
        requires=("no_such_compiler",),
    )
    reasons = missing_artefacts(gone)
    assert {r.field for r in reasons} == {"installation"}
    assert len(reasons) == 2
    assert "no_such_compiler" in str(reasons[0])
    assert "minuet.attention.backends.triton.not_here" not in sys.modules


def test_a_declared_kernel_is_planned_for_but_neither_runs_nor_loads():
    declared = replace(kernel("triton.attend"), level={"sm90": Level.DECLARED})
    assert not declared.runs_on(get("sm90"))
    with pytest.raises(ContractError):
        declared.load()


def test_a_choice_that_is_declared_only_is_refused_by_that_name(monkeypatch):
    table = tuple(
        replace(k, level=dict.fromkeys(k.level, Level.DECLARED)) for k in triton_spec.CAPABILITIES
    )
    monkeypatch.setattr(triton_spec, "CAPABILITIES", table)
    dispatch.forget()
    try:
        choice = dispatch.choose(DENSE, get("sm90"))
        assert choice.kernel is not None
        assert not choice.runnable
        assert [r.field for r in choice.against()] == ["implementation"]
    finally:
        dispatch.forget()


def test_the_index_dtype_is_its_own_fact():
    layout = KVLayout(128, 1, 128, kv_dtype=FP8, index_dim=128, index_dtype=DType.BF16)
    assert layout.lanes[LaneName.INDEX_K].dtype is DType.BF16
    assert layout.lanes[LaneName.K].dtype is FP8

    bf16_index = replace(kernel("triton.write"), index_dtypes=(DType.BF16,))
    problem = replace(SPARSE, op=Op.WRITE, kv_dtype=FP8, index_dtype=DType.BF16)
    assert covers(bf16_index, problem, get("sm90")) == ()
    (refusal,) = covers(bf16_index, replace(problem, index_dtype=FP8), get("sm90"))
    assert (refusal.field, refusal.got) == ("index_dtype", FP8.value)


def test_a_dense_layer_has_no_index_to_refuse():
    bf16_index = replace(kernel("triton.write"), index_dtypes=(DType.BF16,))
    problem = replace(DENSE, op=Op.WRITE, index_dtype=DType.FP32)
    assert problem.layer_kind is LayerKind.DENSE
    assert covers(bf16_index, problem, get("sm90")) == ()
