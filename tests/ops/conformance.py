"""Every operation of a table against plain torch: values, edges, poisoned memory.

The interpreter runs it on the CPU (``test_interpreter.py``), the GPU tests run it on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from minuet.ops.embedding import Embedding, Follows
from minuet.ops.moe import Experts, route
from minuet.ops.norm import gemma_rms_norm
from minuet.ops.rope import inverse_frequencies
from minuet.ops.table import REFERENCE, Ops, ops_for

TOKENS = (0, 1, 15, 16, 17, 64, 65)


@dataclass(frozen=True)
class Sizes:
    """A routed FFN."""

    hidden: int = 64
    experts: int = 8
    top_k: int = 2
    width: int = 32
    shared: int = 32


SMALL = Sizes()
ODD = Sizes(hidden=48, experts=6, top_k=3, width=80, shared=16)  # nothing divides a tile


@dataclass(frozen=True)
class Bench:
    """A table under test, where it runs and how close it comes.

    Attributes:
        ops: the table.
        device: where.
        dtype: of activations and weights.
        tolerance: relative error of a result's norm.
    """

    ops: Ops
    device: torch.device
    dtype: torch.dtype
    tolerance: float

    def random(self, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(shape, generator=generator) * scale).to(self.device, self.dtype)

    def near(self, got: Tensor, want: Tensor, apart: int = 0) -> None:
        """All of it, or, where ``apart`` rows may differ, every other row by itself.

        Two experts may score the same but for rounding: one token in thousands takes the other.
        """
        got = got.to(want.device)
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert torch.isfinite(got).all()
        if apart:
            errors = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
            assert float(errors.sort().values[-1 - apart]) <= self.tolerance
        elif want.numel():
            error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12)
            assert float(error) <= self.tolerance, float(error)


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch hands out is NaN, or -2**31 + something as an integer, until it is written."""
    plain = torch.empty, torch.empty_like

    def poisonous(function):
        def empty(*args, **kwargs):
            out = function(*args, **kwargs)
            if out.numel():
                out.view(torch.uint8).fill_(0xFF if out.dtype.is_floating_point else 0x81)
            return out

        return empty

    torch.empty, torch.empty_like = map(poisonous, plain)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = plain


def make_experts(bench: Bench, sizes: Sizes, seed: int = 1) -> Experts:
    h, e, i, s = sizes.hidden, sizes.experts, sizes.width, sizes.shared

    def matrix(*shape: int, seed: int) -> Tensor:
        return bench.random(*shape, seed=seed, scale=shape[-1] ** -0.5)

    generator = torch.Generator().manual_seed(seed)
    return Experts(
        router=(torch.randn(e, h, generator=generator) * 1.5 * h**-0.5).to(bench.device),
        bias=(torch.randn(e, generator=generator) * 0.1).to(bench.device),
        gate_up=matrix(e, 2 * i, h, seed=seed + 1),
        down=matrix(e, h, i, seed=seed + 2),
        shared_gate_up=matrix(2 * s, h, seed=seed + 3),
        shared_down=matrix(h, s, seed=seed + 4),
        top_k=sizes.top_k,
        routed_scale=2.0,
        alpha=1.702,
        limit=7.0,
    )


# --- rows ----------------------------------------------------------------------------------------


def summed(ops: Ops, residual: Tensor, delta: Any) -> Tensor:
    """``residual + delta``."""
    weight = torch.zeros(residual.shape[1], device=residual.device)
    return ops.add_norm(residual, delta, weight, 1e-6)[0]


def check_add_norm(bench: Bench, hidden: int = 47) -> None:
    weight = bench.random(hidden, seed=5).float()
    for tokens in TOKENS:
        x, delta = bench.random(tokens, hidden), bench.random(tokens, hidden, seed=2)
        with poisoned():
            total, normed = bench.ops.add_norm(x, delta, weight, 1e-6)
        want_total, want_normed = ops_for(REFERENCE).add_norm(x, delta, weight, 1e-6)
        assert torch.equal(total, want_total)  # to the bit: the residual stream is the model
        bench.near(normed, want_normed)


def check_add_norm_of_zeros(bench: Bench) -> None:
    zero, weight = torch.zeros(3, 48, device=bench.device, dtype=bench.dtype), bench.random(48)
    with poisoned():
        total, normed = bench.ops.add_norm(zero, zero, weight.float(), 1e-6)
    assert torch.equal(total, zero)
    assert torch.equal(normed, zero)


