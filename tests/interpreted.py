"""Runs a module of checks through Triton's interpreter, which is chosen at import: in a process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(module: str, *words: str, timeout: float = 280) -> int:
    """Checks that passed: lines of the module's output that begin with ``ok``.

    Args:
        module: with a ``__main__`` that prints ``ok NAME`` per check and fails as Python fails.
        words: its arguments.
        timeout: seconds.
    """
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout.count("ok ")
