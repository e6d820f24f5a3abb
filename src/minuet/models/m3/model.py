"""The text model: embedding, decoder layers, final norm, head."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.attention.runtime import StepKernels
from minuet.kv.cache import KVCache
from minuet.models.m3.attention import Attention
from minuet.models.m3.moe import MLP, MoE
from minuet.models.m3.spec import M3Spec
from minuet.models.m3.weights import M3Weights
from minuet.ops.rope import inverse_frequencies
from minuet.ops.table import REFERENCE, Ops, ops_for

# T tokens, R rows of which logits are wanted, W hidden width, V vocabulary


class Model:
    """MiniMax-M3 over a paged cache.

    Args:
        spec: the parsed config.
        weights: loaded or dummy.
        kernels: chosen at start-up.
        ops: chosen at start-up; None is plain torch.

    Attributes:
        ffn: the FFN of each layer.
    """

    def __init__(
        self, spec: M3Spec, weights: M3Weights, kernels: StepKernels, ops: Ops | None = None
    ):
        ops = ops or ops_for(REFERENCE)
        self.spec = spec
        self._weights, self._kernels, self._ops = weights, kernels, ops
        self._frequencies = inverse_frequencies(
            spec.rotary_dim, spec.rope_theta, device=weights.embed.device
        )
        self._attention = [
            Attention(spec, kind, layer, kernels.layers[kind], ops)
            for kind, layer in zip(spec.layer_kinds, weights.layers, strict=True)
        ]
        self.ffn: list[MLP | MoE] = []
        for layer in weights.layers:
            if layer.moe is not None:
                self.ffn.append(MoE(spec, layer.moe, ops))
            else:
                assert layer.mlp is not None
                self.ffn.append(MLP(spec, layer.mlp, ops))

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, cache: KVCache, plan: Any = None
    ) -> Tensor:
        """Run a step: every query token of ``batch`` is written to the cache and attended from.

        Args:
            token_ids: [T] int64.
            batch: the step.
            cache: written.
            plan: of this step, from the kernels' planner; None makes one.

        Returns:
            [T, W] residual stream after the last layer, before the final norm.
        """
        ops, eps = self._ops, self.spec.rms_norm_eps
        if plan is None:
            plan = self._kernels.plan(batch, cache.layers[0].layout.page_size)
        cos, sin = ops.cos_sin(batch.positions, self._frequencies)
        hidden_TW = F.embedding(token_ids, self._weights.embed)
        delta: Any = None  # what the layer before adds, not yet added
        layers = zip(self._weights.layers, self._attention, self.ffn, cache.layers, strict=True)
        for weights, attention, ffn, lanes in layers:
            if delta is None:
                normed = ops.norm(hidden_TW, weights.input_norm, eps)
            else:
                hidden_TW, normed = ops.add_norm(hidden_TW, delta, weights.input_norm, eps)
            delta = attention(normed, lanes, batch.slots, cos, sin, plan)
            hidden_TW, normed = ops.add_norm(hidden_TW, delta, weights.post_norm, eps)
            delta = ffn(normed)
        return ops.add(hidden_TW, delta)

    def logits(self, hidden_RW: Tensor) -> Tensor:
        """[R, V] float32 of the rows that are wanted."""
        normed = self._ops.norm(hidden_RW, self._weights.norm, self.spec.rms_norm_eps)
        return self._ops.linear(normed, self._weights.lm_head).float()
