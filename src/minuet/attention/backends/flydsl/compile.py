"""Compilation of specialisations in a subprocess, kept on disk.

The compiler ends the process on an instruction it cannot select, and reports LDS overflow by a line
on stderr only; so it runs in a process of its own, and what it printed and produced is judged here.
Results are kept under a key of the arch, the versions of everything involved and the source of the
device code: a change in any of them is a different key.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from minuet.attention.backends.flydsl.signatures import Key
from minuet.attention.backends.flydsl.toolchain import Toolchain, toolchain
from minuet.errors import ConfigError, MinuetError
from minuet.platform.arch import ARCHS

_TIMEOUT_S = 600
_WORKER = "minuet.attention.backends.flydsl.compile_worker"


class CompileError(MinuetError):
    """A kernel of ours did not become machine code that the arch can run."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the machine code of one specialisation needs, read from its assembly.

    Attributes:
        kernel: symbol.
        vgprs: vector registers of a lane.
        sgprs: scalar registers of a wave.
        lds_bytes: LDS of a workgroup.
        spills: registers spilled to memory, vector and scalar.
        scratch_bytes: private memory of a lane.
        matrix: matrix instructions by mnemonic, in the text (a loop body counts once).
        code_bytes: machine code.
        linker: who linked; ``none`` left an object.
    """

    kernel: str
    vgprs: int
    sgprs: int
    lds_bytes: int
    spills: int
    scratch_bytes: int
    matrix: Mapping[str, int]
    code_bytes: int
    linker: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """One specialisation.

    Attributes:
        key: which.
        ir: LLVM IR text, as the code generator receives it.
        isa: assembly text.
        report: resources.
    """

    key: Key
    ir: str
    isa: str
    report: Report


def available() -> bool:
    """Whether FlyDSL is installed; no statement about a device."""
    return find_spec("flydsl") is not None


@cache
def fingerprint() -> str:
    """Hash of versions and device sources: part of every path in the cache."""
    digest = hashlib.sha256()
    for package in ("flydsl", "torch", "triton"):
        try:
            digest.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"{package} absent\n".encode())
    digest.update(f"python {sys.version_info[:2]}\n".encode())
    folder = Path(__file__).parent
    for source in sorted([*folder.glob("kernels/*.py"), folder / "compile_worker.py"]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def compile_all(
    keys: Iterable[Key], cache_dir: Path, *, objects: bool = False
) -> dict[Key, Compiled]:
    """Compile what is not in the cache yet; one subprocess per arch.

    Args:
        keys: specialisations.
        cache_dir: results go to ``<cache_dir>/<fingerprint>/<arch>/``.
        objects: also what a launch loads; doubles the work.

    Returns:
        every key's result.

    Raises:
        ConfigError: FlyDSL is not installed.
        CompileError: a kernel failed, overflows LDS or spills.
    """
    wanted = sorted(set(keys))
    tools = toolchain(cache_dir)
    by_arch: dict[str, list[Key]] = {}
    for key in wanted:
        by_arch.setdefault(key.arch, []).append(key)
    for arch, asked in by_arch.items():
        # one process compiles, others that ask for the same wait and read
        with _locked(cache_dir / fingerprint() / arch / "lock"):
            missing = [k for k in asked if not (_folder(k, cache_dir) / "report.json").exists()]
            if missing:
                _compile(missing, cache_dir, tools)
            todo = [k for k in asked if not (_folder(k, cache_dir) / "loadable").exists()]
            if objects and todo:
                _run_worker(todo, cache_dir, tools, scratch=None)
    return {key: _read(key, cache_dir) for key in wanted}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _folder(key: Key, cache_dir: Path) -> Path:
    return cache_dir / fingerprint() / key.arch / key.name


def object_cache(arch: str, cache_dir: Path) -> Path:
    """Where the compiler keeps code objects of an arch, to be launched from."""
    return cache_dir / fingerprint() / arch / "objects"


def worker_environment(
    arch: str, cache_dir: Path, tools: Toolchain, scratch: str | None
) -> dict[str, str]:
    """The whole environment of the compiling process; nothing is inherited.

    Args:
        arch: target.
        cache_dir: where the compiler may write.
        tools: linker and bitcode.
        scratch: folder for listings, None for none.
    """
    listings = {"FLYDSL_DUMP_IR": "1", "FLYDSL_DUMP_DIR": scratch} if scratch else {}
    return {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HOME": str(cache_dir),
        "ROCM_PATH": str(tools.root),
        # both: some parts read one, some the other, and without them the default is gfx942
        "ARCH": arch,
        "FLYDSL_GPU_ARCH": arch,
        "COMPILE_ONLY": "1",
        "FLYDSL_RUNTIME_CACHE_DIR": str(object_cache(arch, cache_dir)),
        "OMP_NUM_THREADS": "1",
        **listings,
    }


def _compile(keys: list[Key], cache_dir: Path, tools: Toolchain) -> None:
    """Listings and reports of specialisations of one arch, judged."""
    for key in keys:
        _folder(key, cache_dir).mkdir(parents=True, exist_ok=True)
        (_folder(key, cache_dir) / "kernel.s").unlink(missing_ok=True)  # of a run that failed
    with tempfile.TemporaryDirectory() as scratch:
        done = _run_worker(keys, cache_dir, tools, scratch)
    for key in keys:
        folder = _folder(key, cache_dir)
        if not (folder / "kernel.s").exists():
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
            raise CompileError(f"{key.name}: compiler ended with {done.returncode}\n{tail}")
        report = read_report(
            (folder / "kernel.s").read_text(), (folder / "kernel.o").read_bytes(), tools.linker
        )
        judge(key, report, (folder / "stderr.txt").read_text())
        # last: its presence says that everything else is there and was judged
        (folder / "report.json").write_text(json.dumps(asdict(report), indent=1))


def _run_worker(
    keys: list[Key], cache_dir: Path, tools: Toolchain, scratch: str | None
) -> subprocess.CompletedProcess[str]:
    if not available():
        raise ConfigError(
            "kernels of the flydsl backend need FlyDSL",
            got="no package flydsl",
            expected="flydsl>=0.4.2,<0.6",
            remedy="pip install 'minuet[amd]'",
        )
    kernels = [
        {"kernel": k.kernel, "options": dict(k.options), "out": str(_folder(k, cache_dir))}
        for k in keys
    ]
    return subprocess.run(
        [sys.executable, "-m", _WORKER],
        input=json.dumps({"scratch": scratch, "kernels": kernels}),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=worker_environment(keys[0].arch, cache_dir, tools, scratch),
        check=False,
    )


def judge(key: Key, report: Report, stderr: str) -> None:
    """Refuse what the compiler accepts and the arch does not run, or not well.

    Raises:
        CompileError: an error line on stderr, LDS beyond the arch's, or spilled registers.
    """
    errors = [line for line in stderr.splitlines() if "error:" in line.lower()]
    if errors:
        raise CompileError(f"{key.name}: {errors[0].strip()}")
    limit = ARCHS[key.arch].shared_memory_bytes
    if report.lds_bytes > limit:
        raise CompileError(f"{key.name}: {report.lds_bytes} bytes of LDS, {key.arch} has {limit}")
    if report.spills or report.scratch_bytes:
        raise CompileError(
            f"{key.name}: spills {report.spills} registers, {report.scratch_bytes} bytes of scratch"
        )


def read_report(isa: str, code_object: bytes, linker: str) -> Report:
    """Resources of the one kernel in an assembly listing and its ELF file."""

    def number(pattern: str, default: int = 0) -> int:
        found = re.search(pattern, isa)
        return int(found.group(1)) if found else default

    name = re.search(r"\.amdhsa_kernel (\S+)", isa)
    matrix: dict[str, int] = {}
    for mnemonic in re.findall(r"^\s+(v_(?:mfma|wmma)\w+)", isa, re.M):
        matrix[mnemonic] = matrix.get(mnemonic, 0) + 1
    return Report(
        kernel=name.group(1) if name else "",
        vgprs=number(r"\.vgpr_count:\s+(\d+)"),
        sgprs=number(r"\.sgpr_count:\s+(\d+)"),
        lds_bytes=number(r"\.group_segment_fixed_size:\s*(\d+)"),
        spills=number(r"\.vgpr_spill_count:\s*(\d+)") + number(r"\.sgpr_spill_count:\s*(\d+)"),
        scratch_bytes=number(r"\.private_segment_fixed_size:\s*(\d+)"),
        matrix=matrix,
        code_bytes=text_bytes(code_object),
        linker=linker,
    )


def text_bytes(elf: bytes) -> int:
    """Size of the ``.text`` section of a 64-bit little-endian ELF file; 0 for anything else."""
    if elf[:4] != b"\x7fELF":
        return 0
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    # (name, type, flags, address, offset, size)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + size * n) for n in range(count)]
    strings = headers[names][4]
    for header in headers:
        if elf[strings + header[0] :].startswith(b".text\0"):
            return int(header[5])
    return 0


def _read(key: Key, cache_dir: Path) -> Compiled:
    folder = _folder(key, cache_dir)
    return Compiled(
        key,
        (folder / "kernel.ll").read_text(),
        (folder / "kernel.s").read_text(),
        Report(**json.loads((folder / "report.json").read_text())),
    )
