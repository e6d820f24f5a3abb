"""Inputs of prepared steps: what arrives on the device, padding, and rows that are sent again."""

import pytest
import torch

from minuet.engine.inputs import Inputs
from minuet.engine.types import Request, SamplingParams, ScheduledRequest
from minuet.errors import ContractError
from minuet.planning.memory import input_bytes
from minuet.planning.shapes import ShapeSet
from minuet.platform.device import Host

PAGE = 4


def inputs(**sizes: int) -> Inputs:
    wanted = {"max_tokens": 16, "max_seqs": 4, "max_rows": 8, "max_length": 32, "page_size": PAGE}
    return Inputs(Host(torch.device("cpu")), **(wanted | sizes))


def share(
    prompt: int, start: int, count: int, pages: list[int], *, drafts: int = 0, number: int = 0
) -> ScheduledRequest:
    """Token ids are 100 + position."""
    request = Request(
        f"r{number}",
        tuple(range(100, 100 + prompt)),
        SamplingParams(),
        arrival=number,
        page_ids=pages,
        draft_token_ids=list(range(100 + prompt, 100 + prompt + drafts)),
    )
    return ScheduledRequest(request, start, count, samples=start + count >= prompt)


def test_a_prefill_is_laid_out_share_by_share_and_padded_with_tokens_stored_nowhere():
    made = inputs()
    shares = [share(7, 2, 5, [3, 9]), share(10, 0, 4, [5], number=1)]
    lengths = made.fill(shares, [-1, -1], 12)
    views = made.views(12, 4)
    assert (lengths.query_lens, lengths.seq_lens) == ((5, 4), (7, 4))
    assert views.token_ids.tolist() == [102, 103, 104, 105, 106, 100, 101, 102, 103, 0, 0, 0]
    assert views.positions.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 3, 0, 0, 0]
    assert views.slots.tolist() == [14, 15, 36, 37, 38, 20, 21, 22, 23, -1, -1, -1]
    assert views.follows.tolist() == [-1] * 12
    assert views.sample_rows[:1].tolist() == [4]  # the second has more of its prompt to come
    assert views.page_table[:2, :2].tolist() == [[3, 9], [5, 0]]


def test_decoding_tokens_that_the_device_still_draws_are_found_by_place():
    made = inputs()
    shares = [share(5, 4, 1, [1, 2]), share(8, 8, 1, [3, 4, 5], number=1)]
    lengths = made.fill(shares, [-1, 6], 4, query_len=1)
    views = made.views(4, 4)
    assert lengths.seq_lens == (5, 9)
    assert views.token_ids.tolist() == [104, 0, 0, 0]
    assert views.follows.tolist() == [-1, 6, -1, -1]
    assert views.slots.tolist() == [8, 20, -1, -1]
    assert views.sample_rows[:2].tolist() == [0, 1]


def test_a_share_with_fewer_drafts_than_the_shape_asks_again_and_stores_nothing_twice():
    made = inputs()
    shares = [share(6, 5, 3, [1, 2], drafts=2), share(6, 5, 2, [3, 4], drafts=1, number=1)]
    lengths = made.fill(shares, [-1, -1], 6, query_len=3)
    views = made.views(6, 2)
    assert (lengths.query_lens, lengths.seq_lens) == ((3, 3), (8, 7))
    assert views.token_ids.tolist() == [105, 106, 107, 104, 105, 106]
    assert views.positions.tolist() == [5, 6, 7, 4, 5, 6]
    assert views.slots.tolist() == [9, 10, 11, -1, 17, 18]
    assert views.sample_rows[:5].tolist() == [0, 1, 2, 4, 5]


def test_page_tables_are_sent_again_when_a_page_is_added_and_when_rows_move():
    made = inputs()
    first, second = share(9, 8, 1, [1, 2, 3]), share(9, 8, 1, [4, 5, 6], number=1)
    made.fill([first, second], [-1, -1], 2, query_len=1)
    second.request.page_ids.append(7)
    made.fill([first, second], [-1, -1], 2, query_len=1)
    assert made.views(2, 2).page_table[:, :5].tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 0]]
    made.fill([second], [-1], 2, query_len=1)
    assert made.views(2, 2).page_table[0, :5].tolist() == [4, 5, 6, 7, 0]
    # a page taken back and another given: as many pages as before
    second.request.page_ids[-1] = 8
    made.fill([second], [-1], 2, query_len=1)
    assert made.views(2, 2).page_table[0, :5].tolist() == [4, 5, 6, 8, 0]


def test_addresses_never_change():
    made = inputs()
    before = [tensor.data_ptr() for tensor in vars_of(made)]
    for count in (1, 3, 2):
        made.fill([share(9, 8, 1, [1, 2, 3], number=i) for i in range(count)], [-1] * count, 8, 1)
    assert [tensor.data_ptr() for tensor in vars_of(made)] == before


def vars_of(made: Inputs) -> list[torch.Tensor]:
    views = made.views(8, 4)
    return [getattr(views, name) for name in views.__slots__]


def test_a_step_larger_than_the_shape_is_a_bug_of_the_caller():
    made = inputs()
    with pytest.raises(ContractError, match="query tokens"):
        made.fill([share(20, 0, 9, [1, 2, 3])], [-1], 8)
    with pytest.raises(ContractError, match="sequences"):
        made.fill([share(2, 1, 1, [1], number=i) for i in range(5)], [-1] * 5, 8, 1)


def test_the_plan_counts_what_inputs_take_on_the_device():
    shapes = ShapeSet(rungs=(1, 2, 4), query_lens=(1, 3), buckets=(16, 40))
    taken = 0
    for most in (12, 40):  # decode rows of the largest rung; the largest bucket
        views = inputs(max_tokens=most, max_rows=12, max_length=33).views(most, 4)
        tensors = views.token_ids, views.page_table
        taken += sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert taken == input_bytes(shapes, max_seqs=4, max_model_len=33, page_size=PAGE)
