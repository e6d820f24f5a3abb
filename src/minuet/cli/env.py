"""``minuet env``: the environment variables as they are read, and what is installed."""

import argparse
import json
import platform
import sys
from importlib import metadata
from typing import Any

import minuet
from minuet import env

SUMMARY = "Show the environment variables Minuet reads, and the versions a bug report needs."
EXAMPLES = """examples:
  minuet env            for people
  minuet env --json     for programs, and for bug reports
"""

_PACKAGES = ("torch", "triton", "flydsl", "numpy", "safetensors", "tokenizers", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the sub-command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print; 0 unless a variable is refused."""
    found = _collect()
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    lines = [f"minuet {found['minuet']}, Python {found['python']}, {found['machine']}", ""]
    width = max(len(v["name"]) for v in found["variables"])
    for variable in found["variables"]:
        shown = variable["value"] or "(unset)"
        lines.append(f"{variable['name']:<{width}}  {shown}")
        lines.append(f"{'':<{width}}  {variable['why']}")
    lines.append("")
    lines += [
        f"{name:<{width}}  {version or 'not installed'}"
        for name, version in found["packages"].items()
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _collect() -> dict[str, Any]:
    values = env.values()
    return {
        "minuet": minuet.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "variables": [
            {
                "name": variable.name,
                "value": getattr(values, variable.field),
                "default": variable.default,
                "accepts": variable.accepts,
                "why": variable.why,
            }
            for variable in env.VARIABLES
        ],
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    """Installed version, found without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
