"""Problems and splits that several test files ask about, and how a flag changes a problem."""

from dataclasses import replace

import numpy as np

from minuet.attention import dispatch
from minuet.attention.capability import SplitPolicy
from minuet.attention.contract import LayerKind, Op, Phase, Problem
from minuet.attention.plan import DecodePlan, PlanShape
from minuet.dtypes import DType
from minuet.platform.arch import Arch

# One rank's share of a model with 64 query and 4 KV heads on 4 ranks.
DENSE = Problem(
    op=Op.ATTEND,
    layer_kind=LayerKind.DENSE,
    phase=Phase.DECODE,
    num_q_heads=16,
    num_kv_heads=1,
    head_dim=128,
    page_size=128,
    q_dtype=DType.BF16,
    kv_dtype=DType.BF16,
)
SPARSE = replace(
    DENSE,
    layer_kind=LayerKind.SPARSE,
    index_dim=128,
    index_heads=1,
    index_dtype=DType.BF16,
    top_blocks=16,
)
SELECT = replace(SPARSE, op=Op.SELECT)

POLICY = SplitPolicy(
    tile_tokens=256,
    parts_per_unit=2,
    fixed_part_tiles=4,
    fixed_max_parts=16,
    row_max_parts=16,
    fixed_row_parts=4,
)


def balanced(max_seqs: int, **changes: object) -> PlanShape:
    """The shape of paged-decode check values: 512 parts on one KV head, tiles of 256 tokens."""
    sizes = {"max_length": 2**20, "tile_tokens": 256, "max_parts": 256, "budget": 512}
    return PlanShape(max_seqs=max_seqs, **{**sizes, **changes})


def planned(shape: PlanShape, lengths: list[int]) -> DecodePlan:
    """A plan over fresh memory, refreshed once."""
    return DecodePlan.over(shape, np.zeros(shape.size, np.int32)).refresh(lengths)


def with_flag(
    problem: Problem, want: str, arch: Arch, flag: str, value: str
) -> tuple[Problem, str]:
    """A problem after one flag is set; written apart from the library's own table."""
    if flag == "--attention-backend":
        return replace(problem, form=dispatch.preferred_form(arch, value)), value
    field = {
        "--block-size": ("page_size", int),
        "--num-speculative-tokens": ("query_len", lambda text: int(text) + 1),
        "--dtype": ("q_dtype", DType),
        "--kv-cache-dtype": ("kv_dtype", DType),
        "--index-kv-cache-dtype": ("index_dtype", DType),
    }[flag]
    return replace(problem, **{field[0]: field[1](value)}), want
