"""MiniMax-M3's ``config.json``, read strictly. The only home of the model's constants; no torch.

Nothing is defaulted that changes the mathematics: a key that is missing, unknown, or set to a value
this implementation does not compute is refused by name, since the classes other stacks build from
defaults are not this model (their default rotary factor, layer kinds and activation all differ).

Two spellings are read: the released one (``text_config`` with ``sparse_attention_config`` and
``moe_layer_freq``) and the one ``transformers`` >= 5.13 writes when it saves the model
(``index_*``, ``layer_types``, ``mlp_layer_types``, ``rope_parameters``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from minuet.attention.contract import LayerKind
from minuet.errors import ConfigError

ARCHITECTURES = ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM")
_HF_TEXT_ARCHITECTURE = "MiniMaxM3VLForCausalLM"

# Keys that must hold exactly this value where they are present: what the implementation computes.
_FIXED: Mapping[str, Any] = {
    "attention_output_gate": False,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "tie_word_embeddings": False,
    "swiglu_beta": 1.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_index_cache": False,
    "index_topk_freq": 1,
    "index_topk_pattern": None,
    "index_skip_topk_offset": 0,
}
# Keys that say nothing about the text model's mathematics at inference.
_IGNORED = frozenset(
    [
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "image_token_id",
        "image_token_index",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "num_nextn_predict_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "projector_hidden_size",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "video_token_id",
        "video_token_index",
        "vision_config",
        "quantization_config",
        "eos_token_id",
        "img_token_compression_config",
        "text_config",
    ]
)
_REQUIRED = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "intermediate_size",
        "dense_intermediate_size",
        "shared_intermediate_size",
        "num_local_experts",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "swiglu_alpha",
        "swiglu_limit",
    ]
)
_ROPE_KEYS = frozenset({"rotary_dim", "partial_rotary_factor", "rope_theta", "rope_parameters"})
_LAYER_KEYS = frozenset({"moe_layer_freq", "mlp_layer_types", "layer_types", "hidden_act"})
_SPARSE_KEYS: Mapping[str, str] = {  # released spelling -> the one transformers writes
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
_SPARSE_OTHER = frozenset(
    [
        "use_sparse_attention",
        "sparse_score_type",
        "sparse_init_block",
        "sparse_init_blocks",
        "sparse_local_blocks",
        "sparse_attention_freq",
        "sparse_disable_index_value",
    ]
)


@dataclass(frozen=True, slots=True)
class M3Spec:
    """The text model's shape and constants, every one of them stated by the config.

    Attributes:
        vocab_size: rows of the embedding and of the untied head.
        hidden_size: width of the residual stream.
        num_q_heads: query heads.
        num_kv_heads: KV heads; each serves ``num_q_heads / num_kv_heads`` query heads.
        head_dim: channels per head; ``num_q_heads * head_dim`` need not equal ``hidden_size``.
        rotary_dim: leading channels of a head that are rotated, in NeoX halves.
        rope_theta: base of the rotation.
        rms_norm_eps: added to the mean square in every norm.
        max_positions: longest context.
        dense_width: width of the dense MLPs.
        expert_width: width of one routed expert.
        shared_width: width of the shared expert.
        num_experts: routed experts per layer.
        experts_per_token: routed experts a token visits.
        routed_scale: factor on the routed sum; the shared expert is added unscaled.
        swiglu_alpha: gain inside the sigmoid.
        swiglu_limit: clamp of gate (above) and up (both sides).
        layer_kinds: dense or sparse attention, per layer.
        moe_layers: whether the FFN is routed, per layer.
        index_heads: index query heads; head j selects for KV head j. 0 without sparse layers.
        index_dim: channels of an index vector.
        block: tokens per block.
        top_blocks: blocks selected per (token, KV head), forced ones included.
        init_blocks: leading blocks always selected.
        local_blocks: blocks up to the query's own always selected.
        dtype: type of the checkpoint.
        eos_token_ids: ids that end a sequence.
    """

    vocab_size: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    dense_width: int
    expert_width: int
    shared_width: int
    num_experts: int
    experts_per_token: int
    routed_scale: float
    swiglu_alpha: float
    swiglu_limit: float
    layer_kinds: tuple[LayerKind, ...]
    moe_layers: tuple[bool, ...]
    index_heads: int
    index_dim: int
    block: int
    top_blocks: int
    init_blocks: int
    local_blocks: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_kinds)

    @property
    def has_sparse(self) -> bool:
        """Whether any layer selects blocks."""
        return LayerKind.SPARSE in self.layer_kinds


def parse(config: Mapping[str, Any]) -> M3Spec:
    """Read a ``config.json`` object.

    Raises:
        ConfigError: a key is missing, unknown, or holds a value this implementation does not
            compute; the message names the key, the value and what is accepted.
    """
    text, outer = _text_config(config)
    _refuse_unknown(text)
    _refuse_fixed(text)
    _refuse_fixed(outer)
    _refuse_activation(text)
    for key in sorted(_REQUIRED):
        _need(text, key)
    num_layers = _whole(text, "num_hidden_layers")
    sparse = _sparse_config(text)
    kinds = _layer_kinds(text, sparse, num_layers)
    rotary_dim, theta = _rope(text)
    index = _index(text, sparse, kinds)
    spec = M3Spec(
        vocab_size=_whole(text, "vocab_size"),
        hidden_size=_whole(text, "hidden_size"),
        num_q_heads=_whole(text, "num_attention_heads"),
        num_kv_heads=_whole(text, "num_key_value_heads"),
        head_dim=_whole(text, "head_dim"),
        rotary_dim=rotary_dim,
        rope_theta=theta,
        rms_norm_eps=_number(text, "rms_norm_eps"),
        max_positions=_whole(text, "max_position_embeddings"),
        dense_width=_whole(text, "dense_intermediate_size"),
        expert_width=_whole(text, "intermediate_size"),
        shared_width=_whole(text, "shared_intermediate_size"),
        num_experts=_whole(text, "num_local_experts"),
        experts_per_token=_whole(text, "num_experts_per_tok"),
        routed_scale=_number(text, "routed_scaling_factor"),
        swiglu_alpha=_number(text, "swiglu_alpha"),
        swiglu_limit=_number(text, "swiglu_limit"),
        layer_kinds=kinds,
        moe_layers=_moe_layers(text, num_layers),
        dtype=_dtype(text, outer),
        eos_token_ids=_ids(text.get("eos_token_id", outer.get("eos_token_id"))),
        **index,
    )
    _check_shape(spec)
    return spec


def _text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    architectures = config.get("architectures") or ()
    accepted = (*ARCHITECTURES, _HF_TEXT_ARCHITECTURE)
    if not any(a in accepted for a in architectures):
        raise ConfigError(
            "config.json: architectures",
            got=list(architectures),
            expected="one of " + ", ".join(accepted),
        )
    text = config.get("text_config")
    if text is None:
        text = config
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config", got=type(text).__name__, expected="an object")
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if quantization:
        named = isinstance(quantization, Mapping) and quantization.get("quant_method")
        raise ConfigError(
            "config.json: quantization_config",
            got=named or quantization,
            expected="none: BF16 or FP32 weights",
            remedy="use the BF16 checkpoint",
        )
    return text, config


def _sparse_config(text: Mapping[str, Any]) -> Mapping[str, Any]:
    sparse = text.get("sparse_attention_config") or {}
    if not isinstance(sparse, Mapping):
        raise ConfigError(
            "config.json: sparse_attention_config", got=type(sparse).__name__, expected="an object"
        )
    return sparse


def _refuse_unknown(text: Mapping[str, Any]) -> None:
    known = (
        _REQUIRED | _IGNORED | _ROPE_KEYS | _LAYER_KEYS | _FIXED.keys() | set(_SPARSE_KEYS.values())
    ) | {"sparse_attention_config"}
    unknown = sorted(set(text) - known)
    if unknown:
        raise ConfigError(
            "config.json has keys that this implementation does not know",
            got=unknown,
            expected="only keys whose meaning is implemented: others may change the answers",
            remedy="remove the key if it is known to have no effect on the text model",
        )
    unknown = sorted(set(_sparse_config(text)) - _SPARSE_KEYS.keys() - _SPARSE_OTHER)
    if unknown:
        raise ConfigError(
            "config.json: sparse_attention_config has unknown keys",
            got=unknown,
            expected=", ".join(sorted(_SPARSE_KEYS.keys() | _SPARSE_OTHER)),
        )


def _refuse_fixed(text: Mapping[str, Any]) -> None:
    for key, value in _FIXED.items():
        if key in text and text[key] != value:
            raise ConfigError(
                f"config.json: {key} is not implemented", got=text[key], expected=repr(value)
            )


def _refuse_activation(text: Mapping[str, Any]) -> None:
    # transformers calls the activation "silu" when it saves; both names mean SwiGLU-OAI here
    if text.get("hidden_act") not in ("swigluoai", "silu"):
        raise ConfigError(
            "config.json: hidden_act", got=text.get("hidden_act"), expected="'swigluoai'"
        )


def _need(mapping: Mapping[str, Any], key: str, where: str = "") -> Any:
    if mapping.get(key) is None:
        raise ConfigError(
            f"config.json: {where}{key} is missing",
            got=None,
            expected="a value: defaults of other stacks are not this model",
        )
    return mapping[key]


def _whole(mapping: Mapping[str, Any], key: str) -> int:
    value = mapping[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ConfigError(f"config.json: {key}", got=value, expected="a whole number")
    return int(value)


def _number(mapping: Mapping[str, Any], key: str) -> float:
    value = mapping[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ConfigError(f"config.json: {key}", got=value, expected="a number")
    return float(value)


def _per_layer(values: Any, num_layers: int, key: str) -> list[Any]:
    if not isinstance(values, list | tuple) or len(values) != num_layers:
        got = len(values) if isinstance(values, list | tuple) else values
        raise ConfigError(
            f"config.json: {key}", got=got, expected=f"a list of {num_layers} entries"
        )
    return list(values)


def _layer_kinds(
    text: Mapping[str, Any], sparse: Mapping[str, Any], num_layers: int
) -> tuple[LayerKind, ...]:
    if text.get("layer_types") is not None:
        names = {"full_attention": LayerKind.DENSE, "minimax_m3_sparse": LayerKind.SPARSE}
        types = _per_layer(text["layer_types"], num_layers, "layer_types")
        if set(types) - set(names):
            raise ConfigError(
                "config.json: layer_types", got=sorted(set(types)), expected=", ".join(names)
            )
        return tuple(names[t] for t in types)
    if not sparse or not sparse.get("use_sparse_attention", False):
        raise ConfigError(
            "config.json: sparse_attention_config.use_sparse_attention",
            got=sparse.get("use_sparse_attention") if sparse else None,
            expected="true, with sparse_attention_freq naming the sparse layers",
        )
    freq = _per_layer(_need(sparse, "sparse_attention_freq"), num_layers, "sparse_attention_freq")
    return tuple(LayerKind.SPARSE if f else LayerKind.DENSE for f in freq)


def _moe_layers(text: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    if text.get("mlp_layer_types") is not None:
        types = _per_layer(text["mlp_layer_types"], num_layers, "mlp_layer_types")
        if set(types) - {"dense", "sparse"}:
            raise ConfigError(
                "config.json: mlp_layer_types", got=sorted(set(types)), expected="dense, sparse"
            )
        return tuple(t == "sparse" for t in types)
    freq = _per_layer(_need(text, "moe_layer_freq"), num_layers, "moe_layer_freq")
    return tuple(bool(f) for f in freq)


def _rope(text: Mapping[str, Any]) -> tuple[int, float]:
    """(rotary_dim, theta); the two ways of stating the rotated width must agree."""
    nested = text.get("rope_parameters") or {}
    kind = nested.get("rope_type", "default")
    if kind != "default":
        raise ConfigError("config.json: rope_parameters.rope_type", got=kind, expected="'default'")
    merged = {
        **{k: text[k] for k in ("rope_theta", "partial_rotary_factor") if k in text},
        **nested,
    }
    for key in ("partial_rotary_factor", "rope_theta"):
        _need(merged, key)
    factor, theta = _number(merged, "partial_rotary_factor"), _number(merged, "rope_theta")
    head_dim = _whole(text, "head_dim")
    rotary_dim = round(head_dim * factor)
    stated = text.get("rotary_dim", rotary_dim)
    if (
        stated != rotary_dim
        or rotary_dim != head_dim * factor
        or rotary_dim < 2
        or rotary_dim % 2
        or rotary_dim > head_dim
    ):
        raise ConfigError(
            "config.json: rotary_dim and head_dim * partial_rotary_factor disagree",
            got=f"rotary_dim {stated}, head_dim {head_dim} * {factor}",
            expected="the same even number of channels, at most head_dim",
        )
    return rotary_dim, theta


def _index(
    text: Mapping[str, Any], sparse: Mapping[str, Any], kinds: tuple[LayerKind, ...]
) -> dict[str, int]:
    names = ("index_heads", "index_dim", "block", "top_blocks", "local_blocks")
    if LayerKind.SPARSE not in kinds:
        return dict.fromkeys((*names, "init_blocks"), 0)
    score = sparse.get("sparse_score_type", "max")
    if score != "max":
        raise ConfigError("config.json: sparse_score_type", got=score, expected="'max'")
    value_path = sparse.get("sparse_disable_index_value")
    if value_path is not None:
        _per_layer(value_path, len(kinds), "sparse_disable_index_value")
    if value_path is not None and any(
        k is LayerKind.SPARSE and not off for k, off in zip(kinds, value_path, strict=True)
    ):
        raise ConfigError(
            "config.json: sparse_disable_index_value",
            got=value_path,
            expected="1 on every sparse layer: the index branch has no value path",
        )
    values = {}
    for name, (released, saved) in zip(names, _SPARSE_KEYS.items(), strict=True):
        value = sparse.get(released, text.get(saved))
        if value is None and name == "local_blocks":
            value = sparse.get("sparse_local_blocks")
        stated = {released: value}
        _need(stated, released, "sparse_attention_config.")
        values[name] = _whole(stated, released)
    init = sparse.get("sparse_init_block", sparse.get("sparse_init_blocks", 0))
    values["init_blocks"] = _whole({"sparse_init_block": init}, "sparse_init_block")
    return values


def _dtype(text: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    for key in ("dtype", "torch_dtype"):
        for config in (text, outer):
            if config.get(key):
                return str(config[key])
    raise ConfigError(
        "config.json: torch_dtype is missing", got=None, expected="bfloat16 or float32"
    )


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def _check_shape(spec: M3Spec) -> None:
    for name in M3Spec.__slots__:
        value = getattr(spec, name)
        free = ("init_blocks", "index_heads", "index_dim", "block", "top_blocks", "local_blocks")
        if isinstance(value, int | float) and name not in free and not value > 0:
            raise ConfigError(f"config.json: {name}", got=value, expected="> 0")
    if spec.num_q_heads % spec.num_kv_heads:
        raise ConfigError(
            "config.json: num_attention_heads",
            got=spec.num_q_heads,
            expected=f"a multiple of num_key_value_heads {spec.num_kv_heads}",
        )
    if spec.experts_per_token > spec.num_experts:
        raise ConfigError(
            "config.json: num_experts_per_tok",
            got=spec.experts_per_token,
            expected=f"at most num_local_experts {spec.num_experts}",
        )
    if not spec.has_sparse:
        return
    if spec.index_heads != spec.num_kv_heads:
        raise ConfigError(
            "config.json: sparse_num_index_heads",
            got=spec.index_heads,
            expected=f"num_key_value_heads {spec.num_kv_heads}: index head j selects for KV head j",
        )
    if spec.rotary_dim > spec.index_dim:
        raise ConfigError(
            "config.json: sparse_index_dim",
            got=spec.index_dim,
            expected=f"at least rotary_dim {spec.rotary_dim}: index vectors are rotated like keys",
        )
    if min(spec.block, spec.top_blocks, spec.local_blocks) < 1 or spec.init_blocks < 0:
        raise ConfigError(
            "config.json: sparse_attention_config",
            got=f"block {spec.block}, top-k {spec.top_blocks}, "
            f"local {spec.local_blocks}, init {spec.init_blocks}",
            expected="block, top-k and local >= 1, init >= 0",
        )
    if spec.init_blocks + spec.local_blocks > spec.top_blocks:
        raise ConfigError(
            "config.json: forced blocks do not fit the selection",
            got=f"init {spec.init_blocks} + local {spec.local_blocks}",
            expected=f"at most sparse_topk_blocks {spec.top_blocks}",
        )
