"""The definition of sampling: its generator, what filters keep, how much memory it takes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minuet.errors import ContractError
from minuet.ops.sampling import columns, reference, sizes
from minuet.ops.sampling.philox import philox, words_of_tokens
from tests import interpreted
from tests.ops.sampling_cases import COUNTERS, Wish, lines


@pytest.mark.parametrize(("counter", "key", "words"), COUNTERS)
def test_the_generator_gives_the_known_answers(counter, key, words):
    def parsed(text):
        return tuple(torch.tensor([int(word, 16)]) for word in text.split())

    assert " ".join(f"{int(w):08x}" for w in philox(parsed(counter), parsed(key))) == words


def test_tokens_take_the_words_of_their_counter_in_order():
    row = torch.tensor([[5, 6, 7, 8, 9]])
    words = words_of_tokens(row, 11)
    assert words.shape == (1, 11)
    counter = tuple(torch.tensor([n]) for n in (2, 7, 8, 9))
    want = philox(counter, (torch.tensor([5]), torch.tensor([6])))
    assert words[0, 8:].tolist() == [int(w) for w in want[:3]]


def test_noise_is_gumbel_and_finite_at_both_ends():
    noise = reference.noise(lines([Wish()] * 4), 100_000).double()
    assert torch.isfinite(noise).all()
    # mean and variance of the standard Gumbel distribution
    assert abs(float(noise.mean()) - 0.577216) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    # P(noise < x) = exp(-exp(-x))
    for x in (-1.5, 0.0, 2.0, 6.0):
        assert abs(float((noise < x).double().mean()) - math.exp(-math.exp(-x))) < 0.003
    assert not torch.equal(noise[0], noise[1])


def by_hand(values: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """What the filters keep, one token after another."""
    row = torch.tensor([values])
    share, weight = reference.weights(row, lines([Wish()]))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = order[: top_k or None]
    total = sum(int(weight[0, i]) for i in order)
    kept, before = set(), 0
    for i in order:
        if top_p < 1.0 and kept and before * 2**20 >= total * columns.top_p_units(top_p):
            break
        if float(share[0, i]) < torch.tensor(min_p).item():
            break
        kept.add(i)
        before += int(weight[0, i])
    return kept


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-9, 9, width=16), min_size=1, max_size=40),
    st.integers(0, 45),
    st.one_of(st.floats(1e-9, 1.0), st.just(1.0)),
    st.one_of(st.floats(0.0, 1.0), st.just(0.0)),
)
def test_filters_keep_what_they_say(values, top_k, top_p, min_p):
    wish = Wish(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = reference.filtered(torch.tensor([values]), lines([wish]))[0]
    want = by_hand(values, top_k, top_p, min_p)
    assert set(kept.nonzero()[:, 0].tolist()) == want


def test_of_equal_logits_the_lowest_ids_are_kept():
    row = torch.full((1, 50), 0.5)
    for wish, count in ((Wish(top_k=7), 7), (Wish(top_p=0.5), 25), (Wish(min_p=1.0), 50)):
        kept = reference.filtered(row, lines([wish]))[0].nonzero()[:, 0].tolist()
        assert kept == list(range(count))


def test_impossible_tokens_are_neither_kept_nor_counted():
    row = torch.tensor([[float("-inf"), 1.0, float("-inf"), 1.0, 0.0]])
    assert reference.filtered(row, lines([Wish(top_k=5)]))[0].tolist() == [0, 1, 0, 1, 1]
    assert reference.filtered(row, lines([Wish(top_k=2)]))[0].tolist() == [0, 1, 0, 1, 0]
    tokens, stuck = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    params, modes = lines([Wish(top_k=2)]), frozenset({columns.FILTERED})
    reference.draw(torch.full((1, 5), float("-inf")), params, tokens, stuck, modes)
    assert stuck.tolist() == [True]


@given(st.floats(0.0, 1.0, exclude_min=True, exclude_max=True))
def test_top_p_in_units_is_the_largest_below_it(p):
    units = columns.top_p_units(p)
    assert 0 <= units / 2**20 < p or units == 0
    assert (units + 1) / 2**20 >= p


def test_the_scratch_of_all_launches_is_within_what_is_declared():
    triton_form = pytest.importorskip("minuet.ops.triton.sampling")

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, vocab, most = 64, 200_064, 20
    logits = empty(rows, vocab, dtype=torch.float32)
    params, wanted = empty(rows, columns.WIDTH), empty(rows)
    tokens, flags = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.bool)
    made = reference.Report(
        empty(rows, dtype=torch.float32), empty(rows), empty(rows, most),
        empty(rows, most, dtype=torch.float32),
    )  # fmt: skip
    tuning = triton_form.Tuning()
    launches = [
        *triton_form.greedy_launches(logits, tokens, flags, tuning),
        *triton_form.draw_launches(logits, params, tokens, flags, tuning),
        *triton_form.filter_launches(logits, params, tokens, flags, tuning),
        *triton_form.report_launches(logits, tokens, wanted, made, tuning),
    ]
    held = {
        id(value): value.nbytes
        for launch in launches
        for value in launch.args.values()
        if isinstance(value, torch.Tensor)
    }
    total = sum(held.values())  # the logits stand for the copy that penalties change
    declared = sizes.scratch_bytes(rows, vocab, most)
    assert total <= declared <= 1.25 * total


def test_weights_of_the_largest_vocabulary_do_not_overflow():
    total = sizes.MAX_VOCAB << columns.WEIGHT_BITS
    # the product that limit_of takes: the weight in units of 2 ** 16 times top-p's largest units
    assert (total >> 16) * ((1 << columns.TOP_P_BITS) - 1) < 2**63
    with pytest.raises(ContractError, match="vocabulary"):
        sizes.scratch_bytes(1, sizes.MAX_VOCAB + 1, 0)


@pytest.mark.sim
def test_the_kernels_agree_with_the_definition_on_the_cpu():
    pytest.importorskip("triton")
    assert interpreted.run("tests.ops.sampling_interpreter") == 6
