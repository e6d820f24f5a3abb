"""Scratch memory: every slice named and sized at start-up, all of it in one allocation.

A kernel's ``spec.py`` says which slices one call needs (:class:`WorkspaceSpec`). From the demands
of every prepared step :func:`lay_out` computes one arena: slices of one demand that are alive at
the same time never overlap, demands of different steps reuse the same bytes, and every step in
flight has a **lane** of its own, so two of them never meet. :class:`Workspace` then allocates
once, in its constructor, before the KV cache is sized; afterwards it only hands out offsets.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from minuet.attention.capability import Capability, StepSizes, WorkspaceSpec
from minuet.attention.contract import LayerKind, Op, Phase, Problem
from minuet.dtypes import DType
from minuet.errors import ContractError, Refusal

ALIGNMENT_BYTES = 256  # what device allocators give; every vector load and cache line fits

Buffer = TypeVar("Buffer")


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes ``offset .. offset + bytes - 1`` of the workspace."""

    offset: int
    bytes: int

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.bytes


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """Where every slice of every demand lies. All sizes in bytes.

    Attributes:
        lane_bytes: size of one lane.
        in_flight: number of lanes.
        slices: demand key to slice name to place within a lane.
        zeroed: places within a lane that must be zero before the first step.
    """

    lane_bytes: int
    in_flight: int
    slices: Mapping[Hashable, Mapping[str, Slice]]
    zeroed: tuple[Slice, ...]

    @property
    def total_bytes(self) -> int:
        """The one allocation."""
        return self.lane_bytes * self.in_flight

    def slice(self, key: Hashable, name: str, lane: int = 0) -> Slice:
        """Place of one slice in the allocation.

        Args:
            key: the demand, as given to :func:`lay_out`.
            name: the slice, as the kernel's spec names it.
            lane: which step in flight, ``0 .. in_flight - 1``.

        Raises:
            ContractError: a key, name or lane that was not laid out.
        """
        if not 0 <= lane < self.in_flight:
            raise ContractError("workspace lane", got=lane, expected=f"0..{self.in_flight - 1}")
        try:
            place = self.slices[key][name]
        except KeyError:
            raise ContractError(
                "no such workspace slice", got=(key, name), expected="one that was laid out"
            ) from None
        return Slice(place.offset + lane * self.lane_bytes, place.bytes)


def lay_out(
    demands: Mapping[Hashable, Sequence[WorkspaceSpec]], in_flight: int = 1
) -> WorkspaceLayout:
    """Place every slice.

    Args:
        demands: for each (layer kind, shape bucket, ...) the slices of all operations of one
            layer. Two demands never run at the same time in one lane.
        in_flight: steps whose kernels may run at the same time.

    Returns:
        A layout in which slices of one demand overlap only if their lifetimes do not.

    Raises:
        ContractError: a name used twice in one demand, or ``in_flight < 1``.
    """
    if in_flight < 1:
        raise ContractError("in_flight", got=in_flight, expected=">= 1")
    zeroed, base = _place_zeroed(demands)
    slices: dict[Hashable, dict[str, Slice]] = {}
    lane_bytes = base
    for key, specs in demands.items():
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ContractError(f"workspace demand {key!r}", got=names, expected="unique names")
        places = {s.name: Slice(zeroed[s.name].offset, s.bytes) for s in specs if s.zeroed}
        places |= _place([s for s in specs if not s.zeroed], base)
        slices[key] = places
        lane_bytes = max([lane_bytes, *(_aligned(place.end) for place in places.values())])
    return WorkspaceLayout(lane_bytes, in_flight, slices, tuple(zeroed.values()))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _place_zeroed(
    demands: Mapping[Hashable, Sequence[WorkspaceSpec]],
) -> tuple[dict[str, Slice], int]:
    """Zeroed slices first, one place per name for all demands: each leaves it zero again."""
    sizes: dict[str, int] = {}
    for specs in demands.values():
        for spec in specs:
            if spec.zeroed:
                sizes[spec.name] = max(sizes.get(spec.name, 0), spec.bytes)
    places, offset = {}, 0
    for name, size in sizes.items():
        places[name] = Slice(offset, size)
        offset += _aligned(size)
    return places, offset


def _place(specs: Sequence[WorkspaceSpec], base: int) -> dict[str, Slice]:
    """Largest first, each at the lowest offset free during its lifetime."""
    placed: list[tuple[WorkspaceSpec, Slice]] = []
    for spec in sorted(specs, key=lambda s: -s.bytes):
        alive = sorted(
            (place for other, place in placed if other.overlaps(spec)), key=lambda p: p.offset
        )
        offset = base
        for place in alive:
            if offset + spec.bytes <= place.offset:
                break
            offset = max(offset, _aligned(place.end))
        placed.append((spec, Slice(offset, spec.bytes)))
    return {spec.name: place for spec, place in placed}


