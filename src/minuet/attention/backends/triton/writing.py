"""The launch of ``write``: normalise, rotate, quantise and store a step."""

import torch
import triton
from torch import Tensor

from minuet.attention.backends.triton.arguments import (
    OPERAND_OF,
    options_of,
    power_of_2,
    scales_of,
    strides_of,
    target_of,
)
from minuet.attention.backends.triton.config import Target, Tuning
from minuet.attention.backends.triton.kernels import write as write_kernels
from minuet.errors import ContractError
from minuet.kv.cache import LayerCache
from minuet.kv.write import HeadNorms
from minuet.ops.sums import Sums, parts_of
from minuet.platform.triton import Launch

# T query tokens, H query heads, K KV heads, D head dim, I index dim

_SUMMED_HEADS = 1  # query heads of a program that adds parts up: all its loads are in flight


def write(
    cache: LayerCache,
    packed: Tensor | Sums,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms,
) -> tuple[Tensor, Tensor | None]:
    """Normalise, rotate, quantise and store a step in one launch: :func:`minuet.kv.write.write`.

    Args:
        cache: the layer's lanes; written.
        packed: [T, (H + 2K) * D + K * I + I] in one piece, or what adds up to it.
        slots: [T] int64; -1 is skipped.
        cos: [T, half] float32.
        sin: [T, half] float32.
        norms: per-head norm weights.

    Returns:
        q [T, H, D] and index_q [T, K, I] (None on a dense layer).
    """
    layout, num_tokens = cache.layout, packed.shape[0]
    heads, dim, index_dim = layout.num_kv_heads, layout.head_dim, layout.index_dim
    q_heads = layout.query_heads(packed.shape[1])
    q = torch.empty((num_tokens, q_heads, dim), dtype=packed.dtype, device=slots.device)
    index_q = q.new_empty(num_tokens, heads, index_dim) if index_dim else None
    if num_tokens:
        write_launch(cache, packed, slots, cos, sin, norms, (q, index_q))()
    return q, index_q


def write_launch(
    cache: LayerCache,
    packed: Tensor | Sums,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms,
    queries: tuple[Tensor, Tensor | None],
    target: Target | None = None,
) -> Launch:
    """The launch of :func:`write`; ``queries`` are its outputs."""
    layout, target = cache.layout, target or target_of(slots.device)
    q, index_q = queries
    values, sums = parts_of(packed)
    if not values.is_contiguous():
        raise ContractError("packed rows", got=values.stride(), expected="in one piece")
    q_heads = q.shape[1]
    q_heads_each = _SUMMED_HEADS if sums else power_of_2(q_heads)
    k_scale, v_scale = scales_of(cache)
    index_k = cache.index_k if layout.index_dim else cache.k.flatten(1, 2)
    index_fp8 = bool(layout.index_dim) and layout.index_dtype.is_fp8
    args = dict(
        packed_ptr=values,
        q_out_ptr=q,
        index_q_out_ptr=q if index_q is None else index_q,
        slots_ptr=slots,
        cos_ptr=cos,
        sin_ptr=sin,
        q_norm_ptr=norms.q,
        k_norm_ptr=norms.k,
        index_q_norm_ptr=norms.q if norms.index_q is None else norms.index_q,
        index_k_norm_ptr=norms.k if norms.index_k is None else norms.index_k,
        k_ptr=cache.k,
        v_ptr=cache.v,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        index_k_ptr=index_k,
        stride_cos=cos.stride(0),
        **strides_of(cache.k, cache.v, k_scale),
        stride_k_token=cache.k.stride(2),
        stride_v_token=cache.v.stride(2),
        stride_index_page=index_k.stride(0),
        stride_index_token=index_k.stride(1),
        eps=norms.eps,
        WIDTH=values.shape[-1],
        H=q_heads,
        Q_HEADS=q_heads_each,
        K=layout.num_kv_heads,
        K_PAD=power_of_2(layout.num_kv_heads),
        D=layout.head_dim,
        I=layout.index_dim or layout.head_dim,
        HALF=cos.shape[1],
        PAGE=layout.page_size,
        MAX=layout.kv_dtype.max_value,
        SCALED=layout.has_scales,
        INDEX_MAX=layout.index_dtype.max_value,
        INDEX_FP8=index_fp8,
        SUMS=sums,
        KEPT=OPERAND_OF[packed.dtype],
        PDL=target.pdl,
    )
    lanes = 2 + triton.cdiv(q_heads, q_heads_each) + (2 if layout.index_dim else 0)
    grid = (packed.shape[0], lanes)
    # no fused multiply-add: the stored bytes are those of the definition in kv/write.py
    options = options_of(target, Tuning(0, 4, 1), enable_fp_fusion=False)
    return Launch(write_kernels.write_step, grid, args, options)
