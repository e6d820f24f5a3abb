"""Packed weights: every official tensor in its place, dummy weights reproducible, the way back."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from minuet.dtypes import DType
from minuet.models import registry
from minuet.models.m3.dummy import dummy_weights, fill_dummy
from minuet.models.m3.export import (
    config_json,
    dummy_entries,
    shape_of,
    weight_entries,
    write_shards,
)
from minuet.models.m3.spec import M3Spec, parse
from minuet.models.m3.weights import (
    M3Weights,
    empty_weights,
    load_weights,
    named_slices,
)
from minuet.platform.torch import to_torch

TINY = parse(config_json(shape_of("tiny")))
RELEASED: M3Spec = registry.find("minimax-m3").spec


def assert_equal(a: M3Weights, b: M3Weights) -> None:
    for (path, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
        assert x.dtype == y.dtype, path
        assert torch.equal(x, y), path


# --- layout --------------------------------------------------------------------------------------


def test_released_names_are_those_of_the_listing() -> None:
    """Counts by kind; 60 layers, the first 3 dense, 128 experts."""
    named = named_slices(RELEASED, empty_weights(RELEASED, DType.BF16, "meta"))
    kinds: dict[str, int] = {}
    for name in named:
        kind = re.sub(r"\.\d+\.", ".#.", name).removeprefix("model.layers.#.")
        kinds[kind] = kinds.get(kind, 0) + 1
    attention = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    index = ["index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm"]
    ffn = ["gate_proj", "up_proj", "down_proj"]
    assert kinds == {
        "model.embed_tokens.weight": 1,
        "model.norm.weight": 1,
        "lm_head.weight": 1,
        "input_layernorm.weight": 60,
        "post_attention_layernorm.weight": 60,
        **{f"self_attn.{name}.weight": 60 for name in attention},
        **{f"self_attn.{name}.weight": 57 for name in index},
        **{f"mlp.{name}.weight": 3 for name in ffn},
        **{f"block_sparse_moe.shared_experts.{name}.weight": 57 for name in ffn},
        **{f"block_sparse_moe.experts.#.{name}.weight": 57 * 128 for name in ("w1", "w2", "w3")},
        "block_sparse_moe.gate.weight": 57,
        "block_sparse_moe.e_score_correction_bias": 57,
    }


def test_released_shapes() -> None:
    weights = empty_weights(RELEASED, DType.BF16, "meta")
    dense, sparse = weights.layers[2], weights.layers[3]
    assert dense.qkv.shape == (8192 + 2 * 512, 6144)
    assert sparse.qkv.shape == (8192 + 2 * 512 + 512 + 128, 6144)
    assert dense.index_q_norm is None
    assert dense.moe is None
    assert sparse.mlp is None
    assert sparse.o.shape == (6144, 8192)
    assert sparse.moe is not None
    assert sparse.moe.gate_up.shape == (128, 6144, 6144)
    assert sparse.moe.down.shape == (128, 6144, 3072)
    assert sum(tensor.numel() for _, tensor in weights.tensors()) == 426_174_572_928


def test_bytes_are_those_planning_counts() -> None:
    for dtype in (DType.BF16, DType.FP32):
        counted = sum(
            group.params * (dtype.itemsize if group.dtype == "compute" else 4)
            for group in registry.find("minimax-m3").facts.weights
        )
        assert empty_weights(RELEASED, dtype, "meta").nbytes == counted


def test_slices_cover_every_element_once() -> None:
    weights = empty_weights(TINY, DType.FP32, "cpu")
    for _, tensor in weights.tensors():
        tensor.zero_()
    for view in named_slices(TINY, weights).values():
        assert view.is_contiguous()
        view.add_(1)
    for path, tensor in weights.tensors():
        assert bool((tensor == 1).all()), path


def test_packing_order() -> None:
    """Rows are told apart by value: each official tensor is filled with its own number."""
    weights = empty_weights(TINY, DType.FP32, "cpu")
    named = named_slices(TINY, weights)
    numbers = {name: float(number) for number, name in enumerate(named)}
    for name, view in named.items():
        view.fill_(numbers[name])

    def of(name: str) -> float:
        return numbers[f"model.layers.2.{name}.weight"]

    layer = weights.layers[2]
    assert layer.moe is not None
    rows = layer.qkv[:, 0].tolist()
    expected = [("q_proj", 128), ("k_proj", 32), ("v_proj", 32)]
    expected += [("index_q_proj", 32), ("index_k_proj", 16)]
    assert rows == [of(f"self_attn.{name}") for name, count in expected for _ in range(count)]
    moe = "block_sparse_moe"
    gate, up = layer.moe.gate_up[5, :, 0].chunk(2)
    assert gate.unique().tolist() == [of(f"{moe}.experts.5.w1")]  # not interleaved
    assert up.unique().tolist() == [of(f"{moe}.experts.5.w3")]
    assert layer.moe.down[5].unique().tolist() == [of(f"{moe}.experts.5.w2")]
    gate, up = layer.moe.shared.gate_up[:, 0].chunk(2)
    assert gate.unique().tolist() == [of(f"{moe}.shared_experts.gate_proj")]
    assert up.unique().tolist() == [of(f"{moe}.shared_experts.up_proj")]


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_norms_and_router_stay_fp32(dtype: DType) -> None:
    weights = empty_weights(TINY, dtype, "meta")
    is_fp32 = re.compile(r"norm$|router$|bias$")
    for path, tensor in weights.tensors():
        assert tensor.dtype == (torch.float32 if is_fp32.search(path) else to_torch(dtype)), path


# --- dummy weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_dummy_equals_the_written_folder(
    checkpoint: Callable[..., Path], stored: str, dtype: DType
) -> None:
    folder = checkpoint("tiny", dtype=stored, seed=3)
    spec = registry.find(str(folder)).spec
    assert_equal(load_weights(folder, spec, dtype, "cpu"), dummy_weights(spec, dtype, "cpu", 3))


def test_dummy_values_depend_on_seed_and_name_alone() -> None:
    whole = named_slices(TINY, dummy_weights(TINY, DType.FP32, "cpu", 0))
    fewer = dataclasses.replace(TINY, layer_kinds=TINY.layer_kinds[:2], moe_layers=(False, True))
    for name, view in named_slices(fewer, dummy_weights(fewer, DType.FP32, "cpu", 0)).items():
        assert torch.equal(view, whole[name]), name
    other = named_slices(TINY, dummy_weights(TINY, DType.FP32, "cpu", 1))
    assert not any(torch.equal(view, other[name]) for name, view in whole.items())


def test_dummy_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> Tensor:
        out = torch.empty(100, 70)
        fill_dummy(out, "lm_head.weight", 0, DType.FP32)
        return out

    whole = draw()
    monkeypatch.setattr("minuet.models.m3.dummy._CHUNK", {"cpu": 999})
    assert torch.equal(draw(), whole)


def test_dummy_stream_in_plain_integers() -> None:
    """The definition, in Python's integers; folders written before must stay reproducible."""
    digest = hashlib.blake2b(b"7/lm_head.weight", digest_size=8).digest()
    key_a, key_b = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    out = torch.empty(40, 3)
    fill_dummy(out, "lm_head.weight", 7, DType.FP32)
    mask = 2**32 - 1
    for index, value in enumerate(out.flatten().tolist()):
        x = (index + key_a) & mask
        x ^= x >> 16
        x = (x * 0x21F0AAAD + key_b) & mask
        x ^= x >> 15
        x = (x * 0x735A2D97) & mask
        x ^= x >> 15
        signed = x - 2**32 if x >= 2**31 else x
        # gain 2 / sqrt(3 columns), times the sqrt(3) that gives [-1, 1) unit variance
        assert value == pytest.approx(signed / 2**31 * 2.0, rel=1e-6, abs=1e-9)


