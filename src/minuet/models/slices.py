"""Rank slices by model name: what one of N GPUs sees, as a config that any start can take.

Torch is not needed. A model that can be sliced brings ``slice.py`` with a ``rank_slice``; see
``models/m3/slice.py``.
"""

import importlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minuet.errors import ConfigError
from minuet.models.registry import find


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Which part of a model.

    Attributes:
        rank_of: tensor-parallel size whose rank is imitated.
        layers: layers to keep; None keeps all.
        dense_layers: how many of them attend densely; None takes the first layers as they come.
    """

    rank_of: int = 1
    layers: int | None = None
    dense_layers: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut."""
        return self == SliceSpec()


def slice_config(model: str, part: SliceSpec) -> dict[str, Any]:
    """The ``config.json`` object of a slice.

    Args:
        model: a folder, a config file or a preset.
        part: what to keep.

    Raises:
        ConfigError: no such model, one that cannot be sliced, or sizes that do not divide.
    """
    source = find(model)
    if importlib.util.find_spec(source.package + ".slice") is None:
        raise ConfigError(f"{model} cannot be sliced", remedy="leave --rank-of and --layers out")
    module = importlib.import_module(source.package + ".slice")
    found: dict[str, Any] = module.rank_slice(
        source.config,
        rank_of=part.rank_of,
        layers=part.layers,
        dense_layers=part.dense_layers,
    )
    return found


def write_slice(model: str, part: SliceSpec, path: Path) -> Path:
    """Write the config of a slice to a file that ``--load-format dummy`` starts from.

    Args:
        model: a folder, a config file or a preset.
        part: what to keep.
        path: a file; its folder is made.
    """
    config = slice_config(model, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path
