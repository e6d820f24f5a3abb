"""Every ``auto`` gets a value and a source; everything wrong is said at once."""

from dataclasses import replace

import pytest

from minuet.config import Source
from minuet.docs import defaults
from minuet.dtypes import DType
from minuet.errors import RefusedError
from minuet.planning.resolve import resolve, resolve_or_refuse, tensor_parallel_sizes
from minuet.platform.arch import ARCHS, get
from minuet.settings import SETTINGS
from tests.planning.helpers import config, preset, tiny


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_is_left_auto_that_needs_no_memory(arch):
    settled = config(arch)
    undecided = {"attention_backend", "load_format"}  # the first is settled with the kernels
    for setting in SETTINGS:
        if setting.name not in undecided:
            assert getattr(settled, setting.name) != "auto", setting.name
    assert set(settled.sources) == {setting.name for setting in SETTINGS}


def test_types_follow_the_model_on_a_gpu_and_the_arch_on_a_cpu():
    gpu, cpu = config("gfx950"), config("cpu")
    assert (gpu.dtype, gpu.sources["dtype"]) == (DType.BF16, Source.MODEL)
    assert (cpu.dtype, cpu.sources["dtype"]) == (DType.FP32, Source.ARCH)
    assert cpu.kv_cache_dtype is cpu.index_kv_cache_dtype is DType.FP32
    asked = config("cpu", dtype="bfloat16")
    assert asked.dtype is asked.kv_cache_dtype is DType.BF16
    assert asked.sources["dtype"] is Source.FLAG
    assert asked.sources["kv_cache_dtype"] is Source.DEFAULT  # nobody asked for it


def test_fp8_is_the_flavour_of_the_arch():
    assert config("gfx942", kv_cache_dtype="fp8").kv_cache_dtype is DType.FP8_E4M3FNUZ
    assert config("gfx950", kv_cache_dtype="fp8").kv_cache_dtype is DType.FP8_E4M3FN


def test_the_index_type_does_not_follow_the_kv_type():
    settled = config("gfx950", kv_cache_dtype="fp8")
    assert settled.index_kv_cache_dtype is DType.BF16


def test_page_and_length_come_from_the_model():
    settled = config("gfx950")
    assert (settled.block_size, settled.sources["block_size"]) == (128, Source.MODEL)
    assert (settled.max_model_len, settled.sources["max_model_len"]) == (2**20, Source.MODEL)


def test_a_model_without_sparse_layers_has_a_free_page():
    dense = replace(tiny(), index=None, layer_kinds=tiny().layer_kinds[:1])
    assert config("gfx950", dense).sources["block_size"] is Source.DEFAULT
    assert config("gfx950", dense, block_size=16).block_size == 16


def test_a_cpu_gets_one_gibibyte_of_pages():
    settled = config("cpu")
    assert (settled.kv_cache_memory, settled.sources["kv_cache_memory"]) == (2**30, Source.ARCH)
    assert config("gfx950").kv_cache_memory == 0  # what is left decides


def test_the_model_and_arch_that_were_used_stand_in_the_config():
    settled = config("sm90")
    assert (settled.model, settled.arch) == ("minimax-m3", "sm90")
    assert settled.sources["arch"] is Source.ARCH


# --- tensor parallelism --------------------------------------------------------------------------


def test_ranks_divide_the_query_heads_and_split_or_replicate_kv_heads():
    assert tensor_parallel_sizes(preset()) == (1, 2, 4, 8, 16, 32, 64)
    assert tensor_parallel_sizes(tiny()) == (1, 2, 4)


def test_ranks_divide_every_split_weight():
    odd = replace(tiny().weights[0], params=tiny().weights[0].params + 2)
    assert tensor_parallel_sizes(replace(tiny(), weights=(odd,))) == (1, 2)


# --- refusals ------------------------------------------------------------------------------------

WRONG = {  # setting: (value, the value the remedy names)
    "block_size": (64, "128"),
    "tensor_parallel_size": (3, "2"),
    "max_model_len": (2**20 + 1, str(2**20)),
    "max_num_batched_tokens": (100, "256"),
    "cudagraph_capture_sizes": ("1,2,512", "1,2,256"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_with_the_nearest_accepted_one(name):
    value, nearest = WRONG[name]
    settled, found = resolve_or_refuse(defaults(**{name: value}), preset(), get("gfx950"))
    assert settled is None
    assert [(r.field, r.value) for r in found] == [(name, nearest)]
    (refusal,) = found
    assert refusal.flag in refusal.remedy
    assert nearest in refusal.remedy
    assert str(value).replace(",", "") in refusal.got.replace(",", "")
    mended, left = resolve_or_refuse(defaults(**{name: nearest}), preset(), get("gfx950"))
    assert mended is not None
    assert not left


def test_every_wrong_value_is_reported_at_once():
    asked = {name: value for name, (value, _) in WRONG.items()}
    with pytest.raises(RefusedError) as refused:
        resolve(defaults(**asked), preset(), get("gfx950"))
    assert {r.field for r in refused.value.refusals} == set(WRONG)
    for flag in ("--block-size 128", "--tensor-parallel-size 2", "--max-model-len 1048576"):
        assert flag in str(refused.value)


def test_a_step_must_hold_every_request_with_its_drafts():
    _, found = resolve_or_refuse(
        defaults(max_num_seqs=1024, num_speculative_tokens=3), preset(), get("gfx950")
    )
    (refusal,) = found
    assert refusal.value == "4096"
    assert "--max-num-seqs 512" in refusal.remedy


def test_fp8_is_refused_for_each_cache_on_an_arch_without_it():
    asked = {"kv_cache_dtype": "fp8", "index_kv_cache_dtype": "fp8"}
    _, found = resolve_or_refuse(defaults(**asked), preset(), get("sm80"))
    assert [(r.field, r.value) for r in found] == [(name, "bfloat16") for name in asked]
