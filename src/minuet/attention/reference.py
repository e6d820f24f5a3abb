"""The definition of paged attention: FP32, one row at a time. Everything is compared with it.

It reads the cache through :meth:`KVLayout.address` arithmetic written out as indexing, element by
element in meaning, and knows nothing of tiles, splits or batches. Slow on purpose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.kv.cache import LayerCache
from minuet.kv.layout import Form, LaneName

# T tokens, K KV heads, G group, D head dim, I index dim, L context length


@dataclass(frozen=True, slots=True)
class Selection:
    """How blocks are chosen; see :class:`minuet.planning.model.IndexFacts`.

    Attributes:
        top_blocks: blocks per row, forced ones included.
        init_blocks: leading blocks always chosen.
        local_blocks: blocks up to the query's own always chosen; at least 1.
    """

    top_blocks: int
    init_blocks: int = 0
    local_blocks: int = 1


def read(cache: LayerCache, pages: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The first ``length`` tokens of one sequence, dequantised.

    Args:
        cache: the layer's lanes.
        pages: [pages] integer; page of each block in order.
        length: tokens.

    Returns:
        k [L, K, D], v [L, K, D] and index_k [L, I] (None on a dense layer), float32.
    """
    layout = cache.layout
    token = torch.arange(length, device=pages.device)
    page, slot, x = pages.long()[token // layout.page_size], token % layout.page_size, layout.chunk
    if layout.form is Form.HEAD_MAJOR:
        k, v = cache.k.float()[page, :, slot], cache.v.float()[page, :, slot]
    else:
        k = cache.k.float()[page, :, :, slot].flatten(2)
        v = cache.v.float()[page, :, slot // x, :, slot % x]
    if layout.has_scales:
        k = k * cache.lanes[LaneName.K_SCALE][page, :, slot][..., None]
        v = v * cache.lanes[LaneName.V_SCALE][page, :, slot][..., None]
    index_k = cache.index_k.float()[page, slot] if layout.index_dim else None
    return k, v, index_k


def block_scores(index_q: Tensor, index_k: Tensor, position: int, block: int) -> Tensor:
    """Score of each visible block for one query: the largest ``iq . ik`` over its visible tokens.

    Args:
        index_q: [K, I], normalised and rotated.
        index_k: [L, I], L > position.
        position: the query's absolute position; later tokens are not looked at.
        block: tokens per block.

    Returns:
        [K, position // block + 1] float32.
    """
    scores = index_q.float() @ index_k[: position + 1].float().T
    blocks = scores.split(block, dim=1)
    return torch.stack([b.amax(1) for b in blocks], dim=1)


def choose_blocks(scores: Tensor, selection: Selection) -> list[int]:
    """The chosen blocks of one row, ascending. Ties go to the lowest block.

    Args:
        scores: [blocks] float32; NaN ranks last.
        selection: how many, and which are forced.
    """
    count = scores.shape[0]
    forced = set(range(min(selection.init_blocks, count)))
    forced |= set(range(max(0, count - selection.local_blocks), count))
    ranked = sorted(
        range(count),
        key=lambda b: (
            b not in forced,
            -scores[b].item() if scores[b] == scores[b] else float("inf"),
            b,
        ),
    )
    return sorted(ranked[: selection.top_blocks])


def select(
    index_q: Tensor, cache: LayerCache, batch: AttentionBatch, selection: Selection
) -> Tensor:
    """Blocks each row attends to.

    Args:
        index_q: [T, K, I], normalised and rotated.
        cache: the layer's lanes; this step's index keys already written.
        batch: the step.
        selection: how blocks are chosen.

    Returns:
        [T, K, top_blocks] int32: logical block ids (index into the sequence's page table),
        ascending, -1 at the tail.
    """
    num_tokens, heads, _ = index_q.shape
    chosen = torch.full((num_tokens, heads, selection.top_blocks), -1, dtype=torch.int32)
    row = 0
    for seq, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        _, _, index_k = read(cache, batch.page_table[seq], seq_len)
        assert index_k is not None
        for _ in range(query_len):
            position = int(batch.positions[row])
            scores = block_scores(index_q[row], index_k, position, cache.layout.page_size)
            for head in range(heads):
                blocks = choose_blocks(scores[head], selection)
                chosen[row, head, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            row += 1
    return chosen


def attend(
    q: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    blocks: Tensor | None,
    scale: float,
) -> Tensor:
    """``softmax(q . K * scale) V`` over the visible tokens of the chosen blocks, or of all.

    Args:
        q: [T, H, D], normalised and rotated.
        cache: the layer's lanes; this step's keys and values already written.
        batch: the step.
        blocks: [T, K, top_blocks] int32 from :func:`select`; None attends to everything.
        scale: usually ``head_dim ** -0.5``.

    Returns:
        [T, H, D] in the type of ``q``; a row without a visible token is zero.
    """
    block, heads = cache.layout.page_size, cache.layout.num_kv_heads
    group = q.shape[1] // heads
    out = torch.zeros_like(q)
    row = 0
    for seq, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        k, v, _ = read(cache, batch.page_table[seq], seq_len)
        for _ in range(query_len):
            visible = torch.arange(min(int(batch.positions[row]) + 1, seq_len))
            for head in range(heads):
                tokens = visible
                if blocks is not None:
                    tokens = visible[torch.isin(visible // block, blocks[row, head].long())]
                if tokens.numel():
                    mine = slice(head * group, (head + 1) * group)
                    weights = (q[row, mine].float() @ k[tokens, head].T * scale).softmax(-1)
                    out[row, mine] = (weights @ v[tokens, head]).to(q.dtype)
            row += 1
    return out
