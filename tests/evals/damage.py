"""Copies of a checkpoint whose selection is broken, to see that an evaluation notices."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def choose_one_block(source: Path, target: Path) -> Path:
    """Only the query's own block is ever chosen: top-k of 1."""
    config = _copy(source, target)
    text = config.get("text_config", config)
    assert text["sparse_attention_config"]["sparse_topk_blocks"] > 1
    text["sparse_attention_config"]["sparse_topk_blocks"] = 1
    (target / "config.json").write_text(json.dumps(config))
    return target


def shuffle_index_keys(source: Path, target: Path) -> Path:
    """The channels of the index keys are permuted, those of the index queries are not.

    The keys keep their length and their distribution; only what they are compared with is wrong.
    """
    _copy(source, target)
    changed = 0

    def shuffled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal changed
        if "index_k_proj" not in name or tensor.dim() < 2:
            return tensor
        changed += 1
        order = torch.randperm(tensor.shape[0], generator=torch.Generator().manual_seed(0))
        return tensor[order].contiguous()

    _rewrite(target, shuffled)
    assert changed > 0, "the checkpoint has no index keys"
    return target


def _copy(source: Path, target: Path) -> dict[str, Any]:
    shutil.copytree(source, target)
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    return config


def _rewrite(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: change(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path, metadata={"format": "pt"})
