"""What a compilation needs beside FlyDSL: a linker and two bitcode files, laid out as ROCm does.

With ROCm installed that is ROCm. Without it, a directory of links is made from what is there: an
``ld.lld`` of version 18 or later, or the linker built into Triton; if neither exists, objects are
left unlinked, which is enough for the IR, the ISA and the simulator, and cannot be launched.
"""

import shutil
import stat
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROCM = Path("/opt/rocm")
_LINKERS = ("ld.lld-21", "ld.lld-20", "ld.lld-19", "ld.lld-18")

_TRITON_LINKER = """#!{python}
import sys
from triton._C.libtriton import amd
arguments = sys.argv[1:]
output = arguments[arguments.index("-o") + 1]
(source,) = [a for a in arguments if not a.startswith("-") and a != output]
amd.link_hsaco(source, output)
"""

_NO_LINKER = """#!{python}
import shutil, sys
arguments = sys.argv[1:]
output = arguments[arguments.index("-o") + 1]
(source,) = [a for a in arguments if not a.startswith("-") and a != output]
shutil.copyfile(source, output)
"""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Where the compiler looks for the rest.

    Attributes:
        root: what FlyDSL calls ``ROCM_PATH``.
        linker: who links, for reports: ``rocm``, ``ld.lld-19``, ``triton`` or ``none``.
    """

    root: Path
    linker: str

    @property
    def links(self) -> bool:
        """Whether the result is a code object that a device can load."""
        return self.linker != "none"


def toolchain(workplace: Path) -> Toolchain:
    """ROCm, or its stand-in under ``workplace``.

    Args:
        workplace: a directory that is ours; made if missing.
    """
    if (ROCM / "llvm/bin/ld.lld").exists():
        return Toolchain(ROCM, "rocm")
    root = workplace / "toolchain"
    binary = root / "llvm/bin/ld.lld"
    binary.parent.mkdir(parents=True, exist_ok=True)
    bitcode = root / "amdgcn/bitcode"
    bitcode.mkdir(parents=True, exist_ok=True)
    triton = find_spec("triton")
    found = next((name for name in _LINKERS if shutil.which(name)), None)
    if found:
        path = shutil.which(found)
        assert path is not None
        _script(binary, f'#!/bin/sh\nexec {path} "$@"\n')
        linker = found
    elif triton is not None:
        _script(binary, _TRITON_LINKER.format(python=sys.executable))
        linker = "triton"
    else:
        _script(binary, _NO_LINKER.format(python=sys.executable))
        linker = "none"
    return Toolchain(root, linker)


def _script(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR)
    fresh.replace(path)  # never half written for another process
