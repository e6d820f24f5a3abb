"""Where a rank's memory goes, to the byte, in the order in which it is handed out.

Weights, workspace, graphs and activations are reserved first; KV pages get what is left. So nothing
that is allocated later can be missing from the account. Weights, workspace and pages are exact: the
allocators assert that they took what stands here. Graphs and activations belong to the framework's
allocator and are **estimates**, each with its reason beside it.

The share of the device that ``--gpu-memory-utilization`` leaves out is for what nobody of us
allocates: the driver's context, loaded code, library workspaces, fragmentation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.kv.layout import KVLayout
from minuet.ops.sampling.sizes import scratch_bytes
from minuet.planning.model import ModelFacts, Use
from minuet.planning.roofline import shard_count
from minuet.planning.shapes import ShapeSet

# Page 0 belongs to no request: the padded rows of a step read and write it.
DUMMY_PAGES = 1

# A captured graph keeps a node per kernel launch. Measured on one H200 (2026-11-29, torch 2.11,
# driver 580): 2.8 KB per elementwise node and 4.4 KB per matrix product, taken from the device in
# steps of 2 MiB. Other drivers have not been measured.
_NODE_BYTES = 5 * 2**10
_NODES_PER_LAYER = (
    16  # launches of one layer: write, select, attend, merge, products, norms, experts
)
_GRAPH_STEP_BYTES = 2 * 2**20
GRAPH_REASON = "estimate: 16 kernel nodes per layer of 5 KiB each, in steps of 2 MiB per graph"
ACTIVATION_REASON = (
    "estimate: every intermediate of one layer alive at once, two copies of the logits, the "
    "scratch of sampling, the inputs of steps with their page tables, and what libraries and the "
    "allocator take for themselves"
)

# Small segments that start-up takes and leaves free, for small tensors of sizes it has not met.
SPARE_BYTES = 8 * 2**20

# cuBLAS takes 32 MiB for each of two streams on sm90, and segments are used in part only. Measured
# on one H200 (2026-11-29, three slices of M3): 99, 112 and 129 MiB beyond everything else.
_LIBRARY_BYTES = 136 * 2**20 + SPARE_BYTES


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """One weight group on one rank.

    Attributes:
        name: the group.
        dtype: storage type.
        shards: ranks it is divided over; the others hold copies.
        bytes: on one rank.
    """

    name: str
    dtype: DType
    shards: int
    bytes: int


def weights_per_rank(facts: ModelFacts, compute: DType, ranks: int) -> tuple[WeightBytes, ...]:
    """Bytes of every weight group on one rank.

    Args:
        facts: the model.
        compute: type of the groups that follow ``--dtype``.
        ranks: tensor-parallel size; one that divides the model, so every quotient is exact.
    """
    rows = []
    for group in facts.weights:
        dtype = compute if group.dtype == "compute" else DType(group.dtype)
        shards = shard_count(group, facts, ranks)
        rows.append(
            WeightBytes(group.name, dtype, shards, -(-group.params // shards) * dtype.itemsize)
        )
    return tuple(rows)


def graph_bytes(facts: ModelFacts, num_graphs: int) -> int:
    """Memory of the captured graphs; an estimate, see :data:`GRAPH_REASON`."""
    nodes = len(facts.layer_kinds) * _NODES_PER_LAYER * _NODE_BYTES
    return num_graphs * -(-nodes // _GRAPH_STEP_BYTES) * _GRAPH_STEP_BYTES


def activation_bytes(
    facts: ModelFacts, shapes: ShapeSet, compute: DType, ranks: int, max_logprobs: int
) -> int:
    """Memory of a step's intermediates; an estimate, see :data:`ACTIVATION_REASON`.

    Every weight matrix has one side as wide as the residual stream; the other sides of a layer's
    matrices, which are what its intermediates are wide, sum to its visited weights over that width.
    To them come the residual, its norm, the two block outputs, and the outputs of the experts.
    Logits are there twice, as the model made them and where steps keep them; the copy that
    penalties change is part of :func:`minuet.ops.sampling.sizes.scratch_bytes`.
    """
    tokens = max(shape.num_tokens for shape in shapes.all)
    logit_rows = shapes.rungs[-1] * shapes.query_lens[-1]
    per_token = facts.experts.per_token if facts.experts else 0
    visited = 0
    for group in facts.weights:
        if group.use is Use.EVERY_STEP and group.name != "lm_head":
            visited += group.params // shard_count(group, facts, ranks)
        elif group.use is Use.PER_EXPERT and facts.experts:
            visited += group.params * per_token // facts.experts.count // ranks
    inner = -(-visited // (facts.hidden * len(facts.layer_kinds)))
    rows = inner + (4 + per_token) * facts.hidden
    logits = 2 * logit_rows * facts.vocab * DType.FP32.itemsize
    sampling = scratch_bytes(logit_rows, facts.vocab, min(max_logprobs, facts.vocab))
    return tokens * rows * compute.itemsize + logits + sampling + _LIBRARY_BYTES


def input_bytes(shapes: ShapeSet, max_seqs: int, max_model_len: int, page_size: int) -> int:
    """Inputs of prepared steps on the device, exactly: see :class:`minuet.engine.inputs.Inputs`.

    Decode and prefill steps each have token ids, positions, slots and places of drawn tokens, rows
    whose logits are wanted, and a page table that is wide enough for the longest request.

    Args:
        shapes: the closed set.
        max_seqs: requests of a step at most.
        max_model_len: longest request in tokens.
        page_size: tokens per page.
    """
    rows = shapes.rungs[-1] * shapes.query_lens[-1]
    table = max_seqs * -(-max_model_len // page_size) * 4
    tokens = rows, shapes.buckets[-1]
    return sum((4 * most + rows) * 8 + table for most in tokens)


def page_bytes(layouts: Iterable[KVLayout]) -> int:
    """Bytes of one page over all layers of a rank.

    Args:
        layouts: one per layer.
    """
    return sum(layout.page_bytes for layout in layouts)


class Ledger:
    """What is left of a rank's memory while it is handed out.

    Attributes:
        left: bytes nobody has taken; negative when too much was promised; None without a limit.
        taken: name to bytes, in order.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.left = budget_bytes
        self.taken: dict[str, int] = {}

    def take(self, name: str, size: int) -> None:
        """Reserve ``size`` bytes; asking is not refused, the caller looks at :attr:`left`.

        Raises:
            ContractError: a negative size, or a name used twice.
        """
        if size < 0 or name in self.taken:
            raise ContractError(f"ledger entry {name}", got=size, expected=">= 0, once")
        self.taken[name] = size
        if self.left is not None:
            self.left -= size


