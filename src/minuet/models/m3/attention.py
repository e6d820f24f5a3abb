"""One attention block: projections, the cache, and the chosen kernels."""

from typing import Any

from torch import Tensor

from minuet.attention.contract import LayerKind
from minuet.attention.reference import Selection
from minuet.attention.runtime import LayerKernels
from minuet.kv.cache import LayerCache
from minuet.kv.write import HeadNorms
from minuet.models.m3.spec import M3Spec
from minuet.models.m3.weights import LayerWeights
from minuet.ops.table import Ops

# T tokens, W hidden width


class Attention:
    """Attention of one layer; dense or sparse by its kind.

    Args:
        spec: the model.
        kind: of this layer.
        weights: of this layer.
        kernels: chosen at start-up for this layer kind.
        ops: chosen at start-up.
    """

    def __init__(
        self,
        spec: M3Spec,
        kind: LayerKind,
        weights: LayerWeights,
        kernels: LayerKernels,
        ops: Ops,
    ):
        self._pack = ops.linear_sums if kernels.adds_sums else ops.linear
        self._linear_sums = ops.linear_sums
        self._qkv, self._o = weights.qkv, weights.o
        self._norms = HeadNorms(
            q=weights.q_norm,
            k=weights.k_norm,
            index_q=weights.index_q_norm,
            index_k=weights.index_k_norm,
            eps=spec.rms_norm_eps,
        )
        self._kernels = kernels
        self._scale = spec.head_dim**-0.5
        self._selection = None
        if kind is LayerKind.SPARSE:
            self._selection = Selection(spec.top_blocks, spec.init_blocks, spec.local_blocks)

    def __call__(
        self,
        hidden_TW: Tensor,
        cache: LayerCache,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: Any,
    ) -> Any:
        """Attend, writing this step's tokens to the cache first.

        Args:
            hidden_TW: normed input.
            cache: this layer's lanes; written.
            slots: [T] int64.
            cos: [T, half] float32.
            sin: [T, half] float32.
            plan: of this step, from the kernels' own ``plan``.

        Returns:
            the delta that ``ops.add_norm`` takes: [T, W], before the residual is added.
        """
        packed = self._pack(hidden_TW, self._qkv)
        q, index_q = self._kernels.write(cache, packed, slots, cos, sin, self._norms)
        blocks = None
        if self._selection is not None:
            assert self._kernels.select is not None
            blocks = self._kernels.select(index_q, cache, plan, self._selection)
        out = self._kernels.attend(q, cache, plan, blocks, self._scale)
        return self._linear_sums(out.flatten(1), self._o)
