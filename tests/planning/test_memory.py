"""Bytes per token, page, weight and pool: exact integers, against published figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minuet.attention.contract import LayerKind
from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.ops.sampling.sizes import scratch_bytes
from minuet.planning import memory
from minuet.planning.memory import Ledger, human_bytes, pages_needed, pages_that_fit
from tests.planning.helpers import plan, preset

FP8 = {"kv_cache_dtype": "fp8"}
BF16_INDEX, FP8_INDEX = {}, {"index_kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("asked", "per_rank"),
    [
        ({}, (137_472, 76_032, 45_312, 45_312)),
        ({**FP8, **BF16_INDEX}, (77_952, 46_272, 30_432, 30_432)),
        ({**FP8, **FP8_INDEX}, (70_656, 38_976, 23_136, 23_136)),
    ],
)
def test_cache_bytes_of_a_token_on_a_rank(asked, per_rank):
    for ranks, printed in zip((1, 2, 4, 8), per_rank, strict=True):
        settled = plan("gfx950", tensor_parallel_size=ranks, **asked)
        assert settled.memory.token_bytes == printed


@pytest.mark.parametrize(("context", "gb"), [(8192, 0.58), (131_072, 9.26), (1_048_576, 74.1)])
def test_cache_bytes_of_a_context(context, gb):
    settled = plan("gfx950", **FP8, **FP8_INDEX)
    assert context * settled.memory.token_bytes / 1e9 == pytest.approx(gb, rel=0.006)


def test_a_page_at_four_ranks_is_2_96_megabytes():
    settled = plan("gfx950", tensor_parallel_size=4, **FP8, **FP8_INDEX)
    assert settled.memory.page_bytes == 23_136 * 128
    assert round(settled.memory.page_bytes / 1e6, 2) == 2.96


def test_main_and_index_bytes_of_one_layer():
    settled = plan("gfx950")
    assert settled.layouts[LayerKind.DENSE].token_bytes == 2048
    assert settled.layouts[LayerKind.SPARSE].token_bytes == 2048 + 256
    settled = plan("gfx950", **FP8, **FP8_INDEX)
    assert settled.layouts[LayerKind.DENSE].token_bytes == 1056
    assert settled.layouts[LayerKind.SPARSE].token_bytes == 1056 + 128


def test_weights_are_the_published_text_model():
    rows = memory.weights_per_rank(preset(), DType.BF16, 1)
    assert round(sum(row.bytes for row in rows) / 1e9, 2) == 852.44
    assert round(sum(row.bytes for row in rows) / 2**30, 1) == 793.9


def test_ranks_hold_their_share_of_split_weights_and_copies_of_the_rest():
    whole = {row.name: row for row in memory.weights_per_rank(preset(), DType.BF16, 1)}
    eighth = {row.name: row for row in memory.weights_per_rank(preset(), DType.BF16, 8)}
    assert eighth["experts"].bytes * 8 == whole["experts"].bytes
    assert eighth["attention_kv"].bytes * 4 == whole["attention_kv"].bytes  # 4 KV heads
    assert eighth["index_q"].bytes * 4 == whole["index_q"].bytes
    for name in ("index_k", "router", "norms"):
        assert eighth[name].bytes == whole[name].bytes
    assert whole["router"].dtype is DType.FP32


# --- the ledger and the pool ---------------------------------------------------------------------


@given(st.integers(0, 2**50), st.lists(st.integers(0, 2**45), max_size=6))
def test_a_ledger_is_left_with_what_nobody_took(budget, sizes):
    ledger = Ledger(budget)
    for number, size in enumerate(sizes):
        ledger.take(str(number), size)
    assert ledger.left == budget - sum(sizes)
    assert sum(ledger.taken.values()) == sum(sizes)


def test_a_ledger_takes_a_name_once():
    ledger = Ledger(None)
    ledger.take("weights", 1)
    assert ledger.left is None
    with pytest.raises(ContractError, match="weights"):
        ledger.take("weights", 1)


@given(st.integers(-(2**40), 2**50), st.integers(1, 2**30))
def test_pages_fill_what_is_left_to_less_than_a_page(left, page):
    pages = pages_that_fit(left, page)
    assert pages >= 0
    if left >= 0:
        assert 0 <= left - pages * page < page


@given(st.integers(1, 2**21), st.integers(1, 1024))
def test_a_pool_holds_its_longest_request_and_the_dummy_page(length, page):
    pages = pages_needed(length, page)
    assert (pages - memory.DUMMY_PAGES) * page >= length
    assert (pages - memory.DUMMY_PAGES - 1) * page < length


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (2**30 * 3 // 2, "1.5 GiB"), (2**41, "2 TiB")],
)
def test_sizes_for_people(size, text):
    assert human_bytes(size) == text


def test_graphs_are_counted_in_steps_of_the_driver():
    per_graph = memory.graph_bytes(preset(), 1)
    assert per_graph == 6 * 2**20  # 960 nodes of 5 KiB, rounded up to 2 MiB
    assert memory.graph_bytes(preset(), 13) == 13 * per_graph
    assert memory.graph_bytes(preset(), 0) == 0


def test_activations_hold_the_scratch_of_sampling():
    few, many = (plan("sm90", max_logprobs=n, max_num_seqs=64) for n in (0, 20))
    rows = many.shapes.rungs[-1] * many.shapes.query_lens[-1]
    taken = [scratch_bytes(rows, many.facts.vocab, n) for n in (0, 20)]
    assert many.memory.activation_bytes - few.memory.activation_bytes == taken[1] - taken[0] > 0
    assert many.memory.activation_bytes > taken[1] > rows * many.facts.vocab * 4
