"""The compiling process: reads a request from stdin, leaves IR and assembly in the named folders.

``python -m minuet.attention.backends.flydsl.compile_worker`` with the environment that
``compile.worker_environment`` builds. It may end at any point: the caller looks at what is there.
"""

import contextlib
import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minuet.attention.backends.flydsl.signatures import SIGNATURES

_PACKAGE = "minuet.attention.backends.flydsl.kernels"


def main() -> int:
    """Compile every entry of the request."""
    request = json.load(sys.stdin)
    scratch = Path(request["scratch"]) if request["scratch"] else None
    for entry in request["kernels"]:
        compile_one(entry["kernel"], entry["options"], Path(entry["out"]), scratch)
    return 0


def compile_one(kernel: str, options: Mapping[str, Any], out: Path, scratch: Path | None) -> None:
    """One specialisation: ``kernel.ll``, ``kernel.s``, ``kernel.o`` and ``stderr.txt`` in ``out``.

    Args:
        kernel: key of ``SIGNATURES``.
        options: of ``build``.
        out: folder, there already.
        scratch: where the compiler was told to write its listings; None fills its object cache
            instead, since a run that writes listings does not.
    """
    from flydsl.runtime.device import get_rocm_arch

    module = importlib.import_module(f"{_PACKAGE}.{SIGNATURES[kernel].module}")
    device = importlib.import_module(f"{_PACKAGE}.device")
    traits = device.TRAITS[get_rocm_arch()]
    with _captured_stderr(out / "stderr.txt"), contextlib.redirect_stdout(sys.stderr):
        module.build(traits, **options)(*dummies(kernel, options))
    if scratch is None:
        (out / "loadable").touch()
        return
    (text,) = scratch.rglob("*_llvm_ir.ll")
    (isa,) = scratch.rglob("*_final_isa.s")
    (binary,) = scratch.rglob("*_gpu_module_to_binary.mlir")
    (out / "kernel.ll").write_text(text.read_text())
    (out / "kernel.o").write_bytes(embedded(binary.read_text()))
    # last: the caller takes it as the sign that this specialisation was compiled
    (out / "kernel.s").write_text(isa.read_text())
    for folder in scratch.iterdir():
        shutil.rmtree(folder)


def embedded(mlir: str) -> bytes:
    """The code object inside a ``gpu.binary``; bytes that do not print are two hex digits."""
    found = re.search(r'bin = "((?:[^"\\]|\\.)*)"', mlir)
    if found is None:
        return b""
    text = found.group(1).encode("latin-1")
    escaped = re.compile(rb'\\([0-9A-Fa-f]{2}|[\\"nt])')
    simple = {b"\\": b"\\", b'"': b'"', b"n": b"\n", b"t": b"\t"}
    return escaped.sub(lambda m: simple.get(m.group(1)) or bytes([int(m.group(1), 16)]), text)


def element_types(options: Mapping[str, Any]) -> dict[str, Any]:
    """FlyDSL's type of each pointer kind of a specialisation."""
    import flydsl.expr as fx

    return {
        "bf16": fx.BFloat16,
        "f32": fx.Float32,
        "i32": fx.Int32,
        "i64": fx.Int64,
        "cache": fx.Uint8 if options.get("fp8") else fx.BFloat16,
        "index": fx.Uint8 if options.get("index_fp8") else fx.BFloat16,
    }


def dummies(kernel: str, options: Mapping[str, Any]) -> list[Any]:
    """Arguments that give the launcher its types: null pointers, ones, no stream."""
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    types = element_types(options)
    arguments: list[Any] = []
    for _, kind in SIGNATURES[kernel].params:
        if kind.endswith("*"):
            arguments.append(flyc.from_c_void_p(types[kind[:-1]], 0))
        else:
            arguments.append(1.0 if kind == "f32" else 1)
    return [*arguments, *[1] * len(SIGNATURES[kernel].grid), fx.Stream(None)]


@contextlib.contextmanager
def _captured_stderr(path: Path) -> Iterator[None]:
    """File descriptor 2 into a file: the compiler writes there from C++."""
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("wb") as target:
        os.dup2(target.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


if __name__ == "__main__":
    sys.exit(main())
