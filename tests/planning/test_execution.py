"""The plan: reserved before pages, bounded scratch, every refusal at once, remedies that hold."""

from dataclasses import replace

import pytest

from minuet.attention import dispatch
from minuet.attention.backends.triton import spec as triton_spec
from minuet.attention.capability import Level
from minuet.attention.contract import LayerKind, Op, Phase
from minuet.attention.plan import PlanShape
from minuet.config import Source
from minuet.docs import defaults
from minuet.dtypes import DType
from minuet.errors import RefusedError
from minuet.kv.layout import Form
from minuet.planning import execution, explain, kernels, memory
from minuet.planning.execution import plan_for, plan_or_refuse, settle, settle_or_refuse
from minuet.planning.kernels import PREFILL_WORKSPACE_BYTES, Call
from minuet.platform.arch import ARCHS, get
from tests.planning.helpers import PLENTY, config, plan, preset, refusals, tiny

GPUS = [name for name, arch in ARCHS.items() if arch.is_gpu]


@pytest.fixture
def changed_spec(monkeypatch):
    """Change fields of every Triton capability for one test."""

    def change(**fields):
        table = tuple(replace(c, **fields) for c in triton_spec.CAPABILITIES)
        monkeypatch.setattr(triton_spec, "CAPABILITIES", table)
        forget()

    def forget():
        dispatch.forget()
        kernels.forget()

    yield change
    monkeypatch.undo()
    forget()


# --- T1b: reserved before pages ------------------------------------------------------------------


@pytest.mark.parametrize("arch", GPUS)
def test_pages_get_exactly_what_is_left_after_everything_else(arch, monkeypatch):
    seen = []
    sizer = memory.pages_that_fit

    def looking(left, page):
        seen.append(left)
        return sizer(left, page)

    monkeypatch.setattr(memory, "pages_that_fit", looking)
    settled = plan(arch, memory=None, tensor_parallel_size=16, max_model_len=8192)
    account = settled.memory
    budget = int(get(arch).memory_bytes * 0.92)
    declared = settled.workspace.total_bytes
    assert declared == account.workspace_bytes > 0
    assert account.graph_bytes > 0
    left = budget - account.weight_bytes - declared - account.graph_bytes - account.activation_bytes
    assert set(seen) == {left}
    assert account.num_pages == left // account.page_bytes
    assert 0 <= account.unused_bytes < account.page_bytes
    assert account.used_bytes + account.unused_bytes == budget


def test_the_account_is_that_of_the_allocators():
    settled = plan("gfx950", tiny(), max_num_seqs=8)
    assert settled.memory.workspace_bytes == settled.workspace.total_bytes
    per_page = sum(layout.page_bytes for layout in settled.layer_layouts())
    assert settled.memory.page_bytes == per_page
    assert settled.config.kv_cache_memory == settled.memory.kv_bytes
    assert settled.config.kv_cache_pages == settled.memory.num_pages


def test_eager_execution_reserves_no_graphs():
    captured, eager = plan("sm90", tiny()), plan("sm90", tiny(), enforce_eager=True)
    assert captured.graphs == captured.shapes.decode_shapes
    assert eager.graphs == ()
    assert eager.memory.graph_bytes == 0


def test_a_cpu_captures_nothing():
    settled = plan("cpu", tiny(), memory=None)
    assert settled.graphs == ()
    assert settled.memory.graph_bytes == 0
    assert settled.memory.budget_bytes is None


# --- bounded scratch: F-1, T11l ------------------------------------------------------------------


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_prefill_scratch_does_not_follow_the_length_of_a_step(arch, ranks):
    for tokens in (2048, 16384, 65536, 2**20):
        settled = plan(arch, tensor_parallel_size=ranks, max_num_batched_tokens=tokens)
        assert len(settled.shapes.prefill_shapes) <= 16
        for shape in settled.shapes.prefill_shapes:
            step = settled.step_of[shape]
            demand = sum(
                spec.bytes
                for call, choice in settled.choices.items()
                if call.phase is Phase.PREFILL and call.layer_kind is LayerKind.SPARSE
                for spec in choice.kernel.workspace(
                    choice.problem, _sizes(settled, step.query_chunk)
                )
                if spec.name != "scores"
            )
            assert demand <= PREFILL_WORKSPACE_BYTES == 8 * 2**20
            assert step.workspace_bytes <= 8 * 2**20 + settled.config.index_score_memory


