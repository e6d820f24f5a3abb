"""Bytes and operations of one step, and the time below which no machine can run it.

What is counted: every weight that the step reads (experts as far as they are visited), the KV
tokens and index keys that attention reads, two operations per weight and token, and four
(``q.k`` and ``p.v``) or two (index score) per channel and visited token. What is not: activations,
metadata, collectives, and the few bytes a step writes to the cache. A limit must leave out what a
cleverer engine could avoid, so all figures are those of an ideal engine.

All figures are **per rank**; with one rank they are the model's. Replicated data counts on every
rank: index keys, the router, the norms.

Weight formats are a table, so that a published configuration can be computed whether or not this
version loads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

from minuet.attention.contract import LayerKind
from minuet.config import Config
from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.kv.layout import KVLayout, LaneName
from minuet.planning.model import ModelFacts, Shard, Use, WeightGroup
from minuet.platform.arch import Arch

# Bytes per weight. The MX formats add one scale byte per 32 weights (OCP Microscaling 1.0).
WEIGHT_BYTES: Mapping[str, Fraction] = MappingProxyType(
    {
        "float32": Fraction(4),
        "bfloat16": Fraction(2),
        "float16": Fraction(2),
        "fp8": Fraction(1),
        "mxfp8": Fraction(33, 32),
        "mxfp4": Fraction(17, 32),
    }
)

_HEAD = "lm_head"  # the one group that a prefill step applies to few of its tokens


def shard_count(group: WeightGroup, facts: ModelFacts, ranks: int) -> int:
    """Over how many ranks a weight group is divided; the other ranks hold copies.

    Args:
        group: the weights.
        facts: the model, for its KV heads.
        ranks: tensor-parallel size.
    """
    if group.shard is Shard.REPLICATED:
        return 1
    return min(ranks, facts.num_kv_heads) if group.shard is Shard.KV_HEADS else ranks


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a configuration stores what a step reads.

    Attributes:
        kv_dtype: storage type of K and V; FP8 brings its scales.
        index_dtype: storage type of the index keys.
        weights: format of every weight group that ``overrides`` does not name; a key of
            :data:`WEIGHT_BYTES`.
        overrides: weight group to format. A group that is always ``float32`` stays so unless named.
        ranks: tensor-parallel size.

    Raises:
        ContractError: an unknown format.
    """

    kv_dtype: DType
    index_dtype: DType
    weights: str = "bfloat16"
    overrides: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in (self.weights, *self.overrides.values()):
            if name not in WEIGHT_BYTES:
                raise ContractError("weight format", got=name, expected=", ".join(WEIGHT_BYTES))

    def weight_bytes(self, group: WeightGroup) -> Fraction:
        """Bytes per weight of a group."""
        always = group.dtype if group.dtype != "compute" else self.weights
        return WEIGHT_BYTES[self.overrides.get(group.name, always)]


