"""MiniMax-M3 as planning sees it: sizes, weight groups and how a step reads them. No torch."""

from minuet.attention.contract import LayerKind
from minuet.models.m3.spec import ARCHITECTURES, M3Spec
from minuet.planning.model import ExpertFacts, IndexFacts, ModelFacts, Shard, Use, WeightGroup


def facts(spec: M3Spec, name: str) -> ModelFacts:
    """What planning needs to know of the model.

    Args:
        spec: the parsed config.
        name: how to call it in tables.
    """
    s, layers = spec, spec.num_layers
    sparse, moe = s.layer_kinds.count(LayerKind.SPARSE), sum(s.moe_layers)
    expert = 3 * s.hidden_size * s.expert_width
    norms = layers * (2 * s.hidden_size + 2 * s.head_dim) + sparse * 2 * s.index_dim + s.hidden_size
    kv_width = s.num_kv_heads * s.head_dim
    group = WeightGroup
    weights = (
        group("embedding", s.vocab_size * s.hidden_size, "compute", Use.LOOKUP, Shard.SPLIT),
        group("lm_head", s.vocab_size * s.hidden_size, "compute", Use.EVERY_STEP, Shard.SPLIT),
        group(
            "attention_qo",
            layers * 2 * s.hidden_size * s.num_q_heads * s.head_dim,
            "compute",
            Use.EVERY_STEP,
            Shard.SPLIT,
        ),
        group(
            "attention_kv",
            layers * 2 * s.hidden_size * kv_width,
            "compute",
            Use.EVERY_STEP,
            Shard.KV_HEADS,
        ),
        group(
            "index_q",
            sparse * s.hidden_size * s.index_heads * s.index_dim,
            "compute",
            Use.EVERY_STEP,
            Shard.KV_HEADS,
        ),
        group(
            "index_k",
            sparse * s.hidden_size * s.index_dim,
            "compute",
            Use.EVERY_STEP,
            Shard.REPLICATED,
        ),
        group(
            "dense_mlp",
            (layers - moe) * 3 * s.hidden_size * s.dense_width,
            "compute",
            Use.EVERY_STEP,
            Shard.SPLIT,
        ),
        group(
            "router",
            moe * s.num_experts * (s.hidden_size + 1),
            "float32",
            Use.EVERY_STEP,
            Shard.REPLICATED,
        ),
        group("experts", moe * s.num_experts * expert, "compute", Use.PER_EXPERT, Shard.SPLIT),
        group(
            "shared_experts",
            moe * 3 * s.hidden_size * s.shared_width,
            "compute",
            Use.EVERY_STEP,
            Shard.SPLIT,
        ),
        group("norms", norms, "float32", Use.EVERY_STEP, Shard.REPLICATED),
    )
    index = (
        IndexFacts(s.index_heads, s.index_dim, s.block, s.top_blocks, s.init_blocks, s.local_blocks)
        if s.has_sparse
        else None
    )
    return ModelFacts(
        name=name,
        architecture=ARCHITECTURES[0],
        dtype=s.dtype,
        layer_kinds=s.layer_kinds,
        hidden=s.hidden_size,
        vocab=s.vocab_size,
        max_positions=s.max_positions,
        num_q_heads=s.num_q_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        index=index,
        experts=ExpertFacts(s.num_experts, s.experts_per_token, moe, expert) if moe else None,
        weights=tuple(w for w in weights if w.params),
    )
