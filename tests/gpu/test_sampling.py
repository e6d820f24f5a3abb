"""Sampling and the batch-invariant product on a GPU: values, no stop of the host, no growth."""

import random
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from minuet.engine import sampler
from minuet.engine.sampler import Row
from minuet.engine.types import Request, SamplingParams
from minuet.ops.linear import invariant_linear
from minuet.ops.sampling import sizes
from minuet.ops.triton import sampling as form
from minuet.platform.device import facility
from tests.gpu.support import GPU, counted_compilations, device
from tests.ops import sampling_cases as cases
from tests.ops.sampling_cases import Wish
from tests.ops.sampling_interpreter import check_words

pytestmark = [pytest.mark.gpu, GPU]

VOCABS = (37, 1000, 50016, 200064)


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_finds_the_first_of_the_largest_and_what_is_not_finite(vocab):
    cases.check_greedy(form, device(), vocab)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", list(cases.kinds(8)))
def test_tokens_are_those_of_the_definition(vocab, kind):
    row = cases.kinds(vocab)[kind]
    cases.check_draws(form, device(), [(row, wish) for wish in cases.wishes(vocab)])


def test_many_draws_at_the_edge_of_the_kept_set_are_those_of_the_definition():
    # few tokens kept, all about as likely: a wrong edge would show in one of the draws
    row = cases.kinds(50016)["normal"]
    flat = Wish(temperature=1e4, top_k=3)
    cases.check_draws(form, device(), [(row, flat)] * 200)
    wide = Wish(temperature=4.0, top_p=3e-4)
    cases.check_draws(form, device(), [(row, wide)] * 200)


def test_rows_do_not_depend_on_their_batch():
    kinds = [*cases.kinds(50016).values()]
    pairs = [(row, wish) for row in kinds[:3] for wish in cases.wishes(50016)]
    together = _tokens(pairs)
    alone = [_tokens([pair], first=i)[0] for i, pair in enumerate(pairs)]
    assert together == alone


def _tokens(pairs, first=0) -> list[int]:
    wishes = [Wish()] * first + [wish for _, wish in pairs]
    params = cases.lines(wishes)[first:].to(device())
    logits = torch.stack([row for row, _ in pairs]).to(device())
    tokens = torch.full((len(pairs),), -1, device=device())
    stuck = torch.zeros(len(pairs), dtype=torch.bool, device=device())
    form.draw(logits, params, tokens, stuck, frozenset(w.mode for _, w in pairs))
    return tokens.tolist()


@pytest.mark.parametrize("vocab", [1000, 200064])
def test_shaping_and_masks(vocab):
    cases.check_shaping(form, device(), vocab)


@pytest.mark.parametrize("vocab", [37, 50016, 200064])
def test_reports(vocab):
    cases.check_report(form, device(), vocab)
    cases.check_report(form, device(), vocab, most=20)


def test_random_words_are_those_of_the_definition_to_the_bit():
    check_words(device())


# --- through the engine's sampler ----------------------------------------------------------------


class Allow:
    """A grammar that allows tokens below a limit."""

    def __init__(self, vocab, limit):
        bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
        bits[:limit] = 1
        self.words = np.packbits(bits, bitorder="little").view(np.int32)

    def allowed(self, ahead=()):
        return self.words

    def accept(self, token_id):
        return True


def mixed_rows(count: int, vocab: int) -> list[Row]:
    """Rows of every kind, seeded."""
    fields = (
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"seed": 1},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 2, "logprobs": 0},
        {"top_p": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"min_p": 0.1, "presence_penalty": 0.3, "logit_bias": {3: 2.0, 5: -100.0}},
        {"temperature": 0.0, "min_tokens": 9, "logit_bias": {7: 1.0}},
        {"temperature": 0.0},
    )
    random.seed(0)
    return [
        Row(
            Request(
                f"r{i}",
                tuple(random.randrange(vocab) for _ in range(200)),
                SamplingParams(max_tokens=64, **fields[i % len(fields)]),
                i,
                output_token_ids=[random.randrange(vocab) for _ in range(5)],
                eos_token_ids=(1,),
                grammar=Allow(vocab, vocab // 3) if i % 8 == 7 else None,
            )
        )
        for i in range(count)
    ]


@contextmanager
def no_waiting():
    """Inside, an operation that stops the host is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is new
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_guard_notices_a_wait():
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device=device()).item()


@pytest.mark.parametrize("count", [1, 8, 61])
def test_a_draw_never_waits_compiles_or_grows_after_rehearsal(count):
    vocab = 50016
    sampler.rehearse(64, vocab, 20, device())
    logits = torch.randn(count, vocab, device=device()) * 3
    found = sampler.greedy(logits)
    rows = mixed_rows(count, vocab)
    held = facility(device()).allocations()
    with counted_compilations() as compiled, no_waiting():
        drawn = [sampler.draw(logits, rows, 5, greedy=found) for _ in range(3)]
        following = drawn[-1].tokens + 1  # what the next step does with it
        plain = sampler.draw(logits, rows[:1], 5)
    assert compiled == []
    assert facility(device()).allocations() == held
    results = [one.results() for one in drawn]
    assert results[0] == results[1] == results[2]
    assert [r.token_id for r in results[0]] == (following - 1).tolist()
    assert plain.results()[0].token_id == int(logits[0].argmax())
    assert drawn[0].done


def test_a_draw_takes_no_more_memory_than_is_declared():
    vocab, count = 200064, 64
    logits = torch.randn(count, vocab, device=device())
    rows = mixed_rows(count, vocab)
    sampler.sample(logits, rows, 5)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sampler.sample(logits, rows, 5)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= sizes.scratch_bytes(count, vocab, 3)


def test_the_cpu_draws_the_same_tokens_with_the_same_seeds():
    vocab = 5000
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(2)) * 3
    logits[5, 9] = float("nan")
    rows = mixed_rows(64, vocab)
    want = sampler.sample(logits, rows, 5)
    got = sampler.sample(logits.to(device()), rows, 5)
    assert [r.token_id for r in got] == [r.token_id for r in want]
    assert [r.error for r in got] == [r.error for r in want]
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        if mine.logprobs:
            assert mine.logprobs.rank == theirs.logprobs.rank
            assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
            assert [t for t, _ in mine.logprobs.top] == [t for t, _ in theirs.logprobs.top]


def test_greedy_is_the_same_from_a_graph():
    logits = torch.randn(16, 50016, device=device())
    sampler.greedy(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, finite = sampler.greedy(logits)
    logits.normal_()
    logits[3, 5] = float("inf")
    graph.replay()
    rows = torch.arange(16, device=device()) != 3
    assert torch.equal(tokens[rows], logits.argmax(-1)[rows])
    assert torch.equal(finite, rows)


# --- the batch-invariant product -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        (2304, 6144, torch.bfloat16),
        (6144, 2048, torch.bfloat16),
        (50016, 6144, torch.bfloat16),
        (300, 520, torch.float16),
        (1000, 96, torch.bfloat16),
    ],
)
def test_rows_of_the_invariant_product_are_the_same_in_every_batch(n, k, dtype):
    cases.check_linear(invariant_linear, device(), n, k, dtype)


def test_the_librarys_product_is_not_invariant():
    """Why there is another one; if this ever fails, it is not needed."""
    x, weight = cases.linear_operands(200, 2304, 6144, device())
    whole = torch.nn.functional.linear(x, weight)
    same = [
        torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows])
        for rows in (1, 2, 15, 16, 17, 63, 64, 65)
    ]
    assert not all(same)
