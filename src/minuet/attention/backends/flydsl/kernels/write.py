"""The cache writer: norm, rope, quantise and store every lane of a layer in one launch.

One wave per (query token, vector of the packed row): query heads, K heads, V heads, index query
heads, the index key. A lane holds ``dim / wave`` neighbouring channels. Rounding follows
``minuet.kv.write``: to BF16 after the norm, again after the rotation, then the one quantisation
rule with the maximum of the arch's FP8 type.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, range_constexpr, rocdl
from flydsl.expr.typing import T

from minuet.attention.backends.flydsl.kernels import device as dev


def _bf16(x):
    """Rounded to BF16, as float."""
    return fx.Float32(fx.Float32(x).to(fx.BFloat16).to(fx.Float32))


def build(traits, fp8, head_dim, page, index_dim, index_fp8):
    """Launcher of one specialisation.

    Args:
        traits: of the arch.
        fp8: K and V are FP8 with a scale per token, else BF16.
        head_dim: 64 or 128.
        page: tokens per page.
        index_dim: channels of the index key, 0 on a dense layer.
        index_fp8: the index key is FP8, else BF16.
    """
    x = 16 if fp8 else 8
    top = traits.fp8.max_value

    def channel_of(lane, dim, i):
        return lane * (dim // traits.wave) + i

    def normed(packed, weight, base, dim, eps, half, cosine, sine, rope_at, lane):
        """Normalised and rotated channels of this lane, as floats that are BF16 values."""
        width = dim // traits.wave
        own = [
            fx.Float32(
                dev.load(packed, fx.BFloat16, base + channel_of(lane, dim, i)).to(fx.Float32)
            )
            for i in range(width)
        ]
        square = fx.Float32(0.0)
        for value in own:
            square = square + value * value
        square = dev.over_wave(square, dev.add, traits)
        mean = square * fx.Float32(1.0 / dim) + eps
        inverse = fx.Float32(rocdl.rsq(T.f32, mean.ir_value()))
        out = []
        for i, value in enumerate(own):
            channel = channel_of(lane, dim, i)
            mine = _bf16(value * inverse * (dev.load(weight, fx.Float32, channel) + 1.0))
            first, rotated = channel < half, channel < half * 2
            angle = first.select(channel, channel - half)
            other = first.select(channel + half, channel - half)
            other = rotated.select(other, channel)
            angle = rotated.select(angle, fx.Int32(0))
            partner = fx.Float32(
                dev.load(packed, fx.BFloat16, base + fx.Int64(other)).to(fx.Float32)
            )
            partner = _bf16(partner * inverse * (dev.load(weight, fx.Float32, other) + 1.0))
            cos = dev.load(cosine, fx.Float32, rope_at + fx.Int64(angle))
            sin = dev.load(sine, fx.Float32, rope_at + fx.Int64(angle))
            turned = first.select(mine * cos - partner * sin, mine * cos + partner * sin)
            out.append(_bf16(rotated.select(turned, mine)))
        return out

    def plain(packed, base, dim, lane):
        return [
            fx.Float32(
                dev.load(packed, fx.BFloat16, base + channel_of(lane, dim, i)).to(fx.Float32)
            )
            for i in range(dim // traits.wave)
        ]

    def quantised(values):
        """FP8 bytes of this lane's channels, and the vector's scale."""
        amax = fx.Float32(0.0)
        for value in values:
            amax = dev.maximum(amax, (value < fx.Float32(0.0)).select(-value, value))
        amax = dev.over_wave(fx.Float32(amax), dev.maximum, traits)
        scale = fx.Float32((amax > fx.Float32(0.0)).select(amax / fx.Float32(top), fx.Float32(1.0)))
        return [dev.f32_to_fp8(traits, value / scale) for value in values], scale

    def store_bf16(target, base, values, dim, lane):
        for i, value in enumerate(values):
            at = base + channel_of(lane, dim, i)
            dev.store(target, fx.BFloat16, at, fx.Float32(value).to(fx.BFloat16))

    @flyc.kernel(name="write", known_block_size=(traits.wave, 1, 1))
    def kernel(
        q_out: fx.Pointer,  # [tokens, q_heads, head_dim] bf16
        index_q_out: fx.Pointer,  # [tokens, kv_heads, index_dim] bf16
        k: fx.Pointer,  # [pages, kv_heads, head_dim / x, page, x]
        v: fx.Pointer,  # [pages, kv_heads, page / x, head_dim, x]
        k_scale: fx.Pointer,  # [pages, kv_heads, page] f32
        v_scale: fx.Pointer,
        index_k: fx.Pointer,  # [pages, page, index_dim]
        packed: fx.Pointer,  # [tokens, (q_heads + 2 kv_heads) head_dim + (kv_heads + 1) index_dim]
        slots: fx.Pointer,  # [tokens] i64, -1 is skipped
        cosine: fx.Pointer,  # [tokens, half] f32
        sine: fx.Pointer,
        q_norm: fx.Pointer,  # [head_dim] f32
        k_norm: fx.Pointer,
        index_q_norm: fx.Pointer,  # [index_dim] f32
        index_k_norm: fx.Pointer,
        eps: fx.Float32,
        q_heads: fx.Int32,
        kv_heads: fx.Int32,
        half: fx.Int32,
    ):
        lane = fx.Int32(fx.thread_idx.x)
        token = fx.Int32(fx.block_idx.x)
        vector = fx.Int32(fx.block_idx.y)
        main_width = (q_heads + kv_heads * 2) * head_dim
        width = main_width + (kv_heads + 1) * index_dim
        row = fx.Int64(token) * width
        rope_at = fx.Int64(token) * half
        slot = dev.load(slots, fx.Int64, token)
        stored = slot >= fx.Int64(0)
        slot = fx.Int64(stored.select(slot, fx.Int64(0)))
        page_id = slot // page
        inside = fx.Int32(slot % page)
        first_k, first_v = q_heads, q_heads + kv_heads
        first_index = first_v + kv_heads
        base = row + vector * head_dim
        if vector < first_k:
            values = normed(packed, q_norm, base, head_dim, eps, half, cosine, sine, rope_at, lane)
            at = (fx.Int64(token) * q_heads + vector) * head_dim
            store_bf16(q_out, at, values, head_dim, lane)
        if (vector >= first_k) & (vector < first_v):
            values = normed(packed, k_norm, base, head_dim, eps, half, cosine, sine, rope_at, lane)
            lane_at = (page_id * kv_heads + (vector - first_k)) * (head_dim * page)
            scale_at = (page_id * kv_heads + (vector - first_k)) * page + inside
            if const_expr(fp8):
                codes, scale = quantised(values)
            if stored:
                for i in range_constexpr(head_dim // traits.wave):
                    channel = channel_of(lane, head_dim, i)
                    at = lane_at + ((channel // x) * page + inside) * x + channel % x
                    if const_expr(fp8):
                        dev.store(k, fx.Uint8, at, codes[i])
                    else:
                        dev.store(k, fx.BFloat16, at, fx.Float32(values[i]).to(fx.BFloat16))
                if const_expr(fp8):  # noqa: SIM102 - traced apart
                    if lane == 0:
                        dev.store(k_scale, fx.Float32, scale_at, scale)
        if (vector >= first_v) & (vector < first_index):
            values = plain(packed, base, head_dim, lane)
            lane_at = (page_id * kv_heads + (vector - first_v)) * (head_dim * page)
            scale_at = (page_id * kv_heads + (vector - first_v)) * page + inside
            if const_expr(fp8):
                codes, scale = quantised(values)
            if stored:
                for i in range_constexpr(head_dim // traits.wave):
                    channel = channel_of(lane, head_dim, i)
                    at = lane_at + ((inside // x) * head_dim + channel) * x + inside % x
                    if const_expr(fp8):
                        dev.store(v, fx.Uint8, at, codes[i])
                    else:
                        dev.store(v, fx.BFloat16, at, fx.Float32(values[i]).to(fx.BFloat16))
                if const_expr(fp8):  # noqa: SIM102 - traced apart
                    if lane == 0:
                        dev.store(v_scale, fx.Float32, scale_at, scale)
        if const_expr(index_dim > 0):
            number = vector - first_index
            index_base = row + main_width + number * index_dim
            if (number >= 0) & (number < kv_heads):
                values = normed(
                    packed,
                    index_q_norm,
                    index_base,
                    index_dim,
                    eps,
                    half,
                    cosine,
                    sine,
                    rope_at,
                    lane,
                )
                at = (fx.Int64(token) * kv_heads + number) * index_dim
                store_bf16(index_q_out, at, values, index_dim, lane)
            if (number == kv_heads) & stored:
                values = normed(
                    packed,
                    index_k_norm,
                    index_base,
                    index_dim,
                    eps,
                    half,
                    cosine,
                    sine,
                    rope_at,
                    lane,
                )
                at = (page_id * page + inside) * index_dim
                if const_expr(index_fp8):
                    for i in range_constexpr(index_dim // traits.wave):
                        code = dev.f32_to_fp8(traits, values[i])
                        dev.store(index_k, fx.Uint8, at + channel_of(lane, index_dim, i), code)
                else:
                    store_bf16(index_k, at, values, index_dim, lane)

    @flyc.jit
    def launch(
        q_out: fx.Pointer,
        index_q_out: fx.Pointer,
        k: fx.Pointer,
        v: fx.Pointer,
        k_scale: fx.Pointer,
        v_scale: fx.Pointer,
        index_k: fx.Pointer,
        packed: fx.Pointer,
        slots: fx.Pointer,
        cosine: fx.Pointer,
        sine: fx.Pointer,
        q_norm: fx.Pointer,
        k_norm: fx.Pointer,
        index_q_norm: fx.Pointer,
        index_k_norm: fx.Pointer,
        eps: fx.Float32,
        q_heads: fx.Int32,
        kv_heads: fx.Int32,
        half: fx.Int32,
        grid_x: fx.Int32,
        grid_y: fx.Int32,
        stream: fx.Stream,
    ):
        kernel(
            q_out,
            index_q_out,
            k,
            v,
            k_scale,
            v_scale,
            index_k,
            packed,
            slots,
            cosine,
            sine,
            q_norm,
            k_norm,
            index_q_norm,
            index_k_norm,
            eps,
            q_heads,
            kv_heads,
            half,
        ).launch(grid=(grid_x, grid_y, 1), block=(traits.wave, 1, 1), stream=stream)

    return launch
