"""Selected attention and block scores over whole sequences, with gradients.

B rows, T tokens of a row, Q query heads, K KV heads (= index heads), D head dim, N blocks, M
watched queries of a row.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# --- attention over chosen blocks ----------------------------------------------------------


def masked(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> Tensor:
    """Causal attention over chosen blocks, through a mask.

    Args:
        q: [B, T, Q, D].
        k: [B, T, K, D].
        v: [B, T, K, D].
        chosen: [B, K, T, N] bool.
        block: tokens per block.

    Returns:
        [B, T, Q, D].
    """
    B, T, Q, D = q.shape
    K = k.shape[2]
    seen = chosen.repeat_interleave(block, dim=-1)[..., :T]
    seen = seen & torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    grouped = q.view(B, T, K, Q // K, D).permute(0, 2, 3, 1, 4).reshape(B * K, Q // K, T, D)
    keys, values = (
        x.transpose(1, 2).reshape(B * K, 1, T, D).expand(-1, Q // K, -1, -1) for x in (k, v)
    )
    mask = seen.view(B * K, 1, T, T).expand(-1, Q // K, -1, -1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.view(B, K, Q // K, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, Q, D)


def fused(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int) -> Tensor:
    """What :func:`masked` computes, in one generated kernel (FlexAttention)."""
    from torch.nn.attention.flex_attention import BlockMask

    T, group = q.shape[1], q.shape[2] // k.shape[2]

    def seen(b: Tensor, h: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        return (k_at <= q_at) & chosen[b, h // group, q_at, k_at // block]

    counts, indices = _causal_tiles(T, q.device)
    mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=_TILE, mask_mod=seen, seq_lengths=(T, T)
    )
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    attend = _flex_attention(q.device.type)
    return attend(*heads_first, block_mask=mask, enable_gqa=True).transpose(1, 2)


SELECTED: Mapping[str, Callable[..., Tensor]] = {"masked": masked, "fused": fused}

_TILE = 128


@cache
def _flex_attention(device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention


@cache
def _causal_tiles(T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tiles = math.ceil(T / _TILE)
    counts = torch.arange(1, tiles + 1, dtype=torch.int32, device=device)
    indices = torch.arange(tiles, dtype=torch.int32, device=device).expand(tiles, -1)
    return counts[None, None], indices.contiguous()[None, None]


# --- which blocks ----------------------------------------------------------


def block_scores(index_q: Tensor, index_k: Tensor, positions: Tensor, block: int) -> Tensor:
    """Score of every block for queries at ``positions``: the best token in sight.

    Args:
        index_q: [B, M, K, D] at ``positions``.
        index_k: [B, T, D]; T need not be whole blocks.
        positions: [B, M].
        block: tokens per block.

    Returns:
        [B, K, M, N], ``-inf`` for blocks after the query.
    """
    T, D = index_k.shape[1:]
    N = math.ceil(T / block)
    scores = torch.einsum("bmkd,btd->bkmt", index_q, index_k).float() * D**-0.5
    later = torch.arange(T, device=index_k.device) > positions[:, None, :, None]
    scores = F.pad(scores.masked_fill(later, -torch.inf), (0, N * block - T), value=-torch.inf)
    return scores.unflatten(-1, (N, block)).amax(-1)


@torch.no_grad()
def choose(scores: Tensor, positions: Tensor, block: int, top_blocks: int) -> Tensor:
    """The blocks each query attends to: its own, and the best of the others.

    Args:
        scores: [B, K, M, N] from :func:`block_scores`.
        positions: [B, M].
        block: tokens per block.
        top_blocks: blocks per query, its own included.

    Returns:
        [B, K, M, N] bool.
    """
    own = (positions // block)[:, None, :, None]
    N = scores.shape[-1]
    ranked = scores.masked_fill(torch.arange(N, device=scores.device) == own, torch.inf)
    best = ranked.topk(min(top_blocks, N), dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return chosen & (scores > -torch.inf)  # before there are enough blocks, all of them


@torch.no_grad()
def select(index_q: Tensor, index_k: Tensor, block: int, top_blocks: int) -> Tensor:
    """Selection of every token of a row, some queries at a time.

    Args:
        index_q: [B, T, K, D].
        index_k: [B, T, D].
        block: tokens per block.
        top_blocks: as in :func:`choose`.

    Returns:
        [B, K, T, N] bool.
    """
    B, T, K, _ = index_q.shape
    most = 2**28 // (B * K * T)  # elements of a score matrix: 1 GiB
    parts = []
    for start in range(0, T, max(1, most)):
        rows = index_q[:, start : start + most]
        positions = torch.arange(start, start + rows.shape[1], device=index_q.device).expand(B, -1)
        scores = block_scores(rows, index_k, positions, block)
        parts.append(choose(scores, positions, block, top_blocks))
    return torch.cat(parts, dim=2)


# --- what the indexer learns from ----------------------------------------------------------


@torch.no_grad()
def block_mass(q: Tensor, k: Tensor, positions: Tensor, block: int) -> Tensor:
    """Attention mass of every block in full attention, the largest over the heads of a group.

    The largest, not the mean: a block that one head of sixteen needs is needed.

    Args:
        q: [B, M, Q, D] at ``positions``.
        k: [B, T, K, D].
        positions: [B, M].
        block: tokens per block.

    Returns:
        [B, K, M, N].
    """
    B, M, Q, D = q.shape
    T, K = k.shape[1:3]
    N = math.ceil(T / block)
    scores = torch.einsum("bmkgd,btkd->bkgmt", q.view(B, M, K, Q // K, D), k).float() * D**-0.5
    later = torch.arange(T, device=k.device) > positions[:, None, None, :, None]
    mass = F.pad(scores.masked_fill(later, -torch.inf).softmax(-1), (0, N * block - T))
    return mass.unflatten(-1, (N, block)).sum(-1).amax(2)


def index_loss(
    scores: Tensor, mass: Tensor, positions: Tensor, block: int, top_blocks: int
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the block scores with the attention's mass, over all blocks but the own.

    The own block is always selected, so scores need not tell it from the others. A query counts by
    the mass it has elsewhere.

    Args:
        scores: [B, K, M, N] from :func:`block_scores`.
        mass: [B, K, M, N] from :func:`block_mass`.
        positions: [B, M].
        block: tokens per block.
        top_blocks: as in :func:`choose`.

    Returns:
        the loss, and the share of the mass elsewhere that the chosen blocks have; scalars.
    """
    N = scores.shape[-1]
    own = torch.arange(N, device=scores.device) == (positions // block)[:, None, :, None]
    outside = own | (scores == -torch.inf)
    mass = mass.masked_fill(outside, 0.0)
    logits = scores.masked_fill(outside, -1e30).log_softmax(-1)
    total = mass.sum().clamp(min=1e-6)
    chosen = choose(scores, positions, block, top_blocks)
    recall: Any = (mass * chosen).sum() / total
    return -(mass * logits).sum() / total, recall
