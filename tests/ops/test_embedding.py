"""The beginning of a step in plain torch, which every kernel of it is compared with."""

import pytest
import torch
import torch.nn.functional as F

from minuet.ops.embedding import Embedding, Follows, embed
from minuet.ops.norm import gemma_rms_norm
from minuet.ops.rope import cos_sin, inverse_frequencies

VOCAB = 11


@pytest.fixture
def embedding() -> Embedding:
    torch.manual_seed(0)
    table = torch.randn(VOCAB, 24).to(torch.bfloat16)
    return Embedding(table, torch.randn(24), 1e-6, inverse_frequencies(8, 5e6))


def test_a_step_begins_with_rows_their_norm_and_the_angles_of_positions(embedding):
    ids, positions = torch.tensor([VOCAB - 1, 0, 3]), torch.tensor([0, 7, 1 << 20])
    begun = embed(ids, positions, embedding)
    hidden = F.embedding(ids, embedding.table)
    cos, sin = cos_sin(positions, embedding.frequencies)
    assert torch.equal(begun.hidden, hidden)
    assert torch.equal(begun.normed, gemma_rms_norm(hidden, embedding.norm, embedding.eps))
    assert torch.equal(begun.cos, cos)
    assert torch.equal(begun.sin, sin)


def test_a_token_that_follows_a_place_is_the_one_drawn_there(embedding):
    ids, drawn = torch.tensor([1, 2, 3, 4]), torch.tensor([9, VOCAB - 1])
    begun = embed(ids, ids, embedding, Follows(torch.tensor([-1, 1, 0, -2]), drawn))
    assert torch.equal(begun.hidden, embedding.table[[1, VOCAB - 1, 9, 4]])
    assert torch.equal(begun.cos, embed(ids, ids, embedding).cos)


def test_an_empty_step_begins_with_nothing(embedding):
    none = torch.zeros(0, dtype=torch.int64)
    begun = embed(none, none, embedding, Follows(none, torch.tensor([1])))
    assert [tuple(part.shape) for part in begun] == [(0, 24), (0, 24), (0, 4), (0, 4)]


def test_a_token_beyond_the_vocabulary_is_an_error_on_the_host(embedding):
    with pytest.raises(IndexError):
        embed(torch.tensor([VOCAB]), torch.tensor([0]), embedding)
