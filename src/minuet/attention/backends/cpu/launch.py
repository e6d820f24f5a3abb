"""Paged attention on the CPU: batched matrix products over gathered pages. No loop over tokens.

:func:`plan` looks at the host lengths once per step and groups sequences so that each group is one
batch of equal shape; the per-layer functions then only gather, multiply and mask. Two regimes:

* **rows** (few query tokens per sequence): every (sequence, KV head) gathers its own pages - all
  of them on a dense layer, the chosen ones on a sparse layer.
* **tiles** (a prefill chunk): queries of one sequence are taken ``TILE`` at a time against the
  pages that any of them may see or has chosen, under a mask.

Memory that holds no token is never multiplied (0 x NaN is NaN): gathered copies are zeroed there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.kv import write as kv_write
from minuet.kv.cache import LayerCache
from minuet.kv.layout import Form, LaneName

# S sequences of a group, q query tokens each, K KV heads, G group, D head dim, I index dim,
# N gathered pages, P page size, L = N * P gathered tokens, C chosen blocks

write = kv_write.write

ROWS_MAX_QUERY = 8  # up to this many query tokens per sequence rows are gathered, above it tiled
TILE = 256  # query tokens per tile at most; fewer where the context is long, see _tiles
_TILE_BYTES = 64 * 2**20  # scores or mask of one tile, whatever the context
_PADDING_LIMIT = 1.3  # a group may gather at most this multiple of the pages it needs
_NEVER = torch.finfo(
    torch.float32
).min  # not -inf: a row that sees nothing must give zeros, not NaN


@dataclass(frozen=True)
class Group:
    """Sequences with the same number of query tokens and about the same context.

    What follows from it is worked out once per step, not once per layer.

    Attributes:
        tokens: [S * q] int64; their query tokens in the step.
        query_len: q.
        pages: [S, N] int64; pages in order, the dummy page 0 where a sequence has fewer.
        positions: [S, q] int64.
        lens: [S] int64; tokens in the cache including this step's.
        page_size: P.
    """

    tokens: Tensor
    query_len: int
    pages: Tensor
    positions: Tensor
    lens: Tensor
    page_size: int

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.pages.shape[1]

    @cached_property
    def slot(self) -> Tensor:
        """[L] int64: position of each gathered slot."""
        return torch.arange(self.num_blocks * self.page_size)

    @cached_property
    def stale(self) -> tuple[Tensor, ...]:
        """Coordinates (sequence, slot) of gathered slots that hold no token."""
        return (self.slot >= self.lens[:, None]).nonzero(as_tuple=True)

    @cached_property
    def hidden(self) -> Tensor:
        """[S, q, L] bool: slots that a query token must not see."""
        return self.slot > self.positions[..., None]

    @cached_property
    def every_block(self) -> Tensor:
        """[S, q, N] int32: the visible blocks of each query token, -1 at the tail."""
        block = torch.arange(self.num_blocks, dtype=torch.int32)
        return block.where(block <= (self.positions // self.page_size)[..., None], -1)

    def page_heads(self, num_heads: int) -> Tensor:
        """[S * K * N] int64: ``page * K + head`` of every gathered page."""
        if num_heads not in self._page_heads:
            heads = torch.arange(num_heads)[:, None]
            self._page_heads[num_heads] = (self.pages[:, None] * num_heads + heads).flatten()
        return self._page_heads[num_heads]

    @cached_property
    def _page_heads(self) -> dict[int, Tensor]:
        return {}


@dataclass(frozen=True)
class Plan:
    """What every layer of the step shares.

    Attributes:
        groups: every query token is in exactly one.
        num_tokens: query tokens of the step.
    """

    groups: tuple[Group, ...]
    num_tokens: int

    def all_visible(self, num_heads: int, top_blocks: int) -> Tensor | None:
        """[T, K, top_blocks] int32: the selection of a step in which every block is chosen.

        None where some context has more blocks than are chosen. The same for every layer.
        """
        key = (num_heads, top_blocks)
        if key not in self._selections:
            self._selections[key] = None
            if all(group.num_blocks <= top_blocks for group in self.groups):
                chosen = torch.full((self.num_tokens, top_blocks), -1, dtype=torch.int32)
                for group in self.groups:
                    chosen[group.tokens, : group.num_blocks] = group.every_block.flatten(0, 1)
                self._selections[key] = chosen[:, None].expand(-1, num_heads, -1)
        return self._selections[key]

    @cached_property
    def _selections(self) -> dict[tuple[int, int], Tensor | None]:
        return {}


def plan(batch: AttentionBatch, page_size: int) -> Plan:
    """Group the step's sequences. Host lengths decide; device memory is not read.

    Args:
        batch: the step.
        page_size: tokens per page.
    """
    starts = [0]
    for query_len in batch.query_lens:
        starts.append(starts[-1] + query_len)
    blocks = [-(-length // page_size) for length in batch.seq_lens]
    groups = []
    for members in _grouped(batch.query_lens, blocks):
        query_len, width = batch.query_lens[members[0]], max(blocks[m] for m in members)
        first = torch.tensor([starts[m] for m in members])
        tokens = (first[:, None] + torch.arange(query_len)).flatten()
        groups.append(
            Group(
                tokens=tokens,
                query_len=query_len,
                pages=batch.page_table[members, :width].long().clamp(min=0),
                positions=batch.positions[tokens].view(len(members), query_len),
                lens=torch.tensor([batch.seq_lens[m] for m in members]),
                page_size=page_size,
            )
        )
    return Plan(tuple(groups), batch.num_tokens)


def _grouped(query_lens: tuple[int, ...], blocks: list[int]) -> list[list[int]]:
    """Members of each group: equal query length, sorted by context, little padding."""
    order = sorted(range(len(blocks)), key=lambda s: (query_lens[s], blocks[s]))
    groups: list[list[int]] = []
    used = 0
    for seq in order:
        fits = (
            bool(groups)
            and query_lens[groups[-1][0]] == query_lens[seq]
            and query_lens[seq] <= ROWS_MAX_QUERY
            and (len(groups[-1]) + 1) * blocks[seq] <= _PADDING_LIMIT * (used + blocks[seq])
        )
        if fits:
            groups[-1].append(seq)
            used += blocks[seq]
        else:
            groups.append([seq])
            used = blocks[seq]
    return groups


# --- select --------------------------------------------------------------------------------------


def select(index_q: Tensor, cache: LayerCache, plan: Plan, selection: Selection) -> Tensor:
    """Blocks each row attends to; see :func:`minuet.attention.reference.select`.

    Args:
        index_q: [T, K, I], normalised and rotated.
        cache: the layer's lanes; this step's index keys already written.
        plan: of this step.
        selection: how blocks are chosen.

    Returns:
        [T, K, top_blocks] int32 logical block ids, ascending, -1 at the tail.
    """
    num_tokens, heads, _ = index_q.shape
    if (everything := plan.all_visible(heads, selection.top_blocks)) is not None:
        return everything
    chosen = torch.full((num_tokens, heads, selection.top_blocks), -1, dtype=torch.int32)
    for group in plan.groups:
        if group.num_blocks <= selection.top_blocks:
            # everything visible is chosen: nothing to score
            visible = group.every_block.flatten(0, 1)[:, None].expand(-1, heads, -1)
            chosen[group.tokens, :, : group.num_blocks] = visible
            continue
        index_k = _gather_index(cache, group)
        for tile in _tiles(group, 4 * heads * index_k.shape[0] * index_k.shape[1]):
            positions = group.positions[:, tile]
            tokens = group.tokens.view(-1, group.query_len)[:, tile].flatten()
            scores = _block_scores(index_q[tokens], index_k, positions, group.page_size)
            own = positions // group.page_size
            chosen[tokens] = _choose(scores, own + 1, selection).flatten(0, 1)
    return chosen


def _tiles(group: Group, query_bytes: int) -> Iterator[slice]:
    """Query tokens, cut so that what is built per query token stays within a fixed size.

    Args:
        group: whose query tokens.
        query_bytes: bytes built per query token.
    """
    step = min(TILE, max(1, _TILE_BYTES // query_bytes))
    for first in range(0, group.query_len, step):
        yield slice(first, min(first + step, group.query_len))


def _gather_index(cache: LayerCache, group: Group) -> Tensor:
    """[S, L, I] float32, zero where no token lies."""
    lane = cache.index_k
    picked = _take(lane, group.pages.flatten()).view(*group.pages.shape, *lane.shape[1:]).float()
    index_k = picked.flatten(1, 2)
    index_k[group.stale] = 0.0
    return index_k


def _block_scores(index_q: Tensor, index_k: Tensor, positions: Tensor, block: int) -> Tensor:
    """[S, q, K, N] float32: the largest score over the visible tokens of each block."""
    num_seqs, query_len = positions.shape
    heads = index_q.shape[1]
    rows = index_q.float().view(num_seqs, query_len * heads, -1)
    scores = torch.bmm(rows, index_k.transpose(1, 2)).view(num_seqs, query_len, heads, -1)
    later = torch.arange(index_k.shape[1]) > positions[..., None]
    scores.masked_fill_(later[:, :, None], _NEVER)
    return scores.view(*scores.shape[:-1], -1, block).amax(-1)


def _choose(scores: Tensor, visible: Tensor, selection: Selection) -> Tensor:
    """[S, q, K, top_blocks] int32 from block scores and the number of visible blocks [S, q]."""
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks)
    seen = visible[:, :, None, None]
    forced = (block < selection.init_blocks) | (block >= seen - selection.local_blocks)
    # a NaN score must not outrank anything; +inf marks forced blocks, -inf blocks not there yet
    ranked = scores.nan_to_num(
        nan=torch.finfo(torch.float32).min, neginf=torch.finfo(torch.float32).min
    )
    ranked = ranked.masked_fill(forced, float("inf")).masked_fill(block >= seen, _NEVER)
    width = min(selection.top_blocks, num_blocks)
    # a stable descending sort resolves ties to the lowest block
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    order = order.masked_fill(order >= seen, num_blocks).sort(dim=-1).values
    order = order.masked_fill(order == num_blocks, -1)
    return F.pad(order, (0, selection.top_blocks - width), value=-1).to(torch.int32)


# --- attend --------------------------------------------------------------------------------------


def attend(q: Tensor, cache: LayerCache, plan: Plan, blocks: Tensor | None, scale: float) -> Tensor:
    """Attention over chosen blocks or over everything; defined by ``reference.attend``.

    Args:
        q: [T, H, D], normalised and rotated.
        cache: the layer's lanes; this step's keys and values already written.
        plan: of this step.
        blocks: [T, K, top_blocks] int32 from :func:`select`; None attends to everything.
        scale: multiplies the scores.

    Returns:
        [T, H, D] in the type of ``q``.
    """
    out = torch.empty_like(q)
    for group in plan.groups:
        rows, chosen = q[group.tokens], None if blocks is None else blocks[group.tokens]
        if group.query_len > ROWS_MAX_QUERY:
            result = _attend_tiles(rows, cache, group, chosen, scale)
        elif chosen is None or group.num_blocks <= chosen.shape[-1]:
            result = _attend_rows(rows, cache, group, scale)
        else:
            result = _attend_chosen(rows, cache, group, chosen, scale)
        out[group.tokens] = result.to(q.dtype)
    return out


def _attend_rows(q: Tensor, cache: LayerCache, group: Group, scale: float) -> Tensor:
    """Every sequence against all its pages. q [S * q, H, D]."""
    heads, num_seqs, dim = cache.layout.num_kv_heads, group.pages.shape[0], q.shape[-1]
    k, v = _gather(cache, group.page_heads(heads), num_seqs * heads)
    length = k.shape[1]
    seq, slot = group.stale
    for side in (k, v):
        side.view(num_seqs, heads, length, dim)[seq, :, slot] = 0.0
    # rows of one sequence and KV head: q query tokens x G heads
    rows = q.float().view(num_seqs, group.query_len, heads, -1, dim).transpose(1, 2)
    scores = torch.bmm(rows.reshape(num_seqs * heads, -1, dim) * scale, k.transpose(1, 2))
    by_token = scores.view(num_seqs, heads, group.query_len, -1, length)
    by_token.masked_fill_(group.hidden[:, None, :, None], _NEVER)
    result = torch.bmm(scores.softmax(-1), v)
    return result.view(num_seqs, heads, group.query_len, -1, dim).transpose(1, 2).reshape(q.shape)


def _attend_chosen(
    q: Tensor, cache: LayerCache, group: Group, blocks: Tensor, scale: float
) -> Tensor:
    """Every (query token, KV head) against its own chosen blocks. blocks [S * q, K, C]."""
    heads, block = cache.layout.num_kv_heads, cache.layout.page_size
    blocks = blocks[..., : min(blocks.shape[-1], group.num_blocks)].long()
    rows, width = blocks.shape[0] * heads, blocks.shape[-1]
    seq = torch.arange(group.pages.shape[0]).repeat_interleave(group.query_len)
    pages = group.pages[seq[:, None, None], blocks.clamp(min=0)]
    flat = (pages * heads + torch.arange(heads)[:, None]).flatten()
    k, v = _gather(cache, flat, rows)
    token = blocks[..., None] * block + torch.arange(block)
    hidden = (token > group.positions.view(-1, 1, 1, 1)) | (blocks < 0)[..., None]
    hidden = hidden.view(rows, width * block)
    for side in (k, v):
        _zero_stale(side, hidden)
    scores = torch.bmm(q.float().view(rows, -1, q.shape[-1]) * scale, k.transpose(1, 2))
    scores.masked_fill_(hidden[:, None], _NEVER)
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


def _attend_tiles(
    q: Tensor, cache: LayerCache, group: Group, blocks: Tensor | None, scale: float
) -> Tensor:
    """A prefill chunk of one sequence, tile by tile. q [q, H, D]."""
    heads, block = cache.layout.num_kv_heads, cache.layout.page_size
    out = torch.empty(q.shape)
    all_pages, length = group.pages[0], int(group.lens[0])
    for tile in _tiles(group, 4 * heads * length):
        positions = group.positions[0, tile]
        visible = int(positions[-1]) // block + 1
        wanted, chosen = torch.arange(visible), None
        if blocks is not None and visible > blocks.shape[-1]:
            chosen = _chosen_mask(blocks[tile], visible)
            wanted = chosen.any(0).any(0).nonzero()[:, 0]
        flat = (all_pages[wanted][None] * heads + torch.arange(heads)[:, None]).flatten()
        k, v = _gather(cache, flat, heads)
        token = (wanted[:, None] * block + torch.arange(block)).flatten()
        for side in (k, v):
            _zero_stale(side, (token >= length).expand(heads, -1))
        allowed = (token <= positions[:, None])[None]
        if chosen is not None:
            allowed = allowed & chosen[..., wanted].transpose(0, 1).repeat_interleave(block, -1)
        # KV heads as the batch, query heads of one KV head as the heads: K and V are never repeated
        rows = q[tile].float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        group_size = rows.shape[1]
        result = F.scaled_dot_product_attention(
            rows,
            k[:, None].expand(-1, group_size, -1, -1),
            v[:, None].expand(-1, group_size, -1, -1),
            attn_mask=allowed[:, None],
            scale=scale,
        )
        out[tile] = result.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _chosen_mask(blocks: Tensor, num_blocks: int) -> Tensor:
    """[q, K, num_blocks] bool from block lists [q, K, C]."""
    mask = torch.zeros(*blocks.shape[:2], num_blocks + 1, dtype=torch.bool)
    ids = blocks.long()
    mask.scatter_(2, ids.masked_fill(ids < 0, num_blocks), value=True)
    return mask[..., :num_blocks]


# --- gathering -----------------------------------------------------------------------------------


def _gather(cache: LayerCache, flat: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """K and V of (page, head) pairs, dequantised: two [rows, L, D] float32.

    Args:
        cache: the layer's lanes.
        flat: [rows * pages] int64, ``page * K + head``.
        rows: leading extent of the result.
    """
    layout = cache.layout
    sides = []
    for name, scale_name in ((LaneName.K, LaneName.K_SCALE), (LaneName.V, LaneName.V_SCALE)):
        lane = cache.lanes[name].flatten(0, 1)
        picked = _take(lane, flat).float()
        if layout.form is Form.SHUFFLE:
            # K [D/x, P, x] -> [P, D]; V [P/x, D, x] -> [P, D]
            picked = (
                picked.permute(0, 2, 1, 3) if name is LaneName.K else picked.permute(0, 1, 3, 2)
            )
            picked = picked.reshape(-1, layout.page_size, layout.head_dim)
        if layout.has_scales:
            picked = picked * cache.lanes[scale_name].flatten(0, 1)[flat][..., None]
        sides.append(picked.reshape(rows, -1, layout.head_dim))
    return sides[0], sides[1]


def _take(lane: Tensor, index: Tensor) -> Tensor:
    """``lane[index]`` along the first axis; FP8 moves as bytes."""
    if lane.dtype.itemsize == 1:
        return lane.view(torch.uint8).index_select(0, index).view(lane.dtype)
    return lane.index_select(0, index)


def _zero_stale(gathered: Tensor, stale: Tensor) -> None:
    """Zero what holds no visible token; ``gathered`` [rows, L, width], ``stale`` [rows, L] bool."""
    where = stale.nonzero(as_tuple=True)
    if where[0].numel():
        gathered[where] = 0.0
