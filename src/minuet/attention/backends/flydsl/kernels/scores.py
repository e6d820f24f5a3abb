"""Score of every visible block for every index query: the largest product over its tokens.

Workgroup (x, y): query token x, blocks 4 y .. 4 y + 3, one to a wave. All index heads of the token
are the columns of one matrix tile, since they share the index key.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr

from minuet.attention.backends.flydsl.kernels import device as dev

BLOCK = 128  # tokens of a block, which is a page


def build(traits, fp8, index_dim):
    """Launcher of one specialisation.

    Args:
        traits: of the arch.
        fp8: the index key is FP8 (stored as it is), else BF16.
        index_dim: 64 or 128.
    """
    x = 16 if fp8 else 8
    groups, run = traits.groups, traits.run
    chunks = index_dim // x // groups
    cache = fx.Uint8 if fp8 else fx.BFloat16

    @flyc.kernel(name="scores", known_block_size=(traits.threads, 1, 1))
    def kernel(
        scores: fx.Pointer,  # [tokens, heads, max_blocks] f32
        index_q: fx.Pointer,  # [tokens, heads, index_dim] bf16
        index_k: fx.Pointer,  # [pages, 128, index_dim]
        page_table: fx.Pointer,  # [sequences, max_pages] i32
        positions: fx.Pointer,  # [tokens] i64
        sequences: fx.Pointer,  # [tokens] i32
        heads: fx.Int32,
        max_pages: fx.Int32,
        max_blocks: fx.Int32,
    ):
        lane, wave = dev.lane_and_wave(traits)
        column, lane_group = lane & 15, lane >> 4
        token = fx.Int32(fx.block_idx.x)
        block = fx.Int32(fx.block_idx.y) * dev.WAVES + wave
        position = fx.Int32(dev.load(positions, fx.Int64, token))
        if block * BLOCK <= position:
            seq = dev.load(sequences, fx.Int32, token)
            page = dev.load(page_table, fx.Int32, fx.Int64(seq) * max_pages + block)
            head = dev.at_most(column, heads - 1)
            q_row = (fx.Int64(token) * heads + head) * index_dim
            q_words = []
            for c in range_constexpr(chunks):
                for part in range_constexpr(x // 8):
                    at = q_row + (c * groups + lane_group) * x + part * 8
                    eight = dev.load(index_q, fx.BFloat16, at, 8).bitcast(fx.Uint32)
                    q_words = q_words + [eight[i] for i in range_constexpr(4)]
            best = fx.Float32(dev.NEG_INF)
            for j in range_constexpr(BLOCK // 16):
                row = (fx.Int64(page) * BLOCK + j * 16 + column) * index_dim
                words = []
                for c in range_constexpr(chunks):
                    raw = dev.load(index_k, cache, row + (c * groups + lane_group) * x, x)
                    raw = raw.bitcast(fx.Uint32)
                    words = words + dev.words_to_bf16(
                        traits, [raw[i] for i in range_constexpr(4)], fp8
                    )
                product = dev.contract(traits, words, q_words, dev.zero_tile(traits))
                first = block * BLOCK + j * 16 + lane_group * run
                for r in range_constexpr(run):
                    seen = first + r <= position
                    best = dev.maximum(best, seen.select(product[r], fx.Float32(dev.NEG_INF)))
            best = dev.over_groups(best, dev.maximum, traits)
            if lane < heads:
                at = (fx.Int64(token) * heads + lane) * max_blocks + block
                dev.store(scores, fx.Float32, at, best)

    @flyc.jit
    def launch(
        scores: fx.Pointer,
        index_q: fx.Pointer,
        index_k: fx.Pointer,
        page_table: fx.Pointer,
        positions: fx.Pointer,
        sequences: fx.Pointer,
        heads: fx.Int32,
        max_pages: fx.Int32,
        max_blocks: fx.Int32,
        grid_x: fx.Int32,
        grid_y: fx.Int32,
        stream: fx.Stream,
    ):
        kernel(
            scores,
            index_q,
            index_k,
            page_table,
            positions,
            sequences,
            heads,
            max_pages,
            max_blocks,
        ).launch(grid=(grid_x, grid_y, 1), block=(traits.threads, 1, 1), stream=stream)

    return launch
