"""The adapter to aiter, over a stand-in that enforces the contract: values, probing, refusals."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minuet.attention import backends, dispatch
from minuet.attention.backends.aiter import probe, spec
from minuet.attention.backends.aiter.library import library
from minuet.attention.capability import missing_artefacts
from minuet.attention.contract import Op
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.errors import ConfigError
from minuet.kv.layout import Form
from minuet.platform.arch import ARCHS, get
from tests.attention.conformance import Backend, build, check
from tests.attention.flydsl_cases import EDGES, RAGGED, case
from tests.attention.problems import DENSE, SELECT, SPARSE

FAKE = Path(__file__).with_name("fake_aiter")


@pytest.fixture
def aiter(monkeypatch):
    """The stand-in, installed; and forgotten afterwards."""
    monkeypatch.syspath_prepend(FAKE)
    importlib.invalidate_caches()
    forget()
    yield importlib.import_module(probe.MODULE)
    forget()


def forget():
    library.cache_clear()
    for name in [n for n in sys.modules if n.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def launcher():
    """The backend's launchers, found as start-up finds them."""
    (kernel,) = [k for k in backends.capabilities("aiter") if k.op is Op.ATTEND]
    module = importlib.import_module(kernel.target.partition(":")[0])
    return Backend(module, torch.device("cpu"), lambda batch, case: module.plan(batch, case.page))


# --- values --------------------------------------------------------------------------------------