def check_swiglu(bench: Bench, width: int = 80) -> None:
    reference = ops_for(REFERENCE)
    for tokens in TOKENS:
        x = bench.random(tokens, 2 * width, scale=6.0)
        with poisoned():
            bench.near(bench.ops.swiglu(x, 1.702, 7.0), reference.swiglu(x, 1.702, 7.0))


def check_swiglu_clamps(bench: Bench) -> None:
    """Values of the model's specification, -0, infinity; NaN is not hidden."""
    gate = [-20, -7.5, 0, 3, 7, 9, -0.0, 1, float("inf")]
    up = [-9, -7, 0, 1, 7, 9, -0.0, -1, float("inf")]
    want = [0, 1.3e-4, 0, 5.96386, 55.99963, 55.99963, 0, 0, 55.99963]
    x = torch.tensor([gate + up], device=bench.device, dtype=torch.float32).to(bench.dtype)
    got = bench.ops.swiglu(x, 1.702, 7.0).float().cpu()[0]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-2, atol=2e-4)
    bad = torch.full((1, 4), float("nan"), device=bench.device, dtype=bench.dtype)
    assert bench.ops.swiglu(bad, 1.702, 7.0).isnan().all()


def make_embedding(bench: Bench, vocab: int = 19, hidden: int = 47, half: int = 5) -> Embedding:
    return Embedding(
        bench.random(vocab, hidden, seed=7),
        bench.random(hidden, seed=5).float(),
        1e-6,
        inverse_frequencies(2 * half, 5e6).to(bench.device),
    )


def check_embed(bench: Bench) -> None:
    """Tokens that are given or were drawn before, the last of the vocabulary among them."""
    for tokens, hidden, half in ((0, 47, 5), (1, 47, 5), (16, 64, 32), (17, 47, 5)):
        embedding = make_embedding(bench, hidden=hidden, half=half)
        vocab = embedding.table.shape[0]
        drawn = torch.tensor([vocab - 1, 0, 5], device=bench.device)
        step = torch.arange(tokens, device=bench.device)
        ids, positions = (vocab - 1 - step) % vocab, step * 16127
        for follows in (None, Follows(step % 5 - 2, drawn), Follows(step * 0 - 1, drawn)):
            with poisoned():
                got = bench.ops.embed(ids, positions, embedding, follows)
            want = ops_for(REFERENCE).embed(ids, positions, embedding, follows)
            assert torch.equal(got.hidden, want.hidden)
            bench.near(got.normed, want.normed)
            for mine, theirs in ((got.cos, want.cos), (got.sin, want.sin)):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


def check_embed_of_bad_tokens(bench: Bench) -> None:
    """No token of the vocabulary, no place among the drawn: NaN in that row and no other."""
    embedding = make_embedding(bench)
    vocab, far = embedding.table.shape[0], 1 << 60
    ids = torch.tensor([3, vocab, -1, far, 3, 3, 4, 3], device=bench.device)
    at = torch.tensor([-1, -1, -1, -1, 0, 2, 1, far], device=bench.device)
    follows = Follows(at, torch.tensor([vocab, 2], device=bench.device))
    got = bench.ops.embed(ids, torch.zeros_like(ids), embedding, follows)
    good = torch.tensor([True, False, False, False, False, False, True, False])
    for rows in (got.hidden, got.normed):
        assert torch.equal(rows.isnan().any(1).cpu(), ~good)
        assert torch.equal(rows.isnan().all(1).cpu(), ~good)
    assert torch.equal(got.hidden[[0, 6]], embedding.table[[3, 2]])


def check_logits(bench: Bench) -> None:
    """What ``linear`` gives, widened; in the memory of the caller, whatever was there."""
    for vocab, inputs in ((24, 256), (600, 32)):  # in parts, and in more tiles than programs
        weight = bench.random(vocab, inputs, seed=3, scale=inputs**-0.5)
        for rows in (0, 1, 16, 17):
            x = bench.random(rows, inputs, seed=rows)
            want = bench.ops.linear(x, weight).float()
            kept = torch.full((rows + 1, vocab), float("nan"), device=bench.device)
            with poisoned():
                assert torch.equal(bench.ops.logits(x, weight, None), want)
                out = bench.ops.logits(x, weight, kept[:rows])
            assert out.data_ptr() == kept.data_ptr() or not rows
            assert torch.equal(kept[:rows], want)
            assert kept[rows].isnan().all()


