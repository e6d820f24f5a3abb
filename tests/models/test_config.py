"""A config.json becomes facts, or is refused by the name of the key that is at fault."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minuet.attention.contract import LayerKind
from minuet.errors import ConfigError
from minuet.models import registry
from minuet.models.m3.export import config_json, shape_of
from minuet.models.m3.spec import M3Spec, parse

RELEASED = "minimax-m3"
# Parameters of the released text model: its published tensor listing, and the sum of the shapes.
RELEASED_PARAMS = 426_174_572_928


def tiny(**text: Any) -> dict[str, Any]:
    """A valid config in the released spelling, keys of the text model changed; None removes one."""
    config = config_json(shape_of("tiny"))
    change(config["text_config"], text)
    return config


def sparse(**keys: Any) -> dict[str, Any]:
    """The same, keys of ``sparse_attention_config`` changed."""
    config = config_json(shape_of("tiny"))
    change(config["text_config"]["sparse_attention_config"], keys)
    return config


def change(target: dict[str, Any], keys: dict[str, Any]) -> None:
    for key, value in keys.items():
        target[key] = value
        if value is None:
            del target[key]


def saved_spelling() -> dict[str, Any]:
    """``tiny`` as transformers 5.24 writes it."""
    config = tiny(sparse_attention_config=None, moe_layer_freq=None, hidden_act="silu")
    text = config["text_config"]
    for key in ("rope_theta", "partial_rotary_factor"):
        del text[key]
    text |= {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
    }
    return config


# --- what is accepted ----------------------------------------------------------------------------


def test_released_config_is_the_published_model() -> None:
    found = registry.find(RELEASED)
    spec: M3Spec = found.spec
    assert found.facts.params == RELEASED_PARAMS
    assert spec.layer_kinds == (LayerKind.DENSE,) * 3 + (LayerKind.SPARSE,) * 57
    assert spec.moe_layers == (False,) * 3 + (True,) * 57
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (64, 4, 128)
    assert spec.num_q_heads * spec.head_dim == 8192 != spec.hidden_size == 6144
    assert (spec.rotary_dim, spec.rope_theta) == (64, 5e6)
    assert (spec.index_heads, spec.index_dim, spec.block, spec.top_blocks) == (4, 128, 128, 16)
    assert (spec.init_blocks, spec.local_blocks) == (0, 1)
    assert (spec.swiglu_alpha, spec.swiglu_limit, spec.routed_scale) == (1.702, 7.0, 2.0)
    assert spec.max_positions == 1_048_576
    assert spec.eos_token_ids == (200_020,)


def test_both_spellings_mean_the_same() -> None:
    assert parse(saved_spelling()) == parse(tiny())


def test_text_only_config_is_read_without_nesting() -> None:
    nested = tiny()
    flat = {**nested["text_config"], "torch_dtype": nested["torch_dtype"]}
    assert parse(flat) == parse(nested)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_mtp_modules", 7),
        ("num_nextn_predict_layers", 1),
        ("swiglu_beta", 1.0),
        ("rope_scaling", None),
        ("use_index_cache", False),
        ("index_topk_freq", 1),
    ],
)
def test_keys_without_effect_change_nothing(key: str, value: Any) -> None:
    config = tiny()
    config["text_config"][key] = value
    assert parse(config) == parse(tiny())


def test_plural_names_of_forced_blocks_are_read() -> None:
    config = sparse(
        sparse_local_block=None, sparse_local_blocks=2, sparse_init_block=None, sparse_init_blocks=1
    )
    assert (parse(config).local_blocks, parse(config).init_blocks) == (2, 1)


def test_eos_may_be_several() -> None:
    assert parse(tiny(eos_token_id=[5, 7])).eos_token_ids == (5, 7)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "partial_rotary_factor",  # others fall back to rotating every channel
        "rope_theta",
        "moe_layer_freq",
        "sparse_attention_config",
        "hidden_act",
        "head_dim",
        "max_position_embeddings",
        "routed_scaling_factor",
        "swiglu_alpha",
        "swiglu_limit",
        "shared_intermediate_size",
        "num_key_value_heads",
    ],
)
def test_nothing_that_matters_is_defaulted(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse(tiny(**{key: None}))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (tiny(rotary_dim=16), "rotary_dim"),  # contradicts partial_rotary_factor 0.5
        (tiny(partial_rotary_factor=0.45, rotary_dim=None), "rotary_dim"),  # 7.2 channels
        (tiny(swiglu_beta=0.0), "swiglu_beta"),
        (tiny(use_gemma_norm=False), "use_gemma_norm"),
        (tiny(qk_norm_type="full"), "qk_norm_type"),
        (tiny(attention_output_gate=True), "attention_output_gate"),
        (tiny(scoring_func="softmax"), "scoring_func"),
        (tiny(n_shared_experts=2), "n_shared_experts"),
        (tiny(tie_word_embeddings=True), "tie_word_embeddings"),
        (tiny(hidden_act="gelu"), "hidden_act"),
        (tiny(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope_scaling"),
        (tiny(rope_parameters={"rope_type": "yarn"}), "rope_type"),
        (tiny(use_index_cache=True), "use_index_cache"),
        (tiny(index_topk_freq=4), "index_topk_freq"),
        (tiny(index_topk_pattern="FSSS"), "index_topk_pattern"),
        (tiny(sliding_window=4096), "sliding_window"),
        (tiny(num_experts_per_tok=9), "num_experts_per_tok"),
        (tiny(num_attention_heads=7), "num_attention_heads"),
        (tiny(moe_layer_freq=[0, 1]), "moe_layer_freq"),
        (tiny(hidden_size=0), "hidden_size"),
        (tiny(hidden_size="64"), "hidden_size"),
        (tiny(hidden_size=64.5), "hidden_size"),
        (tiny(rms_norm_eps="small"), "rms_norm_eps"),
        (tiny(sparse_attention_config=[1]), "sparse_attention_config"),
        (tiny(quantization_config={"quant_method": "mxfp8"}), "mxfp8"),
        (sparse(sparse_num_index_heads=1), "sparse_num_index_heads"),
        (sparse(sparse_num_index_heads=None), "sparse_num_index_heads"),
        (sparse(sparse_score_type="sum"), "sparse_score_type"),
        (sparse(sparse_index_dim=4), "sparse_index_dim"),  # narrower than the rotated part
        (sparse(sparse_disable_index_value=[1, 0, 1, 1]), "sparse_disable_index_value"),
        (sparse(sparse_disable_index_value=[0]), "sparse_disable_index_value"),
        (sparse(sparse_attention_freq=[0, 1, 1]), "sparse_attention_freq"),
        (sparse(use_sparse_attention=False), "use_sparse_attention"),
        (sparse(sparse_local_block=4), "forced blocks"),  # 4 forced of 3 selected
        (sparse(sparse_block_size=0), "block 0"),
        (sparse(sparse_sink_blocks=1), "sparse_sink_blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_is_not_implemented_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "mxfp8", "activation_scheme": "dynamic"}),
        ("tie_word_embeddings", True),
        ("architectures", ["LlamaForCausalLM"]),
        ("text_config", "none"),
        ("torch_dtype", None),
    ],
)
def test_the_outer_object_is_checked_too(key: str, value: Any) -> None:
    config = {**tiny(), key: value}
    with pytest.raises(ConfigError, match=key if key != "torch_dtype" else "dtype"):
        parse(config)


def test_defaults_of_transformers_are_not_this_model() -> None:
    text = {"model_type": "minimax_m3_vl_text", "hidden_size": 6144}
    with pytest.raises(ConfigError, match="missing"):
        parse({"architectures": ["MiniMaxM3VLForCausalLM"], "hidden_act": "silu", **text})


def test_a_refusal_says_got_and_expected() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(sparse(sparse_num_index_heads=1))
    assert refusal.value.got == 1
    assert "2" in refusal.value.expected
    assert "index head j selects for KV head j" in str(refusal.value)


def test_parsing_leaves_the_config_alone() -> None:
    config = tiny()
    before = copy.deepcopy(config)
    parse(config)
    assert config == before


# --- found by name -------------------------------------------------------------------------------


def test_a_folder_is_found_with_its_facts(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("tiny")
    found = registry.find(str(folder))
    assert found.folder == folder
    assert found.spec == parse(tiny())


def test_unreadable_config_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        registry.find(str(tmp_path))


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="MiniMaxM3SparseForConditionalGeneration"):
        registry.find(str(tmp_path))


def test_unknown_name_lists_the_presets() -> None:
    with pytest.raises(ConfigError, match=RELEASED):
        registry.find("no/such/model")
