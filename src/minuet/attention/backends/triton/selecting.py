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
    """Block scores of some query tokens, not yet turned into a choice.

    Attributes:
        orders: [K, T, blocks] int32 that sort as blocks are chosen: rising scores, then forced
            blocks; undefined beyond the blocks a token sees.
        selection: how blocks are chosen.
    """

    orders: Tensor
    selection: Selection

    @classmethod
    def room(cls, plan: Plan, num_tokens: int, heads: int, selection: Selection) -> "Scores":
        """Scratch memory for ``num_tokens``, not yet written."""
        shape = (heads, num_tokens, plan.shape.max_blocks)
        return cls(plan.scratch.take("scores", shape, torch.int32), selection)


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
        scores = Scores.room(plan, lists.shape[0], lists.shape[1], self.selection)
        yield score_launch(self.index_q, self.cache, plan, scores, chunk)
        yield list_launch(scores, lists, plan, chunk.first)


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
    scores = Scores.room(plan, index_q.shape[0], index_q.shape[1], selection)
    return scores, score_launch(index_q, cache, plan, scores)


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
        heads, num_tokens, _ = blocks.orders.shape
    else:
        num_tokens, heads, _ = blocks.index_q.shape
    shape = (num_tokens, heads, blocks.selection.top_blocks)
    lists = torch.empty(shape, dtype=torch.int32, device=plan.page_table.device)
    if isinstance(blocks, Scores):
        if num_tokens:
            list_launch(blocks, lists, plan, 0)()
        return lists
    for chunk in plan.chunks_of(num_tokens):
        for launch in blocks.launches(plan, chunk, lists[chunk.first : chunk.end]):
            launch()
    return lists


def score_launch(
    index_q: Tensor, cache: LayerCache, plan: Plan, scores: Scores, chunk: Chunk | None = None
) -> Launch:
    """Scores of a decode step (no chunk), or of a chunk of query tiles."""
    target, heads = plan.target, index_q.shape[1]
    heads_pad = power_of_2(heads)
    if chunk is None:
        is_few = plan.shape.max_seqs <= target.few_seqs
        tuning = target.score_few if is_few else target.score
        items = plan.tables["score_work"]
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
        orders_ptr=scores.orders,
        items_ptr=items,
        lengths_ptr=plan.tables["lengths"],
        table_ptr=plan.page_table,
        stride_q_token=index_q.stride(0),
        stride_q_head=index_q.stride(1),
        stride_k_page=index_k.stride(0),
        STRIDE_K_TOKEN=index_k.stride(1),
        stride_table=plan.page_table.stride(0),
        stride_scores_head=scores.orders.stride(0),
        stride_scores_token=scores.orders.stride(1),
        query_len=plan.shape.query_len,
        first_score=0 if chunk is None else chunk.first,
        init_blocks=scores.selection.init_blocks,
        local_blocks=scores.selection.local_blocks,
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


def list_launch(scores: Scores, lists: Tensor, plan: Plan, first_token: int) -> Launch:
    """Lists [tokens, K, top_blocks] of the tokens from ``first_token`` on, from their scores."""
    target, top = plan.target, scores.selection.top_blocks
    ragged = not plan.is_decode
    args = dict(
        orders_ptr=scores.orders,
        lists_ptr=lists,
        lengths_ptr=plan.tables["lengths"],
        token_sequence_ptr=plan.tables["token_sequence" if ragged else "lengths"],
        positions_ptr=plan.positions,
        table_ptr=plan.page_table,
        stride_table=plan.page_table.stride(0),
        stride_scores_head=scores.orders.stride(0),
        stride_scores_token=scores.orders.stride(1),
        query_len=plan.shape.query_len,
        first_token=first_token,
        TOP=top,
        TOP_PAD=power_of_2(top),
        PAGE=plan.shape.page_size,
        **ranking_of(plan),
        RAGGED=ragged,
        PDL=target.pdl,
    )
    grid = (lists.shape[0], lists.shape[1])
    return Launch(choose_kernels.list_blocks, grid, args, options_of(target, Tuning(0, 4, 1)))


def ranking_of(plan: Plan) -> dict[str, int]:
    """How a kernel that chooses blocks ranks them: by the longest context, so start-up decides."""
    target, most = plan.target, power_of_2(plan.shape.max_blocks)
    few = min(target.few_blocks, most)
    return dict(MOST=most, FEW=few, STEP=min(target.rank_step, few), MANY=target.many_blocks)
