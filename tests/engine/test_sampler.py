"""What each sampling field does to a distribution, on values; rows are independent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minuet.engine import rows as row_data
from minuet.engine import sampler
from minuet.engine.runner import prompt_pieces
from minuet.engine.sampler import (
    NOT_FINITE,
    PromptPiece,
    Row,
    prompt_logprobs,
    rows_of,
    sample,
    verify,
)
from minuet.engine.types import Request, Sampled, SamplingParams, ScheduledRequest
from minuet.errors import RequestError
from minuet.ops.sampling import reference

VOCAB = 32


def request(output=(), prompt=(1, 2), arrival=0, eos=(), **params) -> Request:
    return Request(
        request_id=f"r{arrival}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 64, **params}),
        arrival=arrival,
        output_token_ids=list(output),
        eos_token_ids=tuple(eos),
    )


def logits(*values: float) -> torch.Tensor:
    row = torch.full((VOCAB,), -5.0)
    row[: len(values)] = torch.tensor(values)
    return row[None]


def draws(row: torch.Tensor, count: int = 400, **params) -> list[int]:
    many = [Row(request(arrival=i, **params)) for i in range(count)]
    return [s.token_id for s in sample(row.expand(count, -1), many, engine_seed=1)]


def shape(row: torch.Tensor, of: Row) -> torch.Tensor:
    """Logits after penalties and bias, as a draw makes them."""
    shaped = row.clone()
    params = torch.from_numpy(row_data.parameters([of], [of.mode], 0))
    reference.shape(shaped, params, torch.from_numpy(row_data.entries([of])))
    return shaped


def test_greedy_takes_the_most_likely_token():
    assert draws(logits(0.0, 3.0, 2.9), 3, temperature=0.0) == [1, 1, 1]


def test_draws_follow_the_tempered_distribution():
    row = logits(0.0, 1.0, 2.0)
    for temperature in (0.5, 1.0, 2.0):
        want = (row[0] / temperature).softmax(-1)
        got = torch.bincount(
            torch.tensor(draws(row, 4000, temperature=temperature)), minlength=VOCAB
        )
        assert float((got / 4000 - want).abs().max()) < 0.03


def test_top_k_keeps_exactly_k_tokens():
    assert set(draws(logits(1.0, 1.1, 1.2, 1.3), temperature=3.0, top_k=2)) == {2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p_and_always_the_first():
    row = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(draws(row, top_p=0.5)) == {0}
    assert set(draws(row, top_p=0.51)) == {0, 1}
    assert set(draws(row, top_p=0.81)) == {0, 1, 2}
    assert set(draws(row, top_p=1e-9)) == {0}


def test_min_p_is_relative_to_the_most_likely_token():
    row = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(draws(row, min_p=0.59)) == {0, 1}
    assert set(draws(row, min_p=1.0)) == {0}


def test_filters_look_at_the_tempered_distribution():
    row = torch.log(torch.tensor([[0.6, 0.3, 0.1]]))
    assert set(draws(row, top_p=0.6)) == {0}
    assert set(draws(row, top_p=0.6, temperature=4.0)) == {0, 1}


def test_penalties_count_output_and_repetition_counts_the_prompt_too():
    row = logits(2.0, 2.0, 2.0, -1.0)
    shaped = shape(row, Row(request([0, 0, 1], presence_penalty=0.5, frequency_penalty=0.25)))
    assert shaped[0, :4].tolist() == [1.0, 1.25, 2.0, -1.0]
    shaped = shape(row, Row(request([3], prompt=[0], repetition_penalty=2.0)))
    assert shaped[0, :4].tolist() == [1.0, 2.0, 2.0, -2.0]
    assert row[0, :4].tolist() == [2.0, 2.0, 2.0, -1.0], "the model's logits were written"


def test_a_rehearsal_runs_on_the_cpu_too():
    sampler.rehearse(3, VOCAB, 4, torch.device("cpu"))


def test_the_coldest_draw_is_the_most_likely_token():
    row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    for temperature in (1e-30, 1e-300):
        assert draws(row, 20, temperature=temperature) == [int(row.argmax())] * 20


def test_logit_bias_can_force_and_forbid():
    row = logits(1.0, 2.0)
    assert draws(row, 5, temperature=0.0, logit_bias={0: 100.0}) == [0] * 5
    assert 1 not in draws(row, logit_bias={1: -100.0})


def test_stop_ids_cannot_be_drawn_before_min_tokens():
    row = logits(9.0, 1.0)
    early = Row(request([5], eos=(0,), min_tokens=2, temperature=0.0))
    late = Row(request([5, 5], eos=(0,), min_tokens=2, temperature=0.0))
    assert [s.token_id for s in sample(row.expand(2, -1), [early, late], 0)] == [1, 0]


def test_a_seed_repeats_exactly_whoever_else_is_in_the_batch():
    row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    mine = Row(request([4], arrival=7, seed=11))
    alone = sample(row, [mine], engine_seed=0)[0].token_id
    for mates in (1, 5):
        rows = [*(Row(request(arrival=i)) for i in range(mates)), mine]
        batch = torch.cat([torch.randn(mates, VOCAB), row])
        assert sample(batch, rows, engine_seed=99)[-1].token_id == alone


def test_requests_without_a_seed_differ_by_number_and_engine_seed():
    row = torch.zeros(1, VOCAB)
    assert len(set(draws(row, 50))) > 10
    first = [
        s.token_id
        for s in sample(row.expand(50, -1), [Row(request(arrival=i)) for i in range(50)], 1)
    ]
    other = [
        s.token_id
        for s in sample(row.expand(50, -1), [Row(request(arrival=i)) for i in range(50)], 2)
    ]
    assert first != other


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_logit_ends_its_row_and_no_other(bad):
    rows = torch.zeros(3, VOCAB)
    rows[:, 4] = 1.0
    rows[1, 9] = bad
    for params in ({"temperature": 0.0}, {"logprobs": 2, "top_p": 0.9}):
        good, broken, also = sample(rows, [Row(request(arrival=i, **params)) for i in range(3)], 0)
        assert broken.token_id is None
        assert broken.error == NOT_FINITE
        assert good.token_id is not None
        assert also.token_id is not None
        assert not good.error


def test_logprobs_are_of_the_raw_distribution():
    row = logits(1.0, 3.0, 2.0)
    want = row.log_softmax(-1)[0]
    result = sample(row, [Row(request(temperature=0.0, logprobs=2, logit_bias={0: 50.0}))], 0)[0]
    assert result.token_id == 0
    assert result.logprobs.rank == 3
    assert math.isclose(result.logprobs.logprob, float(want[0]), rel_tol=1e-6)
    assert [token for token, _ in result.logprobs.top] == [1, 2]
    assert math.isclose(result.logprobs.top[0][1], float(want[1]), rel_tol=1e-6)


def test_prompt_logprobs_belong_to_the_following_token():
    rows = torch.randn(3, VOCAB)
    reports = prompt_logprobs([PromptPiece(lambda: rows, [4, 5, 6], 0)], rows.device).results()
    assert [r.token_id for r in reports] == [4, 5, 6]
    want = rows.log_softmax(-1)[range(3), [4, 5, 6]].tolist()
    assert [r.logprob for r in reports] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("piece", [1 << 18, 16])  # all by one copy; a copy for each
def test_pieces_of_prompts_are_reported_in_their_order(monkeypatch, piece):
    monkeypatch.setattr(sampler, "PIECE", piece)
    rows, ids = torch.randn(7, VOCAB), [4, 5, 6, 1, 2, 0, 3]
    cuts = [(0, 3, 2), (3, 4, 0), (4, 7, 2)]
    pieces = [PromptPiece(lambda a=a, b=b: rows[a:b], ids[a:b], top) for a, b, top in cuts]
    queued = prompt_logprobs(pieces, rows.device)
    assert queued.done
    reports = queued.results()
    assert [r.token_id for r in reports] == ids
    want = rows.log_softmax(-1)[range(7), ids].tolist()
    assert [r.logprob for r in reports] == pytest.approx(want, abs=1e-6)
    assert [len(r.top) for r in reports] == [2, 2, 2, 0, 2, 2, 2]


@pytest.mark.parametrize("most_rows", [1, 2, 4, 5, 6, 99])
@pytest.mark.parametrize(("start", "count"), [(0, 6), (0, 5), (2, 3), (5, 1)])
def test_prompts_are_cut_into_pieces_that_hold_every_position_once(start, count, most_rows):
    asking = Request("r", tuple(range(10, 16)), SamplingParams(prompt_logprobs=2), arrival=0)
    hidden = torch.arange(start, start + count).unsqueeze(1)
    share = ScheduledRequest(asking, start, count, samples=False)
    pieces = prompt_pieces(share, hidden, most_rows, lambda rows: rows)
    positions = [int(row) for piece in pieces for row in piece.logits()]
    assert positions == list(range(start, min(start + count, 5)))  # nothing follows the last token
    assert [i for piece in pieces for i in piece.next_ids] == [11 + p for p in positions]
    assert all(len(piece.next_ids) == len(piece.logits()) <= most_rows for piece in pieces)
    assert all(piece.top == 2 for piece in pieces)
    silent = Request("r", asking.prompt_token_ids, SamplingParams(), arrival=0)
    silent_share = ScheduledRequest(silent, start, count, samples=False)
    assert prompt_pieces(silent_share, hidden, most_rows, lambda rows: rows) == []


def test_rows_of_drafts_are_drawn_as_if_the_drafts_were_output():
    drafting = request([3], seed=5)
    drafting.draft_token_ids = [8, 9]
    row = torch.randn(1, VOCAB).expand(3, -1)
    got = [s.token_id for s in sample(row, rows_of(ScheduledRequest(drafting, 2, 3, True)), 0)]
    want = [
        sample(row[:1], [Row(request(out, seed=5))], 0)[0].token_id
        for out in ([3], [3, 8], [3, 8, 9])
    ]
    assert got == want


def test_verification_accepts_the_longest_agreeing_prefix():
    drafting = request([3])
    drafting.draft_token_ids = [8, 9]
    for drawn, accepted, token in (([8, 9, 4], 2, 4), ([8, 1, 4], 1, 1), ([2, 9, 4], 0, 2)):
        result = verify(drafting, [Sampled(t) for t in drawn])
        assert (result.num_accepted, result.token_id) == (accepted, token)
    poisoned = [Sampled(8), Sampled(None, error="bad"), Sampled(4)]
    assert verify(drafting, poisoned).error == "bad"
    assert verify(drafting, [Sampled(1), Sampled(None, error="bad"), Sampled(4)]).error == ""


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-8, 8), min_size=4, max_size=VOCAB),
    st.integers(0, 6),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_filters_never_remove_everything_and_never_the_best(values, top_k, top_p, min_p):
    row = torch.tensor([values])
    of = Row(request(top_k=top_k, top_p=top_p, min_p=min_p))
    params = torch.from_numpy(row_data.parameters([of], [of.mode], 0))
    left = reference.filtered(row, params)[0]
    assert left[row[0].argmax()]
    assert not top_k or int(left.sum()) <= top_k


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("top_k", -1),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0.0),
        ("logprobs", -1),
        ("min_tokens", 99),
    ],
)
def test_a_field_out_of_range_is_named_with_what_is_accepted(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert "expected" in str(caught.value)
