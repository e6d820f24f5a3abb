"""The calls behind the package's list.

Everything runs in eager attention: it builds the exact mask of the selected blocks. transformers
5.12 selects one list for all KV heads and is no oracle; 5.13 and later select per KV head.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Parts that the text path never enters: a folder without a vision tower is fine here.
_NOT_TEXT = ("model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True)
class HFModel:
    """A loaded model.

    Attributes:
        module: the complete model or the text-only one; both take ``input_ids``.
        layers: its decoder layers.
    """

    module: Any
    layers: Any

    @classmethod
    def of(cls, module: Any) -> "HFModel":
        text = getattr(module.model, "language_model", module.model)
        return cls(module.eval().requires_grad_(False), text.layers)


@lru_cache(maxsize=2)
def load(folder: Path | str, dtype: torch.dtype = torch.float32) -> HFModel:
    """Load a folder and insist that every tensor of it, and of the text model, found its place.

    Args:
        folder: official names, or the text-only class's.
        dtype: of everything but the router, which stays FP32.
    """
    transformers = _transformers()
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    module, report = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [key for key in report["missing_keys"] if not key.startswith(_NOT_TEXT)]
    wrong = {kind: sorted(keys)[:5] for kind, keys in {**report, "missing_keys": missing}.items()}
    assert not any(wrong.values()), f"transformers reads {folder} differently: {wrong}"
    if dtype is not torch.float32:
        module = module.to(dtype)
        for part in module.modules():
            if type(part).__name__ == "MiniMaxM3VLTopKRouter":
                part.float()
    return HFModel.of(module)


@torch.inference_mode()
def logits(model: HFModel, ids: Sequence[int] | Tensor) -> Tensor:
    """[T, V] FP32 of one sequence, in one forward without a cache."""
    return model.module(input_ids=_batch(ids), use_cache=False).logits[0].float()


@torch.inference_mode()
def selections(model: HFModel, ids: Sequence[int] | Tensor) -> dict[int, Tensor]:
    """Blocks selected in one forward: sparse layer to [Hkv, T, width] int64.

    Width is ``min(top_blocks, blocks of the sequence)``; best score first, -1 at the tail.
    """
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _args: Any, output: Tensor) -> None:
            seen[layer] = output[0].clone()

        return hook

    hooks = [
        layer.self_attn.indexer.register_forward_hook(keep(idx))
        for idx, layer in enumerate(model.layers)
        if layer.self_attn.indexer is not None
    ]
    try:
        model.module(input_ids=_batch(ids), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.inference_mode()
def generate(model: HFModel, ids: Sequence[int] | Tensor, n: int) -> list[int]:
    """``n`` greedy tokens, one at a time with a cache; an end-of-sequence token ends nothing."""
    cache = _transformers().DynamicCache(config=model.module.config.get_text_config())
    step, out = _batch(ids), []
    for _ in range(n):
        step = model.module(input_ids=step, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
        out.append(int(step))
    return out


def golden_model() -> HFModel:
    """A random text-only model whose logits are known (``tests/models/test_oracle.py``).

    Sizes of our preset ``tiny``, a vocabulary of 256, every parameter redrawn in the order of the
    module: the known numbers belong to exactly this procedure.
    """
    transformers = _transformers()
    kinds = [0, 1, 1, 1]
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=32,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=8,
        max_position_embeddings=1 << 20,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
        moe_layer_freq=kinds,
        sparse_attention_config={
            "use_sparse_attention": True,
            "sparse_index_dim": 16,
            "sparse_num_index_heads": 2,
            "sparse_topk_blocks": 3,
            "sparse_block_size": 4,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": kinds,
            "sparse_disable_index_value": kinds,
        },
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = transformers.MiniMaxM3VLForCausalLM._from_config(
            config, attn_implementation="eager"
        ).float()
        for name, parameter in module.named_parameters():
            parameter.normal_(0, 0.25 if "norm" in name else 0.15)
        for name, buffer in module.named_buffers():
            if "e_score" in name:
                buffer.normal_(0, 0.2)
    return HFModel.of(module)


def save_text_only(model: HFModel, folder: Path) -> Path:
    """``save_pretrained`` of the text-only class: its own fused names."""
    model.module.save_pretrained(folder)
    return folder


def save_complete(model: HFModel, folder: Path) -> Path:
    """``save_pretrained`` of the complete model around a text-only one: official names."""
    transformers = _transformers()
    config = transformers.MiniMaxM3VLConfig(
        text_config=model.module.config.to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        projector_hidden_size=64,
        image_token_index=250,
        video_token_index=251,
    )
    complete = transformers.MiniMaxM3SparseForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).float()
    complete.model.language_model.load_state_dict(model.module.model.state_dict())
    complete.lm_head.load_state_dict(model.module.lm_head.state_dict())
    complete.save_pretrained(folder)
    return folder


def _batch(ids: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.long)[None]


def _transformers() -> Any:
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its report of missing keys is an assertion here
    return transformers
