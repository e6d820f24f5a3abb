"""The only writer of the cache: norm, rope, quantise and store every lane, in one function.

This is the definition in plain torch. A GPU kernel that does the same in one launch is compared
with it byte by byte.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.errors import ContractError
from minuet.kv.cache import LayerCache
from minuet.kv.layout import Form, KVLayout, LaneName
from minuet.ops.quant import quantize_per_token
from minuet.ops.rope import rotate

# T tokens, H query heads, K KV heads, D head dim, I index dim


@dataclass(frozen=True)
class HeadNorms:
    """Per-head norm weights of one layer, shared by all heads.

    Attributes:
        q: [D] float32.
        k: [D] float32.
        index_q: [I] float32; None on a dense layer.
        index_k: [I] float32; None on a dense layer.
        eps: added to the mean square.
    """

    q: Tensor
    k: Tensor
    index_q: Tensor | None
    index_k: Tensor | None
    eps: float

    def qk_gains(self, num_q: int, num_k: int) -> Tensor:
        """[num_q + num_k, D] float32: ``1 + w`` of every head, queries first."""
        return self._gains("qk", self.q, num_q, self.k, num_k)

    def index_gains(self, num_q: int) -> Tensor:
        """[num_q + 1, I] float32: ``1 + w`` of every index head, queries first."""
        assert self.index_q is not None
        assert self.index_k is not None
        return self._gains("index", self.index_q, num_q, self.index_k, 1)

    def _gains(self, name: str, q: Tensor, num_q: int, k: Tensor, num_k: int) -> Tensor:
        # made once: weights do not change, and a step of few tokens costs what its operations cost
        key = (name, num_q, num_k)
        if key not in self._made:
            self._made[key] = 1.0 + torch.cat([q.expand(num_q, -1), k.expand(num_k, -1)])
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[str, int, int], Tensor]:
        return {}


def write(
    cache: LayerCache,
    packed: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms,
) -> tuple[Tensor, Tensor | None]:
    """Normalise and rotate this step's vectors, store K, V, scales and index key, return queries.

    Args:
        cache: the layer's lanes; written.
        packed: [T, (H + 2K) * D + K * I + I] rows ``[q | k | v | index_q | index_k]``; the index
            part only on a sparse layer.
        slots: [T] int64, ``page * page_size + token``; -1 is skipped (a padded row).
        cos: [T, half] float32 of the tokens' absolute positions.
        sin: [T, half] float32.
        norms: per-head norm weights.

    Returns:
        q [T, H, D] and index_q [T, K, I] (None on a dense layer), normalised and rotated, in the
        type of ``packed``.

    Raises:
        ContractError: the packed width is not that of the layout.
    """
    layout = cache.layout
    kv_width, index_dim = layout.num_kv_heads * layout.head_dim, layout.index_dim
    num_q = layout.query_heads(packed.shape[1])
    q_width, index_width = num_q * layout.head_dim, (layout.num_kv_heads + 1) * index_dim
    widths = [q_width + kv_width, kv_width]
    if index_dim:
        widths.append(index_width)
    parts = packed.split(widths, dim=1)
    heads = layout.num_kv_heads
    gains = norms.qk_gains(num_q, heads)
    qk = _normed_and_rotated(parts[0], gains, norms.eps, cos, sin)
    v = parts[1].unflatten(1, (-1, layout.head_dim))
    index_q = index_k = None
    if index_dim:
        index = _normed_and_rotated(parts[2], norms.index_gains(heads), norms.eps, cos, sin)
        index_q, index_k = index[:, :heads], index[:, heads]
    store(cache, slots, qk[:, num_q:], v, index_k)
    return qk[:, :num_q], index_q


def _normed_and_rotated(
    packed: Tensor, gains: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """[T, heads, D] from rows of heads, each with its own gain; one pass for queries and keys."""
    heads = packed.unflatten(1, gains.shape)
    normed = F.rms_norm(heads.float(), gains.shape[1:], None, eps) * gains
    return rotate(normed.to(packed.dtype), cos, sin)


def store(cache: LayerCache, slots: Tensor, k: Tensor, v: Tensor, index_k: Tensor | None) -> None:
    """Quantise as the layout says and store; rows with slot -1 leave the cache untouched.

    Args:
        cache: the layer's lanes; written.
        slots: [T] int64.
        k: [T, K, D], final (normalised and rotated).
        v: [T, K, D].
        index_k: [T, I], final; None on a dense layer. Cast without a scale, whatever the type.
    """
    layout = cache.layout
    if (index_k is None) != (layout.index_dim == 0):
        raise ContractError(
            "index_k",
            got=None if index_k is None else tuple(index_k.shape),
            expected="given iff the layer has the lane",
        )
    if slots.numel() and int(slots.min()) < 0:
        keep = slots >= 0
        slots, k, v = slots[keep], k[keep], v[keep]
        index_k = None if index_k is None else index_k[keep]
    page, token = slots // layout.page_size, slots % layout.page_size
    for name, scale_name, value in (
        (LaneName.K, LaneName.K_SCALE, k),
        (LaneName.V, LaneName.V_SCALE, v),
    ):
        lane = cache.lanes[name]
        if layout.has_scales:
            value, scale = quantize_per_token(value, lane.dtype)
            cache.lanes[scale_name][page, :, token] = scale
        _put(lane, layout, name, page, token, value.to(lane.dtype))
    if index_k is not None:
        lane = cache.index_k
        _bytes(lane)[page, token] = _bytes(_saturate(index_k, lane.dtype))


def _put(
    lane: Tensor, layout: KVLayout, name: LaneName, page: Tensor, token: Tensor, value: Tensor
) -> None:
    target, source, x = _bytes(lane), _bytes(value), layout.chunk
    if layout.form is Form.HEAD_MAJOR:
        target[page, :, token] = source
    elif name is LaneName.K:
        target[page, :, :, token] = source.unflatten(2, (-1, x))
    else:
        target[page, :, token // x, :, token % x] = source


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > 1:
        return x.to(dtype)
    top = torch.finfo(dtype).max
    return x.float().clamp(-top, top).to(dtype)


def _bytes(x: Tensor) -> Tensor:
    # indexed assignment is not implemented for FP8; bytes are moved, values are not touched
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
