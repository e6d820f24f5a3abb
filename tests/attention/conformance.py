"""What every backend must agree on: cases, poisoned caches, comparison with the reference.

:func:`cases` is the suite of backends that run on a device of their own; :func:`check` runs one of
them. ``test_conformance_cpu.py`` has the CPU backend's own, with more storage types.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minuet.attention import reference
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import KVCache, LayerCache
from minuet.kv.layout import Form, KVLayout
from minuet.kv.write import HeadNorms, store
from minuet.ops.rope import cos_sin, inverse_frequencies
from minuet.ops.sums import Sums

# Cosine to the FP32 reference on dequantised values, and largest absolute error, by query type.
COSINE = {torch.float32: 0.999999, torch.bfloat16: 0.9999, torch.float16: 0.9999}
ABSOLUTE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Case:
    """One problem with its lengths.

    Attributes:
        lens: tokens in the cache per sequence, this step's included.
        query_lens: query tokens per sequence.
    """

    lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    page: int = 16
    index_dim: int = 0
    kv_dtype: DType = DType.FP32
    index_dtype: DType = DType.FP32
    q_dtype: torch.dtype = torch.float32
    form: Form = Form.HEAD_MAJOR
    selection: Selection | None = None

    @property
    def layout(self) -> KVLayout:
        """Of the one layer."""
        return KVLayout(
            self.page,
            self.kv_heads,
            self.head_dim,
            self.kv_dtype,
            self.index_dim,
            self.index_dtype,
            self.form,
        )


@dataclass
class World:
    """A poisoned cache filled with a case's contexts."""

    case: Case
    cache: LayerCache
    batch: AttentionBatch
    q: Tensor
    index_q: Tensor | None


