"""What every record says of itself, and how a list of samples becomes a few figures. No torch.

A record is one JSON object: this header, what was asked for, what was found. A figure that is
quoted anywhere has a record in ``benchmarks/results``.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minuet import __version__
from minuet.errors import ConfigError

# What is asked of the driver's tool: what is there, and whether something holds it back.
_GPU_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "temperature.gpu",
    "power.draw",
    "ecc.mode.current",
)


def header() -> dict[str, Any]:
    """Date, commit, command and machine."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "minuet": __version__,
        "commit": commit(),
        "command": command(sys.argv),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average_1_min": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit of the tree that runs, with ``+`` if files differ from it; empty outside git."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *words], capture_output=True, text=True, cwd=here, check=True, timeout=20
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    found = git("rev-parse", "--short", "HEAD")
    return found + ("+" if found and git("status", "--porcelain", "--untracked-files=no") else "")


def command(argv: Sequence[str]) -> str:
    """The command line as a reader would type it in the root of the repository.

    Of absolute paths the last part is kept: where a machine keeps its files is nobody's business.
    """
    name = Path(argv[0]).name if argv else ""
    words = [Path(word).name if word.startswith("/") else word for word in argv[1:]]
    program = ["minuet"] if name in ("__main__.py", "minuet") else ["python", f"benchmarks/{name}"]
    return " ".join(program + words)


def gpus(uuid: str | None = None) -> list[dict[str, str]]:
    """What the NVIDIA driver says of each GPU, clocks and limits included; empty without one.

    Args:
        uuid: only this GPU.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [
        dict(zip(_GPU_FIELDS, (word.strip() for word in line.split(",")), strict=False))
        for line in answer.stdout.splitlines()
    ]
    return [row for row in rows if uuid is None or row.get("uuid", "").endswith(uuid)]


def metadata(pairs: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` words, of ``--metadata`` and the like, as a mapping.

    Raises:
        ConfigError: a word without ``=``.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError("bad value", got=pair, expected="KEY=VALUE")
        found[key] = value
    return found


def summary(samples: Sequence[float], scale: float = 1.0, digits: int = 4) -> dict[str, float]:
    """Median, 20th and 80th percentile, extremes and number of samples.

    Args:
        samples: at least one.
        scale: multiplies every figure; 1e3 turns seconds into milliseconds.
        digits: decimals that are kept.
    """
    p20, median, p80 = np.percentile(samples, (20, 50, 80))
    figures = {"median": median, "p20": p20, "p80": p80, "min": min(samples), "max": max(samples)}
    rounded = {name: round(float(value) * scale, digits) for name, value in figures.items()}
    return {**rounded, "samples": len(samples)}


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record, its folder included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
