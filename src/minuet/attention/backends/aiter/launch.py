"""Steps in the terms of aiter's ``pa_decode``: rows of equal query length over page tables.

A dense decode step is one row per sequence. A ragged step (prefill) is one row per query token,
each with the length that it sees. A sparse row is a query token and KV head over the pages of its
own list, with the cache seen as ``[pages * K, 1, ...]``: its last block is its own, so one length
says where its tokens end. Rows are padded to a power of two, tables as well, so that aiter, which
compiles for a number of rows and a width, meets few of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minuet.attention.backends.aiter.library import library
from minuet.attention.backends.aiter.select import choose
from minuet.attention.backends.aiter.spec import MAX_PLAN_ROWS, QUERY_LENS
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.errors import ContractError
from minuet.kv.cache import LayerCache
from minuet.kv.layout import Form, LaneName
from minuet.kv.write import HeadNorms
from minuet.kv.write import write as write_plainly

# T query tokens, S sequences, H query heads, K KV heads, D head dim, R rows of a call


class Rows(NamedTuple):
    """One call's rows, padded.

    Attributes:
        lengths: [R] int32; tokens each row sees, its query tokens included; 0 for padding.
        tables: [R, width] int32; pages, those beyond a row's length are page 0.
        query_len: query tokens of every row.
        used: rows that are not padding.
    """

    lengths: Tensor
    tables: Tensor
    query_len: int
    used: int


@dataclass(slots=True, eq=False)
class Plan:
    """A step; what depends on the layer kind is made when its first layer asks, and kept.

    Attributes:
        batch: the step.
        sequences: [T] int64; sequence of each query token.
        visible: [T] int32; tokens that each query token sees.
        dense: rows of dense layers with their work plans, by KV heads.
    """

    batch: AttentionBatch
    sequences: Tensor
    visible: Tensor
    dense: dict[int, list[tuple[Rows, Any]]] = field(default_factory=dict)


def plan(batch: AttentionBatch, page_size: int) -> Plan:
    """Plan a step.

    Args:
        batch: the step.
        page_size: tokens per page; read from the cache's layout instead.
    """
    device = batch.positions.device
    lens = torch.tensor(batch.query_lens, device=device)
    sequences = torch.arange(batch.num_seqs, device=device).repeat_interleave(lens)
    seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int64, device=device)
    visible = torch.minimum(batch.positions + 1, seq_lens[sequences]).clamp(min=0)
    return Plan(batch, sequences, visible.to(torch.int32))


def write(
    cache: LayerCache, packed: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms
) -> tuple[Tensor, Tensor | None]:
    """The definition of :func:`minuet.kv.write.write`, in torch."""
    return write_plainly(cache, packed, slots, cos, sin, norms)


def select(index_q: Tensor, cache: LayerCache, plan: Plan, selection: Selection) -> Tensor:
    """Blocks each row attends to, sequence by sequence, in torch.

    Args:
        index_q: [T, K, I], normalised and rotated.
        cache: the layer's lanes; this step's index keys already written.
        plan: of this step.
        selection: how blocks are chosen.

    Returns:
        [T, K, top_blocks] int32, ascending, -1 at the tail.
    """
    batch, page = plan.batch, cache.layout.page_size
    shape = (*index_q.shape[:2], selection.top_blocks)
    blocks = torch.full(shape, -1, dtype=torch.int32, device=index_q.device)
    first = 0
    for sequence, query_len in enumerate(batch.query_lens):
        mine = slice(first, first + query_len)
        pages = batch.page_table[sequence, : -(-batch.seq_lens[sequence] // page)]
        if len(pages):
            blocks[mine] = choose(index_q[mine], cache, pages, plan.visible[mine], selection)
        first += query_len
    return blocks


def block_lists(blocks: Tensor, plan: Plan) -> Tensor:
    """Lists from what :func:`select` returned: itself."""
    return blocks


# --- attend --------------------------------------------------------------------------------------


def attend(q: Tensor, cache: LayerCache, plan: Plan, blocks: Tensor | None, scale: float) -> Tensor:
    """``softmax(q . K * scale) V``; see :func:`minuet.attention.reference.attend`.

    Args:
        q: [T, H, D] bfloat16, normalised and rotated.
        cache: the layer's lanes; what no token has written in a page in use must be finite.
        plan: of this step.
        blocks: from :func:`select`; None attends to everything.
        scale: multiplies the scores.

    Returns:
        [T, H, D]; rows that see nothing are zero.

    Raises:
        ContractError: a cache of another form.
    """
    if cache.layout.form is not Form.SHUFFLE:
        raise ContractError(
            "form of the cache", got=cache.layout.form.value, expected=Form.SHUFFLE.value
        )
    if not q.shape[0]:
        return torch.empty_like(q)
    if blocks is not None:
        return _attend_sparse(q, cache, plan, blocks, scale)
    heads = cache.layout.num_kv_heads
    if heads not in plan.dense:
        plan.dense[heads] = [
            (rows, _work_plan(rows, heads)) for rows in _dense_rows(plan, cache.layout.page_size)
        ]
    out, first = torch.empty_like(q), 0
    for rows, work in plan.dense[heads]:
        end = first + rows.used * rows.query_len
        out[first:end] = _decode(q[first:end], cache, rows, work, scale)
        first = end
    return out


def _attend_sparse(
    q: Tensor, cache: LayerCache, plan: Plan, blocks: Tensor, scale: float
) -> Tensor:
    """Every (query token, KV head) is a row of one KV head over a list of its own."""
    heads = cache.layout.num_kv_heads
    by_head = LayerCache(
        cache.layout,
        {
            name: lane.flatten(0, 1)[:, None]
            for name, lane in cache.lanes.items()
            if name is not LaneName.INDEX_K
        },
    )
    mine = q.view(-1, q.shape[1] // heads, q.shape[2])
    out, first = torch.empty_like(mine), 0
    for rows in _sparse_rows(plan, blocks, cache.layout.page_size):
        end = first + rows.used
        work = _work_plan(rows, 1)
        out[first:end] = _decode(mine[first:end], by_head, rows, work, scale)
        first = end
    return out.view_as(q)


def _decode(q: Tensor, cache: LayerCache, rows: Rows, work: Any, scale: float) -> Tensor:
    """One call: ``q`` [used * query_len, H, D] to the same."""
    heads, group = cache.k.shape[1], q.shape[1] // cache.k.shape[1]
    padded = rows.lengths.shape[0] * rows.query_len
    query = q.contiguous() if q.shape[0] == padded else _padded(q, padded)
    out = torch.empty_like(query)
    sums = (heads, work.capacity, rows.query_len * group)
    scales = [cache.lanes.get(name) for name in (LaneName.K_SCALE, LaneName.V_SCALE)]
    library().pa_decode(
        out,
        query,
        cache.k,
        cache.v,
        rows.lengths,
        rows.tables,
        scale,
        rows.query_len,
        compute_type=cache.k.dtype,
        key_scale=None if scales[0] is None else scales[0][..., None],
        value_scale=None if scales[1] is None else scales[1][..., None],
        exp_sums=q.new_empty(sums, dtype=torch.float32),
        max_logits=q.new_empty(sums, dtype=torch.float32),
        temporary_output=q.new_empty((*sums, q.shape[2])),
        work_plan=work,
    )
    return out[: q.shape[0]]


def _work_plan(rows: Rows, heads: int) -> Any:
    return library().plan_pa_decode(rows.lengths, heads, query_length=rows.query_len)


# --- rows ----------------------------------------------------------------------------------------


def _dense_rows(plan: Plan, page: int) -> Iterator[Rows]:
    """A row per sequence where all have one query length, else a row per query token."""
    batch, lens = plan.batch, set(plan.batch.query_lens)
    table = batch.page_table
    (query_len, *others) = lens
    if others or query_len not in QUERY_LENS:
        yield from _cut(plan.visible, table[plan.sequences], page, 1)
        return
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int32, device=table.device)
    yield from _cut(lengths, table, page, query_len)


def _sparse_rows(plan: Plan, blocks: Tensor, page: int) -> Iterator[Rows]:
    """A row per query token and KV head: its chosen pages, in units of (page, head)."""
    heads = blocks.shape[1]
    table = plan.batch.page_table[plan.sequences]
    there = blocks >= 0
    pages = table[:, None].expand(-1, heads, -1).gather(2, blocks.clamp(min=0).long())
    pages = pages * heads + torch.arange(heads, device=table.device, dtype=torch.int32)[:, None]
    count, last = there.sum(2), blocks.amax(2)
    # whole pages, then what is visible of the last: the row's own block
    lengths = (count - 1) * page + plan.visible[:, None] - last * page
    lengths = lengths.where(count > 0, 0).to(torch.int32)
    yield from _cut(lengths.flatten(), pages.where(there, 0).flatten(0, 1), page, 1)


def _cut(lengths: Tensor, tables: Tensor, page: int, query_len: int) -> Iterator[Rows]:
    """Calls of at most as many rows as a work plan takes, padded.

    Args:
        lengths: [R] int32.
        tables: [R, pages] int32; anything beyond a row's length.
        page: tokens per page.
        query_len: query tokens of every row.
    """
    width = _power_of_2(tables.shape[1])
    used = torch.arange(tables.shape[1], device=tables.device) * page < lengths[:, None]
    tables = torch.nn.functional.pad(tables.where(used, 0), (0, width - tables.shape[1]))
    for some, theirs in zip(lengths.split(MAX_PLAN_ROWS), tables.split(MAX_PLAN_ROWS), strict=True):
        rows = _power_of_2(len(some))
        yield Rows(_padded(some, rows), _padded(theirs, rows), query_len, len(some))


def _padded(x: Tensor, rows: int) -> Tensor:
    """With zeros behind, contiguous."""
    out = x.new_zeros(rows, *x.shape[1:])
    out[: len(x)] = x
    return out


def _power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
