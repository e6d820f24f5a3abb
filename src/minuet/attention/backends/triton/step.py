"""What every layer of a step shares: tables on the device, refreshed in place, and scratch memory.

A :class:`Planner` is made once per prepared step shape, from sizes; :meth:`Planner.plan` rewrites
its tables for a step without changing an address, so a captured graph stays valid.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minuet.attention.backends.triton.config import Target
from minuet.attention.backends.triton.spec import MAX_TOP_BLOCKS, SPLIT
from minuet.attention.backends.triton.tiles import (
    NO_SEQUENCE,
    ROW_TILE_TOKENS,
    Chunk,
    query_tiles,
)
from minuet.attention.batch import AttentionBatch, PreparedSizes
from minuet.attention.plan import DecodePlan, Int32Array, PlanShape
from minuet.errors import ContractError
from minuet.platform.device import facility

SCORE_BYTES = 64 * 2**20  # score budget of one-step plans, whose caller states none
_ITEM = 4  # fields of a work item


class Scratch:
    """Named scratch memory: the caller's workspace slices, or a one-step plan's own allocations.

    Args:
        device: where.
        slices: uint8 vectors of a workspace; None allocates what is asked for and keeps it.
    """

    def __init__(self, device: torch.device, slices: Mapping[str, Tensor] | None = None):
        self._device, self._slices = device, slices
        self._own: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """``shape`` values at the start of a slice.

        Raises:
            ContractError: the slice is missing or too small.
        """
        needed = int(np.prod(shape)) * dtype.itemsize
        held = (self._own if self._slices is None else self._slices).get(name)
        if self._slices is None and (held is None or held.numel() < needed):
            held = self._own[name] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        if held is None or held.numel() < needed:
            raise ContractError(
                f"workspace slice {name}",
                got=None if held is None else f"{held.numel()} bytes",
                expected=f">= {needed} bytes",
            )
        return held[:needed].view(dtype).view(shape)

    def rows(self, name: str, row_bytes: int, most: int) -> int:
        """Rows of ``row_bytes`` that a slice holds, ``most`` at most and 1 at least.

        ``most`` where memory is taken as needed, and for a slice that was not planned for: a model
        without sparse layers has none to select with.
        """
        if self._slices is None or name not in self._slices:
            return most
        return max(1, min(most, self._slices[name].numel() // row_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape(PreparedSizes):
    """Sizes of a prepared step, and what follows from them here."""

    score_bytes: int = SCORE_BYTES
    kv_fp8: bool = True
    batch_invariant: bool = False

    @property
    def max_blocks(self) -> int:
        """Pages of the longest context."""
        return -(-self.max_length // self.page_size)

    @property
    def score_row_bytes(self) -> int:
        """Block scores of one query token, all heads."""
        return self.num_kv_heads * self.max_blocks * 4

    def split(self, tile_tokens: int, parts_per_unit: int) -> PlanShape:
        """Division of dense work (or of scoring, with a page as the tile) over parts."""
        return PlanShape(
            max_seqs=self.max_seqs,
            max_length=self.max_length,
            tile_tokens=tile_tokens,
            max_parts=SPLIT.fixed_max_parts if self.batch_invariant else self.compute_units,
            budget=-(-self.compute_units * parts_per_unit // self.num_kv_heads),
            part_tiles=SPLIT.fixed_part_tiles if self.batch_invariant else 0,
            longest_first=SPLIT.longest_first,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """A step, as the kernels read it. Device tables are int32.

    A decode plan holds for every later step of its planner as well, if that step's page table has
    the same address and strides: what launches depend on follows from the shape alone. That is what
    a captured graph needs. A prefill plan is good for its own step.

    Attributes:
        target: launch numbers.
        shape: sizes of the planner.
        num_tokens: query tokens of the step; of a decode step at the time of the plan.
        page_table: [S, pages].
        positions: [T] int64; read by prefill only.
        tables: by name: ``lengths`` [max_seqs]; decode: ``work`` [capacity, 4],
            ``rows`` [max_seqs, 2], ``score_work`` [capacity, 4]; by query tiles
            (sequence, first query token, query tokens, first position): ``tiles`` [n, 4],
            ``score_tiles`` [n, 4], ``row_tiles`` [n, 4]; ``token_sequence`` [max_tokens].
        num_tiles: query tiles in use.
        tile_tokens: query tokens of a tile at most.
        score_tile_tokens: query tokens of a score tile at most.
        row_tile_tokens: query tokens of a row tile at most.
        scores_at_once: a decode step whose scores fit: ``attend`` chooses from them.
        chunks: how any other step is selected for and attended, one after another.
        slots: partial results per KV head of dense decode.
        most_parts: parts of a sequence of dense decode.
        scratch: partial results, scores, lists.
    """

    target: Target
    shape: StepShape
    num_tokens: int
    page_table: Tensor
    positions: Tensor
    tables: Mapping[str, Tensor]
    num_tiles: int
    tile_tokens: int
    score_tile_tokens: int
    row_tile_tokens: int
    scores_at_once: bool
    chunks: tuple[Chunk, ...]
    slots: int
    most_parts: int
    scratch: Scratch

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has ``shape.query_len`` query tokens."""
        return self.shape.query_len > 0

    def check_tokens(self, num_tokens: int) -> None:
        """Whether queries of this many tokens are a step's: all of prefill, whole rows of decode.

        Raises:
            ContractError: they are not.
        """
        shape = self.shape
        if not self.is_decode:
            fits, expected = num_tokens == self.num_tokens, str(self.num_tokens)
        else:
            fits = num_tokens % shape.query_len == 0 and num_tokens <= shape.max_tokens
            expected = f"a multiple of {shape.query_len}, at most {shape.max_tokens}"
        if not fits:
            raise ContractError("query tokens of a step", got=num_tokens, expected=expected)

    def chunks_of(self, num_tokens: int) -> Iterator[Chunk]:
        """Chunks of a step's first ``num_tokens`` query tokens: those of the padded batch or less.

        Args:
            num_tokens: query tokens there are.
        """
        for chunk in self.chunks:
            if chunk.first < num_tokens:
                yield replace(chunk, end=min(chunk.end, num_tokens))

    def row_parts(self, heads: int, top_blocks: int) -> int:
        """Parts that every sparse row is divided into; the same for every step of the shape.

        Args:
            heads: KV heads.
            top_blocks: blocks of a row at most.
        """
        if not self.is_decode:
            return 1
        most = min(SPLIT.row_max_parts, top_blocks)
        if self.shape.batch_invariant:
            return min(SPLIT.fixed_row_parts, most)
        units = self.shape.compute_units * self.target.row_parts_per_unit
        return _floor_power_of_2(max(1, min(units // (self.shape.max_tokens * heads), most)))


class Planner:
    """Tables of one step shape.

    Args:
        shape: sizes.
        device: where the kernels run.
        target: launch numbers of the device.
        scratch: workspace slices by name; None allocates on first use.
    """

    def __init__(
        self,
        shape: StepShape,
        device: torch.device,
        target: Target,
        scratch: Mapping[str, Tensor] | None = None,
    ):
        self.shape, self.target, self._device = shape, target, device
        self._scratch = Scratch(device, scratch)
        group_pad = _power_of_2(shape.group)
        self._tile_tokens = max(1, target.prefill_vectors // group_pad)
        self._row_tile_tokens = min(self._tile_tokens, ROW_TILE_TOKENS)
        self._chunk_tokens, self.scores_at_once = self._divide_selection()
        heads_pad = _power_of_2(shape.num_kv_heads)
        self._score_tile_tokens = min(
            max(1, target.score_vectors // heads_pad), _floor_power_of_2(self._chunk_tokens)
        )
        self._places: dict[str, tuple[int, int, int]] = {}
        self._size = 0
        if shape.query_len:
            dense = shape.split(SPLIT.tile_tokens, SPLIT.parts_per_unit)
            score = shape.split(shape.page_size, target.score_parts_per_unit)
            self._place("work", dense.capacity * _ITEM, _ITEM)
            self._place("rows", shape.max_seqs * 2, 2)
            self._place("lengths", shape.max_seqs, 1)
            self._place("score_work", score.capacity * _ITEM, _ITEM)
            self._place("score_rest", score.size - score.capacity * _ITEM, 1)
            self._dense, self._score = dense, score
            per_unit = target.parts_per_unit_fp8 if shape.kv_fp8 else target.parts_per_unit
            most = min(per_unit, SPLIT.parts_per_unit)
            self._divisions = (shape.split(SPLIT.tile_tokens, most), score)
        else:
            self._place("lengths", shape.max_seqs, 1)
            self._place("token_sequence", shape.max_tokens, 1)
            self._place_tiles("tiles", self._tile_tokens, shape.max_tokens)
            self._place_tiles("row_tiles", self._row_tile_tokens, self._chunk_tokens)
        if not self.scores_at_once:
            self._place_tiles("score_tiles", self._score_tile_tokens, self._chunk_tokens)
        # two host copies: one is filled while the other may still be on its way
        held = facility(device)
        self._host = [held.staging(self._size, torch.int32) for _ in range(2)]
        self._copied = [held.event() for _ in range(2)]
        self._tables = torch.zeros(self._size, dtype=torch.int32, device=device)
        self._views = {
            name: self._tables[first:end].view(-1, fields)
            if fields > 1
            else self._tables[first:end]
            for name, (first, end, fields) in self._places.items()
        }
        self._turn = 0
        # per host copy: its plans, and the tiles of the sequences they divide
        self._plans: list[list[DecodePlan]] = [[], []]
        self._divided: list[bytes] = [b"", b""]

    def plan(self, batch: AttentionBatch, page_size: int) -> Plan:
        """Refresh the tables for a step; nothing is allocated on the device.

        Args:
            batch: the step; a decode step's sequences have ``shape.query_len`` query tokens each.
            page_size: tokens per page.

        Raises:
            ContractError: a batch that this shape does not hold.
        """
        self._check(batch, page_size)
        self._turn ^= 1
        host, copied = self._host[self._turn], self._copied[self._turn]
        copied.synchronize()
        decodes = self.shape.query_len > 0
        if decodes:
            num_tiles, chunks = 0, self._fill_decode(self._turn, batch)
        else:
            num_tiles, chunks = self._fill_prefill(host.numpy(), batch)
        self._tables.copy_(host, non_blocking=True)
        copied.record()
        return Plan(
            target=self.target,
            shape=self.shape,
            num_tokens=batch.num_tokens,
            page_table=batch.page_table,
            positions=batch.positions,
            tables=self._views,
            num_tiles=num_tiles,
            tile_tokens=self._tile_tokens,
            score_tile_tokens=self._score_tile_tokens,
            row_tile_tokens=self._row_tile_tokens,
            scores_at_once=self.scores_at_once,
            chunks=chunks,
            slots=self._dense.slots if decodes else 0,
            most_parts=min(self._dense.max_parts, self._dense.max_tiles) if decodes else 0,
            scratch=self._scratch,
        )

    def _divide_selection(self) -> tuple[int, bool]:
        """Query tokens of a chunk, and whether a decode step is attended from its scores."""
        shape, scratch = self.shape, self._scratch
        budget = max(1, min(shape.score_bytes // shape.score_row_bytes, shape.max_tokens))
        scored = scratch.rows("scores", shape.score_row_bytes, budget)
        list_bytes = shape.num_kv_heads * MAX_TOP_BLOCKS * 4
        chunk = scratch.rows("pages", list_bytes, scratch.rows("blocks", list_bytes, scored))
        return chunk, shape.query_len > 0 and scored >= shape.max_tokens

    def _place(self, name: str, size: int, fields: int) -> None:
        self._places[name] = (self._size, self._size + size, fields)
        self._size += size

    def _place_tiles(self, name: str, tile_tokens: int, chunk_tokens: int) -> None:
        """Room for query tiles: each sequence, chunk and the padding may add a part of one."""
        most = self.shape.max_tokens // tile_tokens + self.shape.max_seqs + 1
        most += -(-self.shape.max_tokens // chunk_tokens)
        self._place(name, most * _ITEM, _ITEM)

    def _check(self, batch: AttentionBatch, page_size: int) -> None:
        shape = self.shape
        checks: list[tuple[str, object, bool, object]] = [
            ("page size", page_size, page_size == shape.page_size, shape.page_size),
            ("sequences", batch.num_seqs, batch.num_seqs <= shape.max_seqs, shape.max_seqs),
            (
                "query tokens",
                batch.num_tokens,
                batch.num_tokens <= shape.max_tokens,
                shape.max_tokens,
            ),
            (
                "context length",
                max(batch.seq_lens, default=0),
                max(batch.seq_lens, default=0) <= shape.max_length,
                shape.max_length,
            ),
        ]
        if shape.query_len:
            lens = set(batch.query_lens)
            checks.append(
                ("query tokens of each sequence", lens, lens <= {shape.query_len}, shape.query_len)
            )
        for what, got, fits, limit in checks:
            if not fits:
                raise ContractError(f"{what} of a step", got=got, expected=f"at most {limit}")

    # --- filling ---------------------------------------------------------------------------------

    def _fill_prefill(
        self, host: Int32Array, batch: AttentionBatch
    ) -> tuple[int, tuple[Chunk, ...]]:
        self._put(host, "lengths", np.asarray(batch.seq_lens, np.int64), rest=0)
        sequence = np.repeat(np.arange(batch.num_seqs), batch.query_lens)
        self._put(host, "token_sequence", sequence, rest=NO_SEQUENCE)
        lens = batch.query_lens, batch.seq_lens
        tiles, _ = query_tiles(lens, batch.num_tokens, self._tile_tokens, batch.num_tokens)
        work = (tiles[:, 3] + tiles[:, 2]) * -1
        self._put(host, "tiles", tiles[np.argsort(work, kind="stable")])
        return len(tiles), self._fill_chunks(host, lens, batch.num_tokens)

    def _fill_decode(self, turn: int, batch: AttentionBatch) -> tuple[Chunk, ...]:
        """Parts of dense attention and of scoring."""
        shape, host = self.shape, self._host[turn].numpy()
        lengths = np.asarray(batch.seq_lens, np.int64)
        tiles = [-(-lengths // division.tile_tokens) for division in self._divisions]
        key = b"".join(counts.tobytes() for counts in tiles)
        if not self._plans[turn]:
            self._plans[turn] = [self._plan_over(name, host) for name in ("work", "score_work")]
        for plan, division in zip(self._plans[turn], self._divisions, strict=True):
            if key == self._divided[turn]:
                # most steps: every sequence is a token longer, and none has a tile more
                plan.lengths[: len(lengths)] = lengths
            else:
                replace(plan, shape=no_finer_than_useful(division, lengths)).refresh(lengths)
        self._divided[turn] = key
        if self.scores_at_once:
            return ()
        # of the padded batch, so that the launches are those of the shape
        missing = (0,) * (shape.max_seqs - batch.num_seqs)
        lens = (shape.query_len,) * shape.max_seqs, (*batch.seq_lens, *missing)
        return self._fill_chunks(host, lens, shape.max_tokens)

    def _plan_over(self, name: str, host: Int32Array) -> DecodePlan:
        first, whole = self._places[name][0], self._dense if name == "work" else self._score
        return DecodePlan.over(whole, host[first : first + whole.size])

    def _fill_chunks(
        self, host: Int32Array, lens: tuple[Sequence[int], Sequence[int]], num_tokens: int
    ) -> tuple[Chunk, ...]:
        """Tiles of chunks; one chunk after another uses the same scratch."""
        chunk = self._chunk_tokens
        score, score_ends = query_tiles(lens, num_tokens, self._score_tile_tokens, chunk)
        self._put(host, "score_tiles", score)
        row_ends = [0] * len(score_ends)
        if not self.shape.query_len:
            rows, row_ends = query_tiles(lens, num_tokens, self._row_tile_tokens, chunk)
            self._put(host, "row_tiles", rows)
        begins = [0, *score_ends], [0, *row_ends]
        return tuple(
            Chunk(
                number * chunk,
                min((number + 1) * chunk, num_tokens),
                (begins[0][number], score_ends[number]),
                (begins[1][number], row_ends[number]),
            )
            for number in range(len(score_ends))
        )

    def _put(
        self, host: Int32Array, name: str, values: np.ndarray, rest: int | None = None
    ) -> None:
        """Write a table; what is left of it becomes ``rest``."""
        first, end, _ = self._places[name]
        flat = values.reshape(-1)
        assert len(flat) <= end - first, name
        host[first : first + len(flat)] = flat
        if rest is not None:
            host[first + len(flat) : end] = rest


def no_finer_than_useful(division: PlanShape, lengths: np.ndarray) -> PlanShape:
    """The fewest parts whose longest is as short as the balanced form's: the step ends no later.

    Dealing 264 parts to 64 equal sequences gives some of them five and most of them four: the step
    lasts as long as with 256, and merges more.
    """
    tiles = -(-lengths.astype(np.int64) // division.tile_tokens)
    if division.part_tiles or not tiles.any():
        return division
    longest = -(-tiles // np.maximum(division.part_counts(tiles), 1))
    return replace(division, part_tiles=int(longest.max()))


def _power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _floor_power_of_2(value: int) -> int:
    return 1 << (value.bit_length() - 1)
