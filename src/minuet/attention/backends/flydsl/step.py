"""What a step's layers share: the plan in device memory, and scratch, both of a fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from minuet.attention.backends.flydsl.calls import Arguments, Call, Runner
from minuet.attention.backends.flydsl.signatures import Key
from minuet.attention.backends.flydsl.spec import SPLIT
from minuet.attention.batch import AttentionBatch
from minuet.attention.plan import DecodePlan, PlanShape
from minuet.errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of the largest step that a planner plans.

    Attributes:
        num_kv_heads: KV heads on this rank.
        max_seqs: sequences.
        max_tokens: query tokens.
        max_length: longest context in tokens.
        query_len: query tokens per sequence of a decode step; 0 for ragged steps (prefill), which
            run row by row.
    """

    num_kv_heads: int
    max_seqs: int
    max_tokens: int
    max_length: int
    query_len: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What every layer of the step shares.

    Attributes:
        planner: whose memory it uses.
        page_table: [S, max_pages] int32, device.
        positions: [T] int64, device.
        sequences: [T] int32, device; sequence of each query token.
        num_seqs: S.
        num_tokens: T.
    """

    planner: "Planner"
    page_table: Tensor
    positions: Tensor
    sequences: Tensor
    num_seqs: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class Planner:
    """Plan memory and scratch of one step shape.

    Attributes:
        shape: sizes.
        runner: who runs.
        device: where the memory is.
        scratch: workspace slices by name, as uint8; of a name that is missing a tensor is
            allocated on first use and kept.
    """

    shape: StepShape
    runner: Runner
    device: torch.device
    scratch: dict[str, Tensor] = field(default_factory=dict)
    split: PlanShape | None = field(init=False, default=None)
    _tables: Tensor = field(init=False)
    _host: DecodePlan | None = field(init=False, default=None)
    _given: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        shape, self._given = self.shape, frozenset(self.scratch)
        self._tables = torch.empty(0, dtype=torch.int32)
        if shape.query_len:
            units = self.runner.compute_units
            self.split = PlanShape(
                max_seqs=shape.max_seqs,
                max_length=shape.max_length,
                tile_tokens=SPLIT.tile_tokens,
                max_parts=units,
                budget=-(-units * SPLIT.parts_per_unit // shape.num_kv_heads),
            )
            self._host = DecodePlan.over(self.split, np.zeros(self.split.size, np.int32))
            self._tables = torch.zeros(self.split.size, dtype=torch.int32, device=self.device)

    @property
    def row_parts(self) -> int:
        """Parts of a sparse row: few rows are divided, so that they fill the machine."""
        wanted = self.runner.compute_units * SPLIT.parts_per_unit
        rows = self.shape.max_tokens * self.shape.num_kv_heads
        return max(1, min(SPLIT.row_max_parts, -(-wanted // rows))) if self.shape.query_len else 1

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the plan's device memory: work, rows, lengths."""
        assert self.split is not None
        work, rows = self.split.capacity * 4, self.split.max_seqs * 2
        return (
            self._tables[:work].view(-1, 4),
            self._tables[work : work + rows].view(-1, 2),
            self._tables[work + rows :],
        )

    def plan(self, batch: AttentionBatch) -> Plan:
        """Plan a step from its host lengths.

        Raises:
            ContractError: a step larger than the shape, or ragged where the shape is not.
        """
        shape = self.shape
        if batch.num_tokens > shape.max_tokens or batch.num_seqs > shape.max_seqs:
            raise ContractError(
                "size of a step",
                got=(batch.num_seqs, batch.num_tokens),
                expected=f"<= {(shape.max_seqs, shape.max_tokens)}",
            )
        if shape.query_len and any(n != shape.query_len for n in batch.query_lens):
            raise ContractError(
                "query_lens", got=batch.query_lens, expected=f"{shape.query_len} each"
            )
        if self._host is not None:
            self._host.refresh(batch.seq_lens)
            self._tables.copy_(torch.from_numpy(self._host.buffer))
        lens = torch.tensor(batch.query_lens, dtype=torch.int64)
        of_token = torch.arange(batch.num_seqs, dtype=torch.int32).repeat_interleave(lens)
        return Plan(
            self,
            batch.page_table,
            batch.positions,
            of_token.to(self.device),
            batch.num_seqs,
            batch.num_tokens,
        )

    def refresh_on_device(self, lengths: Tensor, num_seqs: int) -> None:
        """Rewrite the plan's tables from lengths on the device; capturable, in place.

        Args:
            lengths: [>= num_seqs] int32, device.
            num_seqs: sequences; at most the shape's, the rest is cleared.
        """
        assert self.split is not None
        work, rows, lengths_out = self.tables()
        split = self.split
        arguments: Arguments = {
            "work": work,
            "rows": rows,
            "lengths_out": lengths_out,
            "lengths": lengths,
            "num_seqs": num_seqs,
            "max_seqs": split.max_seqs,
            "capacity": split.capacity,
            "budget": split.budget,
            "max_parts": split.max_parts,
            "part_tiles": split.part_tiles,
            "tile_tokens": split.tile_tokens,
        }
        self.runner([Call(Key.of("plan", self.runner.arch), arguments, (1, 1, 1))])

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A scratch tensor from its slice.

        Raises:
            ContractError: the slice that start-up gave is too small.
        """
        size = prod(shape) * dtype.itemsize
        held = self.scratch.get(name)
        if held is None or held.numel() < size:
            if name in self._given:
                raise ContractError(
                    f"workspace slice {name}",
                    got=f"{0 if held is None else held.numel()} bytes",
                    expected=f">= {size} bytes",
                )
            held = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.scratch[name] = held
        return held[:size].view(dtype).view(*shape)
