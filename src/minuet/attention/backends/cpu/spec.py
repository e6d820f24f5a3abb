"""What the cpu backend covers. Plain data; the tensor library is imported by ``launch.py`` only.

It covers everything but windows and sinks, on any arch, and is chosen by itself on ``cpu`` only:
elsewhere it would hide a refusal behind a server that is a thousand times too slow. It splits
nothing and asks for no workspace: its temporaries are the tensor library's.
"""

from collections.abc import Mapping
from types import MappingProxyType

from minuet.attention.capability import Capability, Level
from minuet.attention.contract import LayerKind, Op
from minuet.dtypes import DType
from minuet.kv.layout import Form
from minuet.platform.arch import ARCHS

NAME = "cpu"

# The code and the processor that runs it are the same whatever arch the plan is made for.
LEVEL: Mapping[str, Level] = MappingProxyType(dict.fromkeys(ARCHS, Level.CONFORMANCE))

FORMS = (Form.HEAD_MAJOR, Form.SHUFFLE)
COMPUTE_DTYPES = (DType.FP32, DType.BF16, DType.FP16)
CACHE_DTYPES = (*COMPUTE_DTYPES, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ)

CAPABILITIES = (
    Capability(
        name="cpu.write",
        backend=NAME,
        op=Op.WRITE,
        level=LEVEL,
        target="minuet.attention.backends.cpu.launch:write",
        automatic_on=("cpu",),
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=CACHE_DTYPES,
        software_fp8=True,
        requires=("torch",),
    ),
    Capability(
        name="cpu.select",
        backend=NAME,
        op=Op.SELECT,
        level=LEVEL,
        target="minuet.attention.backends.cpu.launch:select",
        automatic_on=("cpu",),
        layer_kinds=(LayerKind.SPARSE,),
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=None,
        index_dtypes=CACHE_DTYPES,
        software_fp8=True,
        requires=("torch",),
    ),
    Capability(
        name="cpu.attend",
        backend=NAME,
        op=Op.ATTEND,
        level=LEVEL,
        target="minuet.attention.backends.cpu.launch:attend",
        automatic_on=("cpu",),
        forms=FORMS,
        q_dtypes=COMPUTE_DTYPES,
        kv_dtypes=CACHE_DTYPES,
        index_dtypes=None,
        software_fp8=True,
        requires=("torch",),
    ),
)
