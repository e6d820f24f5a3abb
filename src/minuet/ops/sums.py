"""A product that is not added up yet: who reads it next adds it, and saves a launch."""

from dataclasses import dataclass

import torch
from torch import Tensor

# T tokens, W outputs


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """``x @ weight.T`` with its input channels divided into parts.

    Attributes:
        values: [parts, T, W] float32, in one piece.
        dtype: of the product.
    """

    values: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[T, W], of the product."""
        return self.values.shape[1:]

    def product(self) -> Tensor:
        """[T, W] in ``dtype``: the parts added in order in FP32, rounded once.

        The definition for every kernel that adds them while it reads.
        """
        total = torch.zeros_like(self.values[0])
        for part in self.values:
            total += part
        return total.to(self.dtype)


def parts_of(product: Tensor | Sums) -> tuple[Tensor, int]:
    """Memory of a product and the number of its parts, 0 where it is whole: what kernels take."""
    return (product.values, len(product.values)) if isinstance(product, Sums) else (product, 0)
