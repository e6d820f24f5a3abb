"""What the projections promise; the bits are compared in test_sampling.py and tests/gpu."""

import pytest
import torch

from minuet.errors import ContractError
from minuet.ops.linear import exact_linear, linear
from minuet.ops.table import REFERENCE, ops_for

triton_linear = pytest.importorskip("minuet.ops.triton.linear")


def test_the_librarys_product_is_the_exact_one_rounded():
    x, weight = torch.randn(3, 5, 64), torch.randn(40, 64)
    torch.testing.assert_close(linear(x, weight), exact_linear(x, weight))


def test_logits_of_plain_torch_are_its_product_widened_in_the_memory_that_is_given():
    x, weight = (torch.randn(*shape).to(torch.bfloat16) for shape in ((3, 64), (40, 64)))
    logits = ops_for(REFERENCE).logits
    want, out = linear(x, weight).float(), torch.full((3, 40), float("nan"))
    assert torch.equal(logits(x, weight, None), want)
    assert logits(x, weight, out) is out
    assert torch.equal(out, want)


@pytest.mark.parametrize("tile", triton_linear.TILES.values())
@pytest.mark.parametrize(("n", "k"), [(2560, 6144), (6144, 2048), (50016, 6144), (1, 1), (64, 97)])
def test_no_split_is_empty_and_all_of_k_is_covered(tile, n, k):
    steps = -(-k // tile.k)
    splits = tile.splits(n, k)
    each = -(-steps // splits)
    assert 1 <= splits <= steps
    assert (splits - 1) * each < steps <= splits * each
    # the split launch fills the device once at most
    assert splits == 1 or splits * -(-n // tile.width(n)) <= tile.programs


def test_narrow_tiles_are_for_weights_that_they_do_not_make_too_many_of():
    tile = triton_linear.TILES["sm90"]
    assert [tile.width(n) for n in (1, 2560, 64 * 132, 64 * 132 + 1, 50016)] == [64] * 3 + [128] * 2


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 8)),
        (torch.zeros(2, 8).half(), torch.zeros(4, 9).half()),
        (torch.zeros(2, 8).half(), torch.zeros(4, 8).bfloat16()),
    ],
)
def test_operands_that_do_not_belong_together_are_refused(x, weight):
    with pytest.raises(ContractError, match="bfloat16 or both float16"):
        triton_linear.invariant_linear(x, weight)


def test_rows_with_gaps_between_their_values_are_refused():
    x, weight = torch.zeros(2, 16).half()[:, ::2], torch.zeros(4, 8).half()
    with pytest.raises(ContractError, match="whole rows"):
        next(iter(triton_linear.linear_launches(x, weight, torch.zeros(2, 4).half(), "sm90")))


def test_no_rows_give_no_rows():
    out = triton_linear.invariant_linear(torch.zeros(0, 8).half(), torch.zeros(4, 8).half())
    assert out.shape == (0, 4)
