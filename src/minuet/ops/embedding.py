"""The beginning of a step: embedded tokens, the first norm, and the angles of their positions."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.ops.norm import gemma_rms_norm
from minuet.ops.rope import cos_sin

# T tokens, N tokens drawn before, V vocabulary, H hidden


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """What a model begins with.

    Attributes:
        table: [V, H].
        norm: [H] float32; weight of the norm before the first layer.
        eps: of that norm.
        frequencies: [rotary_dim / 2] float32, see :func:`minuet.ops.rope.inverse_frequencies`.
    """

    table: Tensor
    norm: Tensor
    eps: float
    frequencies: Tensor


class Follows(NamedTuple):
    """Input tokens that an earlier step drew and the host has not seen.

    Attributes:
        at: [T] int64; where in ``drawn`` the input token stands; below 0: the host knew it.
        drawn: [N] int64.
    """

    at: Tensor
    drawn: Tensor


class Embedded(NamedTuple):
    """What the first layer takes.

    Attributes:
        hidden: [T, H] in the type of the table; the residual stream.
        normed: [T, H], its norm.
        cos: [T, rotary_dim / 2] float32.
        sin: the same.
    """

    hidden: Tensor
    normed: Tensor
    cos: Tensor
    sin: Tensor


def embed(
    token_ids: Tensor, positions: Tensor, embedding: Embedding, follows: Follows | None = None
) -> Embedded:
    """Begin a step.

    Args:
        token_ids: [T] int64, below V.
        positions: [T] int64.
        embedding: of the model.
        follows: which input tokens to take from those drawn before, instead of ``token_ids``.
    """
    if follows is not None:
        drawn = follows.drawn[follows.at.clamp_min(0)]
        token_ids = torch.where(follows.at < 0, token_ids, drawn)
    hidden = F.embedding(token_ids, embedding.table)
    normed = gemma_rms_norm(hidden, embedding.norm, embedding.eps)
    return Embedded(hidden, normed, *cos_sin(positions, embedding.frequencies))
