"""What the triton backend covers. Plain data; Triton is imported by ``launch.py`` only."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from minuet.attention.capability import (
    Capability,
    Level,
    SplitPolicy,
    StepSizes,
    WorkspaceSpec,
    one_of,
    up_to,
)
from minuet.attention.contract import LayerKind, Op, Phase, Problem
from minuet.attention.workspace import attend_workspace, select_workspace
from minuet.dtypes import DType
from minuet.kv.layout import Form

NAME = "triton"

# sm90: the conformance suite and the timings ran on an H200 (benchmarks/results/h200/). AMD archs
# are compile targets, an independent witness for the FlyDSL kernels: the suite ran in Triton's
# interpreter, the machine code is inspected (tests/attention/test_triton_compile.py), and what was
# executed from the compiler's IR is listed in docs/amd.md. For the other NVIDIA archs the sources
# are written, and nobody has looked.
LEVEL: Mapping[str, Level] = MappingProxyType(
    {
        "sm90": Level.DEVICE,
        **dict.fromkeys(("sm80", "sm100", "sm120"), Level.DECLARED),
        **dict.fromkeys(("gfx942", "gfx950", "gfx1250"), Level.SIMULATED),
    }
)

FORMS = (Form.HEAD_MAJOR,)
COMPUTE_DTYPES = (DType.BF16, DType.FP16)
CACHE_DTYPES = (*COMPUTE_DTYPES, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ)

HEAD_DIMS = one_of(64, 128)
PAGE_SIZES = one_of(16, 32, 64, 128, 256)
SELECT_PAGE_SIZES = one_of(16, 32, 64, 128)  # one program scores a page of index keys as one tile
MAX_GROUP = 16  # the query vectors of a KV head fill one matrix instruction
MAX_QUERY_LEN = 8
QUERY_LENS = up_to(MAX_QUERY_LEN)
MAX_TOP_BLOCKS = 16  # the list of a row is one vector

SPLIT = SplitPolicy(
    tile_tokens=128,
    # FP8 on H200; a 16-bit cache is given fewer (config.py, with the measurements)
    parts_per_unit=2,
    fixed_part_tiles=16,
    fixed_max_parts=32,
    row_max_parts=16,
    fixed_row_parts=4,
    longest_first=True,
)


def scores_and_lists(problem: Problem, sizes: StepSizes) -> tuple[WorkspaceSpec, ...]:
    """As :func:`select_workspace`, with scores that live on: ``attend`` chooses from them.

    Prefill attends by tiles of query tokens where these share blocks: ``pages`` is int32
    ``[query_tokens, index_heads, top_blocks]`` as ``blocks`` is.
    """
    scores, blocks = select_workspace(problem, sizes)
    scores = replace(scores, last=Op.ATTEND)
    if problem.phase is Phase.DECODE:
        return scores, blocks
    return scores, blocks, replace(blocks, name="pages", first=Op.ATTEND)


CAPABILITIES = (
    Capability(
        name="triton.write",
        backend=NAME,
        op=Op.WRITE,
        level=LEVEL,
        target="minuet.attention.backends.triton.launch:write",
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=CACHE_DTYPES,
        head_dims=HEAD_DIMS,
        index_dims=HEAD_DIMS,
        page_sizes=PAGE_SIZES,
        query_lens=QUERY_LENS,
        sums=True,
        requires=("torch", "triton"),
    ),
    Capability(
        name="triton.select",
        backend=NAME,
        op=Op.SELECT,
        level=LEVEL,
        target="minuet.attention.backends.triton.launch:select",
        layer_kinds=(LayerKind.SPARSE,),
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=None,
        index_dtypes=CACHE_DTYPES,
        index_dims=HEAD_DIMS,
        page_sizes=SELECT_PAGE_SIZES,
        query_lens=QUERY_LENS,
        max_top_blocks=MAX_TOP_BLOCKS,
        workspace=scores_and_lists,
        requires=("torch", "triton"),
    ),
    Capability(
        name="triton.attend",
        backend=NAME,
        op=Op.ATTEND,
        level=LEVEL,
        target="minuet.attention.backends.triton.launch:attend",
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=None,
        head_dims=HEAD_DIMS,
        page_sizes=PAGE_SIZES,
        max_group=MAX_GROUP,
        query_lens=QUERY_LENS,
        max_top_blocks=MAX_TOP_BLOCKS,
        split=SPLIT,
        workspace=attend_workspace,
        requires=("torch", "triton"),
    ),
)
