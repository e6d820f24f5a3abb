"""What every layer of a step shares: tables on the device, refreshed in place, and scratch memory.

A :class:`Planner` is made once per prepared step shape, from sizes; :meth:`Planner.plan` rewrites
its tables for a step without changing an address, so a captured graph stays valid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minuet.attention.backends.triton.config import Target
from minuet.attention.backends.triton.spec import SPLIT
from minuet.attention.batch import AttentionBatch
from minuet.attention.plan import DecodePlan, Int32Array, PlanShape
from minuet.errors import ContractError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a prepared step.

    Attributes:
        page_size: tokens per page.
        num_kv_heads: KV heads of this rank.
        group: query heads per KV head.
        max_seqs: sequences of the padded batch.
        max_tokens: query tokens of the padded batch.
        max_length: longest context in tokens.
        query_len: query tokens of every sequence of a decode step; 0 for ragged (prefill) steps.
        compute_units: of the device.
        score_bytes: budget of the block-score buffer.
        kv_fp8: K and V are FP8.
        batch_invariant: divide dense decode by a request's own length only.
    """

    page_size: int
    num_kv_heads: int
    group: int
    max_seqs: int
    max_tokens: int
    max_length: int
    query_len: int
    compute_units: int
    score_bytes: int = SCORE_BYTES
    kv_fp8: bool = True
    batch_invariant: bool = False

    @property
    def max_blocks(self) -> int:
        """Pages of the longest context."""
        return -(-self.max_length // self.page_size)

    @property
    def score_chunk(self) -> int:
        """Query tokens whose scores fit the budget; at least 1."""
        row_bytes = self.num_kv_heads * self.max_blocks * 4
        return max(1, min(self.score_bytes // row_bytes, self.max_tokens))

    @property
    def scores_at_once(self) -> bool:
        """Whether a decode step's scores fit the budget: ``attend`` then chooses from them."""
        return self.query_len > 0 and self.score_chunk >= self.max_tokens

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

    Attributes:
        target: launch numbers.
        shape: sizes of the planner.
        num_tokens: query tokens of the step.
        num_seqs: sequences of the step.
        page_table: [S, pages].
        positions: [T] int64.
        tables: by name: ``lengths`` [max_seqs]; decode: ``work`` [capacity, 4],
            ``rows`` [max_seqs, 2], ``score_work`` [capacity, 4]; by query tiles: ``tiles`` [n, 4],
            ``score_tiles`` [n, 4], ``token_sequence`` [max_tokens].
        num_tiles: query tiles in use.
        tile_tokens: query tokens of a tile at most.
        score_tile_tokens: query tokens of a score tile at most.
        score_chunks: (first tile, end tile, first token, end token) of each score launch.
        slots: partial results per KV head of dense decode.
        scratch: partial results, scores, lists.
    """

    target: Target
    shape: StepShape
    num_tokens: int
    num_seqs: int
    page_table: Tensor
    positions: Tensor
    tables: Mapping[str, Tensor]
    num_tiles: int
    tile_tokens: int
    score_tile_tokens: int
    score_chunks: tuple[tuple[int, int, int, int], ...]
    slots: int
    scratch: Scratch

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has ``shape.query_len`` query tokens."""
        return self.shape.query_len > 0

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


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Query tokens cut into tiles: records (sequence, first token, tokens, position)."""

    records: Int32Array
    chunks: tuple[tuple[int, int, int, int], ...] = field(default=())


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
        heads_pad = _power_of_2(shape.num_kv_heads)
        self._score_tile_tokens = min(
            max(1, target.score_vectors // heads_pad), _floor_power_of_2(shape.score_chunk)
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
        else:
            self._place("lengths", shape.max_seqs, 1)
        if not shape.scores_at_once:
            tiles = shape.max_tokens // self._tile_tokens + shape.max_seqs
            self._place("tiles", tiles * _ITEM, _ITEM)
            # a chunk of scores may cut a tile in two
            self._score_tiles_most = (
                shape.max_tokens // self._score_tile_tokens
                + shape.max_seqs
                + -(-shape.max_tokens // shape.score_chunk)
            )
            self._place("score_tiles", self._score_tiles_most * _ITEM, _ITEM)
            self._place("token_sequence", shape.max_tokens, 1)
        pinned = device.type == "cuda"
        # two host copies: one is filled while the other may still be on its way
        self._host = [
            torch.zeros(self._size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._copied: list[Any] = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._tables = torch.zeros(self._size, dtype=torch.int32, device=device)
        self._views = {
            name: self._tables[first:end].view(-1, fields)
            if fields > 1
            else self._tables[first:end]
            for name, (first, end, fields) in self._places.items()
        }
        self._turn = 0

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
        if copied is not None:
            copied.synchronize()
        num_tiles, chunks = self._fill(host.numpy(), batch)
        self._tables.copy_(host, non_blocking=True)
        if copied is not None:
            copied.record()
        return Plan(
            target=self.target,
            shape=self.shape,
            num_tokens=batch.num_tokens,
            num_seqs=batch.num_seqs,
            page_table=batch.page_table,
            positions=batch.positions,
            tables=self._views,
            num_tiles=num_tiles,
            tile_tokens=self._tile_tokens,
            score_tile_tokens=self._score_tile_tokens,
            score_chunks=chunks,
            slots=self._dense.slots if self.shape.query_len else 0,
            scratch=self._scratch,
        )

    def _place(self, name: str, size: int, fields: int) -> int:
        first = self._size
        self._places[name] = (first, first + size, fields)
        self._size += size
        return first

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

    def _fill(
        self, host: Int32Array, batch: AttentionBatch
    ) -> tuple[int, tuple[tuple[int, int, int, int], ...]]:
        shape, lengths = self.shape, np.asarray(batch.seq_lens, np.int64)
        if shape.query_len:
            self._fill_decode(host, lengths)
        else:
            first, end, _ = self._places["lengths"]
            host[first : first + len(lengths)] = lengths
            host[first + len(lengths) : end] = 0
        if shape.scores_at_once:
            return 0, ()
        tiles = _query_tiles(batch, self._tile_tokens, batch.num_tokens)
        work = (tiles.records[:, 3] + tiles.records[:, 2]) * -1
        self._put(host, "tiles", tiles.records[np.argsort(work, kind="stable")])
        score = _query_tiles(batch, self._score_tile_tokens, shape.score_chunk)
        self._put(host, "score_tiles", score.records)
        sequence = np.repeat(np.arange(batch.num_seqs), batch.query_lens)
        self._put(host, "token_sequence", sequence)
        return len(tiles.records), score.chunks

    def _fill_decode(self, host: Int32Array, lengths: np.ndarray) -> None:
        """Parts of dense attention and of scoring."""
        shape, target = self.shape, self.target
        per_unit = target.parts_per_unit_fp8 if shape.kv_fp8 else target.parts_per_unit
        dense = shape.split(SPLIT.tile_tokens, min(per_unit, SPLIT.parts_per_unit))
        for name, whole, division in (
            ("work", self._dense, dense),
            ("score_work", self._score, self._score),
        ):
            first = self._places[name][0]
            plan = DecodePlan.over(whole, host[first : first + whole.size])
            replace(plan, shape=_no_finer_than_useful(division, lengths)).refresh(lengths)

    def _put(self, host: Int32Array, name: str, values: np.ndarray) -> None:
        first, end, _ = self._places[name]
        flat = values.reshape(-1)
        assert len(flat) <= end - first, name
        host[first : first + len(flat)] = flat


def _no_finer_than_useful(division: PlanShape, lengths: np.ndarray) -> PlanShape:
    """A smaller budget of parts where it leaves the longest part as short.

    Dealing 264 parts to 64 equal sequences gives some of them five and most of them four: the step
    lasts as long as with 256, and merges more.
    """
    tiles = -(-lengths.astype(np.int64) // division.tile_tokens)
    alive = int(np.count_nonzero(tiles))
    even = division.budget - division.budget % alive if alive else 0
    if division.part_tiles or even in (0, division.budget):
        return division
    fewer = replace(division, budget=even)
    return fewer if _longest_part(fewer, tiles) <= _longest_part(division, tiles) else division


def _longest_part(division: PlanShape, tiles: np.ndarray) -> int:
    return int((-(-tiles // np.maximum(division.part_counts(tiles), 1))).max())


def _query_tiles(batch: AttentionBatch, tile_tokens: int, chunk_tokens: int) -> _Tiles:
    """Cut a step's query tokens into tiles; no tile crosses a sequence or a chunk of tokens."""
    records: list[tuple[int, int, int, int]] = []
    chunks: list[tuple[int, int, int, int]] = []
    token = chunk_tile = chunk_token = 0
    for sequence, (query_len, length) in enumerate(
        zip(batch.query_lens, batch.seq_lens, strict=True)
    ):
        position, left = length - query_len, query_len
        while left:
            count = min(tile_tokens, left, chunk_token + chunk_tokens - token)
            records.append((sequence, token, count, position))
            token, position, left = token + count, position + count, left - count
            if token - chunk_token == chunk_tokens:
                chunks.append((chunk_tile, len(records), chunk_token, token))
                chunk_tile, chunk_token = len(records), token
    if token > chunk_token:
        chunks.append((chunk_tile, len(records), chunk_token, token))
    return _Tiles(np.array(records, np.int32).reshape(-1, _ITEM), tuple(chunks))


def _power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _floor_power_of_2(value: int) -> int:
    return 1 << (value.bit_length() - 1)