def _sizes(settled, tokens):
    return kernels.StepSizes(
        num_seqs=1,
        query_tokens=tokens,
        max_length=settled.config.max_model_len,
        score_bytes=settled.config.index_score_memory,
    )


@pytest.mark.parametrize("budget", [2**20, 2**26, 2**28])
@pytest.mark.parametrize("ranks", [1, 4])
def test_block_scores_stay_within_their_budget_at_a_million_tokens(budget, ranks):
    settled = plan(
        "gfx1250",
        max_model_len=2**20,
        max_num_batched_tokens=16384,
        index_score_memory=budget,
        tensor_parallel_size=ranks,
    )
    heads = 4 // ranks
    unbounded = 16384 * 8192 * 4 * heads
    assert unbounded >= 2**29
    scores = [step.score_bytes for step in settled.steps]
    assert max(scores) <= budget
    assert max(scores) > 0


def test_a_score_budget_below_one_query_is_refused_with_the_least_that_works():
    (refusal, *_) = refusals("gfx1250", index_score_memory=1000)
    assert refusal.flag == "--index-score-memory"
    least = int(refusal.value)
    assert least == 8192 * 4 * 4  # one query token: blocks x index heads x FP32
    assert plan("gfx1250", index_score_memory=least).config.max_model_len == 2**20
    assert refusals("gfx1250", index_score_memory=least - 1)


def test_decode_scratch_comes_from_the_capacity_of_the_split():
    settled = plan("gfx1250", tensor_parallel_size=4, kv_cache_dtype="fp8", max_model_len=2**20)
    shape = settled.shapes.decode(256, 1)
    split = settled.step_of[shape].splits[LayerKind.DENSE]
    assert isinstance(split, PlanShape)
    partials = settled.workspace.slice(shape, "partial_out")
    assert partials.bytes == split.slots * 16 * 128 * 4  # sparse rows need less


# --- T2b: long steps are chunked, rows are never too many ----------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_65536_tokens_with_several_kv_heads_run_in_chunks(ranks, changed_spec):
    changed_spec(max_rows=81_792)
    settled = plan("sm90", tensor_parallel_size=ranks, max_num_batched_tokens=65536)
    heads = 4 // ranks
    for step in settled.steps:
        assert step.query_chunk * heads <= 81_792
    longest = settled.step_of[settled.shapes.prefill(65536)]
    assert longest.query_chunk < 65536


def test_more_decode_rows_than_a_kernel_takes_are_refused_with_the_most_it_takes(changed_spec):
    changed_spec(max_rows=512)
    found = refusals("sm90", max_num_seqs=256)  # 256 x 4 KV heads
    named = {(r.flag, r.value) for r in found}
    assert named == {("--max-num-seqs", "128")}
    assert plan("sm90", max_num_seqs=128)


# --- heads over ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "q", "kv"), [(1, 64, 4), (2, 32, 2), (4, 16, 1), (8, 8, 1), (16, 4, 1)]
)
def test_kv_heads_are_split_then_replicated_and_index_heads_go_with_them(ranks, q, kv):
    settled = plan("gfx950", tensor_parallel_size=ranks)
    problem = settled.choice(LayerKind.SPARSE, Op.ATTEND, Phase.DECODE).problem
    assert (problem.num_q_heads, problem.num_kv_heads, problem.index_heads) == (q, kv, kv)
    index_k = settled.layouts[LayerKind.SPARSE].index_dim
    assert index_k == 128  # whole on every rank


def test_every_call_of_every_layer_kind_has_a_choice():
    settled = plan("gfx950", num_speculative_tokens=3)
    expected = {
        Call(kind, op, phase, query_len)
        for kind, ops in (
            (LayerKind.DENSE, (Op.WRITE, Op.ATTEND)),
            (LayerKind.SPARSE, (Op.WRITE, Op.SELECT, Op.ATTEND)),
        )
        for op in ops
        for phase, query_len in ((Phase.DECODE, 1), (Phase.DECODE, 4), (Phase.PREFILL, 1))
    }
    assert set(settled.choices) == expected
    assert all(choice.kernel for choice in settled.choices.values())


