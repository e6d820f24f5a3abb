"""Which code serves an architecture, and how a model named by a user becomes facts. No torch.

A model is named by a folder with a ``config.json``, by a config file, or by a name of what ships
here: a complete checkpoint (``bundled/``: minuet-tiny, see docs/minuet-tiny.md), or a preset, a
config without weights, enough for ``minuet explain`` and for ``--load-format dummy``.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minuet.errors import ConfigError
from minuet.planning.model import ModelFacts

_PRESETS = Path(__file__).parent / "presets"
_BUNDLED = Path(__file__).parent / "bundled"

# architecture string -> package with spec.py (parse), facts.py (facts) and model.py (Model)
_MODELS: Mapping[str, str] = {
    "MiniMaxM3SparseForConditionalGeneration": "minuet.models.m3",
    "MiniMaxM3SparseForCausalLM": "minuet.models.m3",
    "MiniMaxM3VLForCausalLM": "minuet.models.m3",
}


@dataclass(frozen=True)
class ModelSource:
    """A model found by name, its config read, nothing else loaded.

    Attributes:
        name: as the user named it.
        folder: where weights and tokenizer are; None for a preset or a bare config file.
        config: the ``config.json`` object.
        package: import path of the model's package.
        spec: the parsed config, the model's own type.
        facts: the same as planning sees it.
    """

    name: str
    folder: Path | None
    config: Mapping[str, Any]
    package: str
    spec: Any
    facts: ModelFacts


def preset_names() -> tuple[str, ...]:
    """Configs that ship with the package."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def bundled_names() -> tuple[str, ...]:
    """Complete checkpoints that ship with the package."""
    return tuple(sorted(path.parent.name for path in _BUNDLED.glob("*/config.json")))


def names() -> tuple[str, ...]:
    """What :func:`find` knows without a path: models with weights first."""
    return (*bundled_names(), *preset_names())


def find(name: str) -> ModelSource:
    """Read the config of a model.

    Raises:
        ConfigError: no such model, unreadable JSON, or a config the model's spec refuses.
    """
    path, folder = _locate(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"cannot read {path}", got=str(problem), expected="a JSON object"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}", got=type(config).__name__, expected="a JSON object")
    architectures = config.get("architectures") or []
    package = next((_MODELS[a] for a in architectures if a in _MODELS), None)
    if package is None:
        raise ConfigError(
            f"no model for {path}",
            got=architectures,
            expected="architectures naming one of " + ", ".join(_MODELS),
        )
    spec = importlib.import_module(package + ".spec").parse(config)
    facts = importlib.import_module(package + ".facts").facts(spec, name)
    return ModelSource(name, folder, config, package, spec, facts)


def _locate(name: str) -> tuple[Path, Path | None]:
    path = Path(name)
    if (path / "config.json").is_file():
        return path / "config.json", path
    if path.is_file():
        return path, None
    if name in bundled_names():
        return _BUNDLED / name / "config.json", _BUNDLED / name
    if name in preset_names():
        return _PRESETS / f"{name}.json", None
    raise ConfigError(
        "no such model",
        got=name,
        expected="a folder with config.json, a config file, a bundled model or a preset: "
        + ", ".join(names()),
        remedy="download the checkpoint to a local folder and name that folder",
    )
