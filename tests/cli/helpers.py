"""Run the command in a fresh interpreter, without the variables of the test run."""

import os
import subprocess
import sys


def minuet(*words: str, env: dict[str, str] | None = None, flags: tuple[str, ...] = ()):
    """The finished process of ``python -m minuet WORDS``."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MINUET_") and k != "COLUMNS"}
    return subprocess.run(
        [sys.executable, *flags, "-m", "minuet", *words],
        capture_output=True,
        text=True,
        env={**clean, "PYTHONWARNINGS": "error", **(env or {})},
        timeout=120,
        check=False,
    )
