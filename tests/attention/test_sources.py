"""What a launcher and an engine source may not contain, read from the sources: F-4, F-7."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minuet
from minuet.attention import backends
from tests.attention import source_rules

ROOT = Path(minuet.__file__).parent
LAUNCHERS = sorted(
    path
    for path in (ROOT / "attention" / "backends").rglob("*.py")
    if path.name not in ("spec.py", "__init__.py")
)
ENGINE = sorted(p for part in ("engine", "planning") for p in (ROOT / part).rglob("*.py"))


def named(path):
    return str(path.relative_to(ROOT))


# --- T4b -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LAUNCHERS, ids=named)
def test_a_launcher_knows_no_other_backend_no_flag_and_no_capability(path):
    own = path.relative_to(ROOT / "attention" / "backends").parts[0]
    assert source_rules.launcher_faults(ast.parse(path.read_text()), own) == []


def test_the_launcher_rule_sees_what_it_forbids():
    forbidden = (
        "from minuet.attention.backends.flydsl import launch",
        "import minuet.attention.backends.flydsl.launch as other",
        "import os\nflag = os.environ.get('X')",
        "from os import getenv",
        "from minuet import env",
        "from minuet.attention import dispatch",
        "from minuet.attention.capability import covers",
        "def attend():\n    from minuet.attention.backends import flydsl",
        "import importlib\nimportlib.import_module('minuet.attention.backends.flydsl.launch')",
    )
    for source in forbidden:
        assert source_rules.launcher_faults(ast.parse(source), "triton"), source
    assert not source_rules.launcher_faults(
        ast.parse("from minuet.attention.backends.triton import kernels\nimport torch"), "triton"
    )


# --- T7 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ENGINE, ids=named)
def test_no_limit_of_a_kernel_is_written_in_the_engine(path):
    limits = source_rules.numbers_of(
        kernel for name in backends.NAMES for kernel in backends.capabilities(name)
    )
    assert source_rules.limit_faults(ast.parse(path.read_text()), limits) == []


def test_the_limit_rule_sees_what_it_forbids():
    limits = {8, 16, 64, 128, 256}
    forbidden = (
        "if page_size not in (16, 64, 128): raise ValueError",
        "ok = problem.head_dim == 128",
        "if group > 16: pass",
        "parts = min(num_parts, 256)",
        "MAX_QUERY_LEN = 8",
        "def f(page_size: int = 128): pass",
        "Problem(page_size=128)",
    )
    for source in forbidden:
        assert source_rules.limit_faults(ast.parse(source), limits), source
    allowed = (
        "rungs = 64",
        "if group > 1: pass",
        "pages = max(num_pages, 1)",
        "x = page_size * 128",
    )
    for source in allowed:
        assert not source_rules.limit_faults(ast.parse(source), limits), source


# --- imports -------------------------------------------------------------------------------------


def test_the_decision_half_imports_neither_torch_nor_a_compiler():
    code = (
        "import sys\n"
        "import minuet.attention.dispatch, minuet.attention.plan, minuet.attention.workspace\n"
        "found = {'torch', 'triton', 'flydsl'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# --- devices -------------------------------------------------------------------------------------

# The runner of the one backend that is called past torch names torch's stream.
_MAY_NAME_THE_DEVICE = ("platform/", "attention/backends/flydsl/calls.py")


def test_only_the_platform_asks_whether_there_is_a_gpu():
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in sorted(ROOT.rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(_MAY_NAME_THE_DEVICE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda"))
        or (isinstance(node, ast.Compare) and "'cuda'" in ast.unparse(node))
    ]
    assert not found