def test_the_chosen_backend_brings_its_page_form():
    assert plan("gfx950").form is Form.SHUFFLE
    assert plan("sm90").form is Form.HEAD_MAJOR
    # FlyDSL computes in BF16 only, so FP16 goes to Triton and takes its pages along
    other = plan("gfx950", dtype="float16")
    assert (other.backend, other.form) == ("triton", Form.HEAD_MAJOR)
    assert {layout.form for layout in other.layouts.values()} == {Form.HEAD_MAJOR}


# --- the longest request -------------------------------------------------------------------------


def test_auto_length_is_what_the_pages_hold():
    settled = plan("sm90", memory=None, tensor_parallel_size=8)
    longest = settled.config.max_model_len
    assert longest % 128 == 0
    assert longest < preset().max_positions
    assert settled.config.sources["max_model_len"] is Source.PLAN
    assert settled.memory.concurrent_requests == 1
    asked = {"memory": None, "tensor_parallel_size": 8}
    assert plan("sm90", **asked, max_model_len=longest).config.max_model_len == longest
    (refusal,) = refusals("sm90", **asked, max_model_len=longest + 1)
    assert (refusal.flag, refusal.value) == ("--max-model-len", str(longest))


def test_a_request_that_does_not_fit_a_given_pool_is_refused_with_the_longest_that_does():
    (refusal,) = refusals("cpu", memory=None, max_model_len=4096, kv_cache_pages=32)
    assert (refusal.flag, refusal.value) == ("--max-model-len", str(31 * 128))
    (refusal,) = refusals("cpu", memory=None, kv_cache_pages=1)
    assert (refusal.flag, refusal.kernel) == ("--kv-cache-pages", "memory")


def test_a_pool_larger_than_what_is_left_is_refused_with_what_is_left():
    asked = {"memory": None, "tensor_parallel_size": 8, "max_model_len": 8192}
    left = plan("gfx950", **asked).memory.kv_bytes
    fit = plan("gfx950", **asked).memory.num_pages
    (refusal,) = refusals("gfx950", **asked, kv_cache_pages=fit + 1)
    assert (refusal.flag, refusal.value) == ("--kv-cache-pages", str(fit))
    (refusal,) = refusals("gfx950", **asked, kv_cache_memory=2**40)
    assert left <= int(refusal.value) < left + plan("gfx950", **asked).memory.page_bytes
    assert plan("gfx950", **asked, kv_cache_memory=int(refusal.value))


def test_weights_that_do_not_fit_name_the_ranks_on_which_they_do():
    (refusal,) = refusals("gfx950", memory=None)
    assert (refusal.kernel, refusal.flag, refusal.value) == (
        "memory",
        "--tensor-parallel-size",
        "4",
    )
    assert plan("gfx950", memory=None, tensor_parallel_size=4)
    assert refusals("gfx950", memory=None, tensor_parallel_size=2)


# --- all at once, and remedies -------------------------------------------------------------------


def test_settings_kernels_and_memory_are_refused_together():
    found = refusals("sm90", memory=None, block_size=64, dtype="float32")
    assert {r.kernel.partition(".")[0] for r in found} >= {"config", "triton", "cpu", "memory"}
    assert {r.flag for r in found} >= {
        "--block-size",
        "--dtype",
        "--attention-backend",
        "--tensor-parallel-size",
    }
    with pytest.raises(RefusedError) as refused:
        plan_for(defaults(block_size=64, dtype="float32"), preset(), get("sm90"))
    assert refused.value.refusals == found


def test_one_dtype_flag_is_advised_where_it_changes_three_types():
    found = [r for r in refusals("sm90", dtype="float32") if r.kernel.startswith("triton")]
    assert {r.field for r in found} == {"q_dtype", "kv_dtype", "index_dtype"}
    assert {(r.flag, r.value) for r in found} == {("--dtype", "bfloat16")}
    assert plan("sm90", dtype="bfloat16")


def test_a_plan_settles_to_itself():
    for arch, asked in (
        ("cpu", {"memory": None}),
        ("sm90", {"memory": None, "tensor_parallel_size": 8}),
        ("gfx950", {"memory": None, "tensor_parallel_size": 4, "kv_cache_dtype": "fp8"}),
    ):
        settled = plan(arch, **asked)
        again = settle(settled.config, settled.facts, settled.arch)
        assert again.config == settled.config
        assert again.memory == settled.memory
        assert again.steps == settled.steps


