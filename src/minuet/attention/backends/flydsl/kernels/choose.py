"""The best blocks of every row, ascending, from their scores. One wave per (query token, head).

Each round takes the best block that comes after the one before in a total order: forced blocks
first, then by falling score, then by rising number. Nothing is marked or moved, so the scores are
only read. A NaN ranks with minus infinity; both zeros are equal.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr, rocdl
from flydsl.expr.typing import T

from minuet.attention.backends.flydsl.kernels import device as dev
from minuet.attention.backends.flydsl.kernels.scores import BLOCK

MAX_TOP = 16
_LOWEST = 1  # rank of minus infinity; 0 is for blocks that are not there
_FORCED = 0xFFFFFFFE  # above plus infinity, and below the start of the first round


def _rank(score):
    """Floats as unsigned integers of the same order."""
    bits = (score + fx.Float32(0.0)).bitcast(fx.Uint32)  # -0 becomes +0
    ordered = (bits >= 0x80000000).select(~bits, bits | 0x80000000)
    low = (score > fx.Float32(dev.NEG_INF)).select(ordered, fx.Uint32(_LOWEST))
    return fx.Uint32(low)


def _larger(a, b):
    return fx.Uint64((a > b).select(a, b))


def _other_half(key, distance, traits):
    """A 64-bit value from lane ^ distance, as two of 32 bits."""
    low, high = fx.Int32(fx.Uint32(key)), fx.Int32(fx.Uint32(key >> 32))
    low, high = (fx.shuffle_xor(part, distance, traits.wave) for part in (low, high))
    return (fx.Uint64(fx.Uint32(high)) << 32) | fx.Uint64(fx.Uint32(low))


def build(traits):
    """Launcher."""

    @flyc.kernel(name="choose", known_block_size=(traits.wave, 1, 1))
    def kernel(
        blocks: fx.Pointer,  # [tokens, heads, top] i32
        scores: fx.Pointer,  # [tokens, heads, max_blocks] f32
        positions: fx.Pointer,  # [tokens] i64
        heads: fx.Int32,
        max_blocks: fx.Int32,
        top: fx.Int32,
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
    ):
        lane = fx.Int32(fx.thread_idx.x)
        row = fx.Int32(fx.block_idx.x)
        position = fx.Int32(dev.load(positions, fx.Int64, row // heads))
        count = (position + BLOCK) // BLOCK  # visible blocks; 0 at position -1
        base = fx.Int64(row) * max_blocks
        mine = fx.Int32(-1)
        last = fx.Uint64(0xFFFFFFFFFFFFFFFF)
        for round_number in range(fx.Int32(0), top):
            best = fx.Uint64(0)
            for block in range(lane, count, fx.Int32(traits.wave)):
                rank = _rank(dev.load(scores, fx.Float32, base + block))
                first = block < init_blocks
                recent = block >= count - local_blocks
                rank = first.select(fx.Uint32(_FORCED), rank)
                rank = fx.Uint32(recent.select(fx.Uint32(_FORCED), rank))
                key = (fx.Uint64(rank) << 32) | fx.Uint64(fx.Uint32(0xFFFFFFFF) - fx.Uint32(block))
                best = _larger(best, fx.Uint64((key < last).select(key, fx.Uint64(0))))
            distance = 1
            for _ in range_constexpr(6 if traits.wave == 64 else 5):
                best = _larger(best, _other_half(best, distance, traits))
                distance = distance * 2
            chosen = fx.Int32(fx.Uint32(0xFFFFFFFF) - fx.Uint32(best))
            taken = (lane == round_number) & (best > fx.Uint64(0))
            mine = fx.Int32(taken.select(chosen, mine))
            last = best
        place = fx.Int32(0)
        for other_lane in range_constexpr(MAX_TOP):
            other = fx.Int32(rocdl.readlane(T.i32, mine, other_lane))
            below = (other >= 0) & (other < mine)
            place = place + below.select(fx.Int32(1), fx.Int32(0))
        place = (mine >= 0).select(place, lane)  # lanes without a block hold the tail
        if lane < top:
            dev.store(blocks, fx.Int32, fx.Int64(row) * top + place, mine)

    @flyc.jit
    def launch(
        blocks: fx.Pointer,
        scores: fx.Pointer,
        positions: fx.Pointer,
        heads: fx.Int32,
        max_blocks: fx.Int32,
        top: fx.Int32,
        init_blocks: fx.Int32,
        local_blocks: fx.Int32,
        grid_x: fx.Int32,
        stream: fx.Stream,
    ):
        kernel(blocks, scores, positions, heads, max_blocks, top, init_blocks, local_blocks).launch(
            grid=(grid_x, 1, 1), block=(traits.wave, 1, 1), stream=stream
        )

    return launch
