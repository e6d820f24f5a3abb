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
        early: programs of the second product may start when all of the first have.
        shared_parts: programs that divide the input channels of a piece of the shared expert.
        by_tile: programs of the second product wait for their tile, not for the first product.
    """

    upto: int
    rows: int
    up: Product
    down: Product
    early: bool = False
    shared_parts: int = 1
    by_tile: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """How the scores of a step are computed.

    Attributes:
        upto: applies to steps of up to this many tokens.
        tokens: of a program.
        experts: of a program.
        channels: of a step of its loop; without a loop, of a program.
        sums: partial sums of a score, at most; 0: no loop, one sum per program.
        warps: warps per program.
        stages: depth of its pipeline.
    """

    upto: int
    tokens: int
    experts: int
    channels: int
    sums: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Sorting:
    """How experts are chosen from scores, and rows sorted by expert.

    Attributes:
        upto: applies to steps of up to this many tokens.
        tokens: of a program that chooses.
        warps: of it.
        launches: 1: that program does it all; 2: another lays out and places; 3: places in tiles.
        place_warps: of the programs of the other launches.
    """

    upto: int
    tokens: int
    warps: int
    launches: int
    place_warps: int = 8


@dataclass(frozen=True, slots=True)
class Projection:
    """How a projection of few rows is cut.

    Attributes:
        upto: applies up to this many rows.
        rows: of a program, at least ``upto``.
        product: the rest; input channels are divided in whole steps of its loop.
        programs: at most, where input channels are divided.
        ahead: input channels whose weights are loaded before the kernel before is done; a power
            of two, in whole steps of the loop.
    """

    upto: int
    rows: int
    product: Product
    programs: int
    ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A family of chips.

    Attributes:
        pdl: launches may overlap their prologue with the kernel before (programmatic dependent
            launch).
        tilings: by tokens of the step, ascending.
        invariant: the one tiling of every step, where rows may not depend on their batch.
        routers: by tokens of the step, ascending.
        invariant_router: the one of every step, where rows may not depend on their batch.
        sorts: by tokens of the step, ascending.
        projections: by rows, ascending; more rows go to the library.
        terms: BF16 tokens are multiplied with the FP32 router as three BF16 matrices.
        row_warps: warps of a program that takes a whole row.
        interpreted: runs in Triton's interpreter: matrix operands are FP32, which it gets right.
    """

    pdl: bool
    tilings: tuple[Tiling, ...]
    invariant: Tiling
    routers: tuple[Router, ...]
    invariant_router: Router
    sorts: tuple[Sorting, ...]
    projections: tuple[Projection, ...] = ()
    terms: bool = True
    row_warps: int = 8
    interpreted: bool = False


_ONE = Tiling(1, 16, Product(32, 256, 2, 4), Product(64, 128, 4, 3), early=True, by_tile=True)
_FOUR = Tiling(
    4, 16, Product(64, 64, 4, 5), Product(128, 128, 8, 3), early=True, shared_parts=4, by_tile=True
)
_SIXTEEN = replace(_FOUR, upto=16, up=Product(32, 256, 2, 3))
_FEW = Tiling(64, 16, Product(32, 256, 2, 3), Product(128, 128, 8, 3), early=True)
_SOME = Tiling(512, 32, Product(128, 128, 8, 3), Product(128, 64, 4, 3))
_MORE = Tiling(1024, 64, Product(64, 64, 4, 4), Product(128, 64, 4, 3))
_LOTS = Tiling(MANY, 128, Product(128, 64, 8, 4), Product(128, 64, 8, 3))

_NVIDIA = Target(
    pdl=True,
    tilings=(_ONE, _FOUR, _SIXTEEN, _FEW, _SOME, _MORE, _LOTS),
    invariant=Tiling(MANY, 64, Product(64, 64, 4, 4), Product(128, 64, 4, 3)),
    routers=(
        Router(4, 4, 4, 2048, 0, 4, 1),
        Router(16, 16, 8, 1024, 0, 8, 1),
        Router(64, 16, 32, 128, 8, 4, 3),
        Router(2048, 64, 64, 64, 8, 8, 3),
        Router(MANY, 128, 64, 64, 1, 8, 3),
    ),
    invariant_router=Router(MANY, 16, 32, 128, 8, 4, 3),
    sorts=(
        Sorting(4, 4, 4, 1),
        Sorting(16, 16, 8, 1),
        Sorting(64, 1, 1, 2, 8),
        Sorting(2048, 16, 4, 3, 4),
        Sorting(MANY, 32, 4, 3, 4),
    ),
    projections=(
        Projection(8, 8, Product(64, 128, 4, 3), 384, ahead=512),
        Projection(16, 16, Product(64, 128, 4, 4), 256),
    ),
    row_warps=32,
)
_SM80 = replace(_NVIDIA, pdl=False)

# 99 KiB of shared memory.
_SHALLOW = (
    _FEW,
    Tiling(MANY, 64, Product(64, 64, 4, 3), Product(64, 64, 4, 3)),
)
_SM120 = replace(
    _NVIDIA,
    tilings=_SHALLOW,
    invariant=_SHALLOW[1],
    routers=(*_NVIDIA.routers[:3], Router(MANY, 64, 32, 64, 8, 4, 3)),
)

# gfx9: 64 KiB of LDS on gfx942, the compiler's own pipelining.
_AMD_FEW = Tiling(64, 16, Product(32, 128, 4, 2), Product(64, 128, 4, 2))
_AMD_LOTS = Tiling(MANY, 64, Product(64, 64, 4, 2), Product(64, 64, 4, 2))
_AMD = Target(
    pdl=False,
    tilings=(_AMD_FEW, _AMD_LOTS),
    invariant=_AMD_LOTS,
    routers=(Router(16, 4, 4, 1024, 0, 4, 1), Router(MANY, 16, 16, 128, 8, 4, 2)),
    invariant_router=Router(MANY, 16, 16, 128, 8, 4, 2),
    sorts=(Sorting(16, 16, 4, 1), Sorting(64, 8, 2, 2), Sorting(MANY, 64, 8, 3)),
)

_INTERPRETER = replace(
    _NVIDIA,
    pdl=False,
    terms=False,
    interpreted=True,
    tilings=(
        Tiling(
            16,
            16,
            Product(16, 16, 1, 1),
            Product(16, 16, 1, 1),
            shared_parts=3,
            by_tile=True,
        ),
        Tiling(64, 16, Product(16, 64, 1, 1), Product(32, 64, 1, 1)),
        Tiling(MANY, 32, Product(32, 32, 1, 1), Product(32, 32, 1, 1)),
    ),
    invariant=Tiling(MANY, 32, Product(32, 32, 1, 1), Product(32, 32, 1, 1)),
    routers=(Router(16, 4, 4, 32, 0, 4, 1), Router(MANY, 64, 64, 64, 4, 4, 3)),
    sorts=(
        Sorting(4, 4, 1, 1),
        Sorting(16, 16, 1, 1),
        Sorting(64, 4, 1, 2),
        Sorting(MANY, 16, 1, 3),
    ),
    projections=(
        Projection(8, 8, Product(16, 32, 1, 1), 16, ahead=64),
        Projection(16, 16, Product(16, 32, 1, 1), 16),
    ),
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
