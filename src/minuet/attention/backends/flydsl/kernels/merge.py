"""Merge of partial results: rows of several parts, and zeros for empty rows.

Workgroup (x, y): sequence x of a plan, or query token x of a row split; KV head y. A row written
directly is left alone.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr

from minuet.attention.backends.flydsl.kernels import device as dev


def build(traits, head_dim, planned):
    """Launcher of one specialisation.

    Args:
        traits: of the arch.
        head_dim: 64 or 128.
        planned: parts come from a DecodePlan's rows; otherwise every token has ``parts``.
    """
    pairs = head_dim // 2

    @flyc.kernel(name="merge", known_block_size=(traits.threads, 1, 1))
    def merge(
        out: fx.Pointer,  # [tokens, heads, head_dim] bf16
        partial_out: fx.Pointer,  # [kv_heads, slots, vectors, head_dim] f32
        partial_lse: fx.Pointer,  # [kv_heads, slots, vectors] f32, base 2
        rows: fx.Pointer,  # planned: [sequences, 2] i32
        kv_heads: fx.Int32,
        group: fx.Int32,
        query_len: fx.Int32,
        slots: fx.Int32,
        parts: fx.Int32,
    ):
        tid = fx.Int32(fx.thread_idx.x)
        row = fx.Int32(fx.block_idx.x)
        head = fx.Int32(fx.block_idx.y)
        if const_expr(planned):
            entry = dev.load(rows, fx.Int32, row * 2, 2)
            first, count = entry[0], entry[1]
        else:
            first, count = row * parts, parts
        vectors = group * query_len
        if first >= 0:  # -1: written directly
            base = fx.Int64(head) * slots + first
            for item in range(tid, vectors * pairs, fx.Int32(traits.threads)):
                vector = item // pairs
                channel = (item % pairs) * 2
                peak = fx.Float32(dev.NEG_INF)
                for part in range(fx.Int32(0), count):
                    at = (base + part) * vectors + vector
                    peak = dev.maximum(peak, dev.load(partial_lse, fx.Float32, at))
                peak = (peak > fx.Float32(dev.NEG_INF)).select(peak, fx.Float32(0.0))
                total = fx.Float32(0.0)
                low = fx.Float32(0.0)
                high = fx.Float32(0.0)
                for part in range(fx.Int32(0), count):
                    at = (base + part) * vectors + vector
                    weight = dev.exp2(dev.load(partial_lse, fx.Float32, at) - peak)
                    two = dev.load(partial_out, fx.Float32, at * head_dim + channel, 2)
                    total = total + weight
                    low = low + weight * two[0]
                    high = high + weight * two[1]
                inverse = (total > fx.Float32(0.0)).select(fx.Float32(1.0) / total, fx.Float32(0.0))
                token = row * query_len + vector // group
                q_head = head * group + vector % group
                out_at = (fx.Int64(token) * kv_heads * group + q_head) * head_dim + channel
                word = dev.f32_pair_to_bf16(low * inverse, high * inverse)
                dev.store(out, fx.Uint32, out_at // 2, word)

    @flyc.jit
    def launch(
        out: fx.Pointer,
        partial_out: fx.Pointer,
        partial_lse: fx.Pointer,
        rows: fx.Pointer,
        kv_heads: fx.Int32,
        group: fx.Int32,
        query_len: fx.Int32,
        slots: fx.Int32,
        parts: fx.Int32,
        grid_x: fx.Int32,
        stream: fx.Stream,
    ):
        merge(out, partial_out, partial_lse, rows, kv_heads, group, query_len, slots, parts).launch(
            grid=(grid_x, kv_heads, 1), block=(traits.threads, 1, 1), stream=stream
        )

    return launch
