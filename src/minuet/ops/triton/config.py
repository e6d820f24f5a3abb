"""Tuning numbers of the operations, as data: one row per family of chips.

sm90: measured on one H200, 2026-11, benchmarks/results/h200/ (docs/kernels.md says which run chose
what). Every other row is chosen so that the kernels fit the chip; nobody has timed them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

MANY = 1 << 30  # beyond every count


@dataclass(frozen=True, slots=True)
class Product:
    """Tile of one product over experts.

    Attributes:
        n: output channels of a program; of gate and of up each, in the first product.
        c: input channels of a step of the loop.
        warps: warps (waves) per program.
        stages: depth of the load pipeline; n holds n - 1 tiles in shared memory.
    """

    n: int
    c: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the routed FFN of a step is cut.

    Attributes:
        upto: applies to steps of up to this many tokens.
        rows: rows of a tile.
        up: first product, with the activation.
        down: second product.
    """

    upto: int
    rows: int
    up: Product
    down: Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A family of chips.

    Attributes:
        pdl: launches may overlap their prologue with the kernel before (programmatic dependent
            launch).
        tilings: by tokens of the step, ascending.
        invariant: the one tiling of every step, where rows may not depend on their batch.
        router_experts: experts of a program of the router.
        router_channels: input channels of a step of its loop.
        router_sums: partial sums of a score, at most.
        router_stages: depth of its pipeline.
        terms: BF16 tokens are multiplied with the FP32 router as three BF16 matrices.
        prefetch_programs: programs of a small step's first product that fetch the shared expert's
            weights to L2 while routing still runs, at most; 0: none.
        row_warps: warps of a program that takes a whole row.
        interpreted: runs in Triton's interpreter: matrix operands are FP32, which it gets right.
    """

    pdl: bool
    tilings: tuple[Tiling, ...]
    invariant: Tiling
    router_experts: int = 16
    router_channels: int = 128
    router_sums: int = 8
    router_stages: int = 3
    terms: bool = True
    prefetch_programs: int = 0
    row_warps: int = 8
    interpreted: bool = False


_FEW = Tiling(64, 16, Product(64, 128, 4, 4), Product(64, 128, 4, 4))
_SOME = Tiling(1024, 32, Product(64, 64, 4, 4), Product(128, 64, 4, 4))
_MORE = Tiling(2048, 64, Product(64, 64, 4, 4), Product(128, 64, 8, 4))
_LOTS = Tiling(MANY, 128, Product(64, 64, 8, 4), Product(128, 64, 8, 4))

_NVIDIA = Target(
    pdl=True,
    prefetch_programs=264,
    tilings=(_FEW, _SOME, _MORE, _LOTS),
    invariant=replace(_MORE, upto=MANY),
)
_SM80 = replace(_NVIDIA, pdl=False, prefetch_programs=0)

# 99 KiB of shared memory.
_SHALLOW = tuple(
    replace(t, up=replace(t.up, c=64, stages=3), down=replace(t.down, c=64, stages=3))
    for t in _NVIDIA.tilings
)
_SM120 = replace(_NVIDIA, tilings=_SHALLOW, invariant=replace(_SHALLOW[2], upto=MANY))

# gfx9: 64 KiB of LDS on gfx942, the compiler's own pipelining.
_AMD_FEW = Tiling(64, 16, Product(32, 128, 4, 2), Product(64, 128, 4, 2))
_AMD_LOTS = Tiling(MANY, 64, Product(64, 64, 4, 2), Product(64, 64, 4, 2))
_AMD = Target(
    pdl=False,
    tilings=(_AMD_FEW, _AMD_LOTS),
    invariant=_AMD_LOTS,
    router_stages=2,
)

_INTERPRETER = replace(
    _NVIDIA,
    pdl=False,
    prefetch_programs=0,
    terms=False,
    interpreted=True,
    tilings=(
        Tiling(64, 16, Product(16, 64, 1, 1), Product(32, 64, 1, 1)),
        Tiling(MANY, 32, Product(32, 32, 1, 1), Product(32, 32, 1, 1)),
    ),
    invariant=Tiling(MANY, 32, Product(32, 32, 1, 1), Product(32, 32, 1, 1)),
)

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "cpu": _INTERPRETER,
        "sm80": _SM80,
        "sm90": _NVIDIA,
        "sm100": _NVIDIA,
        "sm120": _SM120,
        "gfx942": _AMD,
        "gfx950": _AMD,
        "gfx1250": _AMD,
    }
)
