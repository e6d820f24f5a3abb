"""M3's weights: the packed tensors the model computes with, and where each official tensor goes.

:func:`named_slices` is the one place that knows both sides. It maps every name of an official
checkpoint to a view into the packed tensors; reading a checkpoint copies into the views, writing
one copies out of them, and dummy weights are drawn into them.

Shape letters: V vocabulary, H hidden size, Q query heads, K KV heads, D head dim, N index heads
(= K), Di index dim, E experts, I width of an MLP. Matrices are ``[out, in]``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from minuet.attention.contract import LayerKind
from minuet.dtypes import DType
from minuet.models.loading import match, open_checkpoint, read_into
from minuet.models.m3.spec import M3Spec
from minuet.platform.torch import to_torch

PREFIX = "language_model."
"""What official names begin with; a text-only checkpoint may leave it out."""

# Parts of an official checkpoint that the text model does not use. No released checkpoint has mtp
# weights, whatever num_mtp_modules says; a later one may.
_OTHER_PARTS = MappingProxyType(
    {
        "vision_tower": r"^vision_tower\.",
        "multi_modal_projector": r"^multi_modal_projector\.",
        "patch_merge_mlp": r"^patch_merge_mlp\.",
        "mtp": r"(^|\.)mtp\.",
    }
)


class _Tensors:
    """A node of the weight tree."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor below, with its path (``layers.3.moe.gate_up``)."""
        for field, value in vars(self).items():
            listed = isinstance(value, list)
            for index, child in enumerate(value if listed else [value]):
                path = f"{field}.{index}" if listed else field
                if isinstance(child, Tensor):
                    yield path, child
                elif isinstance(child, _Tensors):
                    yield from ((f"{path}.{name}", tensor) for name, tensor in child.tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors below."""
        return sum(tensor.nbytes for _, tensor in self.tensors())


@dataclass
class MLPWeights(_Tensors):
    """A SwiGLU MLP: a dense layer's, or a MoE layer's shared expert.

    Attributes:
        gate_up: [2*I, H] compute dtype; the gate's I rows, then up's. Not interleaved.
        down: [H, I] compute dtype.
    """

    gate_up: Tensor
    down: Tensor


@dataclass
class MoEWeights(_Tensors):
    """A routed FFN.

    Attributes:
        router: [E, H] FP32.
        bias: [E] FP32; added to the scores for choosing experts only, never to their weights.
        gate_up: [E, 2*I, H] compute dtype; per expert as in :class:`MLPWeights`.
        down: [E, H, I] compute dtype.
        shared: the expert every token visits.
    """

    router: Tensor
    bias: Tensor
    gate_up: Tensor
    down: Tensor
    shared: MLPWeights


@dataclass
class LayerWeights(_Tensors):
    """A decoder layer; norm gains are ``1 + w``.

    Attributes:
        input_norm: [H] FP32.
        post_norm: [H] FP32; before the FFN.
        qkv: [(Q + 2*K) * D, H] compute dtype, rows ``q | k | v``; a sparse layer has N*Di + Di rows
            more, ``index_q | index_k``, since all five read the same normed input.
        q_norm: [D] FP32, shared by all heads.
        k_norm: [D] FP32, shared by all heads.
        index_q_norm: [Di] FP32; None on a dense layer.
        index_k_norm: [Di] FP32; None on a dense layer.
        o: [H, Q*D] compute dtype.
        mlp: the dense FFN; None on a MoE layer.
        moe: the routed FFN; None on a dense layer.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    index_q_norm: Tensor | None
    index_k_norm: Tensor | None
    o: Tensor
    mlp: MLPWeights | None
    moe: MoEWeights | None


@dataclass
class M3Weights(_Tensors):
    """The text model.

    Attributes:
        embed: [V, H] compute dtype.
        layers: one per decoder layer.
        norm: [H] FP32, the final norm.
        lm_head: [V, H] compute dtype; not tied to ``embed``.
    """

    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Tensor


def empty_weights(spec: M3Spec, dtype: DType, device: torch.device | str) -> M3Weights:
    """Allocate every tensor, uninitialised.

    Args:
        spec: the model.
        dtype: compute dtype.
        device: where; ``meta`` gives shapes without memory.
    """
    compute = to_torch(dtype)

    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=compute, device=device)

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def mlp(width: int) -> MLPWeights:
        return MLPWeights(matrix(2 * width, spec.hidden_size), matrix(spec.hidden_size, width))

    def moe() -> MoEWeights:
        experts, hidden, width = spec.num_experts, spec.hidden_size, spec.expert_width
        return MoEWeights(
            router=fp32(experts, hidden),
            bias=fp32(experts),
            gate_up=matrix(experts, 2 * width, hidden),
            down=matrix(experts, hidden, width),
            shared=mlp(spec.shared_width),
        )

    def layer(idx: int) -> LayerWeights:
        sparse = spec.layer_kinds[idx] is LayerKind.SPARSE
        return LayerWeights(
            input_norm=fp32(spec.hidden_size),
            post_norm=fp32(spec.hidden_size),
            qkv=matrix(sum(rows for _, rows in packed_rows(spec, idx)), spec.hidden_size),
            q_norm=fp32(spec.head_dim),
            k_norm=fp32(spec.head_dim),
            index_q_norm=fp32(spec.index_dim) if sparse else None,
            index_k_norm=fp32(spec.index_dim) if sparse else None,
            o=matrix(spec.hidden_size, spec.num_q_heads * spec.head_dim),
            mlp=None if spec.moe_layers[idx] else mlp(spec.dense_width),
            moe=moe() if spec.moe_layers[idx] else None,
        )

    return M3Weights(
        embed=matrix(spec.vocab_size, spec.hidden_size),
        layers=[layer(idx) for idx in range(spec.num_layers)],
        norm=fp32(spec.hidden_size),
        lm_head=matrix(spec.vocab_size, spec.hidden_size),
    )


