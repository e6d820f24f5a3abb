"""Gemma RMSNorm: the gain is ``1 + w``."""

import torch
from torch import Tensor


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``cast(x32 * rsqrt(mean(x32^2) + eps) * (1 + w32))``; the gain is applied before the cast.

    Args:
        x: [..., width], any floating type.
        weight: [width] float32; zero means gain 1.
        eps: added to the mean square.

    Returns:
        [..., width] in the type of ``x``.
    """
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * inverse_rms * (1.0 + weight)).to(x.dtype)
