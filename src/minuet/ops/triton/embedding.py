"""The beginning of a step in one launch: :func:`minuet.ops.embedding.embed`."""

import torch
import triton
from torch import Tensor

from minuet.errors import ContractError
from minuet.ops.embedding import Embedded, Embedding, Follows
from minuet.ops.triton.common import options_of, power_of_2, target_of
from minuet.ops.triton.config import Target
from minuet.ops.triton.kernels import embedding as kernels
from minuet.platform.triton import Launch

# T tokens, N tokens drawn before, V vocabulary, H hidden

_COS_SIN_ROWS = 16


def embed(
    token_ids: Tensor, positions: Tensor, embedding: Embedding, follows: Follows | None = None
) -> Embedded:
    """See :func:`minuet.ops.embedding.embed`.

    A token that is not in the table, or follows a place that does not exist, reads nothing: its row
    is NaN, which ends its request and no other.
    """
    table, count = embedding.table, token_ids.shape[0]
    hidden = torch.empty((count, table.shape[1]), dtype=table.dtype, device=table.device)
    half = (count, embedding.frequencies.shape[0])
    cos = torch.empty(half, dtype=torch.float32, device=table.device)
    made = Embedded(hidden, torch.empty_like(hidden), cos, torch.empty_like(cos))
    if count:
        embed_launch(token_ids, positions, embedding, follows, made)()
    return made


def embed_launch(
    token_ids: Tensor,
    positions: Tensor,
    embedding: Embedding,
    follows: Follows | None,
    out: Embedded,
    target: Target | None = None,
) -> Launch:
    """The launch of :func:`embed`.

    Raises:
        ContractError: a table whose rows are not in one piece.
    """
    table, count = embedding.table, token_ids.shape[0]
    target = target or target_of(table.device)
    if not table.is_contiguous():
        raise ContractError("embedding", got=table.stride(), expected="rows in one piece")
    (vocab, hidden), half = table.shape, out.cos.shape[1]
    args = dict(
        token_ids_ptr=token_ids,
        at_ptr=token_ids if follows is None else follows.at,
        drawn_ptr=token_ids if follows is None else follows.drawn,
        table_ptr=table,
        weight_ptr=embedding.norm,
        hidden_ptr=out.hidden,
        normed_ptr=out.normed,
        positions_ptr=positions,
        frequencies_ptr=embedding.frequencies,
        cos_ptr=out.cos,
        sin_ptr=out.sin,
        num_tokens=count,
        num_drawn=0 if follows is None else follows.drawn.shape[0],
        vocab=vocab,
        eps=embedding.eps,
        H=hidden,
        BLOCK=power_of_2(hidden),
        HALF=half,
        HALF_PAD=power_of_2(half),
        ROWS=_COS_SIN_ROWS,
        FOLLOWS=follows is not None,
        PDL=target.pdl,
    )
    grid = (count + triton.cdiv(count, _COS_SIN_ROWS),)
    return Launch(kernels.embed, grid, args, options_of(target, target.row_warps))
