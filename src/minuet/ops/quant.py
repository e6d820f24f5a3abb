"""The one quantisation rule of the cache: one FP32 scale per vector, from the largest magnitude."""

import torch
from torch import Tensor


def quantize_per_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``scale = amax / max(dtype)`` where amax > 0, else 1; rounds to nearest even, saturates.

    Args:
        x: [..., channels], any floating type; a vector is the last axis.
        dtype: an FP8 type; its largest finite value comes from the type.

    Returns:
        values [..., channels] of ``dtype`` and scale [...] float32, so that ``values * scale ~ x``.
    """
    x32 = x.float()
    top = torch.finfo(dtype).max
    amax = x32.abs().amax(-1)
    scale = torch.where(amax > 0, amax / top, torch.ones_like(amax))
    # saturate before the cast: rounding may leave x / scale one ulp above the largest value
    return (x32 / scale[..., None]).clamp(-top, top).to(dtype), scale
