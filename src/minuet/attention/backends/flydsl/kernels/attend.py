"""Attention over pages of the shuffle form: dense by plan, dense by rows, sparse by page lists.

One workgroup of four waves works on up to 16 query vectors of one KV head and a range of tokens.
A step of its loop takes 256 tokens, 64 to a wave, and waves never wait for each other: each keeps
its own running maximum, sum and output, and they are merged once, at the end, through LDS.

Both products are computed transposed. ``S^T = K Q^T`` leaves a lane with scores of one query (its
column) and of consecutive tokens, because K's rows are loaded in the order that makes them so; the
exponentials are then the B operand of ``O^T = V^T P^T`` as they stand, without a shuffle, and a
rescaling of a query's output is a product within the lane.

==========  ====================================================================
mode        work of workgroup (x, y, z)
==========  ====================================================================
``plan``    record x of a DecodePlan, KV head y, query vectors 16 z .. 16 z + 15
``rows``    part x % parts of query token x // parts over its whole past
``sparse``  the same over the token's list of blocks (a block is a page)
==========  ====================================================================

Query vectors of a plan's sequence are ``query_len x group``, of a row ``group``. Batch, lengths,
heads, group and query length are run-time values.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, range_constexpr

from minuet.attention.backends.flydsl.kernels import device as dev

WAVE_TOKENS = 64
TILE_TOKENS = dev.WAVES * WAVE_TOKENS
UNIT = 16  # tokens that always lie in one page
MODES = ("plan", "rows", "sparse")


def build(traits, fp8, head_dim, page, mode):
    """Launcher of one specialisation.

    Args:
        traits: of the arch.
        fp8: K and V are FP8 with a scale per token, else BF16.
        head_dim: 64 or 128.
        page: tokens per page: 16, 64 or 128.
        mode: one of :data:`MODES`.
    """
    x = 16 if fp8 else 8  # elements of a 16-byte chunk
    groups, run = traits.groups, traits.run
    lane_tokens = WAVE_TOKENS // groups
    lane_units = lane_tokens // UNIT
    chunks = head_dim // x // groups  # of a token's K, per lane
    tiles_d = head_dim // 16
    half_d = head_dim // 2
    row = half_d + 4  # floats of an LDS row; 4 of padding spread the banks
    each = half_d * 16 // traits.threads  # outputs of a work-item per half
    cache = fx.Uint8 if fp8 else fx.BFloat16
    sparse, plan = mode == "sparse", mode == "plan"

    @flyc.kernel(name=f"attend_{mode}", known_block_size=(traits.threads, 1, 1))
    def attend(
        out: fx.Pointer,  # [tokens, heads, head_dim] bf16
        partial_out: fx.Pointer,  # [kv_heads, slots, vectors, head_dim] f32
        partial_lse: fx.Pointer,  # [kv_heads, slots, vectors] f32, base 2
        q: fx.Pointer,  # [tokens, heads, head_dim] bf16
        k: fx.Pointer,  # [pages, kv_heads, head_dim / x, page, x]
        v: fx.Pointer,  # [pages, kv_heads, page / x, head_dim, x]
        k_scale: fx.Pointer,  # [pages, kv_heads, page] f32
        v_scale: fx.Pointer,  # [pages, kv_heads, page] f32
        page_table: fx.Pointer,  # [sequences, max_pages] i32
        positions: fx.Pointer,  # [tokens] i64
        work: fx.Pointer,  # plan: [capacity, 4] i32; rows: [tokens] i32 sequence of each token
        lists: fx.Pointer,  # plan: [sequences] i32 lengths; sparse: [tokens, kv_heads, top] i32
        scale_log2: fx.Float32,  # softmax scale x log2(e)
        kv_heads: fx.Int32,
        group: fx.Int32,
        query_len: fx.Int32,
        max_pages: fx.Int32,
        slots: fx.Int32,
        parts: fx.Int32,
        top: fx.Int32,
    ):
        lds = fx.SharedAllocator().allocate(dev.WAVES * 16 * (row + 2) * 4).peek().ptr
        lane, wave = dev.lane_and_wave(traits)
        column, lane_group = lane & 15, lane >> 4
        head = fx.Int32(fx.block_idx.y)
        x_id = fx.Int32(fx.block_idx.x)

        # --- what this workgroup works on ---
        if const_expr(plan):
            record = dev.load(work, fx.Int32, x_id * 4, 4)
            seq, first, end, slot = record[0], record[1], record[2], record[3]
            limit_v = dev.load(lists, fx.Int32, seq)
            base_vector = fx.Int32(fx.block_idx.z) * 16
            token0 = seq * query_len
            vectors = group * query_len
            # unused records are all zero: they name slot 0 and must not write to it
            stored = (first < end).select(vectors, fx.Int32(0))
        else:
            token0 = x_id // parts
            part = x_id % parts
            seq = dev.load(work, fx.Int32, token0)
            limit_v = fx.Int32(dev.load(positions, fx.Int64, token0)) + 1
            count = (limit_v + (TILE_TOKENS - 1)) >> 8
            if const_expr(sparse):
                list_at = (fx.Int64(token0) * kv_heads + head) * top
                count = fx.Int32(0)
                for entry in range(fx.Int32(0), top):
                    block = dev.load(lists, fx.Int32, list_at + entry)
                    count = count + (block >= 0).select(fx.Int32(1), fx.Int32(0))
            first, end = part * count // parts, (part + 1) * count // parts
            slot = (parts > 1).select(x_id, fx.Int32(-1))
            base_vector = fx.Int32(0)
            vectors = stored = group
        mine = base_vector + column  # query vector of this lane's column
        clamped = dev.at_most(mine, vectors - 1)
        token = token0 + clamped // group
        q_head = head * group + clamped % group
        limit_q = fx.Int32(dev.load(positions, fx.Int64, token)) + 1
        last_block = dev.at_least(limit_v - 1, fx.Int32(0)) // page
        table_at = fx.Int64(seq) * max_pages
        kv_page = fx.Int64(kv_heads) * (page * head_dim)
        kv_head = fx.Int64(head) * (page * head_dim)

        q_row = (fx.Int64(token) * kv_heads * group + q_head) * head_dim
        q_words = []
        for c in range_constexpr(chunks):
            for part_of_chunk in range_constexpr(x // 8):
                at = q_row + (c * groups + lane_group) * x + part_of_chunk * 8
                eight = dev.load(q, fx.BFloat16, at, 8).bitcast(fx.Uint32)
                q_words = q_words + [eight[i] for i in range_constexpr(4)]

        def page_of(block):
            inside = dev.clamp(block, 0, last_block)
            return fx.Int64(dev.load(page_table, fx.Int32, table_at + inside))

        running_max = fx.Float32(dev.NEG_INF)
        running_sum = fx.Float32(0.0)
        acc = [dev.zero_tile(traits) for _ in range_constexpr(tiles_d)]
        step = 2 if const_expr(sparse) else 1
        for tile in range(first, end, fx.Int32(step)):
            # --- this wave's 64 tokens: position of the first one, and where they are stored ---
            if const_expr(sparse):
                entry = tile + (wave >> 1)
                inside = dev.at_most(entry, end - 1)
                block = dev.load(lists, fx.Int32, list_at + inside)
                token_base = block * page + (wave & 1) * WAVE_TOKENS
                # an entry beyond the part lies in the future of every query
                token_base = (entry < end).select(token_base, limit_v)
                slot_base = (wave & 1) * WAVE_TOKENS
                wave_page = page_of(block)
            else:
                token_base = tile * TILE_TOKENS + wave * WAVE_TOKENS
                slot_base = token_base & (page - 1)
                if const_expr(page >= WAVE_TOKENS):
                    wave_page = page_of(token_base // page)

            def unit(number, token_base=token_base, slot_base=slot_base):
                """Page and first slot of the 16 tokens ``number`` of this wave."""
                if const_expr(page >= WAVE_TOKENS):
                    return wave_page, slot_base + number * UNIT  # noqa: B023 - called at once
                return page_of(token_base // page + number), fx.Int32(0)

            # K's row m of tile j is token lane_tokens * (m / run) + run * j + m % run
            unit_tiles = UNIT // run
            k_units = [unit((column // run) * lane_units + u) for u in range_constexpr(lane_units)]
            v_units = [unit(lane_group * lane_units + u) for u in range_constexpr(lane_units)]
            my_first = token_base + lane_group * lane_tokens

            # --- scores ---
            scores = []
            for j in range_constexpr(4):
                k_page, k_slot = k_units[j // unit_tiles]
                at_slot = k_slot + (j % unit_tiles) * run + column % run
                k_base = k_page * kv_page + kv_head
                words = []
                for c in range_constexpr(chunks):
                    chunk = c * groups + lane_group
                    raw = dev.load(k, cache, k_base + (chunk * page + at_slot) * x, x)
                    raw = raw.bitcast(fx.Uint32)
                    words = words + dev.words_to_bf16(
                        traits, [raw[i] for i in range_constexpr(4)], fp8
                    )
                product = dev.contract(traits, words, q_words, dev.zero_tile(traits))
                scores = scores + [product[r] for r in range_constexpr(run)]
            v_scales = []
            for u in range_constexpr(lane_units if fp8 else 0):
                scale_page, scale_slot = v_units[u]
                at = (scale_page * kv_heads + head) * page + scale_slot
                for quarter in range_constexpr(4):
                    k_four = dev.load(k_scale, fx.Float32, at + quarter * 4, 4)
                    v_four = dev.load(v_scale, fx.Float32, at + quarter * 4, 4)
                    for i in range_constexpr(4):
                        index = u * UNIT + quarter * 4 + i
                        scores[index] = scores[index] * k_four[i]
                        v_scales = [*v_scales, v_four[i]]
            for i in range_constexpr(lane_tokens):
                seen = my_first + i < limit_q
                scores[i] = seen.select(scores[i] * scale_log2, fx.Float32(dev.NEG_INF))

            # --- softmax ---
            top_score = scores[0]
            for i in range_constexpr(1, lane_tokens):
                top_score = dev.maximum(top_score, scores[i])
            top_score = dev.over_groups(top_score, dev.maximum, traits)
            new_max = dev.maximum(running_max, top_score)
            # a query that has seen nothing yet: any finite number keeps the exponentials at zero
            base = (new_max > fx.Float32(dev.NEG_INF)).select(new_max, fx.Float32(0.0))
            shrink = dev.exp2(running_max - base)
            weights = [dev.exp2(scores[i] - base) for i in range_constexpr(lane_tokens)]
            running_sum = running_sum * shrink
            for i in range_constexpr(lane_tokens):
                running_sum = running_sum + weights[i]
            running_max = new_max
            if const_expr(fp8):
                # the scale of a masked token may be NaN: select, never multiply by zero
                for i in range_constexpr(lane_tokens):
                    seen = my_first + i < limit_q
                    weights[i] = seen.select(weights[i] * v_scales[i], fx.Float32(0.0))
            p_words = [
                dev.f32_pair_to_bf16(weights[2 * i], weights[2 * i + 1])
                for i in range_constexpr(lane_tokens // 2)
            ]

            # --- output ---
            masks = dev.token_masks(my_first, limit_v, lane_tokens, fp8)
            for d in range_constexpr(tiles_d):
                words = []
                for u in range_constexpr(lane_units):
                    v_page, v_slot = v_units[u]
                    v_base = v_page * kv_page + kv_head
                    for c in range_constexpr(UNIT // x):
                        chunk = v_slot // x + c
                        at = v_base + (chunk * head_dim + d * 16 + column) * x
                        raw = dev.load(v, cache, at, x).bitcast(fx.Uint32)
                        first_mask = (u * (UNIT // x) + c) * 4
                        words = words + [raw[i] & masks[first_mask + i] for i in range_constexpr(4)]
                acc[d] = dev.contract(
                    traits, dev.words_to_bf16(traits, words, fp8), p_words, acc[d] * shrink
                )

        # --- merge the four waves, one half of the channels at a time ---
        running_sum = dev.over_groups(running_sum, dev.add, traits)
        stats = dev.WAVES * 16 * row
        if lane_group == 0:
            at = stats + (wave * 16 + column) * 2
            dev.lds_store(lds, fx.Float32, at, running_max)
            dev.lds_store(lds, fx.Float32, at + 1, running_sum)
        tid = fx.Int32(fx.thread_idx.x)
        per_query = traits.threads // 16
        query = tid // per_query
        out_vector = base_vector + query
        out_channel = (tid % per_query) * each
        for half in range_constexpr(2):
            if const_expr(half > 0):
                fx.gpu.barrier()  # the first half has been read
            for d in range_constexpr(tiles_d // 2):
                at = (wave * 16 + column) * row + d * 16 + lane_group * run
                for r in range_constexpr(run // 4):
                    four = [acc[half * (tiles_d // 2) + d][r * 4 + i] for i in range_constexpr(4)]
                    dev.lds_store(lds, fx.Float32, at + r * 4, dev.vector(four, fx.Float32), 4)
            fx.gpu.barrier()
            maxima = [
                dev.lds_load(lds, fx.Float32, stats + (w * 16 + query) * 2)
                for w in range_constexpr(dev.WAVES)
            ]
            sums = [
                dev.lds_load(lds, fx.Float32, stats + (w * 16 + query) * 2 + 1)
                for w in range_constexpr(dev.WAVES)
            ]
            overall = maxima[0]
            for w in range_constexpr(1, dev.WAVES):
                overall = dev.maximum(overall, maxima[w])
            overall = (overall > fx.Float32(dev.NEG_INF)).select(overall, fx.Float32(0.0))
            factors = [dev.exp2(maxima[w] - overall) for w in range_constexpr(dev.WAVES)]
            total = fx.Float32(0.0)
            for w in range_constexpr(dev.WAVES):
                total = total + factors[w] * sums[w]
            inverse = (total > fx.Float32(0.0)).select(fx.Float32(1.0) / total, fx.Float32(0.0))
            result = []
            for i in range_constexpr(each // 2):
                pair = [fx.Float32(0.0), fx.Float32(0.0)]
                for w in range_constexpr(dev.WAVES):
                    at = (w * 16 + query) * row + out_channel + i * 2
                    two = dev.lds_load(lds, fx.Float32, at, 2)
                    pair = [pair[n] + factors[w] * two[n] for n in range_constexpr(2)]
                result = result + [pair[n] * inverse for n in range_constexpr(2)]
            channel = half * half_d + out_channel
            if out_vector < stored:
                if slot < 0:
                    out_token = token0 + out_vector // group
                    out_head = head * group + out_vector % group
                    out_at = (fx.Int64(out_token) * kv_heads * group + out_head) * head_dim
                    for i in range_constexpr(each // 2):
                        word = dev.f32_pair_to_bf16(result[2 * i], result[2 * i + 1])
                        at = (out_at + channel) // 2 + i
                        dev.store(out, fx.Uint32, at, word)
                else:
                    partial_at = (fx.Int64(head) * slots + slot) * vectors + out_vector
                    for i in range_constexpr(each // 2):
                        two = dev.vector([result[2 * i], result[2 * i + 1]], fx.Float32)
                        at = partial_at * head_dim + channel + i * 2
                        dev.store(partial_out, fx.Float32, at, two, 2)
                    if const_expr(half == 0):  # noqa: SIM102 - traced apart
                        if tid % per_query == 0:
                            lse = (total > fx.Float32(0.0)).select(
                                overall + dev.log2(total), fx.Float32(dev.NEG_INF)
                            )
                            dev.store(partial_lse, fx.Float32, partial_at, lse)

    @flyc.jit
    def launch(
        out: fx.Pointer,
        partial_out: fx.Pointer,
        partial_lse: fx.Pointer,
        q: fx.Pointer,
        k: fx.Pointer,
        v: fx.Pointer,
        k_scale: fx.Pointer,
        v_scale: fx.Pointer,
        page_table: fx.Pointer,
        positions: fx.Pointer,
        work: fx.Pointer,
        lists: fx.Pointer,
        scale_log2: fx.Float32,
        kv_heads: fx.Int32,
        group: fx.Int32,
        query_len: fx.Int32,
        max_pages: fx.Int32,
        slots: fx.Int32,
        parts: fx.Int32,
        top: fx.Int32,
        grid_x: fx.Int32,
        grid_z: fx.Int32,
        stream: fx.Stream,
    ):
        attend(
            out,
            partial_out,
            partial_lse,
            q,
            k,
            v,
            k_scale,
            v_scale,
            page_table,
            positions,
            work,
            lists,
            scale_log2,
            kv_heads,
            group,
            query_len,
            max_pages,
            slots,
            parts,
            top,
        ).launch(
            grid=(grid_x, kv_heads, grid_z),
            block=(traits.threads, 1, 1),
            stream=stream,
        )

    return launch