def load_weights(
    folder: Path | str, spec: M3Spec, dtype: DType, device: torch.device | str
) -> M3Weights:
    """Read a checkpoint folder straight into the packed tensors.

    Official names, with or without :data:`PREFIX`, or the names ``MiniMaxM3VLForCausalLM`` of
    transformers saves (:func:`fused_slices`). Tensors may be FP32, BF16 or FP16.

    Args:
        folder: has ``model.safetensors``, or an index and its shards.
        spec: the model.
        dtype: compute dtype.
        device: where.

    Raises:
        CheckpointError: the folder is not exactly this model; see :mod:`minuet.models.loading`.
    """
    stored = open_checkpoint(folder)
    fused_names = (".gate_up_proj", ".gate_up_proj.weight")
    is_fused = any(tensor.name.endswith(fused_names) for tensor in stored)
    slices = fused_slices if is_fused else named_slices
    shapes = {
        name: tuple(view.shape)
        for name, view in slices(spec, empty_weights(spec, dtype, "meta")).items()
    }
    matched = match(stored, shapes, prefix=PREFIX, skip=_OTHER_PARTS)
    weights = empty_weights(spec, dtype, device)
    read_into(matched, slices(spec, weights))
    return weights


def packed_rows(spec: M3Spec, idx: int) -> tuple[tuple[str, int], ...]:
    """The projections packed into layer ``idx``'s ``qkv``: ``(name, rows)`` in order."""
    rows = (
        ("q", spec.num_q_heads * spec.head_dim),
        ("k", spec.num_kv_heads * spec.head_dim),
        ("v", spec.num_kv_heads * spec.head_dim),
    )
    if spec.layer_kinds[idx] is LayerKind.DENSE:
        return rows
    return (*rows, ("index_q", spec.index_heads * spec.index_dim), ("index_k", spec.index_dim))


