"""What launches are made of: numbers of the device, compiler options, arguments kernels share."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minuet.attention.backends.triton.config import TARGETS, Target, Tuning
from minuet.kv.cache import LayerCache
from minuet.kv.layout import LaneName
from minuet.platform.triton import arch_name

NARROWEST = 16  # rows of a matrix instruction
# Rows from which NVIDIA's instructions take their second operand from shared memory: FP8 is then
# converted whole and written back there, and reading it as pairs would only scatter it.
_WIDE_ROWS = 64
_OPERANDS = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
OPERAND_OF = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def target_of(device: torch.device) -> Target:
    """Launch numbers of a device; Triton's interpreter stands for the CPU."""
    return TARGETS[arch_name(device)]


def options_of(target: Target, tuning: Tuning, **more: Any) -> dict[str, Any]:
    """Compiler options of a launch."""
    if target.interpreted:
        return {}
    options: dict[str, Any] = {"num_warps": tuning.warps, "num_stages": tuning.stages, **more}
    if tuning.registers:
        options["maxnreg"] = tuning.registers
    if target.pdl:
        options["launch_pdl"] = True
    return options


def paired(lane: Tensor, target: Target, rows: int) -> tuple[Tensor, bool]:
    """An FP8 lane as int16 pairs of neighbouring channels where it is read that way.

    Args:
        lane: of keys or values.
        target: the device.
        rows: of the first operand, when the lane is the second one; else 0.
    """
    pairs = target.pairs and lane.dtype.itemsize == 1 and rows < _WIDE_ROWS
    return (lane.view(torch.int16), True) if pairs else (lane, False)


def operand_of(lane: Tensor, target: Target) -> Any:
    """Type of the matrix operands made from a lane."""
    if target.interpreted:
        return tl.float32
    return _OPERANDS[target.fp8_operand] if lane.dtype.itemsize == 1 else OPERAND_OF[lane.dtype]


def scales_of(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """The scale planes; K and V themselves, unread, where there are none."""
    if not cache.layout.has_scales:
        return cache.k, cache.v
    return cache.lanes[LaneName.K_SCALE], cache.lanes[LaneName.V_SCALE]


def strides_of(k: Tensor, v: Tensor, k_scale: Tensor) -> dict[str, int]:
    """Page and head strides of the lanes."""
    return dict(
        stride_k_page=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v_page=v.stride(0),
        stride_v_head=v.stride(1),
        stride_scale_page=k_scale.stride(0),
        stride_scale_head=k_scale.stride(1),
    )


def power_of_2(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return int(triton.next_power_of_2(value))
