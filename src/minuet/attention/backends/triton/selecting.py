"""Launches of ``select``: block scores, and the lists chosen from them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minuet.attention.backends.triton.arguments import (
    NARROWEST,
    operand_of,
    options_of,
    paired,
    power_of_2,
)
from minuet.attention.backends.triton.config import Tuning
from minuet.attention.backends.triton.kernels import choose as choose_kernels
from minuet.attention.backends.triton.step import Plan
from minuet.attention.backends.triton.tiles import Chunk
from minuet.attention.reference import Selection
from minuet.kv.cache import LayerCache
from minuet.platform.triton import Launch

# T query tokens, K KV heads, I index dim


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Block scores of a decode step, not yet turned into a choice.

    Attributes:
        values: [K, T, blocks] float32; undefined beyond the blocks a token sees.
        selection: how blocks are chosen.
    """

    values: Tensor
    selection: Selection


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """A selection that ``attend`` makes chunk by chunk, since scratch holds one chunk's lists.

    Attributes:
        index_q: [T, K, I].
        cache: the layer's lanes.
        selection: how blocks are chosen.
    """

    index_q: Tensor
    cache: LayerCache
    selection: Selection

    def launches(self, plan: Plan, chunk: Chunk, lists: Tensor) -> Iterator[Launch]:
        """Score a chunk and list its blocks into ``lists`` [tokens, K, top_blocks]."""
        shape = (lists.shape[1], lists.shape[0], plan.shape.max_blocks)
        values = plan.scratch.take("scores", shape, torch.float32)
        yield score_launch(self.index_q, self.cache, plan, values, chunk)
        yield list_launch(values, lists, plan, self.selection, chunk.first)


def select(
    index_q: Tensor, cache: LayerCache, plan: Plan, selection: Selection
) -> Scores | Deferred:
    """Choose the blocks each row attends to; see :func:`minuet.attention.reference.select`.

    Args:
        index_q: [T, K, I], normalised and rotated.
        cache: the layer's lanes; this step's index keys already written.
        plan: of this step.
        selection: how blocks are chosen.

    Returns:
        What ``attend`` takes as ``blocks``: scores of a decode step, in scratch memory and valid
        until the next layer selects; or, where lists do not fit scratch, the order to make them.
    """
    chosen, launch = select_launch(index_q, cache, plan, selection)
    if launch is not None and index_q.shape[0]:
        launch()
    return chosen


def select_launch(
    index_q: Tensor, cache: LayerCache, plan: Plan, selection: Selection
) -> tuple[Scores | Deferred, Launch | None]:
    """What :func:`select` returns, and its launch if it has one."""
    if not plan.scores_at_once:
        return Deferred(index_q, cache, selection), None
    shape = (index_q.shape[1], index_q.shape[0], plan.shape.max_blocks)
    values = plan.scratch.take("scores", shape, torch.float32)
    return Scores(values, selection), score_launch(index_q, cache, plan, values)


def block_lists(blocks: Scores | Deferred | Tensor, plan: Plan) -> Tensor:
    """Lists [T, K, top_blocks] int32, ascending, -1 at the tail, from what :func:`select` returned.

    For tests: ``attend`` needs none of a decode step, and one chunk at a time of any other.

    Args:
        blocks: from :func:`select`.
        plan: of this step.
    """
    if isinstance(blocks, Tensor):
        return blocks
    if isinstance(blocks, Scores):
        heads, num_tokens, _ = blocks.values.shape
    else:
        num_tokens, heads, _ = blocks.index_q.shape
    shape = (num_tokens, heads, blocks.selection.top_blocks)
    lists = torch.empty(shape, dtype=torch.int32, device=plan.page_table.device)
    if isinstance(blocks, Scores):
        if num_tokens:
            list_launch(blocks.values, lists, plan, blocks.selection, 0)()
        return lists
    for chunk in plan.chunks_of(num_tokens):
        for launch in blocks.launches(plan, chunk, lists[chunk.first : chunk.end]):
            launch()
    return lists


def score_launch(
    index_q: Tensor, cache: LayerCache, plan: Plan, values: Tensor, chunk: Chunk | None = None
) -> Launch:
    """Scores of a decode step (no chunk), or of a chunk of query tiles."""
    target, heads = plan.target, index_q.shape[1]
    heads_pad = power_of_2(heads)
    if chunk is None:
        tuning, items = target.score, plan.tables["score_work"]
        vectors = power_of_2(plan.shape.query_len) * heads_pad
        grid: tuple[int, ...] = (items.shape[0],)
    else:
        tuning, items = target.score_prefill, plan.tables["score_tiles"][slice(*chunk.score_tiles)]
        vectors = plan.score_tile_tokens * heads_pad
        # enough programs to fill the device when there are few tiles
        splits = min(plan.shape.max_blocks, -(-2 * plan.shape.compute_units // items.shape[0]))
        grid = (items.shape[0], splits)
    index_k, pairs = paired(cache.index_k, target, 0 if chunk is None else vectors)
    args = dict(
        index_q_ptr=index_q,
        index_k_ptr=index_k,
        scores_ptr=values,
        items_ptr=items,
        lengths_ptr=plan.tables["lengths"],
        table_ptr=plan.page_table,
        stride_q_token=index_q.stride(0),
        stride_q_head=index_q.stride(1),
        stride_k_page=index_k.stride(0),
        STRIDE_K_TOKEN=index_k.stride(1),
        stride_table=plan.page_table.stride(0),
        stride_scores_head=values.stride(0),
        stride_scores_token=values.stride(1),
        query_len=plan.shape.query_len,
        first_score=0 if chunk is None else chunk.first,
        HEADS=heads,
        HEADS_PAD=heads_pad,
        M=max(target.min_columns if chunk is None else NARROWEST, vectors),
        I=index_q.shape[2],
        C=index_k.shape[2],
        PAGE=cache.layout.page_size,
        OPERAND=operand_of(cache.index_k, target),
        PAIRS=pairs,
        RAGGED=chunk is not None,
        STAGES=tuning.stages,
        PDL=target.pdl,
    )
    return Launch(choose_kernels.score_blocks, grid, args, options_of(target, tuning))


def list_launch(
    values: Tensor, lists: Tensor, plan: Plan, selection: Selection, first_token: int
) -> Launch:
    """Lists [tokens, K, top_blocks] of the tokens from ``first_token`` on, from their scores."""
    target = plan.target
    ragged = not plan.is_decode
    args = dict(
        scores_ptr=values,
        lists_ptr=lists,
        lengths_ptr=plan.tables["lengths"],
        token_sequence_ptr=plan.tables["token_sequence" if ragged else "lengths"],
        positions_ptr=plan.positions,
        table_ptr=plan.page_table,
        stride_table=plan.page_table.stride(0),
        stride_scores_head=values.stride(0),
        stride_scores_token=values.stride(1),
        query_len=plan.shape.query_len,
        first_token=first_token,
        init_blocks=selection.init_blocks,
        local_blocks=selection.local_blocks,
        TOP=selection.top_blocks,
        TOP_PAD=power_of_2(selection.top_blocks),
        PAGE=plan.shape.page_size,
        FEW=target.few_blocks,
        MANY=target.many_blocks,
        RAGGED=ragged,
        PDL=target.pdl,
    )
    grid = (lists.shape[0], lists.shape[1])
    return Launch(choose_kernels.list_blocks, grid, args, options_of(target, Tuning(0, 4, 1)))