def test_dummy_streams_are_uniform_and_unrelated() -> None:
    size = 1 << 18
    draws = []
    for name in (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
    ):
        out = torch.empty(size // 256, 256)
        fill_dummy(out, name, 0, DType.FP32)
        draws.append(out.flatten().double() * math.sqrt(256))
    a, b = draws
    noise = 4 / math.sqrt(size)
    assert abs(a.mean()) < noise
    assert abs(a.std() - 1) < noise
    assert abs((a * b).mean()) < noise
    assert abs((a[1:] * a[:-1]).mean()) < noise
    bins = torch.histc(a.float(), bins=64, min=-math.sqrt(3), max=math.sqrt(3))
    assert bins.sum() == size
    assert ((bins - size / 64) ** 2 / (size / 64)).sum() < 120  # chi-square, 63 degrees: p < 1e-5


# --- writing -------------------------------------------------------------------------------------


def test_written_weights_come_back(tmp_path: Path) -> None:
    weights = dummy_weights(TINY, DType.FP32, "cpu", 5)
    write_shards(tmp_path, list(weight_entries(TINY, weights, DType.FP32)), shard_bytes=400_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal(load_weights(tmp_path, TINY, DType.FP32, "cpu"), weights)


def test_router_is_stored_in_fp32(checkpoint: Callable[..., Path]) -> None:
    for file in checkpoint("tiny", dtype="bfloat16").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            is_router = name.endswith(("block_sparse_moe.gate.weight", "e_score_correction_bias"))
            assert tensor.dtype == (torch.float32 if is_router else torch.bfloat16), name


def test_shards_keep_to_their_size(tmp_path: Path) -> None:
    write_shards(tmp_path, list(dummy_entries(TINY, 0)), shard_bytes=200_000)
    sizes = [
        sum(tensor.nbytes for tensor in load_file(file).values())
        for file in tmp_path.glob("*.safetensors")
    ]
    assert max(sizes) <= 200_000
    assert sum(sizes) == sum(entry.nbytes for entry in dummy_entries(TINY, 0))


@pytest.mark.parametrize("preset", ["tiny", "tiny128", "small", "bench"])
def test_presets_have_the_size_they_claim(preset: str) -> None:
    spec = parse(config_json(shape_of(preset)))
    params = sum(t.numel() for _, t in empty_weights(spec, DType.BF16, "meta").tensors())
    claimed = {"tiny": 0.36e6, "tiny128": 0.28e6, "small": 24e6, "bench": 112e6}
    assert params == pytest.approx(claimed[preset], rel=0.01)
