"""Muon for the matrices, AdamW for the rest, under one learning rate."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Quintic iteration towards the nearest orthogonal matrix; coefficients of Keller Jordan's Muon.
_QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass
class _Matrices:
    """Matrices of one shape, updated together.

    Attributes:
        views: parts of parameters, [rows, columns] each.
        grads: the same parts of their gradients.
        momentum: [count, rows, columns].
    """

    views: list[Tensor]
    grads: list[Tensor]
    momentum: Tensor


class Optimizer:
    """Both, with decoupled weight decay on the matrices.

    Muon's update has the root mean square of Adam's, 0.2, so that one rate serves both (Moonlight,
    arXiv 2502.16982).

    Args:
        matrices: name -> views [rows, columns] to be orthogonalised one by one, with the parameter
            that each is part of.
        others: parameters for AdamW.
        decay: weight decay of the matrices.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[Tensor, Tensor]],
        others: Mapping[str, Tensor],
        decay: float = 0.05,
    ):
        self._decay = decay
        self._parameters: list[Tensor] = []
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter, view in matrices:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._parameters.append(parameter)
            # the gradient's storage is allocated once, so its parts are views that stay valid
            grad = parameter.grad.as_strided(
                view.shape, view.stride(), view.storage_offset() - parameter.storage_offset()
            )
            by_shape[view.shape].append((view.detach(), grad))
        self._groups = [
            _Matrices(
                [view for view, _ in parts],
                [grad for _, grad in parts],
                torch.zeros(len(parts), *shape, device=parts[0][0].device),
            )
            for shape, parts in by_shape.items()
        ]
        self._adam = torch.optim.AdamW(
            list(others.values()), betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0, foreach=True
        )

    def step(self, rate: float, momentum: float = 0.95, clip: float = 1.0) -> None:
        """Update, then clear the gradients.

        Args:
            rate: learning rate.
            momentum: Muon's.
            clip: most norm of AdamW's gradients; Muon's updates have a fixed size.
        """
        others = self._adam.param_groups[0]
        torch.nn.utils.clip_grad_norm_(others["params"], clip)
        others["lr"] = rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for group in self._groups:
            grads = torch.stack(group.grads)
            group.momentum.lerp_(grads, 1 - momentum)
            update = orthogonal(grads.lerp_(group.momentum, momentum))
            update *= 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(group.views, 1 - rate * self._decay)
            torch._foreach_add_(group.views, list(update.unbind()), alpha=-rate)
        torch._foreach_zero_([p.grad for p in self._parameters])


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices with the same row and column spaces: singular values near 1.

    Args:
        matrices: [count, rows, columns].
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)
