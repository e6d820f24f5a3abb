"""Gemma RMSNorm: the gain is ``1 + w``."""

import torch.nn.functional as F
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
    return F.rms_norm(x.float(), weight.shape[-1:], 1.0 + weight, eps).to(x.dtype)
