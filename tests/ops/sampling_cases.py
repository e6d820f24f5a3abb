"""Rows for every path of sampling, and the comparison of a form with the reference."""

from dataclasses import dataclass

import numpy as np
import torch

from minuet.ops.sampling import columns, reference

COUNTERS = (
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
)
"""Known answers of Random123 (kat_vectors, philox4x32 of 10 rounds): counter, key, words."""


@dataclass(frozen=True)
class Wish:
    """What one row asks for."""

    mode: int = columns.FILTERED
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def lines(wishes: list[Wish], seed: int = 0) -> torch.Tensor:
    """Their parameters; every row has a key of its own."""
    made = np.zeros((len(wishes), columns.WIDTH), np.uint32)
    floats = made.view(np.float32)
    for i, wish in enumerate(wishes):
        made[i, columns.MODE] = wish.mode
        made[i, columns.KEY_LOW], made[i, columns.KEY_HIGH] = 0xFFFFFF00 + i, seed
        made[i, columns.POSITION], made[i, columns.STREAM] = 3 * i, 7
        made[i, columns.DOMAIN] = i % 2
        made[i, columns.TOP_K], made[i, columns.TOP_P] = wish.top_k, columns.top_p_units(wish.top_p)
        floats[i, columns.INVERSE_TEMPERATURE] = 1 / wish.temperature
        floats[i, columns.MIN_P] = wish.min_p
        floats[i, columns.REPETITION] = 1.0
    return torch.from_numpy(made.view(np.int32))


