"""The operations of a layer on a GPU: the conformance suite, M3's sizes, graphs, compilations."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from minuet.engine import sampler
from minuet.ops.embedding import Follows
from minuet.ops.sampling import reference as sampling
from minuet.ops.sums import parts_of
from minuet.ops.table import REFERENCE, ops_for
from minuet.ops.triton import experts as moe
from tests.gpu.support import GPU, counted_compilations, device
from tests.ops.conformance import (
    Bench,
    Sizes,
    check_moe,
    check_routing,
    checks,
    make_embedding,
    make_experts,
    moe_sum,
    poisoned,
)

pytestmark = [pytest.mark.gpu, GPU]

SLICE = Sizes(hidden=6144, experts=128, top_k=4, width=768, shared=768)  # M3, one of four ranks
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def bench(dtype=torch.bfloat16, batch_invariant=False) -> Bench:
    ops = ops_for("triton", batch_invariant=batch_invariant)
    return Bench(ops, device(), dtype, TOLERANCE[dtype])


NAMES = list(checks(None, None, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_agrees_with_plain_torch(name, dtype):
    checks(bench(dtype), bench(dtype, batch_invariant=True), moe)[name]()


@pytest.fixture(scope="module")
def slice_experts():
    """Experts of M3's size, drawn on the device."""
    small = make_experts(bench(), replace(SLICE, experts=2, width=16, shared=16))

    def matrix(*shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=torch.bfloat16, device=device())
        return out.normal_(0.0, shape[-1] ** -0.5)

    h, e, i = SLICE.hidden, SLICE.experts, SLICE.width
    return replace(
        small,
        router=torch.randn(e, h, device=device()) * 1.5 * h**-0.5,
        bias=torch.randn(e, device=device()) * 0.1,
        gate_up=matrix(e, 2 * i, h),
        down=matrix(e, h, i),
        shared_gate_up=matrix(2 * i, h),
        shared_down=matrix(h, i),
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 65, 513, 1500, 3000])
def test_experts_of_the_models_size_agree_with_plain_torch(slice_experts, tokens, batch_invariant):
    on_gpu, experts = bench(batch_invariant=batch_invariant), slice_experts
    x = on_gpu.random(tokens, SLICE.hidden, seed=tokens)
    with poisoned():
        got = moe_sum(on_gpu.ops, x, experts)
    want = moe_sum(ops_for(REFERENCE), x, experts)
    on_gpu.near(got, want, apart=tokens // 500)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [Sizes(256, 16, 4, 256, 256), Sizes(512, 32, 4, 768, 768), Sizes(1024, 128, 8, 48, 16)],
    ids=str,
)
def test_experts_of_other_models_agree_with_plain_torch(sizes, batch_invariant):
    on_gpu = bench(batch_invariant=batch_invariant)
    check_moe(on_gpu, sizes, (1, 4, 5, 17, 64, 65, 600, 2100))
    check_routing(on_gpu, sizes, moe)


@pytest.mark.parametrize(("outputs", "inputs"), [(2560, 6144), (6144, 2048), (50016, 6144)])
def test_projections_of_the_models_size_agree_with_fp32(outputs, inputs):
    on_gpu = bench()
    weight = torch.randn(outputs, inputs, device=device(), dtype=torch.bfloat16) * inputs**-0.5
    for tokens in (1, 4, 8, 9, 16, 17, 64, 65):
        x = on_gpu.random(tokens, inputs, seed=tokens)
        with poisoned():
            got = on_gpu.ops.linear(x, weight)
        on_gpu.near(got, torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype))


@pytest.mark.parametrize("tokens", [1, 4, 8, 16])
def test_launches_that_overlap_give_what_they_give_one_by_one(tokens):
    """Programs start, and load weights, before the kernels before theirs are done."""
    on_gpu = bench()
    ops, hidden, width = on_gpu.ops, SLICE.hidden, 3072
    sizes = {"o": (hidden, 2048), "gate_up": (2 * width, hidden), "down": (hidden, width)}
    sizes["qkv"] = (2560, hidden)
    weights = {
        name: on_gpu.random(*size, seed=len(name), scale=size[1] ** -0.5)
        for name, size in sizes.items()
    }
    norm = on_gpu.random(hidden, seed=3).float()
    x, residual = on_gpu.random(tokens, 2048), on_gpu.random(tokens, hidden, seed=2)

    def chain(between=lambda: None):
        results = []

        def kept(result):
            between()
            results.extend(result if isinstance(result, tuple) else (result,))
            return result

        attended = kept(ops.linear_sums(x, weights["o"]))
        total, normed = kept(ops.add_norm(residual, attended, norm, 1e-6))
        gated = kept(ops.swiglu(kept(ops.linear_sums(normed, weights["gate_up"])), 1.702, 7.0))
        delta = kept(ops.linear_sums(gated, weights["down"]))
        total, normed = kept(ops.add_norm(total, delta, norm, 1e-6))
        kept(ops.linear_sums(normed, weights["qkv"]))
        return [parts_of(result)[0] for result in results]

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    for seed in range(20):
        x.copy_(on_gpu.random(tokens, 2048, seed=seed))
        wanted = chain(between=torch.cuda.synchronize)
        for out in replayed:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        for got, want in zip(replayed, wanted, strict=True):
            assert torch.equal(got, want)


