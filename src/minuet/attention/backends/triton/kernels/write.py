"""Norm, rope, quantisation and the store into every lane, one launch for all tokens of a step."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.common import let_next_start, load_product, wait_for_previous


@triton.jit
def norm_rope(
    x_ptr, stride_part, weight_ptr, cos_ptr, sin_ptr, mask, eps,
    D: tl.constexpr, HALF: tl.constexpr, SUMS: tl.constexpr, KEPT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """[HB, D] heads at ``x_ptr`` [HB, 1]: Gemma norm, cast, rotation of 2 * HALF channels, cast.

    A channel's partner in the rotation is loaded a second time: no exchange between threads.
    """
    channel = tl.arange(0, D)
    partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
    partner = tl.where(channel < 2 * HALF, partner, channel)
    gain = 1.0 + tl.load(weight_ptr + channel)[None, :]
    partner_gain = 1.0 + tl.load(weight_ptr + partner)[None, :]
    rotated = channel < 2 * HALF
    angle = tl.where(channel < HALF, channel, channel - HALF)
    cos = tl.load(cos_ptr + angle, mask=rotated, other=1.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=rotated, other=0.0)[None, :]
    sin = tl.where((channel < HALF)[None, :], -sin, sin)
    x = load_product(x_ptr + channel[None, :], stride_part, mask, SUMS, KEPT, PDL)
    y = load_product(x_ptr + partner[None, :], stride_part, mask, SUMS, KEPT, PDL)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = (x * inverse * gain).to(KEPT).to(tl.float32)
    y = (y * inverse * partner_gain).to(KEPT).to(tl.float32)
    return (x * cos + y * sin).to(KEPT).to(tl.float32)


@triton.jit
def store_lane(
    value,  # [HB, D] FP32
    lane_ptr,  # [HB, 1] addresses of the vectors
    scale_ptr,  # [HB] addresses of the scales; SCALED only
    head,  # [HB] bool
    MAX: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Quantise by the one rule and store: scale = amax / MAX, or 1 for a zero vector; saturate."""
    if SCALED:
        largest = tl.max(tl.abs(value), 1)
        scale = tl.where(largest > 0, tl.div_rn(largest, MAX), 1.0)
        value = tl.div_rn(value, scale[:, None] + tl.zeros_like(value))
        tl.store(scale_ptr, scale, mask=head)
    if FP8:
        value = tl.minimum(tl.maximum(value, -MAX), MAX)
    at = lane_ptr + tl.arange(0, D)[None, :]
    tl.store(at, value.to(lane_ptr.dtype.element_ty), mask=head[:, None])


@triton.jit(
    do_not_specialize=["stride_cos"],
    do_not_specialize_on_alignment=["slots_ptr", "cos_ptr", "sin_ptr"],
)
def write_step(
    packed_ptr,  # [T, WIDTH]: q | k | v | index_q | index_k; SUMS: [SUMS, T, WIDTH] FP32
    q_out_ptr,  # [T, H, D] contiguous
    index_q_out_ptr,  # [T, K, I] contiguous
    slots_ptr,  # [T] int64
    cos_ptr,  # [T, HALF] FP32
    sin_ptr,
    q_norm_ptr,  # [D] FP32
    k_norm_ptr,
    index_q_norm_ptr,  # [I] FP32
    index_k_norm_ptr,
    k_ptr,  # [N, K, P, D]
    v_ptr,
    k_scale_ptr,  # [N, K, P] FP32
    v_scale_ptr,
    index_k_ptr,  # [N, P, I]
    stride_cos,
    stride_k_page, stride_k_head, stride_k_token,
    stride_v_page, stride_v_head, stride_v_token,
    stride_scale_page, stride_scale_head,
    stride_index_page, stride_index_token,
    eps,
    WIDTH: tl.constexpr, H: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    Q_HEADS: tl.constexpr,  # of a program that has queries
    D: tl.constexpr, I: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    MAX: tl.constexpr, SCALED: tl.constexpr, INDEX_MAX: tl.constexpr, INDEX_FP8: tl.constexpr,
    SUMS: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One lane of one token: 0 keys, 1 values, 2 and on queries, then index queries and key."""
    token, lane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stride_part = tl.num_programs(0) * WIDTH
    index_lane: tl.constexpr = 2 + (H + Q_HEADS - 1) // Q_HEADS
    let_next_start(PDL)
    wait_for_previous(PDL)
    packed_ptr += token * WIDTH
    cos_ptr += token * stride_cos
    sin_ptr += token * stride_cos
    slot = tl.load(slots_ptr + token)
    page, within = slot // PAGE, slot % PAGE
    kv_head = tl.arange(0, K_PAD)
    kept = (kv_head < K) & (slot >= 0)
    if lane == 0:
        k = norm_rope(
            packed_ptr + H * D + kv_head[:, None] * D, stride_part, k_norm_ptr, cos_ptr, sin_ptr,
            kv_head[:, None] < K, eps, D, HALF, SUMS, KEPT, PDL,
        )  # fmt: skip
        k_at = k_ptr + page * stride_k_page + within * stride_k_token + kv_head * stride_k_head
        k_scale_at = k_scale_ptr + page * stride_scale_page + within + kv_head * stride_scale_head
        store_lane(k, k_at[:, None], k_scale_at, kept, MAX, SCALED, SCALED, D)
    elif lane == 1:
        from_ptr = packed_ptr + (H + K) * D + kv_head[:, None] * D + tl.arange(0, D)[None, :]
        v = load_product(from_ptr, stride_part, kv_head[:, None] < K, SUMS, KEPT, PDL)
        v_at = v_ptr + page * stride_v_page + within * stride_v_token + kv_head * stride_v_head
        v_scale_at = v_scale_ptr + page * stride_scale_page + within + kv_head * stride_scale_head
        store_lane(v, v_at[:, None], v_scale_at, kept, MAX, SCALED, SCALED, D)
    elif lane < index_lane:
        q_head = (lane - 2) * Q_HEADS + tl.arange(0, Q_HEADS)[:, None]
        q = norm_rope(
            packed_ptr + q_head * D, stride_part, q_norm_ptr, cos_ptr, sin_ptr,
            q_head < H, eps, D, HALF, SUMS, KEPT, PDL,
        )  # fmt: skip
        q_at = q_out_ptr + (token * H + q_head) * D + tl.arange(0, D)[None, :]
        tl.store(q_at, q.to(KEPT), mask=q_head < H)
    elif lane == index_lane:
        index_head = kv_head[:, None]
        index_q = norm_rope(
            packed_ptr + (H + 2 * K) * D + index_head * I, stride_part, index_q_norm_ptr,
            cos_ptr, sin_ptr, index_head < K, eps, I, HALF, SUMS, KEPT, PDL,
        )  # fmt: skip
        index_q_at = index_q_out_ptr + (token * K + index_head) * I + tl.arange(0, I)[None, :]
        tl.store(index_q_at, index_q.to(KEPT), mask=index_head < K)
    else:
        one = tl.arange(0, 1)
        index_k = norm_rope(
            packed_ptr + (H + 2 * K) * D + K * I + one[:, None] * I, stride_part, index_k_norm_ptr,
            cos_ptr, sin_ptr, one[:, None] < 1, eps, I, HALF, SUMS, KEPT, PDL,
        )  # fmt: skip
        index_at = index_k_ptr + page * stride_index_page + within * stride_index_token + one
        store_lane(
            index_k, index_at[:, None], index_at, (one < 1) & (slot >= 0),
            INDEX_MAX, False, INDEX_FP8, I,
        )  # fmt: skip
