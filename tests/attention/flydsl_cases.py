"""Cases of the AMD kernels in the simulator, and the FlyDSL specialisations they need."""

import torch

from minuet.attention.backends.flydsl.signatures import Key
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.layout import Form
from minuet.platform.arch import ARCHS
from tests.attention.conformance import Case

EDGES = (1, 127, 128, 129, 1000, 2049)
RAGGED = (300, 0, 5, 129, 700)  # the second row is empty


def fp8_of(arch: str) -> DType:
    """The flavour of an arch."""
    flavour = ARCHS[arch].fp8
    assert flavour is not None
    return flavour


def storage(arch: str, name: str) -> DType:
    """``bf16`` or the arch's ``fp8``."""
    return fp8_of(arch) if name == "fp8" else DType.BF16


def case(lens, dtype: DType, *, query_len: int = 1, sparse: bool = False, **changes) -> Case:
    """A case in the form, types and page of the backend."""
    settings = {
        "kv_heads": 2,
        "group": 4,
        "head_dim": 128,
        "page": 128,
        "kv_dtype": dtype,
        "q_dtype": torch.bfloat16,
        "form": Form.SHUFFLE,
    }
    if sparse:
        settings |= {"index_dim": 128, "index_dtype": dtype, "selection": Selection(16)}
    return Case(tuple(lens), (query_len,) * len(lens), **{**settings, **changes})


# (arch, cache, head_dim, page): every page and head size, each on some arch
OTHER_SHAPES = (
    ("gfx1250", "fp8", 128, 16),
    ("gfx942", "fp8", 64, 16),
    ("gfx950", "bf16", 128, 16),
    ("gfx942", "bf16", 128, 64),
    ("gfx950", "fp8", 64, 128),
    ("gfx1250", "bf16", 64, 64),
)


def main_keys(arch: str) -> list[Key]:
    """Page 128 and both cache types, which is what M3 needs, and the arch's other shapes."""
    keys = [Key.of("choose", arch), Key.of("plan", arch)]
    keys += [Key.of("merge", arch, head_dim=128, planned=p) for p in (True, False)]
    for fp8 in (False, True):
        shape = {"fp8": fp8, "head_dim": 128, "page": 128}
        keys += [Key.of("attend", arch, mode=m, **shape) for m in ("plan", "rows", "sparse")]
        keys.append(Key.of("scores", arch, fp8=fp8, index_dim=128))
        keys.append(Key.of("write", arch, **shape, index_dim=128, index_fp8=fp8))
    # a dense layer's writer; small heads and index keys
    dense = {"index_dim": 0, "index_fp8": False}
    keys.append(Key.of("write", arch, fp8=True, head_dim=128, page=128, **dense))
    keys.append(Key.of("write", arch, fp8=False, head_dim=64, page=16, **dense))
    keys.append(Key.of("scores", arch, fp8=True, index_dim=64))
    for name, dtype, head_dim, page in OTHER_SHAPES:
        if name == arch:
            shape = {"fp8": dtype == "fp8", "head_dim": head_dim, "page": page}
            keys += [Key.of("attend", arch, mode=m, **shape) for m in ("plan", "rows")]
            if page == 128:
                keys.append(Key.of("attend", arch, mode="sparse", **shape))
            keys.append(Key.of("merge", arch, head_dim=head_dim, planned=True))
    return keys
