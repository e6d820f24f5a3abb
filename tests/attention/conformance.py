"""What every backend must agree on: cases, poisoned caches, comparison with the reference."""

from dataclasses import dataclass

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
    """The reference's selection, None on a dense case."""
    if world.case.selection is None:
        return None
    assert world.index_q is not None
    return reference.select(world.index_q, world.cache, world.batch, world.case.selection)


def assert_same_selection(got: Tensor, want: Tensor, world: World) -> None:
    """Equal lists, or lists whose scores are equal where exact ties let them differ."""
    assert got.dtype == torch.int32
    assert got.shape == want.shape
    differing = (got != want).any(-1).nonzero().tolist()
    for row, head in differing:
        assert sorted(_scores(world, row, head, got[row, head])) == sorted(
            _scores(world, row, head, want[row, head])
        ), f"row {row} head {head}: {got[row, head].tolist()} for {want[row, head].tolist()}"


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
