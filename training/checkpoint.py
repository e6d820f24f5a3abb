"""Writes the trained model as a checkpoint folder, in the official spelling."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from minuet.dtypes import parse_compute_dtype
from minuet.models.m3.export import weight_entries, write_shards
from minuet.models.m3.sample_tokenizer import BOS, EOS, PAD, marker_ids, write_tokenizer
from training.model import Model


def write(folder: Path, model: Model, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write config, weights, tokenizer and chat template.

    Args:
        folder: created; files of an earlier run are replaced.
        model: trained; written in the config's type.
        config: its ``config.json``.
        tokenizer: of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = parse_compute_dtype(model.spec.dtype)
    write_shards(folder, list(weight_entries(model.spec, model.weights, stored)), 10**9)
    write_tokenizer(folder, tokenizer, model.spec.max_positions)
    ids = marker_ids(tokenizer)
    generation = {
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "do_sample": False,
        "temperature": 0.0,  # one right answer to everything it can do
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
