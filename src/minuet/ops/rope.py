"""Rotary position embedding on the leading channels of a head, in NeoX halves."""

import torch
from torch import Tensor


def inverse_frequencies(
    rotary_dim: int, theta: float, device: torch.device | str = "cpu"
) -> Tensor:
    """``theta ** (-2i / rotary_dim)``: [rotary_dim / 2] float32."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / theta**exponent


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``position * frequency``, once per step for all layers.

    The product is float32 on every path: at positions near 10^6 it carries up to 0.05 rad of
    rounding, and a float64 product would disagree with every other implementation of the model.

    Args:
        positions: [tokens] integer.
        frequencies: [rotary_dim / 2] float32.

    Returns:
        two [tokens, rotary_dim / 2] float32.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + half)`` of the first ``2 * half`` channels; the rest passes through.

    Args:
        x: [tokens, heads, head_dim], any floating type; rotated in float32.
        cos: [tokens, half] float32.
        sin: [tokens, half] float32.

    Returns:
        [tokens, heads, head_dim] in the type of ``x``.
    """
    half = cos.shape[-1]
    out = x.clone()
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos[:, None], sin[:, None]
    out[..., :half] = torch.addcmul(a * cos, b, sin, value=-1.0)
    out[..., half : 2 * half] = torch.addcmul(b * cos, a, sin)
    return out