def pages_that_fit(left_bytes: int, bytes_per_page: int) -> int:
    """Whole pages in what is left; 0 if less than nothing is."""
    return max(0, left_bytes) // bytes_per_page


def pages_needed(max_model_len: int, page_size: int) -> int:
    """Pages of a pool in which one request of ``max_model_len`` tokens fits, page 0 included."""
    return -(-max_model_len // page_size) + DUMMY_PAGES


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of one rank. All sizes in bytes.

    Attributes:
        device_bytes: the device's memory; None where it is the host's and no limit is set.
        budget_bytes: the share of it that may be used.
        weights: by group.
        workspace_bytes: the one scratch allocation.
        graph_bytes: captured graphs, an estimate.
        activation_bytes: intermediates of a step, an estimate.
        page_bytes: one page, all layers.
        page_size: tokens per page.
        num_pages: pages of the pool, the dummy page included.
        max_model_len: longest request.
    """

    device_bytes: int | None
    budget_bytes: int | None
    weights: Sequence[WeightBytes]
    workspace_bytes: int
    graph_bytes: int
    activation_bytes: int
    page_bytes: int
    page_size: int
    num_pages: int
    max_model_len: int

    @property
    def weight_bytes(self) -> int:
        """All weights of the rank."""
        return sum(row.bytes for row in self.weights)

    @property
    def reserved_bytes(self) -> int:
        """Everything that is taken before KV pages are counted."""
        return self.weight_bytes + self.workspace_bytes + self.graph_bytes + self.activation_bytes

    @property
    def kv_bytes(self) -> int:
        """The pool of pages."""
        return self.num_pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """All of it; at most the budget."""
        return self.reserved_bytes + self.kv_bytes

    @property
    def unused_bytes(self) -> int | None:
        """What the budget has left: less than a page, unless the pool was given a size."""
        return None if self.budget_bytes is None else self.budget_bytes - self.used_bytes

    @property
    def token_bytes(self) -> int:
        """Cache of one token, all layers."""
        return self.page_bytes // self.page_size

    @property
    def num_tokens(self) -> int:
        """Tokens that requests can have in the cache."""
        return (self.num_pages - DUMMY_PAGES) * self.page_size

    @property
    def concurrent_requests(self) -> int:
        """Requests of the longest length that fit at the same time."""
        return (self.num_pages - DUMMY_PAGES) // -(-self.max_model_len // self.page_size)


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(size: float) -> str:
    """A size for people, in powers of 1024: ``1.5 GiB``."""
    unit = 0
    while abs(size) >= 1024 and unit < len(_BINARY) - 1:
        size /= 1024
        unit += 1
    return f"{size:.0f} {_BINARY[unit]}" if unit == 0 else f"{size:.4g} {_BINARY[unit]}"
