"""The two feed-forward forms: a dense MLP, and routed experts beside a shared one."""

import torch.nn.functional as F
from torch import Tensor

from minuet.models.m3.spec import M3Spec
from minuet.models.m3.weights import MLPWeights, MoEWeights
from minuet.ops.activation import swiglu_oai
from minuet.ops.moe import experts_forward, route

# T tokens, W hidden width


class MLP:
    """``down(act(gate, up))``."""

    def __init__(self, spec: M3Spec, weights: MLPWeights):
        self._gate_up, self._down = weights.gate_up, weights.down
        self._alpha, self._limit = spec.swiglu_alpha, spec.swiglu_limit

    def __call__(self, hidden_TW: Tensor) -> Tensor:
        """[T, W] to [T, W]."""
        inner = swiglu_oai(F.linear(hidden_TW, self._gate_up), self._alpha, self._limit)
        return F.linear(inner, self._down)


class MoE:
    """``routed_scale * sum of chosen experts + shared expert``; only the routed sum is scaled."""

    def __init__(self, spec: M3Spec, weights: MoEWeights):
        self._spec, self._weights = spec, weights
        self._shared = MLP(spec, weights.shared)

    def __call__(self, hidden_TW: Tensor) -> Tensor:
        """[T, W] to [T, W]."""
        spec, weights = self._spec, self._weights
        experts, shares = route(hidden_TW, weights.router, weights.bias, spec.experts_per_token)
        routed = experts_forward(
            hidden_TW,
            experts,
            shares * spec.routed_scale,
            weights.gate_up,
            weights.down,
            spec.swiglu_alpha,
            spec.swiglu_limit,
        )
        return routed + self._shared(hidden_TW)
