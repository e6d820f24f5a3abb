"""A rank slice costs one GPU what the model's plan says one of N ranks costs."""

import json

import pytest

from minuet.attention.contract import LayerKind
from minuet.config import read_options
from minuet.dtypes import DType
from minuet.errors import ConfigError
from minuet.models.m3.spec import parse
from minuet.models.registry import find
from minuet.models.slices import SliceSpec, slice_config, write_slice
from minuet.planning.execution import plan_for
from minuet.planning.memory import weights_per_rank
from minuet.platform import arch as arch_table

MODEL = "minimax-m3"


def sliced(folder, **part):
    return find(str(write_slice(MODEL, SliceSpec(**part), folder / "slice.json")))


ARCH = "gfx950"  # a card that holds a quarter of M3


def planned(source, **settings):
    settings = {"kv_cache_pages": 100, "max_model_len": 8192, "load_format": "dummy", **settings}
    options = read_options({"model": source.name, "arch": ARCH, **settings})
    return plan_for(options, source.facts, arch_table.get(ARCH))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_weights_of_a_slice_are_those_of_one_rank(tmp_path, ranks):
    whole, part = find(MODEL), sliced(tmp_path, rank_of=ranks)
    mine = {row.name: row.bytes for row in weights_per_rank(part.facts, DType.BF16, 1)}
    theirs = {row.name: row.bytes for row in weights_per_rank(whole.facts, DType.BF16, ranks)}
    assert mine == theirs


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8"])
def test_weights_and_cache_of_a_slice_are_those_that_explain_shows_for_a_rank(
    tmp_path, kv_cache_dtype
):
    whole = planned(find(MODEL), tensor_parallel_size=4, kv_cache_dtype=kv_cache_dtype)
    part = planned(sliced(tmp_path, rank_of=4), kv_cache_dtype=kv_cache_dtype)
    assert part.memory.weight_bytes == whole.memory.weight_bytes
    assert part.memory.page_bytes == whole.memory.page_bytes
    for kind in LayerKind:
        assert part.layouts[kind] == whole.layouts[kind]


def test_each_layer_more_costs_what_a_layer_of_the_rank_costs(tmp_path):
    whole = find(MODEL)
    per_rank = {row.name: row.bytes for row in weights_per_rank(whole.facts, DType.BF16, 4)}
    eleven, twelve = (sliced(tmp_path, rank_of=4, layers=n) for n in (11, 12))
    rows = (weights_per_rank(source.facts, DType.BF16, 1) for source in (eleven, twelve))
    few, many = ({row.name: row.bytes for row in each} for each in rows)
    sparse = whole.facts.count(LayerKind.SPARSE)
    for name in ("experts", "shared_experts", "router", "index_q", "index_k"):
        assert (many[name] - few[name]) * sparse == per_rank[name]
    for name in ("attention_qo", "attention_kv"):
        assert (many[name] - few[name]) * len(whole.facts.layer_kinds) == per_rank[name]
    assert many["dense_mlp"] == few["dense_mlp"] == per_rank["dense_mlp"]


def test_layers_keep_the_models_order(tmp_path):
    dense, sparse = LayerKind.DENSE, LayerKind.SPARSE
    assert sliced(tmp_path, layers=8).facts.layer_kinds == (dense,) * 3 + (sparse,) * 5
    assert sliced(tmp_path, layers=2).facts.layer_kinds == (dense,) * 2
    found = sliced(tmp_path, layers=5, dense_layers=1)
    assert found.facts.layer_kinds == (dense,) + (sparse,) * 4
    assert found.spec.moe_layers == (False, True, True, True, True)


def test_a_slice_of_nothing_is_the_model():
    assert SliceSpec().is_whole
    # the end-of-sequence id is inside the whole vocabulary, and stays
    assert parse(slice_config(MODEL, SliceSpec())) == find(MODEL).spec


def test_a_smaller_vocabulary_still_has_an_end_of_sequence(tmp_path):
    assert find(MODEL).spec.eos_token_ids == (200020,)
    part = sliced(tmp_path, rank_of=4)
    assert part.spec.vocab_size == 200064 // 4
    assert part.spec.eos_token_ids == (200064 // 4 - 1,)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"rank_of": 3}, ["query heads 64", "KV heads 4"]),
        ({"rank_of": 0}, ["--rank-of", "at least 1"]),
        ({"rank_of": 128}, ["query heads 64"]),
        ({"layers": 61}, ["--layers", "1 to 60"]),
        ({"layers": 0}, ["--layers"]),
        ({"layers": 8, "dense_layers": 4}, ["--dense-layers", "0 to 3"]),
        ({"layers": 59, "dense_layers": 1}, ["--dense-layers", "2 to 3"]),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(part, named):
    with pytest.raises(ConfigError) as refused:
        slice_config(MODEL, SliceSpec(**part))
    for words in named:
        assert words in str(refused.value)


def test_both_spellings_of_the_config_are_cut_alike(tmp_path, checkpoint):
    folder = checkpoint("tiny")
    released = json.loads((folder / "config.json").read_text())
    text = released["text_config"]
    sparse = text.pop("sparse_attention_config")
    saved = {
        **text,
        "architectures": released["architectures"],
        "torch_dtype": released["torch_dtype"],
        "index_n_heads": sparse["sparse_num_index_heads"],
        "index_head_dim": sparse["sparse_index_dim"],
        "index_block_size": sparse["sparse_block_size"],
        "index_topk_blocks": sparse["sparse_topk_blocks"],
        "index_local_blocks": sparse["sparse_local_block"],
        "layer_types": [
            "minimax_m3_sparse" if f else "full_attention" for f in sparse["sparse_attention_freq"]
        ],
    }
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    part = SliceSpec(rank_of=2, layers=3, dense_layers=1)
    write_slice(str(folder), part, tmp_path / "a.json")
    write_slice(str(tmp_path / "saved.json"), part, tmp_path / "b.json")
    first, second = find(str(tmp_path / "a.json")).spec, find(str(tmp_path / "b.json")).spec
    assert first == second
    assert (first.num_q_heads, first.num_kv_heads, first.index_heads) == (4, 1, 1)
