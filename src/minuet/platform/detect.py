"""The arch of the machine at hand, found without torch: `explain` and `serve` must agree on it."""

import shutil
import subprocess
from pathlib import Path

from minuet.errors import ConfigError
from minuet.platform.arch import ARCHS, Arch, get

_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def detect() -> Arch:
    """The arch of GPU 0, or ``cpu`` on a machine without a GPU.

    Raises:
        ConfigError: a GPU that is not in the arch table.
    """
    name = _nvidia() or _amd()
    if name is None:
        return get("cpu")
    if name not in ARCHS:
        raise ConfigError(
            "this machine's GPU is not in the arch table",
            got=name,
            expected=", ".join(ARCHS),
            remedy="use --arch cpu, or add a row to the arch table (docs/adding.md)",
        )
    return get(name)


def _nvidia() -> str | None:
    """``sm90`` from the driver's tool; None without an NVIDIA driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--id=0", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # a tool without a driver or a device: no GPU that could be used
    digits = answer.stdout.strip().replace(".", "")
    return f"sm{digits}" if digits.isdigit() else None


def _amd() -> str | None:
    """``gfx942`` from the kernel driver's topology; None without an AMD GPU."""
    for properties in sorted(_KFD_NODES.glob("*/properties")):
        facts = dict(
            line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line
        )
        version = int(facts.get("gfx_target_version", 0))
        if version:  # CPU nodes say 0; a GPU encodes major * 10000 + minor * 100 + stepping
            major, minor, stepping = version // 10000, version // 100 % 100, version % 100
            return f"gfx{major}{minor:x}{stepping:x}"
    return None
