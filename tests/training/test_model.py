"""The trainable model computes what the engine computes from its exported checkpoint."""

import pytest
import torch
from training.model import Model, Pass

from minuet.models.m3.export import config_json, shape_of
from minuet.models.m3.sample_tokenizer import marker_ids, train
from minuet.models.m3.spec import parse
from tests.engine.desk import engine, row_logits, token_ids
from training import attention, checkpoint

SHAPE = shape_of("tiny", dtype="float32")
LENGTH = 90  # 23 blocks of 4, of which 3 are chosen


def model(shape=SHAPE):
    made = Model(parse(config_json(shape)), torch.device("cpu"), seed=3)
    generator = torch.Generator().manual_seed(4)
    for path, tensor in made.named.items():
        with torch.no_grad():  # gains, biases and embeddings as lively as in a trained model
            if tensor.dim() == 1:
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
            if path.endswith("qkv"):
                tensor *= 2
    return made


def test_logits_equal_the_engines_on_the_exported_checkpoint(tmp_path):
    made = model()
    tokenizer = train(SHAPE.vocab)
    checkpoint.write(tmp_path, made, config_json(SHAPE, marker_ids(tokenizer)), tokenizer)
    prepared = engine(tmp_path, kv_cache_memory="16MiB")
    ids = token_ids(LENGTH, SHAPE.vocab)
    with torch.no_grad():
        hidden, _ = made(torch.tensor([ids]), Pass(made.spec.top_blocks))
        ours = made.logits(hidden)[0]
        dense = made.logits(made(torch.tensor([ids]), Pass())[0])[0]
    theirs = row_logits(prepared, ids, [len(ids)])
    assert float(ours.std()) > 0.3
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert float((dense - theirs).abs().max()) > 0.01, "selection made no difference"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [(4, 1), (8, 2)])
def test_both_forms_of_selected_attention_agree(heads):
    q_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 256, n, 16, generator=generator) for n in (q_heads, kv_heads, kv_heads)
    )
    chosen = torch.rand(2, kv_heads, 256, 8, generator=generator) < 0.4
    chosen |= torch.arange(8) == (torch.arange(256) // 32)[:, None]
    one, other = (form(q, k, v, chosen, 32) for form in attention.SELECTED.values())
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_an_indexer_that_scores_by_the_mass_loses_nothing():
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([[3, 40, 63]])
    q, k = (
        torch.randn(1, 3, 4, 16, generator=generator),
        torch.randn(1, 64, 2, 16, generator=generator),
    )
    mass = attention.block_mass(q * 3, k, positions, 8)
    assert torch.allclose(mass[:, :, 0, 1:], torch.zeros(7))
    later = torch.arange(8) > (positions // 8)[..., None]
    perfect = mass.clamp(min=1e-30).log().masked_fill(later[:, None], -torch.inf)
    loss, recall = attention.index_loss(perfect, mass, positions, 8, top_blocks=3)
    shuffled, lower = attention.index_loss(perfect.roll(1, 1), mass, positions, 8, top_blocks=3)
    assert loss < shuffled
    assert lower < recall <= 1


def test_selection_takes_the_own_block_and_the_best_others():
    scores = torch.tensor([5.0, 1.0, 4.0, 3.0, 0.0, -torch.inf])[None, None, None]
    chosen = attention.choose(scores, torch.tensor([[4 * 8 + 1]]), 8, top_blocks=3)
    assert chosen.flatten().tolist() == [True, False, True, False, True, False]
    early = torch.tensor([5.0, 1.0] + 4 * [-torch.inf])[None, None, None]
    chosen = attention.choose(early, torch.tensor([[9]]), 8, top_blocks=3)
    assert chosen.flatten().tolist() == [True, True, False, False, False, False]