def kinds(vocab: int) -> dict[str, torch.Tensor]:
    """Rows of logits that are hard in different ways."""
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(vocab, generator=generator)
    peaked = normal * 4
    some = peaked.clone()
    some[: vocab // 2] = float("-inf")
    one = torch.full((vocab,), float("-inf"))
    one[vocab - 2] = -3.0
    return {
        "normal": normal,
        "peaked": peaked,
        "equal": torch.full((vocab,), 0.25),
        "ties": (peaked * 2).round() / 2,
        "sorted": peaked.sort().values,
        "half masked": some,
        "one possible": one,
        "signed zeros": torch.where(normal > 0, 0.0, -0.0),
    }


def wishes(vocab: int) -> list[Wish]:
    """Every filter alone at its ends and in between, and together."""
    k = [1, 2, 20, vocab // 2, vocab - 1, vocab, vocab + 9]
    return [
        Wish(columns.LARGEST),
        Wish(columns.DRAW),
        Wish(columns.DRAW, 0.3),
        Wish(columns.DRAW, 1e30),
        # colder, equal logits would be told apart by how a product is rounded
        Wish(columns.DRAW, 0.01),
        *(Wish(top_k=n) for n in k),
        *(Wish(top_p=p) for p in (1e-9, 0.3, 0.9, 0.999999, 1.0)),
        *(Wish(min_p=p) for p in (1e-6, 0.05, 1.0)),
        Wish(temperature=0.5, top_k=20, top_p=0.9, min_p=0.01),
        Wish(temperature=2.0, top_k=vocab // 2, top_p=0.95),
        Wish(temperature=1e6, top_k=vocab // 3),
        Wish(temperature=1e6, top_k=vocab // 3, top_p=0.5),
        Wish(temperature=0.7, top_p=0.95, min_p=0.02),
    ]


def check_draws(form, device, pairs: list[tuple[torch.Tensor, Wish]], names=None, **more) -> None:
    """One call for all rows; every token must be the reference's."""
    logits = torch.stack([row for row, _ in pairs]).to(device)
    params = lines([wish for _, wish in pairs]).to(device)
    modes = frozenset(wish.mode for _, wish in pairs)
    answers = []
    for made in (reference, form):
        tokens = torch.full((len(pairs),), -1, device=device)
        stuck = torch.zeros(len(pairs), dtype=torch.bool, device=device)
        made.draw(logits, params, tokens, stuck, modes, **(more if made is form else {}))
        answers.append((tokens.tolist(), stuck.tolist()))
    for i, (_, wish) in enumerate(pairs):
        want, got = ((tokens[i], stuck[i]) for tokens, stuck in answers)
        assert got == want, f"row {i} {names[i] if names else ''} {wish}: {got} and not {want}"


def check_greedy(form, device, vocab: int, **more) -> None:
    """Ties, and what is not a number, anywhere in a row."""
    rows = torch.stack([*kinds(vocab).values()])
    for bad in (float("nan"), float("inf"), float("-inf")):
        for place in (0, vocab // 2, vocab - 1):
            row = rows[0].clone()
            row[place] = bad
            rows = torch.cat([rows, row[None]])
    want = reference.greedy(rows)
    got = form.greedy(rows.to(device), **more)
    for made in (reference, form):  # in the first rows of memory that holds something else
        held = torch.full((len(rows) + 1,), -7, device=device)
        flags = torch.ones(len(rows) + 1, dtype=torch.bool, device=device)
        out = held[:-1], flags[:-1]
        back = made.greedy(rows.to(device), out, **(more if made is form else {}))
        assert [part.data_ptr() for part in back] == [part.data_ptr() for part in out]
        assert torch.equal(out[1].cpu(), want[1])
        assert torch.equal(out[0][out[1]], got[0][out[1]])
        assert int(held[-1]) == -7
        assert bool(flags[-1])
    assert torch.equal(got[1].cpu(), want[1])
    assert torch.equal(got[0].cpu()[want[1]], want[0][want[1]])
    assert 0 <= int(got[0].min()) <= int(got[0].max()) < vocab


def check_shaping(form, device, vocab: int) -> None:
    """Penalties, bias and masks, of rows that want them and rows that do not."""
    rows = torch.stack([*kinds(vocab).values()])[:5]
    params = lines([Wish()] * 5)
    floats = params.view(torch.float32)
    floats[:, columns.REPETITION] = torch.tensor([1.0, 1.3, 0.7, 2.0, 1.0])
    floats[:, columns.PRESENCE] = torch.tensor([0.0, 0.5, -0.5, 0.0, 2.0])
    floats[:, columns.FREQUENCY] = torch.tensor([0.0, 0.25, 0.0, 1.0, -2.0])
    generator = torch.Generator().manual_seed(1)
    entries = torch.stack(
        [
            torch.arange(300) % 4 + 1,
            torch.arange(300) // 4 * (vocab // 75),
            torch.randint(0, 9, (300,), generator=generator),
            torch.randn(300, generator=generator).view(torch.int32).long(),
        ],
        dim=1,
    ).int()
    entries[7, 3] = torch.tensor(float("-inf")).view(torch.int32)
    entries = torch.cat([entries, torch.tensor([[2, vocab, 3, 0], [4, vocab + 7, 1, 0]])]).int()
    allowed = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=generator).int()
    masked = torch.tensor([4, 1], dtype=torch.int32)
    want, got = rows.clone(), rows.clone().to(device)
    reference.shape(want, params, entries)
    form.shape(got, params.to(device), entries.to(device))
    torch.testing.assert_close(got.cpu(), want, rtol=3e-7, atol=3e-7)
    reference.mask(want, masked, allowed)
    form.mask(got, masked.to(device), allowed.to(device))
    assert torch.equal(got.cpu() == float("-inf"), want == float("-inf"))


def check_report(form, device, vocab: int, most: int = 5, **more) -> None:
    """Log-probabilities, ranks and alternatives of rows that want different numbers of them."""
    rows = torch.stack([kinds(vocab)[name] for name in ("normal", "peaked", "equal", "ties")])
    tokens = torch.tensor([3, int(rows[1].argmax()), vocab - 1, 0])
    wanted = torch.tensor([-1, 0, most, most - 1], dtype=torch.int32)
    want = reference.report(rows, tokens, wanted, most)
    got = form.report(rows.to(device), tokens.to(device), wanted.to(device), most, **more)
    for i, top in enumerate(wanted.tolist()):
        if top < 0:
            continue
        torch.testing.assert_close(got.logprob[i].cpu(), want.logprob[i], rtol=1e-5, atol=1e-5)
        assert int(got.rank[i]) == int(want.rank[i])
        assert torch.equal(got.top_ids[i, :top].cpu(), want.top_ids[i, :top])
        torch.testing.assert_close(
            got.top_logprobs[i, :top].cpu(), want.top_logprobs[i, :top], rtol=1e-5, atol=1e-5
        )


def linear_operands(rows: int, n: int, k: int, device, dtype=torch.bfloat16):
    """Random operands; the generator does not know the number of rows."""
    generator = torch.Generator().manual_seed(n * k)
    weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    return x.to(device), weight.to(device)


def check_linear(product, device, n: int, k: int, dtype=torch.bfloat16, *, bits=True) -> None:
    """Rows are right, and the same in any batch, at any place: to the bit, unless told otherwise.

    Triton's interpreter multiplies with the host's library, whose bits depend on the place of a
    row, and rounds BF16 towards zero; there only values are compared.
    """
    x, weight = linear_operands(200, n, k, device, dtype)
    whole = product(x, weight)
    want = x.float() @ weight.float().T
    rounding = torch.finfo(dtype).eps
    error = (whole.float() - want).norm() / want.norm()
    assert error < rounding * (0.4 if bits else 0.7), error

    def check(first: int, last: int) -> None:
        got = product(x[first:last], weight)
        if bits:
            assert torch.equal(got, whole[first:last]), (first, last)
        else:
            tolerance = {"rtol": 2 * rounding, "atol": 2 * rounding}
            torch.testing.assert_close(got, whole[first:last], **tolerance)

    for rows in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129):
        check(0, rows)
        check(200 - rows, 200)
    check(77, 78)
