"""Models and options of the planning tests; the environment of the test run is not looked at."""

from dataclasses import replace
from functools import cache

from minuet.attention.contract import LayerKind
from minuet.config import Config
from minuet.docs import defaults
from minuet.models.registry import find
from minuet.planning.execution import ExecutionPlan, plan_or_refuse
from minuet.planning.model import (
    ExpertFacts,
    IndexFacts,
    ModelFacts,
    Shard,
    Use,
    WeightGroup,
)
from minuet.planning.resolve import resolve
from minuet.platform.arch import get

PLENTY = 2**50  # bytes; a device on which memory refuses nothing


@cache
def preset() -> ModelFacts:
    return find("minimax-m3").facts


@cache
def tiny() -> ModelFacts:
    """One dense and one sparse layer, 4 query heads over 2 KV heads; fits anywhere."""
    experts = ExpertFacts(count=8, per_token=2, layers=1, params=3 * 64 * 32)
    groups = (
        WeightGroup("embedding", 256 * 64, "compute", Use.LOOKUP, Shard.SPLIT),
        WeightGroup("lm_head", 256 * 64, "compute", Use.EVERY_STEP, Shard.SPLIT),
        WeightGroup("attention_qo", 2 * 2 * 64 * 4 * 64, "compute", Use.EVERY_STEP, Shard.SPLIT),
        WeightGroup("attention_kv", 2 * 2 * 64 * 2 * 64, "compute", Use.EVERY_STEP, Shard.KV_HEADS),
        WeightGroup("router", 8 * 65, "float32", Use.EVERY_STEP, Shard.REPLICATED),
        WeightGroup("experts", 8 * 3 * 64 * 32, "compute", Use.PER_EXPERT, Shard.SPLIT),
    )
    return ModelFacts(
        name="tiny",
        architecture="Tiny",
        dtype="bfloat16",
        layer_kinds=(LayerKind.DENSE, LayerKind.SPARSE),
        hidden=64,
        vocab=256,
        max_positions=4096,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        index=IndexFacts(heads=2, dim=64, block=128, top_blocks=4, init_blocks=0, local_blocks=1),
        experts=experts,
        weights=groups,
    )


def config(arch: str, facts: ModelFacts | None = None, **asked: object) -> Config:
    """The resolved configuration; a refusal is an error of the test."""
    return resolve(defaults(**asked), facts or preset(), get(arch))


def plan(
    arch: str, facts: ModelFacts | None = None, memory: int | None = PLENTY, **asked: object
) -> ExecutionPlan:
    """The plan; a refusal is an error of the test."""
    settled, refusals = plan_or_refuse(
        defaults(**asked), facts or preset(), get(arch), device_bytes=memory
    )
    assert settled is not None, "\n".join(map(str, refusals))
    return settled


def refusals(
    arch: str, facts: ModelFacts | None = None, memory: int | None = PLENTY, **asked: object
):
    """The refusals; a plan is an error of the test."""
    settled, found = plan_or_refuse(
        defaults(**asked), facts or preset(), get(arch), device_bytes=memory
    )
    assert settled is None
    return found


def with_shard(facts: ModelFacts, name: str, shard: Shard) -> ModelFacts:
    """The same model with one weight group divided differently."""
    groups = tuple(replace(g, shard=shard) if g.name == name else g for g in facts.weights)
    return replace(facts, weights=groups)
