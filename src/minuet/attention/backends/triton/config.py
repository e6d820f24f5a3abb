"""Tuning numbers of the Triton kernels, as data: one row per family of chips.

sm90: measured on one H200, 2026-11, benchmarks/results/h200/ (docs/kernels.md says which run chose
what). Every other row is chosen so that the kernels fit the chip; nobody has timed them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

MANY = 1 << 30  # beyond every count


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one kernel is launched.

    Attributes:
        tile: tokens per step of its loop, at most; a smaller page lowers it where it must.
        warps: warps (waves) per program.
        stages: depth of the load pipeline; n holds n - 1 tiles in shared memory.
        registers: cap per thread, NVIDIA; 0 leaves it to the assembler, which now and then spills
            to fit one more program on a unit.
    """

    tile: int
    warps: int
    stages: int
    registers: int = 0


@dataclass(frozen=True, slots=True)
class Merge:
    """How the parts of a row are merged.

    Attributes:
        upto: the entry of its table for up to this many parts (dense) or rows (sparse).
        vectors: query vectors of a program.
        width: channels of a program.
        chunk: parts taken at once, if a row can have as many.
        warps: warps per program.
        early: lets the next kernel's prologue start before the merge. Its programs take places
            while ours still run: pays but for large grids of sparse rows.
    """

    upto: int
    vectors: int
    width: int
    chunk: int
    warps: int
    early: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A family of chips.

    Attributes:
        pairs: FP8 is read as 16-bit pairs and converted by instructions (NVIDIA, sm_89 on).
        fp8_operand: 16-bit type of matrix operands made from FP8.
        pdl: launches may overlap their prologue with the kernel before (programmatic dependent
            launch).
        min_columns: narrowest matrix operand.
        dense: decode over everything, BF16 or FP16 cache.
        dense_fp8: the same, FP8 cache.
        wide: decode over everything with 32 or more query vectors per sequence and KV head
            (several query tokens), where accumulators fill the registers.
        blocks: attention of a row over its chosen blocks, 16-bit cache.
        blocks_fp8: the same, FP8 cache.
        brief: attention of a part that is a single block: nothing to pipeline, and its code, which
            a step finds cold, had better be short; 16-bit cache.
        brief_fp8: the same, FP8 cache.
        prefill: a tile of query tokens against everything, 16-bit cache.
        prefill_fp8: the same, FP8 cache.
        prefill_vectors: query vectors (tokens x group) of a prefill tile.
        score: block scores, decode.
        score_few: the same, steps of at most ``few_seqs`` sequences. A program has few blocks, and
            shared memory that it leaves lets parts of attention start beside it.
        few_seqs: see there.
        score_parts_per_unit: parts of scoring per compute unit, over all KV heads.
        score_prefill: block scores, many query tokens.
        score_vectors: query vectors (tokens x index heads) of a prefill score tile.
        merge: merge of parts of dense decode, by parts of a row.
        merge_blocks: merge of parts of sparse decode, by rows of the step.
        few_blocks: blocks up to which a row ranks all against all.
        rank_step: blocks that it compares all with at once.
        many_blocks: blocks up to which a row ranks groups first; taken at once beyond.
        parts_per_unit: parts of dense decode per compute unit, 16-bit cache.
        parts_per_unit_fp8: the same, FP8 cache: a second part hides the conversions of the first.
        row_parts_per_unit: parts per compute unit that sparse decode rows make, at most.
        tiles: sparse prefill by tiles of query tokens, 16-bit cache.
        tiles_fp8: the same, FP8 cache.
        row_blocks_per_step: blocks that sparse prefill rows attend to in the time a tile of query
            tokens takes for one, 16-bit cache; lists are united where that makes the tile cheaper.
        row_blocks_per_step_fp8: the same, FP8 cache.
        interpreted: runs in Triton's interpreter: matrix operands are FP32, which it gets right.
    """

    pairs: bool
    fp8_operand: str
    pdl: bool
    min_columns: int
    dense: Tuning
    dense_fp8: Tuning
    wide: Tuning
    blocks: Tuning
    blocks_fp8: Tuning
    brief: Tuning
    brief_fp8: Tuning
    prefill: Tuning
    prefill_fp8: Tuning
    prefill_vectors: int
    tiles: Tuning
    tiles_fp8: Tuning
    score: Tuning
    score_few: Tuning
    score_parts_per_unit: int
    score_prefill: Tuning
    score_vectors: int
    merge: tuple[Merge, ...] = (
        Merge(8, 1, 128, 8, 1, True),
        Merge(24, 1, 64, 16, 1, True),
        Merge(MANY, 1, 32, 128, 2, True),
    )
    merge_blocks: tuple[Merge, ...] = (
        Merge(4, 1, 32, 16, 1, True),
        Merge(16, 1, 64, 16, 1, True),
        Merge(MANY, 1, 128, 8, 1, False),
    )
    few_seqs: int = 4
    few_blocks: int = 256
    rank_step: int = 32
    many_blocks: int = 1024
    parts_per_unit: int = 1
    parts_per_unit_fp8: int = 2
    row_parts_per_unit: int = 1
    row_blocks_per_step: int = 2
    row_blocks_per_step_fp8: int = 6
    interpreted: bool = False


_NVIDIA = Target(
    pairs=True,
    fp8_operand="fp16",
    pdl=True,
    min_columns=8,
    dense=Tuning(128, 4, 3),
    dense_fp8=Tuning(128, 4, 3),
    wide=Tuning(64, 8, 3),
    blocks=Tuning(128, 4, 3),
    blocks_fp8=Tuning(128, 4, 3, registers=255),
    brief=Tuning(128, 8, 2),
    brief_fp8=Tuning(128, 8, 2),
    prefill=Tuning(64, 8, 3),
    prefill_fp8=Tuning(128, 8, 2),
    prefill_vectors=128,
    tiles=Tuning(128, 8, 3),
    tiles_fp8=Tuning(128, 8, 2),
    score=Tuning(128, 4, 3),
    score_few=Tuning(128, 4, 2),
    score_parts_per_unit=3,
    score_prefill=Tuning(128, 8, 2),
    score_vectors=128,
)

# Ampere: no FP8, no programmatic dependent launch; 163 KiB of shared memory.
_SM80 = replace(_NVIDIA, pairs=False, pdl=False, tiles=Tuning(64, 8, 3))

# 99 KiB of shared memory: shallower pipelines.
_SM120 = replace(
    _NVIDIA,
    dense=Tuning(64, 4, 3),
    wide=Tuning(64, 8, 2),
    blocks=Tuning(64, 4, 3),
    brief=Tuning(64, 8, 2),
    prefill=Tuning(64, 8, 2),
    prefill_fp8=Tuning(64, 8, 2),
    tiles=Tuning(64, 8, 2),
    tiles_fp8=Tuning(64, 8, 2),
)

# gfx9: 64 KiB of LDS on gfx942; four waves, so that a wave may use 512 registers; the compiler's
# own pipelining.
_GFX9 = Target(
    pairs=False,
    fp8_operand="bf16",
    pdl=False,
    min_columns=16,
    dense=Tuning(64, 4, 2),
    dense_fp8=Tuning(64, 4, 2),
    wide=Tuning(32, 4, 2),
    blocks=Tuning(64, 4, 2),
    blocks_fp8=Tuning(64, 4, 2),
    brief=Tuning(64, 4, 2),
    brief_fp8=Tuning(64, 4, 2),
    prefill=Tuning(32, 4, 1),
    prefill_fp8=Tuning(32, 4, 1),
    prefill_vectors=64,
    tiles=Tuning(32, 4, 1),
    tiles_fp8=Tuning(32, 4, 1),
    score=Tuning(128, 4, 2),
    score_few=Tuning(128, 4, 2),
    score_parts_per_unit=2,
    score_prefill=Tuning(128, 4, 1),
    score_vectors=32,
)

# gfx1250: its matrix layout wants tiles of 64 (the compiler aborts on 32).
_GFX1250 = replace(
    _GFX9,
    wide=Tuning(64, 4, 2),
    prefill=Tuning(64, 4, 1),
    prefill_fp8=Tuning(64, 4, 1),
    tiles=Tuning(64, 4, 1),
    tiles_fp8=Tuning(64, 4, 1),
)

_INTERPRETER = replace(
    _NVIDIA,
    pairs=False,
    pdl=False,
    fp8_operand="fp32",
    interpreted=True,
)

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "cpu": _INTERPRETER,
        "sm80": _SM80,
        "sm90": _NVIDIA,
        "sm100": _NVIDIA,
        "sm120": _SM120,
        "gfx942": _GFX9,
        "gfx950": _GFX9,
        "gfx1250": _GFX1250,
    }
)
