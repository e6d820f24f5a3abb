"""Selection of blocks in plain torch, for a library that has none."""

import torch
from torch import Tensor

from minuet.attention.reference import Selection
from minuet.kv.cache import LayerCache

_TOKENS_AT_ONCE = 256  # query tokens whose scores are held at once

# T query tokens, K KV heads, I index dim, L context length, N blocks


def choose(
    index_q: Tensor, cache: LayerCache, pages: Tensor, visible: Tensor, selection: Selection
) -> Tensor:
    """Blocks of the query tokens of one sequence; see :func:`minuet.attention.reference.select`.

    Args:
        index_q: [T, K, I], normalised and rotated.
        cache: the layer's lanes.
        pages: [N] int32; page of each block up to the last that is visible.
        visible: [T] tokens that each query token sees.
        selection: how blocks are chosen.

    Returns:
        [T, K, top_blocks] int32, ascending, -1 at the tail.
    """
    keys = cache.index_k[pages.long()].float().flatten(0, 1)  # [L, I]
    chosen = [
        _choose(part.float(), keys, seen, cache.layout.page_size, selection)
        for part, seen in zip(
            index_q.split(_TOKENS_AT_ONCE), visible.split(_TOKENS_AT_ONCE), strict=True
        )
    ]
    return torch.cat(chosen)


def _choose(
    index_q: Tensor, keys: Tensor, visible: Tensor, block: int, selection: Selection
) -> Tensor:
    token = torch.arange(keys.shape[0], device=keys.device)
    hidden = token >= visible[:, None]
    # what no token has written may be NaN; it takes no part in the product
    keys = keys.where((token < visible.max())[:, None], 0.0)
    scores = torch.einsum("tki,li->tkl", index_q, keys)
    scores = scores.masked_fill(hidden[:, None], -torch.inf).unflatten(2, (-1, block)).amax(3)
    number = torch.arange(scores.shape[2], device=keys.device)
    count = -(-visible // block)[:, None, None]
    forced = (number < selection.init_blocks) | (number >= count - selection.local_blocks)
    scores = scores.nan_to_num(nan=torch.finfo(torch.float32).min, neginf=-torch.inf)
    scores = scores.where(~forced, torch.inf).where(number < count, -torch.inf)
    # stable: of equal scores the lowest block stands first
    best = scores.argsort(dim=2, descending=True, stable=True)[..., : selection.top_blocks]
    best = best.where(best < count, scores.shape[2]).sort(dim=2).values
    best = best.where(best < scores.shape[2], -1).to(torch.int32)
    missing = selection.top_blocks - best.shape[2]
    return torch.nn.functional.pad(best, (0, missing), value=-1)
