"""The text model: embedding, decoder layers, final norm, head."""

from typing import Any

from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.attention.runtime import StepKernels
from minuet.kv.cache import KVCache
from minuet.models.m3.attention import Attention
from minuet.models.m3.moe import MLP, MoE
from minuet.models.m3.spec import M3Spec
from minuet.models.m3.weights import M3Weights
from minuet.ops.embedding import Embedding, Follows
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
        # the norm before each layer, and the one after the last
        first, *self._norms = [*(layer.input_norm for layer in weights.layers), weights.norm]
        frequencies = inverse_frequencies(
            spec.rotary_dim, spec.rope_theta, device=weights.embed.device
        )
        self._embedding = Embedding(weights.embed, first, spec.rms_norm_eps, frequencies)
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
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        plan: Any = None,
        follows: Follows | None = None,
    ) -> Tensor:
        """Run a step: every query token of ``batch`` is written to the cache and attended from.

        Args:
            token_ids: [T] int64.
            batch: the step.
            cache: written.
            plan: of this step, from the kernels' planner; None makes one.
            follows: which of the tokens to take from those drawn before, instead.

        Returns:
            [T, W] last hidden states, after the final norm.
        """
        ops, eps = self._ops, self.spec.rms_norm_eps
        if plan is None:
            plan = self._kernels.plan(batch, cache.layers[0].layout.page_size)
        hidden_TW, normed_TW, cos, sin = ops.embed(
            token_ids, batch.positions, self._embedding, follows
        )
        for weights, attention, ffn, lanes, next_norm in zip(
            self._weights.layers, self._attention, self.ffn, cache.layers, self._norms, strict=True
        ):
            # no name for what a block adds: it would live on, as large as the residual stream
            hidden_TW, normed_TW = ops.add_norm(
                hidden_TW,
                attention(normed_TW, lanes, batch.slots, cos, sin, plan),
                weights.post_norm,
                eps,
            )
            hidden_TW, normed_TW = ops.add_norm(hidden_TW, ffn(normed_TW), next_norm, eps)
        return normed_TW

    def logits(self, hidden_RW: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of the rows that are wanted.

        Args:
            hidden_RW: rows of what :meth:`forward` returned.
            out: [R, V] float32 to write them to; None: a new tensor.

        Returns:
            [R, V] float32.
        """
        return self._ops.logits(hidden_RW, self._weights.lm_head, out)
