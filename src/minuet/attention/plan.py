"""How attention work is divided over workers and merged: integers, worked out on the host.

Three forms, one per situation; :func:`split_for` picks by problem and sizes, at start-up:

* **balanced** (dense decode): each step divides a budget of parts over the sequences by their
  real lengths, so one long request among short ones still fills the machine.
* **fixed** (dense decode, batch-invariant): parts depend on a request's own length only, so its
  result does not depend on who else is in the batch.
* **rows** (sparse decode, every prefill): a row attends to a few blocks, or is one of many, so a
  static division known at start-up is enough and no step plans anything.

A :class:`DecodePlan` is one block of int32 that the caller owns, three tables in it:

=========  ================  ==============================================================
table      shape             meaning
=========  ================  ==============================================================
``work``   ``[capacity, 4]`` (sequence, first tile, end tile, slot); unused records all 0
``rows``   ``[max_seqs, 2]`` (first slot, number of parts); (-1, 1) direct, (0, 0) empty
``lengths``  ``[max_seqs]``  context length in tokens; 0 for padding
=========  ================  ==============================================================

A **tile** is ``tile_tokens`` tokens. A sequence of exactly one part is written **directly** (slot
-1): no partial result, nothing to merge. Parts of any other sequence have consecutive slots of the
partial-result buffer, counted per KV head; the merge reads slots ``first .. first + parts - 1`` of
its row and no others. Sizes are fixed by :class:`PlanShape` at start-up; batch and lengths are
run-time values, and a refresh with fewer sequences than ``max_seqs`` clears the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minuet.attention.capability import SplitPolicy
from minuet.attention.contract import LayerKind, Phase, Problem
from minuet.errors import ContractError

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_WORK_FIELDS, _ROW_FIELDS = 4, 2
DIRECT = -1  # slot of a part that is the whole row


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """Sizes of a :class:`DecodePlan`; nothing in it changes after start-up.

    Attributes:
        max_seqs: sequences of the padded batch.
        max_length: longest context in tokens.
        tile_tokens: tokens per tile.
        max_parts: parts of one sequence at most.
        budget: parts the balanced form divides among the sequences, per KV head.
        part_tiles: tiles per part of the fixed form; 0 selects the balanced form.
        longest_first: order work records by falling size.
    """

    max_seqs: int
    max_length: int
    tile_tokens: int
    max_parts: int
    budget: int
    part_tiles: int = 0
    longest_first: bool = False

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_length", "tile_tokens", "max_parts", "budget"):
            if getattr(self, name) < 1:
                raise ContractError(f"PlanShape.{name}", got=getattr(self, name), expected=">= 1")
        if self.part_tiles < 0:
            raise ContractError("PlanShape.part_tiles", got=self.part_tiles, expected=">= 0")

    @property
    def max_tiles(self) -> int:
        """Tiles of the longest context."""
        return -(-self.max_length // self.tile_tokens)

    @property
    def capacity(self) -> int:
        """Work records: no lengths need more."""
        if self.part_tiles:
            most = min(self.max_parts, -(-self.max_tiles // self.part_tiles))
            return self.max_seqs * most
        return min(self.max_seqs * self.max_parts, max(self.max_seqs, self.budget))

    @property
    def slots(self) -> int:
        """Partial results per KV head at most; 0 if every sequence is always written directly.

        The balanced form splits only while fewer sequences than ``budget`` are alive, so a large
        batch needs no more slots than a small one.
        """
        most = min(self.max_parts, self.max_tiles)
        if self.part_tiles:
            return self.capacity if self.capacity > self.max_seqs else 0
        return min(self.capacity, self.budget) if most > 1 and self.budget > 1 else 0

    @property
    def size(self) -> int:
        """int32 elements of the plan's buffer."""
        return self.capacity * _WORK_FIELDS + self.max_seqs * (_ROW_FIELDS + 1)

    def part_counts(self, tiles: Int64Array) -> Int64Array:
        """Parts of each sequence.

        Balanced: every non-empty sequence gets one part; what is left of the budget is dealt by
        prefix sums, ``cum_i * left // total - cum_(i-1) * left // total``, which telescopes and so
        never exceeds it. Fixed: tiles over tiles per part, rounded up, at most ``max_parts``.
        Part ``k`` of ``n`` covers tiles ``k * tiles // n .. (k + 1) * tiles // n - 1`` in both.

        Args:
            tiles: tiles of each sequence; 0 for an empty one.
        """
        if self.part_tiles:
            return np.minimum(-(-tiles // self.part_tiles), self.max_parts)
        alive = int(np.count_nonzero(tiles))
        left = max(min(self.budget, self.capacity) - alive, 0)
        total = int(tiles.sum())
        if left == 0 or total == 0:
            return np.minimum(tiles, 1)
        dealt = np.cumsum(tiles) * left // total
        share: Int64Array = np.diff(dealt, prepend=0)
        return np.minimum(np.minimum(share + 1, self.max_parts), tiles)


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """The plan of one prepared batch size, over memory that the caller owns.

    Build it with :meth:`over`; :meth:`refresh` rewrites the tables in place every step, so their
    addresses can be captured in a graph.

    Attributes:
        shape: the sizes.
        buffer: int32 ``[shape.size]``, the memory given to :meth:`over`.
        work: view ``[capacity, 4]``.
        rows: view ``[max_seqs, 2]``.
        lengths: view ``[max_seqs]``.
    """

    shape: PlanShape
    buffer: Int32Array
    work: Int32Array
    rows: Int32Array
    lengths: Int32Array

    @classmethod
    def over(cls, shape: PlanShape, buffer: Int32Array) -> "DecodePlan":
        """Lay a plan over memory.

        Args:
            shape: the sizes.
            buffer: int32 ``[shape.size]``, contiguous and writable; cleared here.

        Raises:
            ContractError: a buffer of another type or size.
        """
        fits = buffer.shape == (shape.size,) and buffer.dtype == np.int32
        if not (fits and buffer.flags.c_contiguous and buffer.flags.writeable):
            raise ContractError(
                "buffer of a DecodePlan",
                got=f"{buffer.dtype}{list(buffer.shape)}",
                expected=f"contiguous writable int32[{shape.size}]",
            )
        buffer[:] = 0
        work_end = shape.capacity * _WORK_FIELDS
        rows_end = work_end + shape.max_seqs * _ROW_FIELDS
        return cls(
            shape,
            buffer,
            buffer[:work_end].reshape(shape.capacity, _WORK_FIELDS),
            buffer[work_end:rows_end].reshape(shape.max_seqs, _ROW_FIELDS),
            buffer[rows_end:],
        )

    def refresh(self, lengths: NDArray[np.integer] | Sequence[int]) -> "DecodePlan":
        """Divide this step's work. Every step and every draft pass that changed a length calls it.

        Args:
            lengths: context length of each sequence in tokens, this step's tokens included; 0 for
                an empty row. May be shorter than the padded batch, whose rest is cleared.

        Returns:
            The same plan: nothing is allocated that outlives the call.

        Raises:
            ContractError: more sequences than ``max_seqs``, a negative or too long length, or
                something that is not a vector of integers. The tables are unchanged then.
        """
        shape = self.shape
        checked = self._checked(lengths)
        num_seqs = len(checked)
        tiles = (checked + shape.tile_tokens - 1) // shape.tile_tokens
        counts = shape.part_counts(tiles)
        ends = np.cumsum(counts)
        num_parts = int(ends[-1]) if num_seqs else 0
        if num_parts > shape.capacity:
            raise ContractError("parts of a plan", got=num_parts, expected=f"<= {shape.capacity}")

        slots_of = np.where(counts > 1, counts, 0)
        first_slot = np.where(counts > 1, np.cumsum(slots_of) - slots_of, -np.minimum(counts, 1))
        # one entry per part from here on
        sequence = np.repeat(np.arange(num_seqs), counts)
        of_tiles, of_parts = tiles[sequence], counts[sequence]
        part = np.arange(num_parts) - (ends - counts)[sequence]
        first, end = part * of_tiles // of_parts, (part + 1) * of_tiles // of_parts
        slot = np.where(of_parts > 1, first_slot[sequence] + part, DIRECT)
        columns: list[Int64Array] = [sequence, first, end, slot]
        if shape.longest_first:
            order = np.argsort(first - end, kind="stable")
            columns = [column[order] for column in columns]

        for number, column in enumerate(columns):
            self.work[:num_parts, number] = column
        self.work[num_parts:] = 0
        self.rows[:num_seqs, 0] = first_slot
        self.rows[:num_seqs, 1] = counts
        self.rows[num_seqs:] = 0
        self.lengths[:num_seqs] = checked
        self.lengths[num_seqs:] = 0
        return self

    def _checked(self, lengths: NDArray[np.integer] | Sequence[int]) -> Int64Array:
        given = np.asarray(lengths)
        if given.size == 0:
            given = given.astype(np.int64)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise ContractError(
                "lengths of a plan",
                got=f"{given.dtype}{list(given.shape)}",
                expected="a vector of integers",
            )
        if len(given) > self.shape.max_seqs:
            raise ContractError(
                "sequences of a plan", got=len(given), expected=f"<= {self.shape.max_seqs}"
            )
        if len(given) and (given.min() < 0 or given.max() > self.shape.max_length):
            raise ContractError(
                "lengths of a plan",
                got=f"{given.min()}..{given.max()}",
                expected=f"0..{self.shape.max_length}",
            )
        return given.astype(np.int64)


class DecodePlans:
    """The closed set of plans of an engine: one per prepared batch size and step in flight.

    All of them are made in the constructor. A step takes the smallest that holds its batch, so the
    number of plans, and of graphs that point into them, does not depend on what is served.
    """

    def __init__(
        self,
        shapes: Sequence[PlanShape],
        allocate: Callable[[int], Int32Array],
        in_flight: int = 1,
    ):
        """Make every plan.

        Args:
            shapes: one per prepared batch size, in any order.
            allocate: number of elements to an int32 vector, pinned where that matters; called
                once per shape and lane.
            in_flight: steps that may be on their way at the same time.

        Raises:
            ContractError: no shape, or two for the same batch size.
        """
        ordered = sorted(shapes, key=lambda shape: shape.max_seqs)
        sizes = [shape.max_seqs for shape in ordered]
        if not sizes or len(set(sizes)) != len(sizes):
            raise ContractError(
                "batch sizes of plans", got=sizes, expected="at least one, each once"
            )
        self._lanes = [
            [DecodePlan.over(shape, allocate(shape.size)) for shape in ordered]
            for _ in range(in_flight)
        ]

    def __len__(self) -> int:
        """Plans in existence, all lanes."""
        return sum(len(lane) for lane in self._lanes)

    @property
    def size(self) -> int:
        """int32 elements of all plans."""
        return sum(plan.shape.size for lane in self._lanes for plan in lane)

    def for_batch(self, num_seqs: int, lane: int = 0) -> DecodePlan:
        """The plan of the smallest prepared batch that holds ``num_seqs`` sequences.

        Raises:
            ContractError: no prepared batch is large enough.
        """
        for plan in self._lanes[lane]:
            if num_seqs <= plan.shape.max_seqs:
                return plan
        raise ContractError(
            "sequences of a step",
            got=num_seqs,
            expected=f"<= {self._lanes[lane][-1].shape.max_seqs}, the largest prepared batch",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSplit:
    """Static division of rows that attend to a bounded list, or stand alone in large numbers.

    Attributes:
        max_rows: rows per KV head: query tokens of the padded step.
        parts: parts of every row; 1 writes directly.
    """

    max_rows: int
    parts: int

    @property
    def slots(self) -> int:
        """Partial results per KV head; 0 if every row is written directly."""
        return self.max_rows * self.parts if self.parts > 1 else 0

    def block_range(self, part: int, num_blocks: int) -> tuple[int, int]:
        """Entries ``first .. end - 1`` of a row's list that a part covers.

        Args:
            part: ``0 .. parts - 1``.
            num_blocks: entries of the row's list; a device value in a kernel, the same formula.
        """
        return part * num_blocks // self.parts, (part + 1) * num_blocks // self.parts


Split = PlanShape | RowSplit


def split_for(
    policy: SplitPolicy,
    problem: Problem,
    *,
    compute_units: int,
    num_seqs: int,
    query_tokens: int,
    max_length: int,
    batch_invariant: bool = False,
) -> Split:
    """How attention of one shape bucket is divided: known at start-up, from sizes alone.

    Args:
        policy: the kernel's numbers.
        problem: an attend problem.
        compute_units: of the arch.
        num_seqs: sequences of the padded batch.
        query_tokens: query tokens of the padded batch.
        max_length: longest context in tokens.
        batch_invariant: the division may depend on a request's own length only.
    """
    if problem.phase is Phase.PREFILL:
        # Rows outnumber compute units, or the step is short anyway: no partials, whatever the size.
        return RowSplit(max_rows=query_tokens, parts=1)
    budget = -(-compute_units * policy.parts_per_unit // problem.num_kv_heads)
    if problem.layer_kind is LayerKind.SPARSE:
        most = min(policy.row_max_parts, problem.top_blocks)
        wanted = policy.fixed_row_parts if batch_invariant else -(-budget // query_tokens)
        return RowSplit(max_rows=query_tokens, parts=max(1, min(wanted, most)))
    return PlanShape(
        max_seqs=num_seqs,
        max_length=max_length,
        tile_tokens=policy.tile_tokens,
        max_parts=policy.fixed_max_parts if batch_invariant else compute_units,
        budget=budget,
        part_tiles=policy.fixed_part_tiles if batch_invariant else 0,
        longest_first=policy.longest_first,
    )


def fold_page_list(
    page_list: Int32Array, num_kv_heads: int, pages_per_block: int = 1
) -> Int32Array:
    """Rewrite selected blocks as pages of the cache seen with one KV head per page.

    A cache ``[N, H, ...]`` re-viewed as ``[N * H, 1, ...]`` lets every KV head have a list of its
    own: page ``p`` of head ``h`` is entry ``p * H + h``. With smaller pages than blocks, block
    ``b`` is pages ``b * pages_per_block + j`` first.

    Args:
        page_list: int32 ``[rows, H, top_blocks]``, -1 at the tail.
        num_kv_heads: H.
        pages_per_block: cache pages per selected block.

    Returns:
        int32 ``[rows * H, top_blocks * pages_per_block]``, -1 where the block is -1.
    """
    rows, heads, top = page_list.shape
    if heads != num_kv_heads:
        raise ContractError("heads of a page list", got=heads, expected=str(num_kv_heads))
    pages = page_list[..., None] * pages_per_block + np.arange(pages_per_block, dtype=np.int32)
    folded = pages * num_kv_heads + np.arange(num_kv_heads, dtype=np.int32)[None, :, None, None]
    folded = np.where(page_list[..., None] < 0, -1, folded).astype(np.int32)
    return np.ascontiguousarray(folded.reshape(rows * heads, top * pages_per_block))