class Workspace(Generic[Buffer]):
    """The allocation behind a layout. It is made in the constructor and never grows.

    Attributes:
        layout: where the slices lie.
        buffer: what ``allocate`` returned.
    """

    def __init__(
        self,
        layout: WorkspaceLayout,
        allocate: Callable[[int], Buffer],
        zero: Callable[[Buffer, Slice], None] | None = None,
    ):
        """Allocate.

        Args:
            layout: from :func:`lay_out`.
            allocate: bytes to a buffer aligned to :data:`ALIGNMENT_BYTES`; called exactly once.
            zero: clears a place of the buffer; called once per zeroed place and lane.

        Raises:
            ContractError: the layout has zeroed slices and no ``zero`` was given.
        """
        if layout.zeroed and zero is None:
            raise ContractError("Workspace.zero", got=None, expected="a function to clear with")
        self.layout = layout
        self.buffer = allocate(layout.total_bytes)
        for lane in range(layout.in_flight):
            for place in layout.zeroed:
                if zero is not None:
                    zero(self.buffer, Slice(place.offset + lane * layout.lane_bytes, place.bytes))

    def slice(self, key: Hashable, name: str, lane: int = 0) -> Slice:
        """Place of one slice; see :meth:`WorkspaceLayout.slice`."""
        return self.layout.slice(key, name, lane)


# --- formulas: what our kernels ask for; a backend's spec.py says which of them it uses ----------


def attend_workspace(problem: Problem, sizes: StepSizes) -> tuple[WorkspaceSpec, ...]:
    """Partial results of split rows; nothing where every row is written directly.

    ``partial_out`` is FP32 ``[num_kv_heads, slots, vectors, head_dim]`` and ``partial_lse`` FP32
    ``[num_kv_heads, slots, vectors]``, the logarithm of the part's softmax sum. FP32 because the
    error of 16-bit partials grows with their number. ``vectors`` are the query vectors of a work
    item: the group, times ``query_len`` in a dense layer, where a sequence's tokens share a part.
    """
    if sizes.slots == 0:
        return ()
    vectors = problem.group * (problem.query_len if problem.layer_kind is LayerKind.DENSE else 1)
    sums = problem.num_kv_heads * sizes.slots * vectors * DType.FP32.itemsize
    return (
        WorkspaceSpec("partial_out", sums * problem.head_dim),
        WorkspaceSpec("partial_lse", sums),
    )


def select_workspace(problem: Problem, sizes: StepSizes) -> tuple[WorkspaceSpec, ...]:
    """Block scores of one chunk of queries, and the chosen blocks that ``attend`` reads.

    ``scores`` is FP32 ``[index_heads, chunk, blocks]`` with the chunk of
    :func:`score_chunk_tokens`, so its size is bounded by a byte budget at any context length;
    ``blocks`` is int32 ``[query_tokens, index_heads, top_blocks]``.
    """
    row_bytes = score_row_bytes(problem, sizes.max_length)
    chunk = score_chunk_tokens(problem, sizes.max_length, sizes.score_bytes)
    chunk = max(
        1, min(chunk, sizes.query_tokens)
    )  # one token always: covers_step holds it to budget
    lists = sizes.query_tokens * problem.index_heads * problem.top_blocks
    return (
        WorkspaceSpec("scores", chunk * row_bytes, first=Op.SELECT, last=Op.SELECT),
        WorkspaceSpec("blocks", lists * DType.INT32.itemsize, first=Op.SELECT),
    )


def score_row_bytes(problem: Problem, max_length: int) -> int:
    """Bytes of the block scores of one query token, all index heads.

    Args:
        problem: a select problem.
        max_length: longest context in tokens.
    """
    return problem.index_heads * -(-max_length // problem.page_size) * DType.FP32.itemsize


def score_chunk_tokens(problem: Problem, max_length: int, budget_bytes: int) -> int:
    """Query tokens scored at once, so that the scores stay within a budget.

    0 if the budget does not even hold one query token: start-up refuses then.
    """
    return budget_bytes // score_row_bytes(problem, max_length)


def covers_step(capability: Capability, problem: Problem, sizes: StepSizes) -> tuple[Refusal, ...]:
    """Every reason why the largest step of a bucket does not fit a kernel that covers its problem.

    A remedy names the largest accepted value (the smallest budget), so it suffices for its refusal.
    """
    return (
        *_row_refusals(capability, problem, sizes),
        *_score_refusals(capability, problem, sizes),
    )


def _row_refusals(capability: Capability, problem: Problem, sizes: StepSizes) -> Iterator[Refusal]:
    rows = sizes.query_tokens * problem.num_kv_heads
    if capability.max_rows is None or rows <= capability.max_rows:
        return
    flag, rows_each = "--max-num-batched-tokens", problem.num_kv_heads
    if problem.phase is Phase.DECODE:
        flag, rows_each = "--max-num-seqs", problem.num_kv_heads * problem.query_len
    refusal = Refusal(capability.name, "rows", str(rows), f"<= {capability.max_rows}")
    largest = capability.max_rows // rows_each
    if largest:
        refusal = replace(refusal, remedy=f"set {flag} {largest}", flag=flag, value=str(largest))
    yield refusal


def _score_refusals(
    capability: Capability, problem: Problem, sizes: StepSizes
) -> Iterator[Refusal]:
    needed = sum(s.bytes for s in capability.workspace(problem, sizes) if s.name == "scores")
    if needed <= sizes.score_bytes:
        return
    flag = "--index-score-memory"
    yield Refusal(
        capability.name,
        "index_score_memory",
        f"{sizes.score_bytes} bytes",
        f">= {needed} bytes, the scores of one query token",
        f"set {flag} {needed}",
        flag,
        str(needed),
    )
