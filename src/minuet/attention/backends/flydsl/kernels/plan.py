"""The planner on the device: the integers of ``DecodePlan.refresh`` from lengths that are there.

One workgroup goes over the sequences in chunks, with running sums in registers: nothing in LDS
depends on the batch, so there is no largest batch. Three passes: totals; counts, slots and records;
zeros behind the last record. A graph captures it before the layers; it writes in place.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import range_constexpr

from minuet.attention.backends.flydsl.kernels import device as dev


def build(traits):
    """Launcher."""
    threads = traits.threads
    steps = threads.bit_length() - 1

    @flyc.kernel(name="plan", known_block_size=(threads, 1, 1))
    def kernel(
        work: fx.Pointer,  # [capacity, 4] i32
        rows: fx.Pointer,  # [max_seqs, 2] i32
        lengths_out: fx.Pointer,  # [max_seqs] i32
        lengths: fx.Pointer,  # [num_seqs] i32
        num_seqs: fx.Int32,
        max_seqs: fx.Int32,
        capacity: fx.Int32,
        budget: fx.Int32,
        max_parts: fx.Int32,
        part_tiles: fx.Int32,
        tile_tokens: fx.Int32,
    ):
        lds = fx.SharedAllocator().allocate(2 * threads * 8).peek().ptr
        tid = fx.Int32(fx.thread_idx.x)

        def scanned(value):
            """Inclusive sums over the workgroup, and the total."""
            fx.gpu.barrier()  # the last scan has been read
            dev.lds_store(lds, fx.Int64, tid, value)
            for step in range_constexpr(steps):
                here, there = (step % 2) * threads, ((step + 1) % 2) * threads
                fx.gpu.barrier()
                before = dev.at_least(tid - (1 << step), fx.Int32(0))
                other = dev.lds_load(lds, fx.Int64, before + here)
                value = value + (tid >= (1 << step)).select(other, fx.Int64(0))
                dev.lds_store(lds, fx.Int64, tid + there, value)
            fx.gpu.barrier()
            last = (steps % 2) * threads + threads - 1
            return value, dev.lds_load(lds, fx.Int64, fx.Int32(last))

        tiles_sum = fx.Int64(0)
        alive_sum = fx.Int64(0)
        for seq in range(tid, num_seqs, fx.Int32(threads)):
            tiles = (dev.load(lengths, fx.Int32, seq) + tile_tokens - 1) // tile_tokens
            tiles_sum = tiles_sum + fx.Int64(tiles)
            alive_sum = alive_sum + (tiles > 0).select(fx.Int64(1), fx.Int64(0))
        _, total = scanned(tiles_sum)
        _, alive = scanned(alive_sum)
        left = fx.Int64(dev.at_most(budget, capacity)) - alive
        left = dev.at_least(left, fx.Int64(0))
        dealing = (left > fx.Int64(0)) & (total > fx.Int64(0))
        divisor = dev.at_least(total, fx.Int64(1))

        seen_tiles = fx.Int64(0)
        seen_parts = fx.Int64(0)
        for chunk in range(fx.Int32(0), max_seqs, fx.Int32(threads)):
            seq = chunk + tid
            there = seq < num_seqs
            safe = dev.at_least(dev.at_most(seq, num_seqs - 1), fx.Int32(0))
            length = fx.Int32(0)
            if there:
                length = dev.load(lengths, fx.Int32, safe)
            tiles = fx.Int64((length + tile_tokens - 1) // tile_tokens)
            sums, chunk_tiles = scanned(tiles)
            upto = seen_tiles + sums
            share = upto * left // divisor - (upto - tiles) * left // divisor
            share = dealing.select(share, fx.Int64(0))
            most = fx.Int64(max_parts)
            balanced = dev.at_most(dev.at_most(share + 1, most), tiles)
            each = fx.Int64(dev.at_least(part_tiles, fx.Int32(1)))
            fixed = dev.at_most((tiles + each - 1) // each, most)
            count = (part_tiles > 0).select(fixed, balanced)
            slots = (count > fx.Int64(1)).select(count, fx.Int64(0))
            # parts in the upper half, slots in the lower: one scan for both
            packed = (count << fx.Int64(32)) | slots
            sums, chunk_parts = scanned(packed)
            before = seen_parts + sums - packed
            record = fx.Int32(before >> fx.Int64(32))
            slot = fx.Int32(before & fx.Int64(0xFFFFFFFF))
            parts = fx.Int32(count)
            split = parts > 1
            if seq < max_seqs:
                direct = (parts > 0).select(fx.Int32(-1), fx.Int32(0))
                dev.store(rows, fx.Int32, seq * 2, split.select(slot, direct))
                dev.store(rows, fx.Int32, seq * 2 + 1, parts)
                dev.store(lengths_out, fx.Int32, seq, length)
                tiles32 = fx.Int32(tiles)
                for part in range(fx.Int32(0), parts):
                    at = fx.Int64(record + part) * 4
                    dev.store(work, fx.Int32, at, seq)
                    dev.store(work, fx.Int32, at + 1, part * tiles32 // parts)
                    dev.store(work, fx.Int32, at + 2, (part + 1) * tiles32 // parts)
                    dev.store(work, fx.Int32, at + 3, split.select(slot + part, fx.Int32(-1)))
            seen_tiles = seen_tiles + chunk_tiles
            seen_parts = seen_parts + chunk_parts

        used = fx.Int32(seen_parts >> fx.Int64(32))
        for record in range(used + tid, capacity, fx.Int32(threads)):
            at = fx.Int64(record) * 4
            for field in range_constexpr(4):
                dev.store(work, fx.Int32, at + field, fx.Int32(0))

    @flyc.jit
    def launch(
        work: fx.Pointer,
        rows: fx.Pointer,
        lengths_out: fx.Pointer,
        lengths: fx.Pointer,
        num_seqs: fx.Int32,
        max_seqs: fx.Int32,
        capacity: fx.Int32,
        budget: fx.Int32,
        max_parts: fx.Int32,
        part_tiles: fx.Int32,
        tile_tokens: fx.Int32,
        stream: fx.Stream,
    ):
        kernel(
            work,
            rows,
            lengths_out,
            lengths,
            num_seqs,
            max_seqs,
            capacity,
            budget,
            max_parts,
            part_tiles,
            tile_tokens,
        ).launch(grid=(1, 1, 1), block=(threads, 1, 1), stream=stream)

    return launch
