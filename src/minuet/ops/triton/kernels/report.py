"""Log-probabilities: each row in chunks, then the chunks of each row."""

import triton
import triton.language as tl

from minuet.ops.triton.kernels.sampling import NEVER, NOTHING, candidate, number_of, token_of


@triton.jit(do_not_specialize=["depth"])
def report_chunks(
    logits_ptr,  # [R, V] FP32, raw
    stride,
    vocab,
    tokens_ptr,  # [R] int64
    wanted_ptr,  # [R] int32; -1: nothing
    depth,  # best of a chunk that are kept
    stats_ptr,  # [R, chunks, 3] FP32: maximum, sum, logits above the token's
    best_ptr,  # [R, chunks, depth] int64
    TILE: tl.constexpr,
):
    """Softmax statistics and the best candidates of a chunk."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    wanted = tl.load(wanted_ptr + row)
    if wanted >= 0:
        base = logits_ptr + row.to(tl.int64) * stride
        token = chunk * TILE + tl.arange(0, TILE)
        x = tl.load(base + token, mask=token < vocab, other=NEVER)
        mine = tl.load(base + tl.load(tokens_ptr + row))
        top = tl.max(x, 0)
        at = stats_ptr + (row * chunks + chunk) * 3
        tl.store(at, top)
        tl.store(at + 1, tl.sum(tl.exp(x - top), 0))
        tl.store(at + 2, tl.sum((x > mine).to(tl.int32), 0).to(tl.float32))
        key = tl.where(token < vocab, candidate(x, token, 0), NOTHING)
        for i in range(tl.minimum(wanted, depth)):
            best = tl.max(key, 0)
            tl.store(best_ptr + (row * chunks + chunk).to(tl.int64) * depth + i, best)
            key = tl.where(key == best, NOTHING, key)


@triton.jit(do_not_specialize=["chunks", "depth", "most"])
def report_rows(
    logits_ptr,  # [R, V] FP32, raw
    stride,
    tokens_ptr,  # [R] int64
    wanted_ptr,  # [R] int32
    chunks,
    depth,
    most,
    stats_ptr,
    best_ptr,
    logprob_ptr,  # [R] FP32
    rank_ptr,  # [R] int32
    top_ids_ptr,  # [R, most] int32
    top_logprobs_ptr,  # [R, most] FP32
    CHUNKS: tl.constexpr,
):
    """The report of a row: chunks' best are sorted, so each round looks at one of each."""
    row = tl.program_id(0)
    wanted = tl.load(wanted_ptr + row)
    if wanted >= 0:
        chunk = tl.arange(0, CHUNKS)
        here = chunk < chunks
        at = stats_ptr + (row * chunks + chunk) * 3
        tops = tl.load(at, mask=here, other=NEVER)
        sums = tl.load(at + 1, mask=here, other=0.0)
        above = tl.load(at + 2, mask=here, other=0.0)
        top = tl.max(tops, 0)
        norm = tl.log(tl.sum(sums * tl.exp(tops - top), 0)) + top
        mine = tl.load(logits_ptr + row.to(tl.int64) * stride + tl.load(tokens_ptr + row))
        tl.store(logprob_ptr + row, mine - norm)
        tl.store(rank_ptr + row, tl.sum(above.to(tl.int32), 0) + 1)
        taken = tl.zeros([CHUNKS], tl.int32)
        heads = best_ptr + (row * chunks + chunk).to(tl.int64) * depth
        listed = tl.minimum(wanted, depth)
        for i in range(wanted):
            key = tl.load(heads + taken, mask=here & (taken < listed), other=NOTHING)
            best = tl.max(key, 0)
            taken += (key == best).to(tl.int32)
            tl.store(top_ids_ptr + row * most + i, token_of(best))
            value = number_of((best >> 32).to(tl.int32))
            tl.store(top_logprobs_ptr + row * most + i, value - norm)