def storage_of(config: Config) -> Storage:
    """How a settled configuration stores what its steps read."""
    return Storage(
        kv_dtype=config.kv_cache_dtype,
        index_dtype=config.index_kv_cache_dtype,
        weights=config.dtype.value,
        ranks=config.tensor_parallel_size,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One thing a step reads and computes with.

    Attributes:
        name: a weight group, or ``kv dense``, ``kv sparse``, ``index keys``.
        bytes: read by one rank.
        flops: done by one rank; a multiply-add is two.
    """

    name: str
    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Limit:
    """The shortest possible time of a step on an arch.

    Attributes:
        seconds: the larger of the two times below.
        bandwidth_s: bytes over the arch's bandwidth.
        compute_s: operations over the arch's BF16 rate; None where the arch states none.
    """

    seconds: float
    bandwidth_s: float
    compute_s: float | None

    @property
    def bound_by(self) -> str:
        """``memory`` or ``compute``."""
        return "memory" if self.seconds == self.bandwidth_s else "compute"


@dataclass(frozen=True)
class Roofline:
    """Bytes and operations of one step on one rank.

    Attributes:
        step: the step in words.
        parts: what they are made of.
        distinct_experts: experts of one layer that the step reads; 0 without experts.
    """

    step: str
    parts: tuple[Part, ...]
    distinct_experts: float

    @property
    def bytes(self) -> float:
        """Read by one rank in the step."""
        return sum(part.bytes for part in self.parts)

    @property
    def flops(self) -> float:
        """Done by one rank in the step."""
        return sum(part.flops for part in self.parts)

    def part(self, name: str) -> Part:
        """One part by name.

        Raises:
            ContractError: the step has no such part.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise ContractError(
            "no such part", got=name, expected=", ".join(p.name for p in self.parts)
        )

    def limit(self, arch: Arch) -> Limit | None:
        """The shortest time of this step on ``arch``; None where the arch states no bandwidth."""
        if arch.bandwidth_bytes_per_s is None:
            return None
        bandwidth_s = self.bytes / arch.bandwidth_bytes_per_s
        rate = arch.bf16_flops_per_s
        compute_s = self.flops / rate if rate else None
        return Limit(max(bandwidth_s, compute_s or 0.0), bandwidth_s, compute_s)


def expected_distinct_experts(count: int, per_token: int, tokens: int) -> float:
    """Experts of a layer that at least one of ``tokens`` visits, if routing is uniform.

    ``count * (1 - (1 - per_token / count) ** tokens)``. Real routing is skewed, so this is an upper
    estimate; pass a measured number where there is one.
    """
    return count * (1.0 - (1.0 - per_token / count) ** tokens)


def decode(
    facts: ModelFacts,
    storage: Storage,
    *,
    batch: int,
    context: int,
    query_len: int = 1,
    distinct_experts: float | None = None,
) -> Roofline:
    """A decode step.

    Args:
        facts: the model.
        storage: formats and ranks.
        batch: requests in the step.
        context: tokens in the cache of each, this step's included.
        query_len: query tokens per request; above 1 it verifies drafts.
        distinct_experts: experts read per layer as measured; None expects uniform routing.

    Raises:
        ContractError: a non-positive size, or more query tokens than context.
    """
    _check(batch=batch, query_len=query_len, context=context - query_len + 1)
    tokens = batch * query_len
    experts = _distinct(facts, tokens, distinct_experts)
    reads = _Visits(facts, contexts=batch * context, rows=tokens)
    # a row at context c may attend to its own position and all before it
    reads.add_rows(range(context - query_len + 1, context + 1), batch)
    shared = min(context, query_len * _selected(facts, context))
    reads.sparse_read = batch * shared
    return _build(
        f"decode, {batch} x {query_len} tokens at context {context}",
        facts,
        storage,
        reads,
        head_rows=tokens,
        experts=experts,
    )


def prefill(
    facts: ModelFacts,
    storage: Storage,
    *,
    tokens: int,
    context_before: int = 0,
    requests: int = 1,
    distinct_experts: float | None = None,
) -> Roofline:
    """A step that reads ``tokens`` prompt tokens of each request, behind ``context_before`` others.

    The KV bytes are those of an engine that reads each token once however many queries attend to
    it; one logit row is computed per request.

    Args:
        facts: the model.
        storage: formats and ranks.
        tokens: prompt tokens of each request in the step.
        context_before: tokens of each that are in the cache already.
        requests: requests in the step, none of which share a context.
        distinct_experts: experts read per layer as measured; None expects uniform routing.

    Raises:
        ContractError: a non-positive number of tokens or requests, or a negative context.
    """
    _check(tokens=tokens, requests=requests, context_before=context_before + 1)
    rows, context = requests * tokens, context_before + tokens
    experts = _distinct(facts, rows, distinct_experts)
    reads = _Visits(facts, contexts=requests * context, rows=rows)
    reads.add_rows(range(context_before + 1, context + 1), requests)
    reads.sparse_read = requests * min(context, tokens * _selected(facts, context))
    several = f"{requests} x " if requests > 1 else ""
    return _build(
        f"prefill, {several}{tokens} tokens behind {context_before}",
        facts,
        storage,
        reads,
        head_rows=requests,
        experts=experts,
    )


class _Visits:
    """Tokens that a step's rows read (once each) and visit (per row), per layer."""

    def __init__(self, facts: ModelFacts, *, contexts: int, rows: int) -> None:
        self.facts, self.contexts, self.rows = facts, contexts, rows
        self.dense_visits = self.sparse_visits = self.sparse_read = 0

    def add_rows(self, lengths: range, times: int) -> None:
        """Count rows whose visible contexts are ``lengths``, each ``times`` over."""
        # sums of arithmetic progressions: a prompt of a million tokens must not be a loop
        self.dense_visits += times * _sum(lengths)
        if self.facts.index:
            limit = self.facts.index.top_blocks * self.facts.index.block
            short = range(lengths.start, min(lengths.stop, limit + 1))
            capped = len(lengths) - len(short)
            self.sparse_visits += times * (_sum(short) + capped * limit)


def _sum(lengths: range) -> int:
    return len(lengths) * (lengths.start + lengths.stop - 1) // 2 if len(lengths) else 0


def _selected(facts: ModelFacts, context: int) -> int:
    """Tokens one row of a sparse layer attends to."""
    return min(context, facts.index.top_blocks * facts.index.block) if facts.index else context


def _distinct(facts: ModelFacts, tokens: int, measured: float | None) -> float:
    if facts.experts is None:
        return 0.0
    if measured is not None:
        return measured
    return expected_distinct_experts(facts.experts.count, facts.experts.per_token, tokens)


def _build(
    step: str,
    facts: ModelFacts,
    storage: Storage,
    reads: _Visits,
    *,
    head_rows: int,
    experts: float,
) -> Roofline:
    parts = [
        _weight_part(group, facts, storage, reads.rows, head_rows, experts)
        for group in facts.weights
        if group.use is not Use.LOOKUP
    ]
    parts += _attention_parts(facts, storage, reads)
    return Roofline(step, tuple(parts), experts)


def _weight_part(
    group: WeightGroup,
    facts: ModelFacts,
    storage: Storage,
    rows: int,
    head_rows: int,
    experts: float,
) -> Part:
    shards = shard_count(group, facts, storage.ranks)
    read, used = float(group.params), float(group.params)
    if group.use is Use.PER_EXPERT and facts.experts:
        read *= experts / facts.experts.count
        used *= facts.experts.per_token / facts.experts.count
    tokens = head_rows if group.name == _HEAD else rows
    return Part(
        group.name, read * float(storage.weight_bytes(group)) / shards, 2.0 * used * tokens / shards
    )


def _attention_parts(facts: ModelFacts, storage: Storage, reads: _Visits) -> list[Part]:
    ranks, index = storage.ranks, facts.index
    heads = max(1, facts.num_kv_heads // ranks)
    # bytes per token do not depend on the page, so any page does for the arithmetic
    layout = KVLayout(
        page_size=index.block if index else 1,
        num_kv_heads=heads,
        head_dim=facts.head_dim,
        kv_dtype=storage.kv_dtype,
        index_dim=index.dim if index else 0,
        index_dtype=storage.index_dtype,
    )
    index_bytes = layout.lanes[LaneName.INDEX_K].page_bytes // layout.page_size if index else 0
    kv_bytes = layout.token_bytes - index_bytes
    dense, sparse = facts.count(LayerKind.DENSE), facts.count(LayerKind.SPARSE)
    attend_flops = 4.0 * facts.num_q_heads * facts.head_dim / ranks
    parts = [
        Part(
            "kv dense", dense * reads.contexts * kv_bytes, dense * reads.dense_visits * attend_flops
        )
    ]
    if index:
        score_flops = 2.0 * heads * index.dim
        parts += [
            Part(
                "kv sparse",
                sparse * reads.sparse_read * kv_bytes,
                sparse * reads.sparse_visits * attend_flops,
            ),
            Part(
                "index keys",
                sparse * reads.contexts * index_bytes,
                sparse * reads.dense_visits * score_flops,
            ),
        ]
    return parts


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ContractError(f"roofline: {name}", got=value, expected=">= 1")