def test_a_row_is_the_same_alone_and_among_others(slice_experts):
    on_gpu, experts = bench(batch_invariant=True), slice_experts
    x = on_gpu.random(700, SLICE.hidden)
    whole = moe_sum(on_gpu.ops, x, experts)
    for rows in ([0], [699], list(range(17, 81)), list(range(300, 470))):
        assert torch.equal(moe_sum(on_gpu.ops, x[rows], experts), whole[rows])


def test_results_do_not_change_between_runs(slice_experts):
    """Two inputs in turns, so that a program that does not wait finds the other's values."""
    on_gpu, experts = bench(), slice_experts
    for tokens, runs in ((2, 100), (4, 100), (16, 100), (64, 10), (600, 10)):
        inputs = [on_gpu.random(tokens, SLICE.hidden, seed=seed) for seed in (1, 2)]
        first = [moe_sum(on_gpu.ops, x, experts) for x in inputs]
        for run in range(runs):
            got = moe_sum(on_gpu.ops, inputs[run % 2], experts)
            assert torch.equal(got, first[run % 2])


def layer(ops, x, delta, weight, experts):
    """What a layer asks of the table."""
    total, normed = ops.add_norm(x, delta, weight, 1e-6)
    gated = ops.swiglu(torch.cat((normed, normed), 1), 1.702, 7.0)
    parts = ops.moe(normed, experts)
    return *ops.add_norm(total, parts, weight, 1e-6), gated


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_a_captured_layer_replays_the_eager_one_to_the_bit(slice_experts, tokens):
    on_gpu, experts = bench(), slice_experts
    x, delta = on_gpu.random(tokens, SLICE.hidden), on_gpu.random(tokens, SLICE.hidden, seed=2)
    weight = on_gpu.random(SLICE.hidden, seed=3).float()
    inputs = (on_gpu.ops, x, delta, weight, experts)
    layer(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = layer(*inputs)
    for seed in (5, 6):
        x.copy_(on_gpu.random(tokens, SLICE.hidden, seed=seed))
        for out in replayed:
            out.fill_(float("nan"))
        graph.replay()
        for got, want in zip(replayed, layer(*inputs), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_the_edge_of_a_captured_step_replays_the_eager_one_to_the_bit(tokens):
    """First and last launches of a step: tokens drawn before, then logits and the next tokens."""
    on_gpu, vocab = bench(), 50016
    embedding = make_embedding(on_gpu, vocab, SLICE.hidden, half=32)
    weight = on_gpu.random(vocab, SLICE.hidden, seed=8, scale=SLICE.hidden**-0.5)
    ids, positions = torch.zeros(2, tokens, dtype=torch.int64, device=device())
    drawn = torch.zeros(64, dtype=torch.int64, device=device())
    follows = Follows(torch.arange(tokens, device=device()) % 3 - 1, drawn)
    kept = torch.empty(64, vocab, device=device())

    def step():
        begun = on_gpu.ops.embed(ids, positions, embedding, follows)
        logits = on_gpu.ops.logits(begun.normed, weight, kept[:tokens])
        return *begun, logits, *sampler.greedy(logits)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for turn in (1, 2):
        ids.random_(vocab)
        drawn.random_(vocab)
        positions.random_(1 << 20)
        kept.fill_(float("nan"))
        eager = [out.clone() for out in step()]
        for out in replayed:
            out.fill_(-turn if out.dtype is torch.int64 else 0)
        graph.replay()
        for got, want in zip(replayed, eager, strict=True):
            assert torch.equal(got, want)
        plain = ops_for(REFERENCE).embed(ids, positions, embedding, follows)
        assert torch.equal(replayed[0], plain.hidden)
        assert torch.equal(replayed[4], on_gpu.ops.linear(replayed[1], weight).float())
        assert torch.equal(replayed[5], sampling.greedy(replayed[4])[0])
        assert kept[tokens:].isnan().all()


def test_nothing_compiles_after_one_step_of_every_rung(slice_experts):
    on_gpu, experts = bench(), slice_experts
    weight = on_gpu.random(SLICE.hidden, seed=3).float()
    embedding = make_embedding(on_gpu, 100, SLICE.hidden, half=32)
    numbers = torch.zeros(3, 4000, dtype=torch.int64, device=device())

    def step(tokens: int, drawn: int = 64) -> None:
        # addresses of any alignment, as in the inputs of prepared steps
        ids, at, positions = (numbers[i, i : i + tokens] for i in range(3))
        follows = Follows(at, numbers[0, :drawn])
        x = on_gpu.ops.embed(ids, positions, embedding, follows).hidden
        layer(on_gpu.ops, x, x, weight, experts)

    for tokens in (*on_gpu.ops.rungs, on_gpu.ops.rungs[-1] + 1):
        step(tokens)
    with counted_compilations() as compilations:
        for tokens in (2, 3, 7, 16, 33, 48, 64, 100, 128, 511, 1023, 1024, 1777, 2048, 2500):
            step(tokens, drawn=tokens)
    assert not compilations
