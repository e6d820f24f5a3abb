"""The batch-invariant product in Triton: tiles per arch, and how K is split.

The tile and the splits follow from N and K alone, never from the number of rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minuet.errors import ContractError
from minuet.ops.triton.kernels import linear as kernels
from minuet.platform.triton import Launch, arch_name

# T rows, K input features, N output features

_ADD_BLOCK = 1024
# Up to so many rows are one tile, and up to so many the splits run side by side: beyond, rows alone
# fill the device.
_FEW_ROWS, _SPLIT_ROWS = 64, 128
RUNGS = (1, _FEW_ROWS + 1, _SPLIT_ROWS + 1)
"""Row counts from which another kernel is used."""
_OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Block:
    """What one program computes.

    Attributes:
        m: rows.
        n: outputs.
        num_warps: warps of the program.
        num_stages: depth of its pipeline of loads.
    """

    m: int
    n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut on an arch; steps and splits of K are the same for any number of rows.

    Attributes:
        m: rows of a tile.
        n: outputs of a tile, where they are many.
        k: columns of a step.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads.
        programs: tiles of one row block are split along K until they are so many.
        few: outputs of a tile of a weight with fewer than ``programs`` tiles of them.
        many: the block where rows are more than 64. A matrix instruction sums an output over 16
            columns whatever the block is, so the bits are the same; a test compares them.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    programs: int
    few: int = 0
    many: Block | None = None

    def block(self, rows: int, n_size: int) -> Block:
        """The block for so many rows and outputs."""
        width = self.width(n_size)
        if self.many is None or rows <= _FEW_ROWS:
            return Block(self.m, width, self.num_warps, self.num_stages)
        # splits side by side: a narrow tile, as for few rows, so that all units have one
        return replace(self.many, n=width) if rows <= _SPLIT_ROWS else self.many

    def width(self, n_size: int) -> int:
        """Outputs of a tile, from the number of outputs alone."""
        return self.few if self.few and n_size <= self.few * self.programs else self.n

    def splits(self, n_size: int, k_size: int) -> int:
        """Parts of K, from the sizes of the weight alone."""
        steps = triton.cdiv(k_size, self.k)
        wanted = max(1, min(steps, self.programs // triton.cdiv(n_size, self.width(n_size))))
        return int(triton.cdiv(steps, triton.cdiv(steps, wanted)))  # no part is empty


_HOPPER = Tile(_FEW_ROWS, 128, 128, 4, 4, 132, few=64, many=Block(128, 128, 8, 3))
_CDNA = Tile(_FEW_ROWS, 128, 64, 4, 2, 256)
TILES: Mapping[str, Tile] = MappingProxyType(
    {
        "sm90": _HOPPER,
        "sm100": _HOPPER,
        "gfx942": _CDNA,
        "gfx950": _CDNA,
        "gfx1250": _CDNA,
        "cpu": Tile(_FEW_ROWS, 32, 32, 4, 2, 4),  # Triton's interpreter
    }
)


def invariant_linear(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None, tile: Tile | None = None
) -> Tensor:
    """See :func:`minuet.ops.linear.invariant_linear`."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    for launch in linear_launches(rows, weight, out, arch_name(x.device), tile):
        launch()
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_launches(
    x: Tensor, weight: Tensor, out: Tensor, arch: str, tile: Tile | None = None
) -> Iterator[Launch]:
    """The launches of :func:`invariant_linear` on an arch; a tile of one's own is for measuring.

    Raises:
        ContractError: shapes or types that do not belong together.
    """
    (rows, k_size), n_size = x.shape, weight.shape[0]
    if weight.shape[1] != k_size or weight.dtype != x.dtype or x.dtype not in _OPERANDS:
        raise ContractError(
            "operands of the invariant product",
            got=f"{x.dtype} {tuple(x.shape)}, {weight.dtype} {tuple(weight.shape)}",
            expected="[T, K] and [N, K], both bfloat16 or both float16",
        )
    if (x.stride(1), weight.stride(1)) != (1, 1):
        raise ContractError("strides", got=(x.stride(), weight.stride()), expected="whole rows")
    if rows == 0:
        return
    tile = tile or TILES[arch]
    splits = tile.splits(n_size, k_size)
    side_by_side = splits > 1 and rows <= _SPLIT_ROWS
    target = out
    if side_by_side:
        target = torch.empty((splits, rows, n_size), dtype=torch.float32, device=x.device)
    # the interpreter multiplies 16-bit numbers wrongly
    operand: Any = tl.float32 if arch == "cpu" else _OPERANDS[x.dtype]
    block = tile.block(rows, n_size)
    tiles = triton.cdiv(n_size, block.n), triton.cdiv(rows, block.m)
    yield Launch(
        kernels.linear_tiles,
        (*tiles, splits) if side_by_side else tiles,
        {
            "x_ptr": x, "w_ptr": weight, "out_ptr": target, "rows": rows, "n_size": n_size,
            "k_size": k_size, "x_stride": x.stride(0), "w_stride": weight.stride(0),
            "splits": splits, "M": block.m, "N": block.n, "K": tile.k,
            "EVEN_K": k_size % tile.k == 0, "SPLIT": side_by_side, "OPERAND": operand,
        },
        {"num_warps": block.num_warps, "num_stages": block.num_stages},
    )  # fmt: skip
    if side_by_side:
        size = rows * n_size
        yield Launch(
            kernels.add_splits,
            (triton.cdiv(size, _ADD_BLOCK),),
            {
                "parts_ptr": target, "out_ptr": out, "size": size, "splits": splits,
                "BLOCK": _ADD_BLOCK,
            },
            {"num_warps": 4},
        )  # fmt: skip
