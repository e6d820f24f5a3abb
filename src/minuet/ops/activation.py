"""SwiGLU-OAI, the gated activation with clamps."""

import torch
from torch import Tensor


def swiglu_oai(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """``g * sigmoid(alpha * g) * (u + 1)`` with ``g`` clamped from above and ``u`` from both sides.

    Args:
        gate_up: [..., 2 * width]: gate in the first half, up in the second (not interleaved).
        alpha: gain inside the sigmoid.
        limit: the clamp.

    Returns:
        [..., width] in the type of ``gate_up``; computed in float32.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    shifted = up.clamp(-limit, limit).add_(1.0)
    return torch.sigmoid(alpha * gate).mul_(gate).mul_(shifted).to(gate_up.dtype)
