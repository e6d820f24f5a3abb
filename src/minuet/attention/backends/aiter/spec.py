"""What the aiter backend covers. Plain data; aiter is imported by ``library.py`` only.

An adapter, for whoever has ROCm's aiter installed and wants its kernels: ``attend`` is aiter's
``pa_decode``, ``write`` and ``select`` are plain torch on whatever device, since aiter has no
counterpart of ours. It is never a dependency and never chosen by itself; ``probe.py`` says, before
anything is loaded, whether the installed form is the one that it was written to.

The levels are those of the adapter: it agrees with the reference over a stand-in that enforces
aiter's contract. Minuet has not run aiter's kernels (docs/amd.md).
"""

from collections.abc import Mapping
from types import MappingProxyType

from minuet.attention.capability import Capability, Level, one_of, up_to
from minuet.attention.contract import LayerKind, Op
from minuet.dtypes import DType
from minuet.kv.layout import Form

NAME = "aiter"

# The form that pa_decode takes work plans in, of 2026-09, has kernels for these two.
LEVEL: Mapping[str, Level] = MappingProxyType(
    dict.fromkeys(("gfx942", "gfx950"), Level.CONFORMANCE)
)

NAMED_ONLY = ()  # no arch on which it is chosen by itself
FORMS = (Form.SHUFFLE,)
COMPUTE_DTYPES = (DType.BF16,)
CACHE_DTYPES = (DType.BF16, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ)

HEAD_DIMS = one_of(64, 128)  # of what pa_decode takes, what Minuet's models have
PAGE_SIZES = one_of(16, 64, 128)
MAX_GROUP = 16
QUERY_LENS = up_to(8)

MAX_PLAN_ROWS = 4096  # sequences of one work plan; longer calls are cut
TILE_TOKENS = 256  # of a work plan

PROBE = "minuet.attention.backends.aiter.probe:lacking"

CAPABILITIES = (
    Capability(
        name="aiter.write",
        backend=NAME,
        op=Op.WRITE,
        level=LEVEL,
        target="minuet.attention.backends.aiter.launch:write",
        automatic_on=NAMED_ONLY,
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=CACHE_DTYPES,
        head_dims=HEAD_DIMS,
        page_sizes=PAGE_SIZES,
        query_lens=QUERY_LENS,
        requires=("torch", "aiter"),
        probe=PROBE,
    ),
    Capability(
        name="aiter.select",
        backend=NAME,
        op=Op.SELECT,
        level=LEVEL,
        target="minuet.attention.backends.aiter.launch:select",
        automatic_on=NAMED_ONLY,
        layer_kinds=(LayerKind.SPARSE,),
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=None,
        index_dtypes=CACHE_DTYPES,
        page_sizes=PAGE_SIZES,
        query_lens=QUERY_LENS,
        requires=("torch", "aiter"),
        probe=PROBE,
    ),
    Capability(
        name="aiter.attend",
        backend=NAME,
        op=Op.ATTEND,
        level=LEVEL,
        target="minuet.attention.backends.aiter.launch:attend",
        automatic_on=NAMED_ONLY,
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=None,
        head_dims=HEAD_DIMS,
        page_sizes=PAGE_SIZES,
        max_group=MAX_GROUP,
        query_lens=QUERY_LENS,
        requires=("torch", "aiter"),
        probe=PROBE,
    ),
)
