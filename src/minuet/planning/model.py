"""What planning knows of a model: sizes and how weights are read. No model's name or constant.

A model's ``spec.py`` fills :class:`ModelFacts` from its ``config.json``.
"""

from dataclasses import dataclass
from enum import Enum

from minuet.attention.contract import LayerKind


class Use(Enum):
    """How a decode step reads a weight group."""

    EVERY_STEP = "every step"  # read once per step, whatever the batch
    PER_EXPERT = "per expert"  # read once per distinct expert that a token of the step chose
    LOOKUP = "lookup"  # one row per token: not counted


class Shard(Enum):
    """How a weight group is divided over tensor-parallel ranks."""

    SPLIT = "split"
    KV_HEADS = "kv heads"  # split, but no further than the number of KV heads
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights that share a storage format, a use and a sharding.

    Attributes:
        name: ``attention``, ``experts``, ... - the key of a storage format table.
        params: parameters over all layers, all ranks.
        dtype: ``compute`` (follows ``--dtype``) or ``float32`` (always; a router).
        use: how a decode step reads it.
        shard: how tensor parallelism divides it.
    """

    name: str
    params: int
    dtype: str
    use: Use
    shard: Shard


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """The indexer of the sparse layers.

    Attributes:
        heads: index query heads of the whole model; equals the KV heads.
        dim: channels of an index vector.
        block: tokens per block; the page.
        top_blocks: blocks a query attends to, forced ones included.
        init_blocks: leading blocks always attended to.
        local_blocks: blocks up to and including the query's own that are always attended to.
    """

    heads: int
    dim: int
    block: int
    top_blocks: int
    init_blocks: int
    local_blocks: int


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The routed experts.

    Attributes:
        count: experts per layer.
        per_token: experts a token visits.
        layers: layers that have experts.
        params: parameters of one expert.
    """

    count: int
    per_token: int
    layers: int
    params: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as planning sees it.

    Attributes:
        name: for people.
        architecture: the string of ``config.json``, key of the model registry.
        dtype: type of the checkpoint, ``bfloat16`` or ``float32``.
        layer_kinds: one entry per layer.
        hidden: width of the residual stream.
        vocab: rows of the embedding table.
        max_positions: longest context the model was made for.
        num_q_heads: query heads of the whole model.
        num_kv_heads: KV heads of the whole model.
        head_dim: channels per head.
        index: the indexer; None without sparse layers.
        experts: the routed experts; None without.
        weights: every parameter, grouped; sums to the parameter count.
    """

    name: str
    architecture: str
    dtype: str
    layer_kinds: tuple[LayerKind, ...]
    hidden: int
    vocab: int
    max_positions: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    index: IndexFacts | None
    experts: ExpertFacts | None
    weights: tuple[WeightGroup, ...]

    @property
    def params(self) -> int:
        """All parameters."""
        return sum(group.params for group in self.weights)

    def count(self, kind: LayerKind) -> int:
        """Layers of one kind."""
        return sum(k is kind for k in self.layer_kinds)
