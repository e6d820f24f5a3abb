"""Writes M3 checkpoint folders in the official spelling: random ones of any size, or loaded ones.

:func:`make_checkpoint` is behind ``tools/make_checkpoint.py`` and the tests. Tensors are drawn
shard by shard, so writing needs the memory of one shard, whatever the model.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from minuet.dtypes import DType, parse_compute_dtype
from minuet.errors import ConfigError
from minuet.models.m3.dummy import fill_dummy
from minuet.models.m3.sample_tokenizer import (
    BOS,
    EOS,
    IMAGE,
    PAD,
    VIDEO,
    marker_ids,
    train,
    write_tokenizer,
)
from minuet.models.m3.spec import M3Spec, parse
from minuet.models.m3.weights import (
    PREFIX,
    M3Weights,
    empty_weights,
    named_slices,
    stored_dtype,
)
from minuet.platform.torch import to_torch

# The vision tower that config.json describes: the smallest that other libraries can build.
_VISION = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_channels": 3,
        "image_size": 28,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    }
)
_OWN_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a generated model; the constants are the released model's.

    Attributes:
        layers: decoder layers.
        dense_layers: leading layers with dense attention and a dense FFN; the others select blocks
            and route.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: KV heads, and index heads.
        head_dim: channels per head; the first half is rotated.
        index_dim: channels of an index vector; 0 means ``head_dim``.
        experts: routed experts per layer.
        topk_experts: routed experts a token visits.
        expert_width: width of one routed expert.
        dense_width: width of the dense FFNs.
        shared_width: width of the shared expert.
        block: tokens per block.
        top_blocks: blocks a query attends to.
        local_blocks: blocks up to the query's own that are always selected.
        vocab: rows of embedding and head; the tokenizer has at most as many tokens.
        max_positions: longest context.
        dtype: type of the stored tensors.
    """

    layers: int = 4
    dense_layers: int = 1
    hidden: int = 64
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    index_dim: int = 0
    experts: int = 8
    topk_experts: int = 2
    expert_width: int = 32
    dense_width: int = 96
    shared_width: int = 32
    block: int = 4
    top_blocks: int = 3
    local_blocks: int = 1
    vocab: int = 640
    max_positions: int = 32768
    dtype: str = "float32"


PRESETS = MappingProxyType(
    {
        # everything happens within a few dozen tokens
        "tiny": Shape(),
        # the released block and selection; attention becomes sparse after 2,048 tokens
        "tiny128": Shape(layers=3, block=128, top_blocks=16),
        # the released head geometry (64/4 heads of 128, halved): what kernels are tried on
        "small": Shape(
            layers=6,
            hidden=256,
            heads=32,
            head_dim=128,
            expert_width=256,
            dense_width=1024,
            shared_width=256,
            block=128,
            top_blocks=16,
            vocab=1024,
            max_positions=131072,
            dtype="bfloat16",
        ),
        # large enough that arithmetic, not overhead, sets the speed on a CPU
        "bench": Shape(
            layers=6,
            hidden=512,
            heads=16,
            head_dim=64,
            experts=16,
            topk_experts=4,
            expert_width=768,
            dense_width=2048,
            shared_width=768,
            block=128,
            top_blocks=16,
            vocab=1024,
            max_positions=131072,
            dtype="bfloat16",
        ),
    }
)


def shape_of(preset: str = "tiny", **changes: Any) -> Shape:
    """A preset's shape with some sizes changed.

    Raises:
        ConfigError: no such preset or size.
    """
    if preset not in PRESETS:
        raise ConfigError("no such preset", got=preset, expected=", ".join(PRESETS))
    known = {field.name for field in fields(Shape)}
    if unknown := sorted(set(changes) - known):
        raise ConfigError("no such size", got=unknown, expected=", ".join(sorted(known)))
    return replace(PRESETS[preset], **changes)


