"""What an attention block hands to the writer of the cache."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from minuet.attention.contract import LayerKind
from minuet.attention.runtime import LayerKernels
from minuet.models.m3.attention import Attention
from minuet.models.m3.model import Model
from minuet.ops.sums import Sums, parts_of


def linear_sums(x, weight):
    """The product in two halves of its input channels."""
    halves = zip(x.float().chunk(2, -1), weight.float().chunk(2, -1), strict=True)
    return Sums(torch.stack([F.linear(mine, theirs) for mine, theirs in halves]), x.dtype)


@pytest.mark.parametrize("adds_sums", [False, True])
def test_packed_rows_are_a_tensor_for_a_writer_that_does_not_add_parts_up(adds_sums):
    received = []

    def write(cache, packed, *rest):
        received.append(packed)
        return torch.zeros(3, 2, 4), None

    spec = SimpleNamespace(rms_norm_eps=1e-6, head_dim=4)
    weights = SimpleNamespace(
        qkv=torch.randn(16, 8), o=torch.randn(8, 8), q_norm=torch.zeros(4), k_norm=torch.zeros(4),
        index_q_norm=None, index_k_norm=None,
    )  # fmt: skip
    kernels = LayerKernels(write, None, lambda q, *rest: q, adds_sums)
    ops = SimpleNamespace(linear=F.linear, linear_sums=linear_sums)
    attention = Attention(spec, LayerKind.DENSE, weights, kernels, ops)
    hidden = torch.randn(3, 8)
    attention(hidden, *[None] * 5)
    (packed,) = received
    assert isinstance(packed, Sums) is adds_sums
    product = packed.product() if adds_sums else packed
    torch.testing.assert_close(product, F.linear(hidden, weights.qkv))


def test_sums_are_added_in_order_and_rounded_once():
    values = torch.tensor([1.0, 2.0**-9, 2.0**-9, -1.0]).reshape(4, 1, 1)
    sums = Sums(values, torch.bfloat16)
    assert sums.shape == (1, 1)
    assert sums.product().item() == 2.0**-8  # 1 + 2**-9 is not 1 before the last part is added
    assert sums.product().dtype is torch.bfloat16
    lost = Sums(torch.tensor([1.0, 2.0**-9]).reshape(2, 1, 1), torch.bfloat16)
    assert lost.product().item() == 1.0
    assert Sums(torch.full((2, 1, 1), -0.0), torch.bfloat16).product().signbit().item() is False
    assert parts_of(sums)[1] == 4
    assert parts_of(lost.product())[1] == 0


def test_what_a_block_adds_is_gone_when_the_next_block_runs():
    """It is as large as the residual stream: a name for it would keep it for another block."""
    added = []

    def block(*inputs):
        assert all(before() is None for before in added)
        delta = torch.zeros(3, 8)
        added.append(weakref.ref(delta))
        return delta

    def embed(*inputs):
        return torch.zeros(3, 8), torch.zeros(3, 8), None, None

    def add_norm(residual, delta, weight, eps):
        return residual + delta, residual + delta

    model = object.__new__(Model)
    model.spec = SimpleNamespace(rms_norm_eps=1e-6)
    model._ops = SimpleNamespace(embed=embed, add_norm=add_norm)
    model._weights = SimpleNamespace(layers=[SimpleNamespace(post_norm=None)] * 3)
    model._attention, model.ffn, model._norms = [block] * 3, [block] * 3, [None] * 3
    model._embedding = None
    batch = SimpleNamespace(positions=None, slots=None)
    model.forward(None, batch, SimpleNamespace(layers=[None] * 3), plan=object())
    assert len(added) == 6
