"""The plan's tables are enough to split a row, merge it, and touch nothing else (F-11m)."""

import numpy as np
import pytest

from tests.attention import merge_model
from tests.attention.problems import balanced, planned

TILE, DIM = 16, 8
LENGTHS = [700, 0, 1, 16, 17, 333, 5]


@pytest.mark.parametrize(
    "shape",
    [
        balanced(9, tile_tokens=TILE, max_length=1024, budget=24),
        balanced(9, tile_tokens=TILE, max_length=1024, budget=2),
        balanced(9, tile_tokens=TILE, max_length=1024, part_tiles=2, max_parts=8),
        balanced(9, tile_tokens=TILE, max_length=1024, longest_first=True),
    ],
    ids=["split", "direct", "fixed", "longest-first"],
)
def test_split_and_merge_equal_a_single_pass_on_poisoned_scratch(shape):
    rng = np.random.default_rng(0)
    plan = planned(shape, [999] * 9).refresh(LENGTHS)
    q = rng.standard_normal((9, DIM))
    k, v = (rng.standard_normal((9, 1024, DIM)) for _ in range(2))
    for sequence in range(9):
        length = int(plan.lengths[sequence])
        k[sequence, length:] = v[sequence, length:] = np.nan
    got = merge_model.attend(plan, q, k, v, rng.permutation(shape.capacity))
    for sequence, length in enumerate([*LENGTHS, 0, 0]):
        want = np.zeros(DIM)
        if length:
            want, _ = merge_model.single_pass(
                q[sequence], k[sequence, :length], v[sequence, :length]
            )
        np.testing.assert_allclose(got[sequence], want, rtol=1e-12, atol=1e-12)
