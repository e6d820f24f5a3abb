"""Views of a cache reinterpret its memory; addresses are written out here: F-9, F-11b."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minuet.attention.plan import fold_page_list
from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.kv.layout import Form, KVLayout, LaneName

FP8 = DType.FP8_E4M3FN
PLACES = [(0, 0, 0, 0), (3, 17, 1, 5), (7, 127, 1, 127), (5, 16, 0, 16), (2**31, 1, 1, 1)]


def shuffle(page, heads=2, dtype=FP8, dim=128):
    return KVLayout(page, heads, dim, dtype, form=Form.SHUFFLE)


@pytest.mark.parametrize("dtype", [FP8, DType.BF16])
@pytest.mark.parametrize("place", PLACES)
def test_shuffle_addresses_are_the_published_formulas(dtype, place):
    layout, (p, t, h, d) = shuffle(128, dtype=dtype), place
    heads, page, dim, x = 2, 128, 128, 16 // dtype.itemsize
    k = ((p * heads + h) * (dim // x) + d // x) * page * x + t * x + d % x
    v = ((p * heads + h) * (page // x) + t // x) * dim * x + d * x + t % x
    assert layout.address(LaneName.K, p, t, h, d) == k
    assert layout.address(LaneName.V, p, t, h, d) == v


@pytest.mark.parametrize("place", PLACES)
def test_v_in_the_shuffle_form_is_not_a_plain_transpose(place):
    p, t, h, d = place
    plain = (p * 2 + h) * 128 * 128 + d * 128 + t
    same = shuffle(128).address(LaneName.V, p, t, h, d) == plain
    assert same == (place == (0, 0, 0, 0) or (t, d) == (127, 127))


@pytest.mark.parametrize("place", PLACES)
def test_head_major_and_scale_addresses_are_row_major(place):
    p, t, h, d = place
    layout = KVLayout(128, 2, 128, FP8)
    assert layout.address(LaneName.V, p, t, h, d) == ((p * 2 + h) * 128 + t) * 128 + d
    for lane in (LaneName.K_SCALE, LaneName.V_SCALE):
        assert layout.address(lane, p, t, h) == (p * 2 + h) * 128 + t


def test_views_have_the_published_shapes():
    shapes = {
        (128, FP8): ((2, 8, 128, 16), (2, 8, 128, 16)),
        (128, DType.BF16): ((2, 16, 128, 8), (2, 16, 128, 8)),
        (16, FP8): ((2, 8, 16, 16), (2, 1, 128, 16)),
        (16, DType.BF16): ((2, 16, 16, 8), (2, 2, 128, 8)),
    }
    for (page, dtype), (k, v) in shapes.items():
        lanes = shuffle(page, dtype=dtype).lanes
        assert (lanes[LaneName.K].shape, lanes[LaneName.V].shape) == (k, v)
        scales = [lane.shape for name, lane in lanes.items() if "scale" in name.value]
        assert scales == ([(2, page)] * 2 if dtype is FP8 else [])


@given(
    st.sampled_from(list(Form)),
    st.sampled_from((DType.BF16, FP8)),
    st.integers(1, 4),
    st.integers(0, 1000),
    st.integers(0, 127),
    st.integers(0, 127),
    st.data(),
)
def test_a_cache_seen_with_one_head_per_page_is_the_same_memory(form, dtype, heads, p, t, d, data):
    # values and scales alike: a scale plane left behind would dequantise with another head's scale
    h = data.draw(st.integers(0, heads - 1))
    whole, folded = (
        KVLayout(128, heads, 128, dtype, form=form),
        KVLayout(128, 1, 128, dtype, form=form),
    )
    for lane in whole.lanes:
        channel = 0 if lane in (LaneName.K_SCALE, LaneName.V_SCALE) else d
        assert whole.address(lane, p, t, h, channel) == folded.address(
            lane, p * heads + h, t, 0, channel
        )
    assert whole.page_bytes == heads * folded.page_bytes


@given(st.integers(0, 50), st.integers(0, 127), st.integers(0, 127), st.integers(0, 1))
def test_pages_of_16_re_view_v_and_scales_of_a_page_of_128_but_not_k(p, t, d, h):
    # only with one KV head: otherwise the head axis lies between
    large, small = shuffle(128, heads=1), shuffle(16, heads=1)
    page, token = p * 8 + t // 16, t % 16
    for lane in (LaneName.V, LaneName.V_SCALE, LaneName.K_SCALE):
        channel = d if lane is LaneName.V else 0
        assert large.address(lane, p, t, 0, channel) == small.address(lane, page, token, 0, channel)
    same = large.address(LaneName.K, p, t, 0, d) == small.address(LaneName.K, page, token, 0, d)
    # the first chunk of the first page and the last of the last coincide, nothing else does
    assert same == (t // 16 == d // 16)


def test_golden_page_table_rows():
    # block 5 of KV head 1 of 2, in pages of 16: ((5 * 8 + j) * 2 + 1)
    selected = np.array([[[0, 5, -1], [5, 7, -1]]], np.int32)
    folded = fold_page_list(selected, num_kv_heads=2, pages_per_block=8)
    assert folded.shape == (2, 24)
    assert folded[1, :8].tolist() == [81, 83, 85, 87, 89, 91, 93, 95]
    assert folded[0, :8].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert folded[1, 8:16].tolist() == [113, 115, 117, 119, 121, 123, 125, 127]
    assert (folded[:, 16:] == -1).all()
    whole, one = shuffle(16, heads=2), shuffle(16, heads=1)
    for j in range(8):
        for lane in (LaneName.K, LaneName.V):
            assert whole.address(lane, 40 + j, 3, 1, 9) == one.address(lane, folded[1, j], 3, 0, 9)


def test_pages_equal_to_blocks_fold_to_page_times_heads_plus_head():
    selected = np.array([[[2, 9], [4, -1]]], np.int32)
    assert fold_page_list(selected, num_kv_heads=2).tolist() == [[4, 18], [9, -1]]
    with pytest.raises(ContractError):
        fold_page_list(selected, num_kv_heads=4)


def test_a_page_that_does_not_hold_whole_chunks_is_refused():
    with pytest.raises(ContractError):
        shuffle(8)
    with pytest.raises(ContractError):
        shuffle(128, dim=72)
    with pytest.raises(ContractError):
        KVLayout(128, 1, 128, DType.BF16).address(LaneName.K_SCALE, 0, 0)
    for place in ((0, 128, 0, 0), (0, 0, 2, 0), (0, 0, 0, 128), (-1, 0, 0, 0)):
        with pytest.raises(ContractError):
            shuffle(128).address(LaneName.K, *place)