def named_slices(spec: M3Spec, weights: M3Weights) -> dict[str, Tensor]:
    """Views into ``weights`` by official name, without :data:`PREFIX`.

    The views cover every element of every tensor exactly once.
    """
    named = {"model.embed_tokens.weight": weights.embed}
    for idx, layer in enumerate(weights.layers):
        layer_slices = {**_attention_slices(spec, idx, layer), **_ffn_slices(layer)}
        named |= {f"model.layers.{idx}.{name}": view for name, view in layer_slices.items()}
    named["model.norm.weight"] = weights.norm
    named["lm_head.weight"] = weights.lm_head
    return named


def fused_slices(spec: M3Spec, weights: M3Weights) -> dict[str, Tensor]:
    """Views by the names of transformers' text-only class, whose fused tensors are packed as ours.

    ``save_pretrained`` of the complete model writes official names, that of
    ``MiniMaxM3VLForCausalLM`` its attributes' (seen with 5.24.0).
    """
    named = {
        name.replace(".self_attn.index_", ".self_attn.indexer."): view
        for name, view in named_slices(spec, weights).items()
        if ".mlp." not in name and ".block_sparse_moe." not in name
    }
    for idx, layer in enumerate(weights.layers):
        ffn = f"model.layers.{idx}.mlp."
        if layer.mlp is not None:
            named[ffn + "gate_up_proj.weight"] = layer.mlp.gate_up
            named[ffn + "down_proj.weight"] = layer.mlp.down
        if layer.moe is not None:
            named[ffn + "gate.weight"] = layer.moe.router
            named[ffn + "gate.e_score_correction_bias"] = layer.moe.bias
            named[ffn + "experts.gate_up_proj"] = layer.moe.gate_up
            named[ffn + "experts.down_proj"] = layer.moe.down
            named[ffn + "shared_experts.gate_up_proj.weight"] = layer.moe.shared.gate_up
            named[ffn + "shared_experts.down_proj.weight"] = layer.moe.shared.down
    return named


def _attention_slices(spec: M3Spec, idx: int, layer: LayerWeights) -> dict[str, Tensor]:
    named = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
    }
    start = 0
    for name, rows in packed_rows(spec, idx):
        named[f"self_attn.{name}_proj.weight"] = layer.qkv[start : start + rows]
        start += rows
    if layer.index_q_norm is not None and layer.index_k_norm is not None:
        named["self_attn.index_q_norm.weight"] = layer.index_q_norm
        named["self_attn.index_k_norm.weight"] = layer.index_k_norm
    named["self_attn.o_proj.weight"] = layer.o
    return named


def _ffn_slices(layer: LayerWeights) -> dict[str, Tensor]:
    named = {"post_attention_layernorm.weight": layer.post_norm}
    if layer.mlp is not None:
        named |= _mlp_slices("mlp", layer.mlp)
    if layer.moe is not None:
        moe = "block_sparse_moe"
        named[f"{moe}.gate.weight"] = layer.moe.router
        named[f"{moe}.e_score_correction_bias"] = layer.moe.bias
        for expert, (gate_up, down) in enumerate(
            zip(layer.moe.gate_up, layer.moe.down, strict=True)
        ):
            gate, up = gate_up.chunk(2)
            named[f"{moe}.experts.{expert}.w1.weight"] = gate
            named[f"{moe}.experts.{expert}.w3.weight"] = up
            named[f"{moe}.experts.{expert}.w2.weight"] = down
        named |= _mlp_slices(f"{moe}.shared_experts", layer.moe.shared)
    return named


def _mlp_slices(name: str, mlp: MLPWeights) -> dict[str, Tensor]:
    gate, up = mlp.gate_up.chunk(2)
    return {
        f"{name}.gate_proj.weight": gate,
        f"{name}.up_proj.weight": up,
        f"{name}.down_proj.weight": mlp.down,
    }


def stored_dtype(name: str, checkpoint: DType) -> DType:
    """Type in which an official checkpoint of type ``checkpoint`` stores tensor ``name``.

    Norms are stored in the checkpoint's type and computed with in FP32; the router is FP32 in both.
    """
    is_router = name.endswith((".gate.weight", ".e_score_correction_bias"))
    return DType.FP32 if is_router else checkpoint
