"""What the launchers of the operations share."""

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from minuet.ops.triton.config import (
    TARGETS,
    Product,
    Projection,
    Router,
    Sorting,
    Target,
    Tiling,
)
from minuet.platform.triton import Launch, arch_name

_Cut = TypeVar("_Cut", Tiling, Router, Sorting, Projection)
_NARROWEST = 16  # of a matrix operand
_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@cache
def target_of(device: torch.device) -> Target:
    """Launch numbers of a device; Triton's interpreter stands for the CPU."""
    return TARGETS[arch_name(device)]


def operand(dtype: torch.dtype, target: Target) -> Any:
    """Type of matrix operands; the interpreter multiplies 16-bit numbers wrongly."""
    return tl.float32 if target.interpreted else _OPERANDS[dtype]


def product_launch(
    kernel: Any,
    args: dict[str, Any],
    product: Product,
    extents: tuple[int, int, int],
    target: Target,
) -> Launch:
    """``extents``: tiles, output channels, input channels; small ones make small programs."""
    tiles, outputs, inputs = extents
    n = min(product.n, max(_NARROWEST, power_of_2(outputs)))
    c = min(product.c, max(_NARROWEST, power_of_2(inputs)))
    args = args | dict(N=n, C=c, STAGES=product.stages)
    options = options_of(target, product.warps, product.stages)
    return Launch(kernel, (tiles * triton.cdiv(outputs, n),), args, options)


def cut(cuts: Iterable[_Cut], count: int) -> _Cut:
    """The entry of a table by ``upto``."""
    return next(cut for cut in cuts if count <= cut.upto)


def options_of(target: Target, warps: int, stages: int = 1) -> dict[str, Any]:
    """Compiler options of a launch."""
    if target.interpreted:
        return {}
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if target.pdl:
        options["launch_pdl"] = True
    return options


def power_of_2(value: int) -> int:
    """The least that is not below ``value``."""
    return int(triton.next_power_of_2(value))
