"""Triton launches as values, and which arch a torch device is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minuet.platform.arch import ARCHS


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel launch, not yet made. Compile tests read it, everything else calls it.

    Attributes:
        kernel: the jitted function.
        grid: programs.
        args: every parameter of the kernel by name.
        options: compiler options.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    options: Mapping[str, Any]

    def __call__(self) -> None:
        """Launch."""
        self.kernel[self.grid](**self.args, **self.options)


def arch_name(device: torch.device) -> str:
    """The arch row of a device; a chip that has none goes by its generation (``sm103``: sm100)."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    exact = f"sm{properties.major}{properties.minor}"
    return exact if exact in ARCHS else f"sm{properties.major}0"
