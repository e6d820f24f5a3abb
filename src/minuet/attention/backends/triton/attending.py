"""Launches of ``attend``: dense and sparse decode with their merges, dense and sparse prefill."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minuet.attention.backends.triton.arguments import (
    NARROWEST,
    operand_of,
    options_of,
    paired,
    power_of_2,
    scales_of,
    strides_of,
)
from minuet.attention.backends.triton.config import MANY, Merge, Tuning
from minuet.attention.backends.triton.kernels import attend as attend_kernels
from minuet.attention.backends.triton.kernels import tiles as tile_kernels
from minuet.attention.backends.triton.selecting import Deferred, Scores, ranking_of
from minuet.attention.backends.triton.spec import MAX_TOP_BLOCKS, SPLIT
from minuet.attention.backends.triton.step import Plan
from minuet.attention.backends.triton.tiles import ROW_TILE_TOKENS, Chunk
from minuet.errors import ContractError
from minuet.kv.cache import LayerCache
from minuet.platform.triton import Launch

# T query tokens, H query heads, K KV heads, D head dim

Blocks = Scores | Deferred | Tensor

_WIDE = 32  # query vectors from which ``config.Target.wide`` applies
_MOST_ACROSS_PAGES = 64  # tokens
_ROW_PROGRAMS_PER_UNIT = 8
_NEVER_UNITED = ROW_TILE_TOKENS * MAX_TOP_BLOCKS + 1  # more than all lists of a tile hold
_LOG2_E = 1.4426950408889634


def attend(q: Tensor, cache: LayerCache, plan: Plan, blocks: Blocks | None, scale: float) -> Tensor:
    """Attention over chosen blocks or over everything: :func:`minuet.attention.reference.attend`.

    Args:
        q: [T, H, D], normalised and rotated. Of a decode step it may be the padded batch: rows
            that the plan has no sequence for come out zero.
        cache: the layer's lanes; this step's keys and values already written.
        plan: of this step.
        blocks: from :func:`~minuet.attention.backends.triton.selecting.select`; lists
            [T, K, top_blocks]; None attends to everything.
        scale: multiplies the scores.

    Returns:
        [T, H, D] in the type of ``q``.

    Raises:
        ContractError: queries of another number or shape than the plan and the cache have.
    """
    out = torch.empty_like(q)
    if q.shape[0]:
        for launch in attend_launches(q, out, cache, plan, blocks, scale):
            launch()
    return out


def attend_launches(
    q: Tensor, out: Tensor, cache: LayerCache, plan: Plan, blocks: Blocks | None, scale: float
) -> Iterator[Launch]:
    """The launches of :func:`attend`, in order."""
    plan.check_tokens(q.shape[0])
    call = _Call(q, out, cache, plan, scale)
    if blocks is None:
        if plan.is_decode:
            yield from _dense_launches(call)
        else:
            yield _prefill_launch(call)
    elif plan.is_decode and not isinstance(blocks, Deferred):
        yield from _blocks_launches(call, blocks, Chunk(0, q.shape[0], (0, 0)))
    else:
        assert not isinstance(blocks, Scores)  # of decode steps only
        for chunk in plan.chunks_of(q.shape[0]):
            yield from _chunk_launches(call, blocks, chunk)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What every launch of a call to :func:`attend` needs of its arguments."""

    q: Tensor
    out: Tensor
    cache: LayerCache
    plan: Plan
    scale: float

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.cache.layout.num_kv_heads

    @property
    def fp8(self) -> bool:
        """Whether keys and values are FP8."""
        return self.cache.layout.has_scales


def _chunk_launches(call: _Call, blocks: Deferred | Tensor, chunk: Chunk) -> Iterator[Launch]:
    """A chunk of query tokens: select for it, then attend; prefill by rows and by tiles."""
    plan = call.plan
    top = blocks.selection.top_blocks if isinstance(blocks, Deferred) else blocks.shape[2]
    shape = (chunk.end - chunk.first, call.heads, top)
    lists = plan.scratch.take("blocks", shape, torch.int32)
    if isinstance(blocks, Deferred):
        yield from blocks.launches(plan, chunk, lists)
    if plan.is_decode:
        yield from _blocks_launches(call, lists, chunk)
        return
    given = lists if isinstance(blocks, Deferred) else blocks[chunk.first : chunk.end]
    unions = lists, plan.scratch.take("pages", shape, torch.int32)
    yield _unite_launch(call, given, unions, chunk)
    yield _rows_launch(call, lists, chunk)
    yield _tiles_launch(call, unions, chunk)