FP8 = DType.FP8_E4M3FN
CASES = {
    "bf16": case(EDGES, DType.BF16, kv_heads=1, group=16),
    "fp8": case(EDGES, FP8),
    "ragged": case(RAGGED, FP8),
    "page-16": case((1, 15, 16, 17, 300), DType.BF16, page=16),
    "page-64": case((63, 64, 65), FP8, page=64, head_dim=64),
    "verification": case((3, 130, 700), FP8, query_len=3),
    "prefill": replace(case((40, 300), DType.BF16), query_lens=(3, 12)),
    "sparse": case((*EDGES, 2500), FP8, sparse=True),
    "sparse-bf16": case((300, 2500), DType.BF16, sparse=True, kv_heads=1, group=16),
    "sparse-ragged": replace(
        case(RAGGED, FP8, sparse=True), selection=Selection(5, init_blocks=1, local_blocks=2)
    ),
    "sparse-prefill": replace(
        case((40, 300), FP8, sparse=True, selection=Selection(2)), query_lens=(3, 12)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_through_the_adapter_equals_the_reference(aiter, name):
    check(CASES[name], launcher())
    for rows, width, _ in aiter.CALLS:
        assert rows & (rows - 1) == width & (width - 1) == 0, "few shapes for it to compile"


def test_ties_and_scores_that_are_no_numbers(aiter):
    chosen = Selection(4)
    world = build(case((7 * 128,), DType.BF16, sparse=True, selection=chosen))
    world.cache.index_k.fill_(0.25)
    world.cache.index_k[int(world.batch.page_table[0, 1])] = float("nan")
    backend = launcher()
    plan = backend.plan(world.batch, world.case)
    got = backend.launch.select(world.index_q, world.cache, plan, chosen)
    assert got.tolist() == [[[0, 2, 3, 6]] * 2]


def test_a_step_plans_its_dense_layers_once_and_each_sparse_layer(aiter):
    plans = sys.modules["aiter.ops.flydsl.kernels.pa_decode_plan"].PLANS
    world, backend = build(CASES["sparse"]), launcher()
    plan = backend.plan(world.batch, world.case)
    blocks = backend.launch.select(world.index_q, world.cache, plan, world.case.selection)
    before = len(plans)
    for _ in range(3):
        backend.launch.attend(world.q, world.cache, plan, None, 0.1)
    assert len(plans) - before == 1
    for _ in range(3):
        backend.launch.attend(world.q, world.cache, plan, blocks, 0.1)
    assert len(plans) - before == 4


def test_calls_longer_than_a_work_plan_are_cut(aiter, monkeypatch):
    backend = launcher()
    monkeypatch.setattr(backend.launch, "MAX_PLAN_ROWS", 4)
    for name in ("ragged", "sparse-prefill"):
        check(CASES[name], backend)
    assert max(rows for rows, _, _ in aiter.CALLS) == 4


# --- is it there, and is it the right one? -------------------------------------------------------


def refusals():
    return [r for kernel in spec.CAPABILITIES for r in missing_artefacts(kernel)]


def test_without_aiter_every_kernel_says_what_is_missing():
    assert {r.got for r in refusals()} == {"no package aiter"}
    assert all("aiter" in r.remedy for r in refusals())


def test_probing_imports_nothing_of_aiter(monkeypatch):
    monkeypatch.syspath_prepend(FAKE)
    importlib.invalidate_caches()
    forget()
    assert refusals() == []
    assert "aiter" not in sys.modules


OLD_FORMS = {
    "def pa_decode(output, query, key_cache, value_cache, context_lengths, block_tables,"
    " softmax_scale, query_length, max_context_partition_num, *, compute_type=None,"
    " key_scale=None, value_scale=None, exp_sums=None, max_logits=None,"
    " temporary_output=None): ...\n": {
        "parameter work_plan of pa_decode",
        "value for parameter max_context_partition_num of pa_decode, which it requires",
    },
    "def pa_decode(query, output, key_cache, value_cache, context_lengths, block_tables,"
    " softmax_scale, query_length, *, compute_type, key_scale, value_scale, exp_sums, max_logits,"
    " temporary_output, work_plan): ...\n": {
        "pa_decode(output, query, key_cache, value_cache, context_lengths, block_tables, "
        "softmax_scale, query_length, ...)"
    },
    "": {f"function {probe.MODULE}.pa_decode"},
}
PLANNER = "def plan_pa_decode(context_lengths, num_kv_heads, *, query_length=1, plan=None): ...\n"


@pytest.mark.parametrize("form", OLD_FORMS)
def test_a_form_that_the_adapter_was_not_written_to_is_refused_by_signature(
    form, tmp_path, monkeypatch
):
    folder = tmp_path / "aiter" / "ops" / "flydsl"
    folder.mkdir(parents=True)
    (tmp_path / "aiter" / "__init__.py").write_text("raise RuntimeError('no ROCm')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert {r.got for r in refusals()} == {f"no module {probe.MODULE}"}
    (folder / "pa_decode.py").write_text(form + PLANNER)
    assert {r.got for r in refusals()} == {f"no {what}" for what in OLD_FORMS[form]}


def test_an_aiter_that_does_not_come_up_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("raise RuntimeError('no ROCm')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    forget()
    with pytest.raises(ConfigError, match=r"no ROCm.*--attention-backend auto"):
        library()


# --- what it offers itself for -------------------------------------------------------------------

SHUFFLED = [replace(p, form=Form.SHUFFLE) for p in (DENSE, SPARSE, SELECT)]


@pytest.mark.parametrize("arch_name", sorted(ARCHS))
def test_it_is_never_chosen_unless_named_and_then_only_where_it_has_kernels(arch_name):
    arch = get(arch_name)
    for problem in SHUFFLED:
        silent = dispatch.choose(problem, arch).kernel
        assert silent is None or silent.backend != "aiter"
        named = dispatch.choose(problem, arch, "aiter")
        if arch_name in ("gfx942", "gfx950"):
            assert named.kernel.name == f"aiter.{problem.op.value}"
        else:
            assert named.kernel is None
            own = named.refusals[f"aiter.{problem.op.value}"]
            assert [(r.field, r.accepts) for r in own] == [("arch", "gfx942, gfx950")]


def test_its_limits_are_refusals_with_remedies():
    arch = get("gfx950")
    for change, field, remedy in (
        ({"page_size": 256}, "page_size", "set --block-size 128"),
        ({"query_len": 9}, "query_len", "set --num-speculative-tokens 7"),
        ({"kv_dtype": DType.FP8_E4M3FNUZ}, "kv_dtype", "set --kv-cache-dtype fp8_e4m3fn"),
        ({"q_dtype": DType.FP16}, "q_dtype", "set --dtype bfloat16"),
        ({"sinks": True}, "sinks", ""),
        ({"window": 4096}, "window", ""),
    ):
        choice = dispatch.choose(replace(SHUFFLED[0], **change), arch, "aiter")
        (refusal,) = choice.refusals["aiter.attend"]
        assert (refusal.field, refusal.remedy) == (field, remedy)


# --- the stand-in enforces what it says ----------------------------------------------------------


def arguments(aiter, **changes):
    k = torch.zeros(3, 2, 16, 16, 8, dtype=torch.bfloat16)
    v = torch.zeros(3, 2, 2, 128, 8, dtype=torch.bfloat16)
    lengths = torch.tensor([5, 30], dtype=torch.int32)
    plan = aiter.plan_pa_decode(lengths, 2)
    q = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    sums = (2, plan.capacity, 4)
    given = dict(
        output=torch.empty_like(q), query=q, key_cache=k, value_cache=v, context_lengths=lengths,
        block_tables=torch.tensor([[1, 0], [1, 2]], dtype=torch.int32), softmax_scale=1.0,
        query_length=1, exp_sums=torch.empty(sums), max_logits=torch.empty(sums),
        temporary_output=torch.empty(*sums, 128, dtype=torch.bfloat16), work_plan=plan,
    )  # fmt: skip
    return given | {name: change(given[name]) for name, change in changes.items()}


BROKEN = {
    "block_tables": lambda x: x.long(),
    "context_lengths": lambda x: x + 40,
    "key_cache": lambda x: x.to(torch.float8_e4m3fn),
    "value_cache": lambda x: x.flatten(2, 3),
    "exp_sums": lambda x: x[:, :-1],
    "temporary_output": lambda x: x.float(),
    "query": lambda x: x[:1],
    "work_plan": lambda x: replace(x, num_kv_heads=1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_stand_in_refuses_what_aiter_would_refuse_or_get_wrong(aiter, name):
    aiter.pa_decode(**arguments(aiter))
    with pytest.raises(ValueError, match=r"\w"):
        aiter.pa_decode(**arguments(aiter, **{name: BROKEN[name]}))


def test_the_stand_in_refuses_a_page_that_does_not_exist(aiter):
    for page in (3, -1):
        table = torch.tensor([[1, page], [1, 2]], dtype=torch.int32)
        with pytest.raises(ValueError, match="page ids"):
            aiter.pa_decode(**arguments(aiter, block_tables=lambda _, table=table: table))
