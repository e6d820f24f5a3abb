"""The two feed-forward forms: a dense MLP, and routed experts beside a shared one."""

from typing import Any

from torch import Tensor

from minuet.models.m3.spec import M3Spec
from minuet.models.m3.weights import MLPWeights, MoEWeights
from minuet.ops.moe import Experts
from minuet.ops.table import Ops

# T tokens, W hidden width


class MLP:
    """``down(act(gate, up))``."""

    def __init__(self, spec: M3Spec, weights: MLPWeights, ops: Ops):
        self._gate_up, self._down, self._ops = weights.gate_up, weights.down, ops
        self._alpha, self._limit = spec.swiglu_alpha, spec.swiglu_limit

    def __call__(self, hidden_TW: Tensor) -> Any:
        """[T, W] to the delta that ``ops.add_norm`` takes."""
        ops = self._ops
        gate_up = ops.linear_sums(hidden_TW, self._gate_up)
        return ops.linear_sums(ops.swiglu(gate_up, self._alpha, self._limit), self._down)


class MoE:
    """``routed_scale * sum of chosen experts + shared expert``; only the routed sum is scaled.

    Attributes:
        moe: what runs it; a measurement may put itself in between.
    """

    def __init__(self, spec: M3Spec, weights: MoEWeights, ops: Ops):
        self.moe = ops.moe
        self._experts = Experts(
            router=weights.router,
            bias=weights.bias,
            gate_up=weights.gate_up,
            down=weights.down,
            shared_gate_up=weights.shared.gate_up,
            shared_down=weights.shared.down,
            top_k=spec.experts_per_token,
            routed_scale=spec.routed_scale,
            alpha=spec.swiglu_alpha,
            limit=spec.swiglu_limit,
        )

    def __call__(self, hidden_TW: Tensor) -> Any:
        """[T, W] to the delta that ``ops.add_norm`` takes."""
        return self.moe(hidden_TW, self._experts)