def check_linear(bench: Bench) -> None:
    """Few rows take a kernel of their own, more the library; widths that nothing divides."""
    for outputs, inputs in ((80, 48), (24, 256), (128, 64), (200, 1024)):
        weight = bench.random(outputs, inputs, seed=3, scale=inputs**-0.5)
        for tokens in (0, 1, 15, 16, 17, 64, 65):
            x = bench.random(tokens, inputs, seed=tokens)
            with poisoned():
                got = bench.ops.linear(x, weight)
            want = torch.nn.functional.linear(x.cpu().float(), weight.cpu().float())
            bench.near(got, want.to(bench.dtype))
            residual = bench.random(tokens, outputs, seed=9)
            with poisoned():
                total = summed(bench.ops, residual, bench.ops.linear_sums(x, weight))
            assert torch.equal(total, residual + got)  # adding parts up later changes nothing
            if tokens in (1, 16):
                with poisoned():
                    gated = bench.ops.swiglu(bench.ops.linear_sums(x, weight), 1.702, 7.0)
                assert torch.equal(gated, bench.ops.swiglu(got, 1.702, 7.0))


# --- experts -------------------------------------------------------------------------------------


def check_routing(bench: Bench, sizes: Sizes, module) -> None:
    """Sorted rows hold every (token, expert) once, in tiles of one expert, in order of tokens."""
    experts = make_experts(bench, sizes)
    for tokens in TOKENS[1:]:
        x = bench.random(tokens, sizes.hidden, seed=tokens)
        for rows in (16, 32):
            with poisoned():
                routing = module.route(x, experts, rows, flags=300)
            assert routing.flags.tolist() == [0] * 300
            check_sorted(routing, *route(x, experts.router, experts.bias, sizes.top_k), 2.0)


def check_sorted(routing, chosen: Tensor, shares: Tensor, scale: float) -> None:
    num_tokens, top_k = chosen.shape
    slots, found, last = top_k + 1, {}, {}
    tiles, lists = routing.tiles.tolist(), routing.rows.tolist()
    used = sum(tile >= 0 for tile in tiles)
    assert all(tile >= 0 for tile in tiles[:used])
    assert tiles[used:] == [-1] * (len(tiles) - used)
    assert tiles[:used] == sorted(tiles[:used])
    for expert, row_list in zip(tiles[:used], lists, strict=False):
        real = [row for row in row_list if row >= 0]
        assert real
        assert row_list == real + [-1] * (len(row_list) - len(real))  # gaps only at the end
        for row in real:
            token, slot = divmod(row, slots)
            assert 0 <= token < num_tokens
            assert slot < top_k
            assert last.get(expert, -1) < token  # by token within an expert, over all its tiles
            last[expert] = token
            assert (token, expert) not in found
            found[token, expert] = float(routing.shares[token, slot])
    wanted = {
        (token, expert): share * scale
        for token, (row, weights) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True))
        for expert, share in zip(row, weights, strict=True)
    }
    assert found.keys() == wanted.keys()
    for key, share in wanted.items():
        assert abs(found[key] - share) <= 1e-4 * scale, key


def check_ties(bench: Bench, module) -> None:
    """Equal scores go to the lowest experts, best first; -0 and 0 are equal."""
    experts = make_experts(bench, SMALL)
    bias = torch.tensor([0.0, -0.0, 0.5, 0.5, 0.0, 0.5, -1.0, -0.0], device=bench.device)
    experts = replace(experts, router=torch.zeros_like(experts.router), bias=bias - 0.5, top_k=4)
    routing = module.route(bench.random(3, 64), experts, 16)
    assert routing.tiles.tolist()[:4] == [0, 2, 3, 5]
    best_first = [routing.rows[tile, 0].item() % 5 for tile in range(4)]
    assert best_first == [3, 0, 1, 2]
    torch.testing.assert_close(routing.shares, torch.full_like(routing.shares, 0.5))