# --- everything ----------------------------------------------------------------------------------


def _dense_launches(call: _Call) -> Iterator[Launch]:
    q, plan, heads = call.q, call.plan, call.heads
    target, query_len = plan.target, plan.shape.query_len
    vectors = power_of_2(query_len) * power_of_2(q.shape[1] // heads)
    tuning = target.dense_fp8 if call.fp8 else target.dense
    if vectors >= _WIDE:
        tuning = target.wide
    group, group_pad, common = _attend_args(call, tuning, power_of_2(query_len))
    slots = plan.slots
    partial, lse = _partials(plan, (heads, slots, query_len * group, q.shape[2]))
    args = dict(
        **common,
        partial_ptr=partial,
        lse_ptr=lse,
        work_ptr=plan.tables["work"],
        lengths_ptr=plan.tables["lengths"],
        stride_slot=slots,
        query_len=query_len,
        GROUP=group,
        GROUP_PAD=group_pad,
        M=max(NARROWEST, vectors),
        ROW_MASK=query_len > 1,
        PLAN_TILE=SPLIT.tile_tokens,
    )
    grid = (plan.tables["work"].shape[0], heads)
    yield Launch(attend_kernels.attend_dense, grid, args, options_of(target, tuning))
    extents = (q.shape[0] // query_len, heads, query_len * group)
    yield _merge_launch(call.out, plan, (partial, lse), extents, common, slots)


def _prefill_launch(call: _Call) -> Launch:
    plan, target = call.plan, call.plan.target
    tuning = target.prefill_fp8 if call.fp8 else target.prefill
    group, group_pad, common = _attend_args(call, tuning, plan.tile_tokens)
    # a tile that spans pages looks one up per token: it is kept narrow
    tile = min(tuning.tile, max(plan.shape.page_size, _MOST_ACROSS_PAGES))
    args = dict(
        **(common | {"TILE": tile}),
        tiles_ptr=plan.tables["tiles"],
        GROUP=group,
        GROUP_PAD=group_pad,
        M=max(NARROWEST, plan.tile_tokens * group_pad),
    )
    grid = (plan.num_tiles, call.heads)
    return Launch(attend_kernels.attend_prefill, grid, args, options_of(target, tuning))


# --- chosen blocks -------------------------------------------------------------------------------


def _blocks_launches(call: _Call, blocks: Scores | Tensor, chunk: Chunk) -> Iterator[Launch]:
    """Every row (query token x KV head) of a decode step's chunk, from scores or from lists."""
    plan, heads, num_tokens = call.plan, call.heads, chunk.end - chunk.first
    target = plan.target
    if isinstance(blocks, Scores):
        source, top = blocks.orders, blocks.selection.top_blocks
        stride_scores = source.stride(1)
    else:
        source, top, stride_scores = blocks, blocks.shape[2], 0
    parts = plan.row_parts(heads, top)
    is_brief = parts == top
    if is_brief:
        tuning = target.brief_fp8 if call.fp8 else target.brief
    else:
        tuning = target.blocks_fp8 if call.fp8 else target.blocks
    group, _, common = _attend_args(call, tuning, 1)
    slots = num_tokens * parts if parts > 1 else 0
    partial, lse = _partials(plan, (heads, slots, group, common["D"]))
    args = dict(
        **(common | {"TILE": min(tuning.tile, plan.shape.page_size)}),
        partial_ptr=partial,
        lse_ptr=lse,
        source_ptr=source,
        lengths_ptr=plan.tables["lengths"],
        stride_scores=stride_scores,
        query_len=plan.shape.query_len,
        first_token=chunk.first,
        GROUP=group,
        M=max(NARROWEST, power_of_2(group)),
        TOP=top,
        TOP_PAD=power_of_2(top),
        PARTS=parts,
        MINE=power_of_2(-(-top // parts)),
        FROM_SCORES=isinstance(blocks, Scores),
        **ranking_of(plan),
        EARLY=is_brief,
    )
    grid = (num_tokens, heads, parts)
    yield Launch(attend_kernels.attend_blocks, grid, args, options_of(target, tuning))
    if parts > 1:
        mine, extents = call.out[chunk.first : chunk.end], (num_tokens, heads, group)
        yield _merge_launch(mine, plan, (partial, lse), extents, common, slots, static_parts=parts)


def _unite_launch(
    call: _Call, lists: Tensor, unions: tuple[Tensor, Tensor], chunk: Chunk
) -> Launch:
    """Lists, or unions with their pages where a tile shares enough blocks; maybe in place."""
    plan, top = call.plan, lists.shape[2]
    target = plan.target
    row_blocks = target.row_blocks_per_step_fp8 if call.fp8 else target.row_blocks_per_step
    if plan.shape.batch_invariant:  # who shares a tile is the schedule's doing
        row_blocks = _NEVER_UNITED
    records = plan.tables["row_tiles"][slice(*chunk.row_tiles)]
    args = dict(
        lists_ptr=lists,
        unions_ptr=unions[0],
        pages_ptr=unions[1],
        tiles_ptr=records,
        table_ptr=plan.page_table,
        stride_table=plan.page_table.stride(0),
        first_token=chunk.first,
        row_blocks_per_step=row_blocks,
        TOKENS=plan.row_tile_tokens,
        TOP=top,
        TOP_PAD=power_of_2(top),
        PDL=target.pdl,
    )
    grid = (records.shape[0], lists.shape[1])
    return Launch(tile_kernels.unite_lists, grid, args, options_of(target, Tuning(0, 4, 1)))


def _rows_launch(call: _Call, lists: Tensor, chunk: Chunk) -> Launch:
    """Rows of a chunk's tiles that share too few blocks."""
    plan, heads, top = call.plan, call.heads, lists.shape[2]
    target = plan.target
    tuning = target.blocks_fp8 if call.fp8 else target.blocks
    group, _, common = _attend_args(call, tuning, 1)
    records = plan.tables["row_tiles"][slice(*chunk.row_tiles)]
    args = dict(
        **(common | {"TILE": min(tuning.tile, plan.shape.page_size)}),
        lists_ptr=lists,
        tiles_ptr=records,
        first_token=chunk.first,
        GROUP=group,
        M=max(NARROWEST, power_of_2(group)),
        TOP=top,
        TOP_PAD=power_of_2(top),
    )
    # enough programs to fill the device when there are few tiles
    wanted = -(-_ROW_PROGRAMS_PER_UNIT * plan.shape.compute_units // (records.shape[0] * heads))
    grid = (records.shape[0], heads, min(plan.row_tile_tokens, wanted))
    return Launch(tile_kernels.attend_rows, grid, args, options_of(target, tuning))


def _tiles_launch(call: _Call, unions: tuple[Tensor, Tensor], chunk: Chunk) -> Launch:
    """Tiles of a chunk whose query tokens share enough blocks."""
    plan, top = call.plan, unions[0].shape[2]
    target = plan.target
    tuning = target.tiles_fp8 if call.fp8 else target.tiles
    group, group_pad, common = _attend_args(call, tuning, plan.row_tile_tokens)
    records = plan.tables["row_tiles"][slice(*chunk.row_tiles)]
    del common["table_ptr"], common["stride_table"]  # pages are in the unions
    args = dict(
        **(common | {"TILE": min(tuning.tile, plan.shape.page_size)}),
        unions_ptr=unions[0],
        pages_ptr=unions[1],
        tiles_ptr=records,
        first_token=chunk.first,
        GROUP=group,
        GROUP_PAD=group_pad,
        M=max(NARROWEST, plan.row_tile_tokens * group_pad),
        TOKENS=plan.row_tile_tokens,
        TOP=top,
        TOP_PAD=power_of_2(top),
    )
    grid = (records.shape[0], call.heads)
    return Launch(tile_kernels.attend_tiles, grid, args, options_of(target, tuning))


# --- parts ---------------------------------------------------------------------------------------


def _partials(plan: Plan, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Partial results [K, slots, vectors, D] and their logarithms; unused memory without slots."""
    if shape[1] == 0:
        unused = plan.tables["lengths"].view(torch.float32)
        return unused, unused
    partial = plan.scratch.take("partial_out", shape, torch.float32)
    return partial, plan.scratch.take("partial_lse", shape[:3], torch.float32)


def _merge_launch(
    out: Tensor,
    plan: Plan,
    parts: tuple[Tensor, Tensor],
    extents: tuple[int, int, int],
    common: Mapping[str, Any],
    slots: int,
    static_parts: int = 0,
) -> Launch:
    """Merge; ``extents`` are rows, KV heads and query vectors of a row."""
    target, (rows, heads, vectors) = plan.target, extents
    how: Merge
    if static_parts:
        most = plan.shape.max_tokens * heads  # of the shape, not of the step: nothing recompiles
        # threads that divide the channels otherwise add parts in another order
        most = MANY if plan.shape.batch_invariant else most
        how = next(m for m in target.merge_blocks if most <= m.upto)
    else:
        how = next(m for m in target.merge if -(-slots // plan.shape.max_seqs) <= m.upto)
    dim = common["D"]
    width = min(how.width, dim)
    args = dict(
        out_ptr=out,
        partial_ptr=parts[0],
        lse_ptr=parts[1],
        rows_ptr=plan.tables["lengths" if static_parts else "rows"],
        stride_out_token=out.stride(0),
        stride_out_head=out.stride(1),
        stride_slot=slots,
        query_len=1 if static_parts else plan.shape.query_len,
        GROUP=out.shape[1] // heads,
        D=dim,
        C=common["C"],
        VECTORS=how.vectors,
        WIDTH=width,
        CHUNK=min(how.chunk, power_of_2(static_parts or plan.most_parts)),
        STATIC_PARTS=static_parts,
        PAIRS=common["PAIRS"],
        EARLY=how.early,
        PDL=target.pdl,
    )
    grid = (rows, heads, -(-vectors // how.vectors) * (dim // width))
    return Launch(
        attend_kernels.merge_parts, grid, args, options_of(target, Tuning(0, how.warps, 1))
    )


def _attend_args(call: _Call, tuning: Tuning, tokens: int) -> tuple[int, int, dict[str, Any]]:
    """Group, padded group, and the arguments of every attention kernel for ``tokens`` at once."""
    q, out, cache, plan = call.q, call.out, call.cache, call.plan
    layout, target = cache.layout, plan.target
    group, rest = divmod(q.shape[1], layout.num_kv_heads)
    if rest or q.shape[2] != layout.head_dim:
        raise ContractError(
            "queries",
            got=tuple(q.shape),
            expected=f"heads a multiple of {layout.num_kv_heads}, {layout.head_dim} channels",
        )
    if q.stride() != out.stride() or q.stride(2) != 1:
        raise ContractError("strides of queries", got=q.stride(), expected=str(out.stride()))
    rows = tokens * power_of_2(group)
    (k, pairs), (v, _) = paired(cache.k, target, rows), paired(cache.v, target, rows)
    k_scale, v_scale = scales_of(cache)
    return (
        group,
        power_of_2(group),
        dict(
            q_ptr=q,
            out_ptr=out,
            k_ptr=k,
            v_ptr=v,
            k_scale_ptr=k_scale,
            v_scale_ptr=v_scale,
            table_ptr=plan.page_table,
            stride_q_token=q.stride(0),
            stride_q_head=q.stride(1),
            **strides_of(k, v, k_scale),
            STRIDE_K_TOKEN=k.stride(2),
            STRIDE_V_TOKEN=v.stride(2),
            stride_table=plan.page_table.stride(0),
            score_scale=call.scale * _LOG2_E,
            D=q.shape[2],
            C=k.shape[3],
            TILE=tuning.tile,
            PAGE=layout.page_size,
            OPERAND=operand_of(cache.k, target),
            SCALED=layout.has_scales,
            PAIRS=pairs,
            NATIVE=target.pairs,
            STAGES=tuning.stages,
            PDL=target.pdl,
        ),
    )
