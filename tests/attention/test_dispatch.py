"""A kernel is chosen once, in one place, from limits that one file owns: F-4, F-6, F-7."""

import time
from dataclasses import replace
from statistics import median

import pytest

from minuet.attention import backends, dispatch
from minuet.attention.capability import covers, one_of, up_to
from minuet.attention.contract import LayerKind, Op, Phase
from minuet.attention.workspace import StepSizes, covers_step
from minuet.dtypes import DType
from minuet.errors import ConfigError
from minuet.kv.layout import Form
from minuet.platform.arch import ARCHS, get
from tests.attention.problems import DENSE, SELECT, SPARSE

LAYERS = (DENSE,) * 3 + (SPARSE,) * 57


@pytest.fixture(autouse=True)
def _forget():
    dispatch.forget()
    yield
    dispatch.forget()


# --- T4a, T6 -------------------------------------------------------------------------------------


def test_a_hundred_steps_of_sixty_layers_evaluate_each_problem_once():
    dispatch.forget()
    before = dispatch.evaluations()
    names = set()
    for _ in range(100):
        for problem in LAYERS:
            choice = dispatch.choose(problem, get("sm90"))
            names.add((problem.layer_kind, choice.kernel.name))
    assert dispatch.evaluations() - before == 2
    assert names == {(LayerKind.DENSE, "triton.attend"), (LayerKind.SPARSE, "triton.attend")}


def test_a_kept_choice_is_never_evaluated_again():
    kept = [dispatch.choose(problem, get("sm90")) for problem in LAYERS]
    before = dispatch.evaluations()
    assert all(choice.kernel.name for _ in range(100) for choice in kept)
    assert dispatch.evaluations() == before


def test_a_repeated_question_costs_less_than_five_microseconds():
    arch = get("sm90")
    dispatch.choose(DENSE, arch)
    runs = []
    for _ in range(30):
        start = time.thread_time()
        for _ in range(60):
            dispatch.choose(DENSE, arch)
        runs.append((time.thread_time() - start) / 60)
    assert median(runs) < 5e-6


# --- choice --------------------------------------------------------------------------------------


def test_the_same_question_has_the_same_answer():
    assert dispatch.choose(DENSE, get("sm90")) is dispatch.choose(DENSE, get("sm90"))


def test_every_other_kernel_of_the_operation_answers_for_itself():
    choice = dispatch.choose(SELECT, get("sm90"))
    assert choice.kernel.name == "triton.select"
    assert set(choice.refusals) == {"cpu.select", "flydsl.select", "aiter.select"}
    assert all(choice.refusals.values())


@pytest.mark.parametrize("arch_name", sorted(ARCHS))
def test_the_cpu_backend_is_automatic_on_the_cpu_only(arch_name):
    for problem in (DENSE, SPARSE, SELECT, replace(DENSE, op=Op.WRITE)):
        kernel = dispatch.choose(problem, get(arch_name)).kernel
        named = dispatch.choose(problem, get(arch_name), "cpu").kernel
        assert (kernel is not None and kernel.backend == "cpu") == (arch_name == "cpu")
        assert named is not None
        assert named.backend == "cpu"


@pytest.mark.parametrize("arch_name", sorted(ARCHS))
@pytest.mark.parametrize("want", ["auto", *backends.NAMES])
def test_one_form_serves_every_operation_of_a_choice(arch_name, want):
    arch = get(arch_name)
    form = dispatch.preferred_form(arch, want)
    kernels = [
        dispatch.choose(replace(p, form=form, phase=phase), arch, want).kernel
        for p in (DENSE, SPARSE, SELECT, replace(DENSE, op=Op.WRITE), replace(SPARSE, op=Op.WRITE))
        for phase in Phase
    ]
    covered = {k.backend if k else None for k in kernels}
    assert len(covered) == 1, "a model is served by one backend or by none"
    if want == "auto":
        assert None not in covered


def test_amd_prefers_the_shuffle_form_and_triton_its_own():
    assert dispatch.preferred_form(get("gfx950")) is Form.SHUFFLE
    assert dispatch.preferred_form(get("gfx950"), "triton") is Form.HEAD_MAJOR
    assert dispatch.preferred_form(get("sm90")) is Form.HEAD_MAJOR


def test_an_unknown_backend_is_an_error_of_the_user():
    with pytest.raises(ConfigError, match="--attention-backend auto"):
        dispatch.choose(DENSE, get("sm90"), "cutlass")
    with pytest.raises(ConfigError):
        dispatch.preferred_form(get("sm90"), "cutlass")


def test_every_arch_has_an_order_over_every_backend():
    assert set(backends.PREFERENCE) == set(ARCHS)
    assert all(sorted(order) == sorted(backends.NAMES) for order in backends.PREFERENCE.values())


def test_kernel_names_are_unique_and_start_with_their_backend():
    kernels = [k for name in backends.NAMES for k in backends.capabilities(name)]
    assert len({k.name for k in kernels}) == len(kernels)
    assert all(k.name.startswith(f"{k.backend}.") for k in kernels)
    assert all(set(k.level) <= set(ARCHS) for k in kernels)


def test_kernels_of_a_backend_prefer_the_same_form():
    for name in backends.NAMES:
        assert len({k.forms[0] for k in backends.capabilities(name)}) == 1


# --- T7: change a number in a spec, and it has changed everywhere --------------------------------

CHANGED = (
    ("page_sizes", one_of(64), replace(DENSE, page_size=128), "64"),
    ("head_dims", one_of(64), DENSE, "64"),
    ("max_group", 8, DENSE, "1..8"),
    ("query_lens", up_to(2), replace(DENSE, query_len=3), "1..2"),
    ("max_top_blocks", 8, SPARSE, "1..8"),
    ("kv_dtypes", (DType.FP16,), DENSE, "float16"),
)


@pytest.mark.parametrize(("field", "value", "problem", "shown"), CHANGED)
def test_a_limit_changed_in_the_spec_is_changed_for_everybody(
    monkeypatch, field, value, problem, shown
):
    arch, spec = get("sm90"), backends.SPECS["triton"]
    assert dispatch.choose(problem, arch).kernel.name == "triton.attend"
    table = tuple(replace(k, **{field: value}) for k in spec.CAPABILITIES)
    monkeypatch.setattr(spec, "CAPABILITIES", table)
    dispatch.forget()
    choice = dispatch.choose(problem, arch)
    assert choice.kernel is None
    (refusal,) = choice.refusals["triton.attend"]
    assert refusal.accepts == shown
    assert refusal in covers(backends.capabilities("triton")[2], problem, arch)


def test_a_row_limit_in_the_spec_is_the_bound_of_a_step_and_of_the_advice():
    attend = backends.capabilities("flydsl")[2]
    problem = replace(DENSE, num_q_heads=32, num_kv_heads=2, phase=Phase.PREFILL)
    step = StepSizes(num_seqs=1, query_tokens=65536, max_length=65536)
    assert attend.max_rows is None, "our planner has no row limit"
    assert covers_step(attend, problem, step) == ()
    for limit, largest in ((81792, "40896"), (4096, "2048")):
        (refusal,) = covers_step(replace(attend, max_rows=limit), problem, step)
        assert (refusal.flag, refusal.value) == ("--max-num-batched-tokens", largest)
        fits = replace(step, query_tokens=int(largest))
        assert covers_step(replace(attend, max_rows=limit), problem, fits) == ()
    decode = replace(problem, phase=Phase.DECODE, query_len=4)
    (refusal,) = covers_step(replace(attend, max_rows=4096), decode, step)
    assert (refusal.flag, refusal.value) == ("--max-num-seqs", "512")