def config_json(shape: Shape, ids: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The ``config.json`` of a generated model, in the released spelling.

    Args:
        shape: its sizes.
        ids: of the markers; None: those of the sample tokenizer.
    """
    ids = ids or marker_ids(train(shape.vocab))
    sparse = [int(idx >= shape.dense_layers) for idx in range(shape.layers)]
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attention_output_gate": False,
        "rotary_dim": shape.head_dim // 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5000000,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "intermediate_size": shape.expert_width,
        "dense_intermediate_size": shape.dense_width,
        "shared_intermediate_size": shape.shared_width,
        "n_shared_experts": 1,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.topk_experts,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": sparse,
        "tie_word_embeddings": False,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": shape.index_dim or shape.head_dim,
            "sparse_num_index_heads": shape.kv_heads,
            "sparse_topk_blocks": shape.top_blocks,
            "sparse_block_size": shape.block,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": shape.local_blocks,
            "sparse_attention_freq": sparse,
            "sparse_disable_index_value": sparse,
        },
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": shape.dtype,
        "image_token_index": ids[IMAGE],
        "video_token_index": ids[VIDEO],
        "projector_hidden_size": shape.hidden,
        "text_config": text,
        "vision_config": dict(_VISION),
    }


def generation_config_json(shape: Shape) -> dict[str, Any]:
    """The ``generation_config.json``: the sampling defaults of the model's card."""
    ids = marker_ids(train(shape.vocab))
    return {
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 40,
    }


@dataclass(frozen=True)
class Entry:
    """One tensor to write.

    Attributes:
        name: its name in the file.
        shape: its shape.
        dtype: its type in the file.
        make: returns it on the CPU; called once, when its shard is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def make_checkpoint(
    folder: Path | str,
    *,
    preset: str = "tiny",
    seed: int = 0,
    shard_bytes: int = 5 * 10**9,
    vision_stub: bool = False,
    force: bool = False,
    **sizes: Any,
) -> Path:
    """Write a random checkpoint: config, tokenizer, chat template, weights.

    Args:
        folder: written; created where missing.
        preset: key of :data:`PRESETS`.
        seed: of the weights, as in :func:`minuet.models.m3.dummy.dummy_weights`.
        shard_bytes: a shard holds at most this, or one tensor.
        vision_stub: also write a minimal vision tower, for libraries that want all tensors.
        force: replace the files of an earlier run.
        sizes: changes to the preset, fields of :class:`Shape`.

    Raises:
        ConfigError: sizes that make no model, or files in the way.
    """
    shape = shape_of(preset, **sizes)
    config = config_json(shape)
    spec = parse(config)  # refuses impossible sizes before anything is written
    folder = Path(folder)
    _make_room(folder, force)
    entries = [*dummy_entries(spec, seed), *(vision_entries(shape, seed) if vision_stub else ())]
    write_shards(folder, entries, shard_bytes)
    write_tokenizer(folder, train(shape.vocab), shape.max_positions)
    _write_json(folder / "generation_config.json", generation_config_json(shape))
    _write_json(folder / "config.json", config)
    return folder


def dummy_entries(spec: M3Spec, seed: int) -> Iterator[Entry]:
    """The text model's tensors under their official names, random."""
    checkpoint = parse_compute_dtype(spec.dtype)
    for name, view in named_slices(spec, empty_weights(spec, checkpoint, "meta")).items():
        stored = stored_dtype(name, checkpoint)
        yield _dummy_entry(PREFIX + name, name, tuple(view.shape), stored, seed)


def weight_entries(spec: M3Spec, weights: M3Weights, stored: DType) -> Iterator[Entry]:
    """Loaded tensors under their official names: the inverse of loading.

    Args:
        spec: the model.
        weights: read, on any device.
        stored: type of the checkpoint; the router stays FP32.
    """
    for name, view in named_slices(spec, weights).items():
        dtype = stored_dtype(name, stored)

        def make(view: Tensor = view, dtype: DType = dtype) -> Tensor:
            return view.to("cpu", to_torch(dtype)).contiguous()

        yield Entry(PREFIX + name, tuple(view.shape), dtype, make)


def vision_entries(shape: Shape, seed: int) -> Iterator[Entry]:
    """The tensors of the minimal vision tower and its projectors."""
    width, mlp, patch = _VISION["hidden_size"], _VISION["intermediate_size"], _VISION["patch_size"]
    merged = shape.hidden * _VISION["spatial_merge_size"] ** 2
    layer = "encoder.layers.0."
    linears = {
        **{f"{layer}self_attn.{x}_proj": (width, width) for x in ("q", "k", "v", "out")},
        f"{layer}mlp.fc1": (mlp, width),
        f"{layer}mlp.fc2": (width, mlp),
        **{f"{layer}layer_norm{n}": (width,) for n in (1, 2)},
        "pre_layrnorm": (width,),
    }
    sizes = {"vision_tower.vision_model." + name: size for name, size in linears.items()}
    sizes |= {
        "multi_modal_projector.linear_1": (shape.hidden, width),
        "multi_modal_projector.linear_2": (shape.hidden, shape.hidden),
        "patch_merge_mlp.linear_1": (shape.hidden, merged),
        "patch_merge_mlp.linear_2": (shape.hidden, shape.hidden),
    }
    tensors = {f"{name}.weight": size for name, size in sizes.items()}
    tensors |= {f"{name}.bias": size[:1] for name, size in sizes.items()}
    tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"] = (
        width,
        _VISION["num_channels"],
        _VISION["temporal_patch_size"],
        patch,
        patch,
    )
    stored = parse_compute_dtype(shape.dtype)
    for name, size in sorted(tensors.items()):
        yield _dummy_entry(name, name, size, stored, seed)


def _dummy_entry(written: str, name: str, shape: tuple[int, ...], dtype: DType, seed: int) -> Entry:
    def make() -> Tensor:
        out = torch.empty(shape, dtype=to_torch(dtype))
        fill_dummy(out, name, seed, dtype)
        return out

    return Entry(written, shape, dtype, make)


def write_shards(folder: Path, entries: Sequence[Entry], shard_bytes: int) -> None:
    """Write ``model.safetensors``, or numbered shards with an index if there are several.

    Args:
        folder: exists.
        entries: tensors, in the order they are written.
        shard_bytes: a shard holds at most this, or one tensor.
    """
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    total = sum(entry.nbytes for entry in entries)
    weight_map: dict[str, str] = {}
    # disable=None: no bar unless stderr is a terminal
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None, delay=1.0)
    with bar:
        for number, shard in enumerate(shards, 1):
            numbers = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
            file = f"model{numbers}.safetensors"
            tensors = {}
            for entry in shard:
                tensors[entry.name] = entry.make()
                bar.update(entry.nbytes)
            save_file(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _make_room(folder: Path, force: bool) -> None:
    """Create the folder; with ``force``, remove what an earlier run wrote and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        return
    if not force:
        raise ConfigError(
            f"{folder} is not empty",
            got=sorted(path.name for path in folder.iterdir())[:5],
            expected="a new or an empty folder",
            remedy="name another folder, or replace the checkpoint in it with --force",
        )
    for path in folder.iterdir():
        if path.name in _OWN_FILES or path.match("model-*-of-*.safetensors"):
            path.unlink()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