def build(case: Case, seed: int = 0, spare_pages: int = 3) -> World:
    """Random contexts in a cache whose every unwritten byte is NaN, pages in random order."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // case.page) for length in case.lens]
    num_pages = sum(blocks) + 1 + spare_pages
    pool = KVCache([case.layout], num_pages, fill=float("nan"))
    cache = pool.layers[0]
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    table = torch.full((len(blocks), max(1, *blocks)), -1, dtype=torch.int32)
    for seq, count in enumerate(blocks):
        table[seq, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        _fill(cache, table[seq], case, case.lens[seq], generator)
    positions = [
        p for n, q in zip(case.lens, case.query_lens, strict=True) for p in range(n - q, n)
    ]
    total = len(positions)
    heads = case.kv_heads * case.group
    q = torch.randn(total, heads, case.head_dim, generator=generator).to(case.q_dtype)
    index_q = None
    if case.index_dim:
        index_q = torch.randn(total, case.kv_heads, case.index_dim, generator=generator).to(
            case.q_dtype
        )
    batch = AttentionBatch(
        case.query_lens,
        case.lens,
        torch.tensor(positions),
        torch.full((total,), -1),
        table,
    )
    return World(case, cache, batch, q, index_q)


def _fill(
    cache: LayerCache, pages: Tensor, case: Case, length: int, generator: torch.Generator
) -> None:
    token = torch.arange(length)
    slots = pages.long()[token // case.page] * case.page + token % case.page
    shape = (length, case.kv_heads, case.head_dim)
    # scales that span a wide range: a kernel with one scale per tensor cannot pass
    spread = torch.logspace(-2, 2, max(length, 1))[:length, None, None]
    k = torch.randn(shape, generator=generator)
    v = torch.randn(shape, generator=generator) * (spread if case.kv_dtype.is_fp8 else 1.0)
    index_k = torch.randn(length, case.index_dim, generator=generator) if case.index_dim else None
    store(cache, slots, k, v, index_k)


def assert_close(got: Tensor, want: Tensor, q_dtype: torch.dtype) -> None:
    """Finite, nearly parallel to the reference, and nowhere far from it."""
    assert torch.isfinite(got.float()).all(), "non-finite output"
    got32, want32 = got.float(), want.float()
    size = float(want32.abs().max()) or 1.0
    torch.testing.assert_close(got32, want32, atol=ABSOLUTE[q_dtype] * size, rtol=0.0)
    if want32.norm() > 0:
        cosine = torch.nn.functional.cosine_similarity(
            got32.double().flatten(), want32.double().flatten(), dim=0
        )
        assert float(cosine) >= COSINE[q_dtype]


def reference_blocks(world: World) -> Tensor | None:
    """The reference's selection, None on a dense case; nothing for an empty sequence's rows."""
    if world.case.selection is None:
        return None
    assert world.index_q is not None
    batch, seen = world.batch, world.batch.positions >= 0
    alive = [s for s, length in enumerate(batch.seq_lens) if length]
    part = AttentionBatch(
        tuple(batch.query_lens[s] for s in alive),
        tuple(batch.seq_lens[s] for s in alive),
        batch.positions[seen],
        batch.slots[seen],
        batch.page_table[alive],
    )
    chosen = reference.select(world.index_q[seen], world.cache, part, world.case.selection)
    blocks = torch.full((len(seen), *chosen.shape[1:]), -1, dtype=torch.int32)
    blocks[seen] = chosen
    return blocks


def assert_same_selection(got: Tensor, want: Tensor, world: World) -> None:
    """Equal lists, or lists whose scores are equal but for rounding in another order of sums."""
    assert got.dtype == torch.int32
    assert got.shape == want.shape
    differing = (got != want).any(-1).nonzero().tolist()
    for row, head in differing:
        mine, theirs = got[row, head].tolist(), want[row, head].tolist()
        told = f"row {row} head {head}: {mine} for {theirs}"
        assert len(set(mine) - {-1}) == len(set(theirs) - {-1}), told
        assert mine == [b for b in sorted(set(mine)) if b >= 0] + [-1] * mine.count(-1), told
        torch.testing.assert_close(
            torch.tensor(sorted(_scores(world, row, head, got[row, head]))),
            torch.tensor(sorted(_scores(world, row, head, want[row, head]))),
            rtol=1e-5,
            atol=1e-4,
            msg=told,
        )


def _scores(world: World, row: int, head: int, blocks: Tensor) -> list[float]:
    assert world.index_q is not None
    seq = next(s for s in range(world.batch.num_seqs) if sum(world.batch.query_lens[: s + 1]) > row)
    _, _, index_k = reference.read(
        world.cache, world.batch.page_table[seq], world.batch.seq_lens[seq]
    )
    assert index_k is not None
    position = int(world.batch.positions[row])
    scores = reference.block_scores(world.index_q[row], index_k, position, world.case.page)
    return [float(scores[head, b]) for b in blocks.tolist() if b >= 0]


def norms(case: Case, seed: int = 1) -> HeadNorms:
    """Random per-head norm weights."""
    generator = torch.Generator().manual_seed(seed)

    def weight(size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.3

    index = case.index_dim
    return HeadNorms(
        weight(case.head_dim),
        weight(case.head_dim),
        weight(index) if index else None,
        weight(index) if index else None,
        1e-6,
    )


def rotation(positions: Tensor, rotary_dim: int, theta: float = 5e6) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions."""
    return cos_sin(positions, inverse_frequencies(rotary_dim, theta))


