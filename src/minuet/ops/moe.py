"""Routing and the routed experts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.ops.activation import swiglu_oai

# T tokens, E experts, k experts per token, H hidden, I expert width, S shared width


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A routed FFN with a shared expert: ``routed_scale * sum of the chosen + shared``.

    Attributes:
        router: [E, H] float32.
        bias: [E] float32.
        gate_up: [E, 2 * I, H], gate rows first.
        down: [E, H, I].
        shared_gate_up: [2 * S, H], gate rows first; every token visits it, with share 1.
        shared_down: [H, S].
        top_k: experts per token.
        routed_scale: multiplies the shares of the chosen.
        alpha: see :func:`minuet.ops.activation.swiglu_oai`.
        limit: the same.
    """

    router: Tensor
    bias: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor
    top_k: int
    routed_scale: float
    alpha: float
    limit: float


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

    Rows are sorted by expert, so that each expert is one matrix product over its rows, and all of
    them one grouped product.

    Args:
        hidden: [T, H].
        experts: [T, k] int64.
        weights: [T, k] float32.
        gate_up: [E, 2 * I, H], gate rows first.
        down: [E, H, I].
        alpha: see :func:`minuet.ops.activation.swiglu_oai`.
        limit: the same.

    Returns:
        [T, H] in the type of ``hidden``; the sum over experts is in float32.
    """
    num_tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0).to(torch.int32)
    inner = F.grouped_mm(hidden[order // top_k], gate_up.transpose(1, 2), offs=ends)
    out = F.grouped_mm(swiglu_oai(inner, alpha, limit), down.transpose(1, 2), offs=ends)
    by_token = (
        torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, top_k, out.shape[1])
    )
    return torch.bmm(weights[:, None], by_token.float())[:, 0].to(hidden.dtype)
