"""What the flydsl backend covers. Plain data; FlyDSL is imported by ``calls.py`` only.

Every kernel here has been compiled for its archs and executed in the simulator from the compiler's
IR; none has run on AMD hardware, and no speed is claimed (docs/amd.md says what that covers).
There is no row limit: the planner keeps no table in LDS, so batch size is a run-time value.
"""

from collections.abc import Mapping
from types import MappingProxyType

from minuet.attention.capability import Capability, Level, SplitPolicy, one_of, up_to
from minuet.attention.contract import LayerKind, Op
from minuet.attention.workspace import attend_workspace, select_workspace
from minuet.dtypes import DType
from minuet.kv.layout import Form

NAME = "flydsl"

LEVEL: Mapping[str, Level] = MappingProxyType(
    dict.fromkeys(("gfx1250", "gfx950", "gfx942"), Level.SIMULATED)
)

FORMS = (Form.SHUFFLE,)
COMPUTE_DTYPES = (DType.BF16,)
CACHE_DTYPES = (DType.BF16, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ)

HEAD_DIMS = one_of(64, 128)
PAGE_SIZES = one_of(16, 64, 128)
SPARSE_PAGE_SIZES = one_of(128)
MAX_GROUP = 16  # rows of one matrix instruction
QUERY_LENS = up_to(8)
MAX_TOP_BLOCKS = 16

SPLIT = SplitPolicy(
    tile_tokens=256,  # four waves of 64 tokens
    parts_per_unit=2,
    fixed_part_tiles=8,
    fixed_max_parts=32,
    row_max_parts=16,
    fixed_row_parts=4,
    # The device planner writes records as it counts them. Balanced parts differ by less than a
    # part, so an order by size would save little.
    longest_first=False,
)

CAPABILITIES = (
    Capability(
        name="flydsl.write",
        backend=NAME,
        op=Op.WRITE,
        level=LEVEL,
        target="minuet.attention.backends.flydsl.launch:write",
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=CACHE_DTYPES,
        head_dims=HEAD_DIMS,
        index_dims=HEAD_DIMS,
        page_sizes=PAGE_SIZES,
        query_lens=QUERY_LENS,
        requires=("torch", "flydsl"),
    ),
    Capability(
        name="flydsl.select",
        backend=NAME,
        op=Op.SELECT,
        level=LEVEL,
        target="minuet.attention.backends.flydsl.launch:select",
        layer_kinds=(LayerKind.SPARSE,),
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=None,
        index_dtypes=CACHE_DTYPES,
        index_dims=HEAD_DIMS,
        page_sizes=SPARSE_PAGE_SIZES,
        query_lens=QUERY_LENS,
        max_top_blocks=MAX_TOP_BLOCKS,
        workspace=select_workspace,
        requires=("torch", "flydsl"),
    ),
    Capability(
        name="flydsl.attend_dense",
        backend=NAME,
        op=Op.ATTEND,
        level=LEVEL,
        target="minuet.attention.backends.flydsl.launch:attend_dense",
        layer_kinds=(LayerKind.DENSE,),
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=None,
        head_dims=HEAD_DIMS,
        page_sizes=PAGE_SIZES,
        max_group=MAX_GROUP,
        query_lens=QUERY_LENS,
        split=SPLIT,
        workspace=attend_workspace,
        requires=("torch", "flydsl"),
    ),
    Capability(
        name="flydsl.attend_sparse",
        backend=NAME,
        op=Op.ATTEND,
        level=LEVEL,
        target="minuet.attention.backends.flydsl.launch:attend_sparse",
        layer_kinds=(LayerKind.SPARSE,),
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=None,
        head_dims=HEAD_DIMS,
        page_sizes=SPARSE_PAGE_SIZES,
        max_group=MAX_GROUP,
        query_lens=QUERY_LENS,
        max_top_blocks=MAX_TOP_BLOCKS,
        split=SPLIT,
        workspace=attend_workspace,
        requires=("torch", "flydsl"),
    ),
)