# --- the suite of device backends ----------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """A backend under test.

    Attributes:
        launch: its module with ``write``, ``select``, ``attend`` and ``block_lists``.
        device: where it runs.
        plan: ``plan(batch, case)``.
    """

    launch: Any
    device: torch.device
    plan: Callable[[AttentionBatch, Case], Any]


def moved(world: World, device: torch.device) -> World:
    """The same world on another device."""
    if device.type == "cpu":
        return world
    batch = world.batch
    return World(
        world.case,
        LayerCache(world.cache.layout, {n: x.to(device) for n, x in world.cache.lanes.items()}),
        replace(
            batch,
            positions=batch.positions.to(device),
            slots=batch.slots.to(device),
            page_table=batch.page_table.to(device),
        ),
        world.q.to(device),
        None if world.index_q is None else world.index_q.to(device),
    )


def check(case: Case, backend: Backend, seed: int = 0) -> None:
    """One case: selection, attention over it in both forms, and dense attention."""
    world = build(case, seed)
    there = moved(world, backend.device)
    plan, scale = backend.plan(there.batch, case), case.head_dim**-0.5
    want_blocks = reference_blocks(world)
    want = reference.attend(world.q, world.cache, world.batch, want_blocks, scale)
    if want_blocks is None:
        got = backend.launch.attend(there.q, there.cache, plan, None, scale)
        assert_close(got.cpu(), want, case.q_dtype)
        return
    chosen = backend.launch.select(there.index_q, there.cache, plan, case.selection)
    lists = backend.launch.block_lists(chosen, plan)
    assert_same_selection(lists.cpu(), want_blocks, world)
    got = backend.launch.attend(there.q, there.cache, plan, chosen, scale)
    want = reference.attend(world.q, world.cache, world.batch, lists.cpu(), scale)
    assert_close(got.cpu(), want, case.q_dtype)
    from_lists = backend.launch.attend(there.q, there.cache, plan, lists, scale)
    assert_close(from_lists.cpu(), want, case.q_dtype)


_BF16 = torch.bfloat16
_EDGES = {
    page: (1, page - 1, page, page + 1, 3 * page, 3 * page + 1, 7 * page - 1)
    for page in (16, 32, 64, 128, 256)
}


def _decode(page: int = 16, query_len: int = 1, empty: bool = False, **more: Any) -> Case:
    lens = tuple(n for n in _EDGES[page] if n >= query_len)
    return Case(lens, (query_len,) * len(lens), page=page, q_dtype=_BF16, **more)


def _sparse(**more: Any) -> dict[str, Any]:
    return {"index_dim": 64, "index_dtype": DType.BF16, "selection": Selection(3)} | more


def cases(fp8: DType = DType.FP8_E4M3FN) -> dict[str, Case]:
    """Every case by name. ``fp8``: the flavour of the device."""
    made: dict[str, Case] = {}
    for kv in (DType.BF16, fp8):
        for page in (16, 32, 64, 128, 256):
            made[f"dense-{kv}-page{page}"] = _decode(page, kv_dtype=kv, group=16, kv_heads=1)
        for heads in (1, 2, 4, 8):
            made[f"dense-{kv}-kv{heads}"] = _decode(
                128, kv_dtype=kv, kv_heads=heads, group=16 // heads, head_dim=128
            )
            made[f"sparse-{kv}-kv{heads}"] = _decode(
                128, kv_dtype=kv, kv_heads=heads, group=16 // heads, head_dim=128,
                **_sparse(index_dim=128),
            )  # fmt: skip
        for group in (1, 3, 5, 12):
            made[f"dense-{kv}-group{group}"] = _decode(kv_dtype=kv, group=group)
            made[f"sparse-{kv}-group{group}"] = _decode(kv_dtype=kv, group=group, **_sparse())
        for query_len in (2, 3, 5, 8):
            made[f"dense-{kv}-q{query_len}"] = _decode(64, query_len, kv_dtype=kv)
            made[f"sparse-{kv}-q{query_len}"] = _decode(64, query_len, kv_dtype=kv, **_sparse())
        for name, selection in {
            "top1": Selection(1),
            "init": Selection(2, 1, 1),
            "local": Selection(4, 1, 2),
            "top16": Selection(16),
        }.items():
            made[f"sparse-{kv}-{name}"] = _decode(kv_dtype=kv, **_sparse(selection=selection))
        long = {"kv_dtype": kv, "q_dtype": _BF16, "page": 16, "kv_heads": 1}
        for blocks in (40, 120, 129, 300, 1000, 1030, 2500):
            made[f"sparse-{kv}-{blocks}blocks"] = Case(
                (blocks * 16 - 3, 90), (1, 1), **long, **_sparse(selection=Selection(16))
            )
        made[f"dense-{kv}-ragged"] = Case((3001, 5, 260, 1), (1,) * 4, **long, group=16)
        made[f"dense-{kv}-empty"] = Case((0, 300, 0), (1,) * 3, **long)
        made[f"sparse-{kv}-empty"] = Case((0, 300, 0), (1,) * 3, **long, **_sparse())
        for cached in (0, 1, 37):
            for chunk in (9, 16, 83):
                lens = {"lens": (cached + chunk, 50), "query_lens": (chunk, 1)}
                made[f"prefill-dense-{kv}-{cached}+{chunk}"] = Case(
                    **lens, **(long | {"kv_heads": 2})
                )
                made[f"prefill-sparse-{kv}-{cached}+{chunk}"] = Case(
                    **lens, **(long | {"kv_heads": 2}), **_sparse()
                )
        made[f"prefill-dense-{kv}-m3"] = Case(
            (700, 300, 129), (130, 300, 1), 1, 16, 128, 128, kv_dtype=kv, q_dtype=_BF16
        )
        made[f"prefill-sparse-{kv}-m3"] = Case(
            (700, 300, 129), (130, 300, 1), 1, 16, 128, 128, kv_dtype=kv, q_dtype=_BF16,
            **_sparse(index_dim=128),
        )  # fmt: skip
        made[f"mixed-{kv}"] = Case((50, 30, 3, 60, 130, 49), (1, 30, 1, 4, 100, 1), **long)
    made["sparse-index-fp8"] = _decode(kv_dtype=fp8, **_sparse(index_dtype=fp8))
    made["prefill-sparse-index-fp8"] = Case(
        (300, 40), (70, 40), q_dtype=_BF16, kv_dtype=fp8, **_sparse(index_dtype=fp8)
    )
    made["dense-fp16"] = replace(_decode(kv_dtype=DType.FP16), q_dtype=torch.float16)
    made["sparse-fp16"] = replace(
        _decode(kv_dtype=DType.FP16, **_sparse(index_dtype=DType.FP16)), q_dtype=torch.float16
    )
    return made


# What stands for the rest where a case takes seconds (the interpreter).
REDUCED = (
    "dense-{fp8}-page16", "dense-bfloat16-page128", "dense-{fp8}-group3", "dense-{fp8}-q3",
    "dense-{fp8}-empty", "sparse-{fp8}-init", "sparse-bfloat16-group5", "sparse-{fp8}-q2",
    "sparse-{fp8}-129blocks", "sparse-{fp8}-empty", "prefill-dense-{fp8}-37+9",
    "prefill-sparse-{fp8}-1+16", "sparse-index-fp8", "dense-fp16",
)  # fmt: skip


def check_ties(backend: Backend) -> None:
    """Blocks of equal score: the lowest ids win, in every form of the choice."""
    for blocks in (6, 70, 140, 1030):
        case = Case(
            (blocks * 16,),
            (1,),
            page=16,
            kv_heads=1,
            q_dtype=_BF16,
            kv_dtype=DType.BF16,
            **_sparse(),
        )
        world = build(case)
        world.cache.index_k.fill_(0.25)
        there = moved(world, backend.device)
        plan = backend.plan(there.batch, case)
        chosen = backend.launch.select(there.index_q, there.cache, plan, case.selection)
        lists = backend.launch.block_lists(chosen, plan)
        assert lists[0, 0].tolist() == [0, 1, blocks - 1]


def norms_on(weights: HeadNorms, device: torch.device) -> HeadNorms:
    """The same weights on a device."""
    moved = (weights.q, weights.k, weights.index_q, weights.index_k)
    return HeadNorms(*(None if w is None else w.to(device) for w in moved), weights.eps)


def check_write(
    backend: Backend,
    kv_dtype: DType,
    index_dtype: DType,
    index_dim: int,
    q_dtype: torch.dtype = _BF16,
    carries: bool = True,
) -> None:
    """The written lanes are those of the definition, byte for byte but for rounding at its edge.

    ``carries``: FP8 rounding carries into the exponent; Triton's interpreter loses that.
    """
    from minuet.kv import write as definition

    case = Case(
        (), (), kv_dtype=kv_dtype, index_dtype=index_dtype, index_dim=index_dim, q_dtype=q_dtype
    )
    slots = torch.tensor([17, -1, 0, 95, 40, -1])
    generator = torch.Generator().manual_seed(3)
    width = (case.group + 2) * case.kv_heads * case.head_dim
    width += (case.kv_heads + 1) * index_dim if index_dim else 0
    packed = torch.randn(len(slots), width, generator=generator).to(q_dtype)
    packed[2] = 0.0  # a zero vector has scale 1
    packed[3] *= 1e3
    cos, sin = rotation(torch.arange(len(slots)) * 37, 32)
    weights = norms(case)
    pools = [KVCache([case.layout], 6, fill=float("nan")).layers[0] for _ in range(2)]
    want_q, want_index_q = definition.write(pools[0], packed, slots, cos, sin, weights)
    device = backend.device
    cache = LayerCache(case.layout, {n: x.to(device) for n, x in pools[1].lanes.items()})
    moved_norms = norms_on(weights, device)
    q, index_q = backend.launch.write(
        cache, packed.to(device), slots.to(device), cos.to(device), sin.to(device), moved_norms
    )
    assert_nearly_equal(q.cpu(), want_q)
    if want_index_q is not None:
        assert_nearly_equal(index_q.cpu(), want_index_q)
    for name, want in pools[0].lanes.items():
        assert_nearly_equal(cache.lanes[name].cpu(), want, carries)


def check_write_of_sums(
    backend: Backend, kv_dtype: DType, index_dim: int, q_dtype: torch.dtype = _BF16
) -> None:
    """Packed rows that are not added up yet give, to the byte, what they add up to gives."""
    case = Case(
        (), (), kv_dtype=kv_dtype, index_dtype=kv_dtype, index_dim=index_dim, q_dtype=q_dtype
    )
    slots = torch.tensor([17, -1, 0, 95, 40])
    generator = torch.Generator().manual_seed(4)
    width = (case.group + 2) * case.kv_heads * case.head_dim
    width += (case.kv_heads + 1) * index_dim if index_dim else 0
    values = torch.randn(3, len(slots), width, generator=generator)
    values[:, 2] = -0.0  # a zero vector has scale 1, and adding up makes it +0
    values[2, 3] = -values[0, 3] - values[1, 3] * 0.999  # nearly nothing is left of large terms
    sums = Sums(values.to(backend.device), q_dtype)
    cos, sin = rotation(torch.arange(len(slots)) * 37, 32)
    found = []
    for packed in (sums.product(), sums):
        lanes = KVCache([case.layout], 6, fill=float("nan")).layers[0].lanes
        cache = LayerCache(case.layout, {n: x.to(backend.device) for n, x in lanes.items()})
        queries = backend.launch.write(
            cache, packed, *(x.to(backend.device) for x in (slots, cos, sin)),
            norms_on(norms(case), backend.device),
        )  # fmt: skip
        found.append([*cache.lanes.values(), *(q for q in queries if q is not None)])
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def assert_nearly_equal(got: Tensor, want: Tensor, carries: bool = True) -> None:
    """Same NaNs; few values differ, and those by one step of the larger terms of their sum."""
    assert got.dtype == want.dtype
    got32, want32 = got.float(), want.float()
    assert torch.equal(got32.isnan(), want32.isnan()), "touched other slots than the definition"
    step = torch.finfo(got.dtype).eps * (1 if got.dtype.itemsize == 1 else 2)
    if got.dtype is torch.float32:  # scales follow a value that may have moved by one BF16 step
        step = torch.finfo(torch.bfloat16).eps
    largest = float(want32.nan_to_num(nan=0.0).abs().max())
    if carries or got.dtype.itemsize > 1:
        torch.testing.assert_close(
            got32, want32, rtol=step, atol=step * largest / 8, equal_nan=True
        )
    if got.dtype is not torch.float32:
        differing = (got32 != want32) & ~want32.isnan()
        assert float(differing.float().mean()) < (0.01 if carries else 0.03)