def test_settle_raises_with_every_refusal():
    asked = config("sm90", dtype="float32")
    with pytest.raises(RefusedError) as refused:
        settle(asked, preset(), get("sm90"))
    _, found = settle_or_refuse(asked, preset(), get("sm90"))
    assert refused.value.refusals == found


def test_a_remedy_is_sought_among_backends_if_no_single_one_takes_every_call(monkeypatch):
    """Not reachable with today's tables; if it were, it would be refused and not half planned."""
    monkeypatch.setattr(kernels.Kernels, "complete", property(lambda self: self.form is None))
    _, found = plan_or_refuse(defaults(), tiny(), get("sm90"), device_bytes=PLENTY)
    assert [r.field for r in found] == ["attention_backend"]


# --- runnable ------------------------------------------------------------------------------------


def test_a_declared_kernel_is_planned_but_not_run(changed_spec):
    changed_spec(level={"sm90": Level.DECLARED})
    settled = plan("sm90", tiny(), enforce_eager=True)
    assert not settled.runnable
    with pytest.raises(RefusedError) as refused:
        settled.require_runnable()
    assert {r.field for r in refused.value.refusals} == {"implementation"}
    assert {(r.flag, r.value) for r in refused.value.refusals} == {("--attention-backend", "cpu")}
    assert plan("sm90", tiny(), attention_backend="cpu").runnable


def test_steps_of_triton_are_captured_and_those_of_other_backends_run_eagerly():
    captured = plan("sm90", tiny())
    assert captured.prepared
    assert captured.graphs
    assert not [r for r in captured.obstacles() if r.field == "enforce_eager"]
    other = plan("sm90", tiny(), attention_backend="cpu")
    assert not other.prepared
    (refusal,) = [r for r in other.obstacles() if r.field == "enforce_eager"]
    assert (refusal.kernel, refusal.flag) == ("cpu", "--enforce-eager")
    eager = plan("sm90", tiny(), attention_backend="cpu", enforce_eager=True)
    assert not eager.graphs
    assert not [r for r in eager.obstacles() if r.field == "enforce_eager"]
    on_host = plan("cpu", tiny(), memory=None)
    assert not on_host.prepared
    assert not on_host.graphs


def test_more_ranks_than_this_version_runs_can_be_planned_only():
    settled = plan("cpu", tiny(), memory=None, tensor_parallel_size=2)
    assert settled.runnable  # the kernels are there
    (obstacle,) = settled.obstacles()
    assert (obstacle.flag, obstacle.value) == ("--tensor-parallel-size", "1")
    with pytest.raises(RefusedError, match="one rank"):
        settled.require_runnable()


def test_an_implemented_kernel_is_run():
    settled = plan("cpu", tiny(), memory=None)
    assert settled.runnable
    settled.require_runnable()
    assert settled.obstacles() == ()


# --- what start-up prints ------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_the_summary_is_short_and_names_the_kernels(arch):
    settled = plan(arch, tiny())
    lines = explain.summary(settled)
    assert 5 <= len(lines) <= 12
    text = "\n".join(lines)
    for name in {choice.kernel.name for choice in settled.choices.values()}:
        assert name in text
    assert str(settled.memory.num_pages) in text


def test_index_and_kv_types_are_independent():
    settled = plan("gfx950", kv_cache_dtype="fp8", index_kv_cache_dtype="bfloat16")
    problem = settled.choice(LayerKind.SPARSE, Op.WRITE, Phase.DECODE).problem
    assert (problem.kv_dtype, problem.index_dtype) == (DType.FP8_E4M3FN, DType.BF16)


def test_planning_answers_in_about_a_millisecond_once_warm():
    import time

    asked = config("gfx950", tensor_parallel_size=4)
    settle(asked, preset(), get("gfx950"))
    started = time.process_time()
    for _ in range(20):
        settle(asked, preset(), get("gfx950"))
    assert (time.process_time() - started) / 20 < 0.01


def test_execution_module_has_no_second_dispatch():
    """One function chooses: nothing else of planning calls it."""
    assert not hasattr(execution, "choose")
