"""Projections. The library's product is fast; the invariant one does not depend on the batch.

A library picks another kernel, and with it another order of summation, for another number of rows,
so a row's last bits depend on its batch-mates (He et al. 2025, "Defeating nondeterminism in LLM
inference"). ``--batch-invariant`` uses one tile and one order for every number of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# T rows, K input features, N output features


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` by the library: [..., K], [N, K] -> [..., N]."""
    return F.linear(x, weight)


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The same in FP32, rounded once: what the others are compared with."""
    return F.linear(x.float(), weight.float()).to(x.dtype)


def invariant_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x @ weight.T`` with rows that do not depend, to the bit, on how many there are.

    Args:
        x: [..., K], BF16 or FP16, on a GPU.
        weight: [N, K], likewise.
        out_dtype: of the result; None: that of ``x``.

    Returns:
        [..., N].
    """
    # Triton is there where there is a GPU, and only there
    from minuet.ops.triton.linear import invariant_linear as product

    return product(x, weight, out_dtype)
