"""The oracle is the model we mean, and both sides read each other's folders."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minuet.dtypes import DType
from minuet.models import registry
from minuet.models.m3.weights import M3Weights, load_weights
from tests import oracle

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def golden() -> oracle.HFModel:
    return oracle.golden_model()


@pytest.fixture(scope="module")
def golden_ids() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 256, (1, 45), generator=generator)[0]


def load(folder: Path) -> M3Weights:
    return load_weights(folder, registry.find(str(folder)).spec, DType.FP32, "cpu")


def assert_same_weights(weights: M3Weights, model: oracle.HFModel) -> None:
    """Our packed tensors are transformers' fused ones, attribute by attribute."""
    assert len(weights.layers) == len(model.layers)
    for ours, theirs in zip(weights.layers, model.layers, strict=True):
        attention, ffn = theirs.self_attn, theirs.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        pairs = [
            (ours.input_norm, theirs.input_layernorm.weight),
            (ours.post_norm, theirs.post_attention_layernorm.weight),
            (ours.q_norm, attention.q_norm.weight),
            (ours.k_norm, attention.k_norm.weight),
            (ours.o, attention.o_proj.weight),
        ]
        if attention.indexer is not None:
            projections += [attention.indexer.q_proj, attention.indexer.k_proj]
            pairs += [
                (ours.index_q_norm, attention.indexer.q_norm.weight),
                (ours.index_k_norm, attention.indexer.k_norm.weight),
            ]
        pairs.append((ours.qkv, torch.cat([linear.weight for linear in projections])))
        if ours.moe is not None:
            pairs += [
                (ours.moe.router, ffn.gate.weight),
                (ours.moe.bias, ffn.gate.e_score_correction_bias),
                (ours.moe.gate_up, ffn.experts.gate_up_proj),
                (ours.moe.down, ffn.experts.down_proj),
            ]
            ffn = ffn.shared_experts
        mlp = ours.mlp if ours.moe is None else ours.moe.shared
        assert mlp is not None
        pairs += [(mlp.gate_up, ffn.gate_up_proj.weight), (mlp.down, ffn.down_proj.weight)]
        for number, (mine, other) in enumerate(pairs):
            assert mine is not None
            assert torch.equal(mine, other), number


# --- the oracle itself ---------------------------------------------------------------------------


def test_golden_logits(golden: oracle.HFModel, golden_ids: Tensor) -> None:
    """Seen with transformers 5.13.0 and 5.24.0; an independent reference came within 3e-6."""
    assert golden_ids[:8].tolist() == [105, 116, 158, 23, 27, 211, 69, 42]
    logits = oracle.logits(golden, golden_ids)
    assert logits[44, :4].tolist() == pytest.approx([-0.8548, 0.7903, -0.6746, 0.8987], abs=1e-4)
    assert float(logits.double().sum()) == pytest.approx(225.266, abs=5e-3)
    assert float(logits.abs().max()) == pytest.approx(4.8991, abs=1e-4)
    expected = [254, 129, 254, 158, 56, 79, 158, 144, 100, 33, 191, 121]
    assert logits[-12:].argmax(-1).tolist() == expected


def test_golden_selection_is_per_kv_head(golden: oracle.HFModel, golden_ids: Tensor) -> None:
    selected = oracle.selections(golden, golden_ids)
    assert list(selected) == [1, 2, 3]
    assert all(blocks.shape == (2, 45, 3) for blocks in selected.values())
    assert [set(blocks[44].tolist()) for blocks in selected[3]] == [{1, 8, 11}, {6, 7, 11}]


def test_greedy_generation_is_the_argmax_of_full_forwards(
    golden: oracle.HFModel, golden_ids: Tensor
) -> None:
    ids = golden_ids[:20].tolist()
    for token_id in oracle.generate(golden, ids, 6):
        assert token_id == int(oracle.logits(golden, ids)[-1].argmax())
        ids.append(token_id)


# --- their folders, our loader -------------------------------------------------------------------


@pytest.mark.parametrize("save", [oracle.save_text_only, oracle.save_complete])
def test_folder_saved_by_transformers_loads(
    golden: oracle.HFModel, golden_ids: Tensor, tmp_path: Path, save: Callable[..., Path]
) -> None:
    folder = save(golden, tmp_path)
    assert_same_weights(load(folder), golden)
    reloaded = oracle.load(folder)
    assert torch.equal(oracle.logits(reloaded, golden_ids), oracle.logits(golden, golden_ids))


# --- our folders, their loader -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "tiny"},
        {"preset": "tiny", "vision_stub": True, "shard_bytes": 300_000},
        {"preset": "tiny", "dtype": "bfloat16", "index_dim": 32, "dense_layers": 2},
        {"preset": "tiny128"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_transformers_loads_our_folder(
    checkpoint: Callable[..., Path], options: dict[str, object]
) -> None:
    folder = checkpoint(**options)
    model = oracle.load(folder)  # asserts that nothing is missing, unexpected or mismatched
    assert_same_weights(load(folder), model)
    assert torch.isfinite(oracle.logits(model, list(range(3, 20)))).all()


def test_random_models_are_lively(checkpoint: Callable[..., Path]) -> None:
    """Attention, selection and routing choose; a model of equal scores would test nothing."""
    model = oracle.load(checkpoint("tiny"))
    ids = torch.randint(0, 600, (120,), generator=torch.Generator().manual_seed(0))
    logits = oracle.logits(model, ids)
    assert 1.0 < float(logits.std()) < 3.0
    assert len(set(logits.argmax(-1).tolist())) > 40
    for blocks in oracle.selections(model, ids).values():
        late = blocks[:, 60:]
        heads_differ = (late[0].sort().values != late[1].sort().values).any(-1)
        assert float(heads_differ.float().mean()) > 0.5
        assert late.unique().numel() > 15
