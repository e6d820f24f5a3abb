"""The text model: embedding, decoder layers, final norm, head."""

import torch.nn.functional as F
from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.attention.runtime import StepKernels
from minuet.kv.cache import KVCache
from minuet.models.m3.attention import Attention
from minuet.models.m3.moe import MLP, MoE
from minuet.models.m3.spec import M3Spec
from minuet.models.m3.weights import M3Weights
from minuet.ops.norm import gemma_rms_norm
from minuet.ops.rope import cos_sin, inverse_frequencies

# T tokens, R rows of which logits are wanted, W hidden width, V vocabulary


class Model:
    """MiniMax-M3 over a paged cache.

    Args:
        spec: the parsed config.
        weights: loaded or dummy.
        kernels: chosen at start-up.
    """

    def __init__(self, spec: M3Spec, weights: M3Weights, kernels: StepKernels):
        self.spec = spec
        self._weights, self._kernels = weights, kernels
        self._frequencies = inverse_frequencies(
            spec.rotary_dim, spec.rope_theta, device=weights.embed.device
        )
        self._attention = [
            Attention(spec, kind, layer, kernels.layers[kind])
            for kind, layer in zip(spec.layer_kinds, weights.layers, strict=True)
        ]
        self._ffn: list[MLP | MoE] = []
        for layer in weights.layers:
            if layer.moe is not None:
                self._ffn.append(MoE(spec, layer.moe))
            else:
                assert layer.mlp is not None
                self._ffn.append(MLP(spec, layer.mlp))

    def forward(self, token_ids: Tensor, batch: AttentionBatch, cache: KVCache) -> Tensor:
        """Run a step: every query token of ``batch`` is written to the cache and attended from.

        Args:
            token_ids: [T] int64.
            batch: the step.
            cache: written.

        Returns:
            [T, W] residual stream after the last layer, before the final norm.
        """
        eps = self.spec.rms_norm_eps
        plan = self._kernels.plan(batch, cache.layers[0].layout.page_size)
        cos, sin = cos_sin(batch.positions, self._frequencies)
        hidden_TW = F.embedding(token_ids, self._weights.embed)
        layers = zip(self._weights.layers, self._attention, self._ffn, cache.layers, strict=True)
        for weights, attention, ffn, lanes in layers:
            normed = gemma_rms_norm(hidden_TW, weights.input_norm, eps)
            hidden_TW = hidden_TW + attention(normed, lanes, batch.slots, cos, sin, plan)
            normed = gemma_rms_norm(hidden_TW, weights.post_norm, eps)
            hidden_TW = hidden_TW + ffn(normed)
        return hidden_TW

    def logits(self, hidden_RW: Tensor) -> Tensor:
        """[R, V] float32 of the rows that are wanted."""
        normed = gemma_rms_norm(hidden_RW, self._weights.norm, self.spec.rms_norm_eps)
        return F.linear(normed, self._weights.lm_head).float()
