"""Routing and the routed experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.ops.activation import swiglu_oai

# T tokens, E experts, k experts per token, H hidden, I expert width


def route(hidden: Tensor, router: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose experts by biased score, weigh them by the raw one.

    ``s = sigmoid(router . h)``; experts are the ``top_k`` of ``s + bias``; weights are ``s`` of the
    chosen, renormalised to sum 1. The bias changes which experts run, never how much they count.

    Args:
        hidden: [T, H].
        router: [E, H] float32.
        bias: [E] float32.
        top_k: experts per token.

    Returns:
        experts [T, k] int64 and weights [T, k] float32.
    """
    scores = torch.sigmoid(F.linear(hidden.float(), router))
    experts = torch.topk(scores + bias, top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, experts)
    return experts, weights / weights.sum(-1, keepdim=True)


def experts_forward(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Weighted sum of each token's experts: ``sum_k w_k * down_k(act(gate_up_k(h)))``.

    Tokens are sorted by expert so that each expert is one matrix product over its tokens.

    Args:
        hidden: [T, H].
        experts: [T, k] int64.
        weights: [T, k] float32.
        gate_up: [E, 2 * I, H], gate rows first.
        down: [E, H, I].
        alpha: see :func:`minuet.ops.activation.swiglu_oai`.
        limit: the same.

    Returns:
        [T, H] in the type of ``hidden``.
    """
    num_tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    token_of = order // top_k
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    gathered = hidden[token_of]
    out = torch.empty_like(gathered)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = slice(start, start + count)
        inner = swiglu_oai(F.linear(gathered[rows], gate_up[expert]), alpha, limit)
        torch.matmul(inner, down[expert].T, out=out[rows])
        start += count
    scaled = out.float() * weights.reshape(-1)[order][:, None]
    total = torch.zeros(num_tokens, hidden.shape[-1], dtype=torch.float32, device=hidden.device)
    return total.index_add_(0, token_of, scaled).to(hidden.dtype)