def check_bad_scores(bench: Bench, module) -> None:
    """Tokens of NaN still get different experts in range: an index is never out of bounds."""
    x = bench.random(5, 64)
    x[1] = float("nan")
    experts = make_experts(bench, SMALL)
    with poisoned():
        routing = module.route(x, experts, 16)
    rows = [r for tile in routing.rows.tolist() for r in tile if r >= 0 and r // 3 == 1]
    assert sorted(rows) == [3, 4]
    got = moe_sum(bench.ops, x, experts)
    assert torch.isfinite(got[[0, 2, 3, 4]]).all()  # nobody else is touched


def moe_sum(ops: Ops, x: Tensor, experts: Experts) -> Tensor:
    return summed(ops, torch.zeros_like(x), ops.moe(x, experts))


def wanted(x: Tensor, experts: Experts) -> Tensor:
    """Plain torch, on the CPU: its grouped product takes every type and size there."""
    on_cpu = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in ((f.name, getattr(experts, f.name)) for f in fields(experts))
    }
    return moe_sum(ops_for(REFERENCE), x.cpu(), Experts(**on_cpu))


def check_moe(bench: Bench, sizes: Sizes, tokens: tuple[int, ...] = TOKENS) -> None:
    experts = make_experts(bench, sizes)
    for count in tokens:
        x = bench.random(count, sizes.hidden, seed=count)
        with poisoned():
            got = moe_sum(bench.ops, x, experts)
        bench.near(got, wanted(x, experts), apart=count // 500)


def check_moe_of_one_expert(bench: Bench) -> None:
    """All tokens on the same experts: the others have no row, these have many tiles."""
    experts = make_experts(bench, SMALL)
    bias = torch.zeros_like(experts.bias)
    bias[3], bias[7] = 5.0, 4.0
    for tokens in (17, 65):
        x = bench.random(tokens, 64, seed=tokens)
        mine = replace(experts, bias=bias)
        with poisoned():
            got = moe_sum(bench.ops, x, mine)
        bench.near(got, wanted(x, mine))


def check_add_norm_of_parts(bench: Bench) -> None:
    """The sum over experts inside the norm is the sum over experts before it."""
    experts, weight = make_experts(bench, SMALL), bench.random(64, seed=5).float()
    x = bench.random(17, 64)
    delta = bench.ops.moe(x, experts)
    total, normed = bench.ops.add_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, x + moe_sum(bench.ops, x, experts))
    bench.near(normed, gemma_rms_norm(total, weight, 1e-6))


def check_rows_alone(bench: Bench, tokens: tuple[int, ...] = (1, 17, 65)) -> None:
    """Batch-invariant: a row's result is the same to the bit alone and among others."""
    assert bench.ops.batch_invariant
    for sizes in (SMALL, Sizes(experts=16, top_k=4)):
        experts, x = make_experts(bench, sizes), bench.random(max(tokens), sizes.hidden)
        whole = moe_sum(bench.ops, x, experts)
        for count in tokens:
            alone = moe_sum(bench.ops, x[-count:].contiguous(), experts)
            assert torch.equal(alone, whole[-count:])


def checks(bench: Bench, invariant: Bench, module) -> dict[str, Callable[[], None]]:
    """Every check by name."""
    return {
        "add norm": lambda: check_add_norm(bench),
        "add norm of zeros": lambda: check_add_norm_of_zeros(bench),
        "swiglu": lambda: check_swiglu(bench),
        "swiglu clamps": lambda: check_swiglu_clamps(bench),
        "linear": lambda: check_linear(bench),
        "embed": lambda: check_embed(bench),
        "embed bad tokens": lambda: check_embed_of_bad_tokens(bench),
        "logits": lambda: check_logits(bench),
        "logits, batch-invariant": lambda: check_logits(invariant),
        "routing": lambda: check_routing(bench, SMALL, module),
        "routing, odd sizes": lambda: check_routing(bench, ODD, module),
        "ties": lambda: check_ties(bench, module),
        "bad scores": lambda: check_bad_scores(bench, module),
        "moe": lambda: check_moe(bench, SMALL),
        "moe, odd sizes": lambda: check_moe(bench, ODD, (1, 17, 65)),
        "moe of one expert": lambda: check_moe_of_one_expert(bench),
        "add norm of parts": lambda: check_add_norm_of_parts(bench),
        "rows alone": lambda: check_rows_alone(invariant),
    }
