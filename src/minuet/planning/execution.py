"""Config x model x arch -> :class:`ExecutionPlan`, or every refusal at once. No torch, no device.

The plan is what the engine then does, not a description of it: the kernels it loads, the one
scratch allocation and the slices in it, the graphs it captures, the pages it allocates. What is
reserved comes first and KV pages get what is left, so nothing can be missing from the account.
Nothing is refused one reason at a time; :mod:`minuet.planning.settling` does the work.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from minuet.attention.backends import PREFERENCE, PREPARED
from minuet.attention.capability import missing_artefacts
from minuet.attention.contract import LayerKind, Op, Phase
from minuet.attention.dispatch import Choice
from minuet.attention.plan import Split
from minuet.attention.workspace import WorkspaceLayout
from minuet.config import Config, Options, Source
from minuet.errors import Refusal, RefusedError
from minuet.kv.layout import Form, KVLayout
from minuet.ops.triton import spec as triton_ops
from minuet.planning.kernels import PLAIN, Call, Features
from minuet.planning.memory import DUMMY_PAGES, MemoryPlan, human_bytes, pages_that_fit
from minuet.planning.model import ModelFacts
from minuet.planning.resolve import resolve_or_refuse
from minuet.planning.settling import Settled, Settling
from minuet.planning.shapes import ShapeSet, StepShape
from minuet.platform.arch import Arch
from minuet.settings import BY_NAME

RUNNABLE_RANKS = 1  # there are no collectives in this version; plans are made for any number


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One prepared step shape.

    Attributes:
        shape: the shape.
        workspace_bytes: scratch it uses, the block scores included.
        score_bytes: scratch for block scores, bounded by ``--index-score-memory``.
        query_chunk: query tokens that a layer selects for and attends at once.
        graph: whether a graph is captured for it.
        splits: how attention is divided over workers, per layer kind.
    """

    shape: StepShape
    workspace_bytes: int
    score_bytes: int
    query_chunk: int
    graph: bool
    splits: Mapping[LayerKind, Split | None]


@dataclass(frozen=True)
class ExecutionPlan:
    """All that will run, for one rank. Every rank's plan is the same.

    Attributes:
        config: the configuration, now with pages and, where it was ``auto``, ``max_model_len``.
        facts: the model.
        arch: what it was made for.
        shapes: the closed set of step shapes.
        form: arrangement of the pages.
        layouts: cache layout per layer kind.
        choices: kernel per call.
        steps: one per shape, in the order of ``shapes.all``.
        workspace: places of the slices; keys are shapes.
        memory: the account.
    """

    config: Config
    facts: ModelFacts
    arch: Arch
    shapes: ShapeSet
    form: Form
    layouts: Mapping[LayerKind, KVLayout]
    choices: Mapping[Call, Choice]
    steps: tuple[StepPlan, ...]
    workspace: WorkspaceLayout
    memory: MemoryPlan

    def choice(self, kind: LayerKind, op: Op, phase: Phase, query_len: int = 1) -> Choice:
        """The kernel of one call; a KeyError is a bug of the caller."""
        return self.choices[Call(kind, op, phase, query_len)]

    @cached_property
    def step_of(self) -> Mapping[StepShape, StepPlan]:
        """Step plans by shape."""
        return MappingProxyType({step.shape: step for step in self.steps})

    @property
    def backend(self) -> str:
        """The one backend whose kernels were chosen."""
        names = {choice.kernel.backend for choice in self.choices.values() if choice.kernel}
        (name,) = names
        return name

    @property
    def runnable(self) -> bool:
        """Whether this version contains every chosen kernel; :meth:`obstacles` knows of more."""
        return all(choice.runnable for choice in self.choices.values())

    @property
    def graphs(self) -> tuple[StepShape, ...]:
        """Shapes for which a graph is captured."""
        return tuple(step.shape for step in self.steps if step.graph)

    def layer_layouts(self) -> tuple[KVLayout, ...]:
        """Cache layout of every layer, in order: what the pool is allocated from."""
        return tuple(self.layouts[kind] for kind in self.facts.layer_kinds)

    def obstacles(self) -> tuple[Refusal, ...]:
        """Why a plan that holds cannot run here: what this version or installation lacks."""
        found = [refusal for choice in self.choices.values() for refusal in choice.against()]
        for choice in self.choices.values():
            if choice.kernel and choice.runnable:
                found += missing_artefacts(choice.kernel)
        others = (b for b in PREFERENCE[self.arch.name] if b != self.backend)
        backend = next((b for b in others if self._runs_with(b)), "") if found else ""
        flag, remedy = "--attention-backend", f"use --attention-backend {backend}"
        kernels = (
            replace(r, remedy=remedy, flag=flag, value=backend) if backend and not r.remedy else r
            for r in dict.fromkeys(found)
        )
        return (
            *kernels,
            *self._operations(),
            *self._too_many_ranks(),
            *self._graphs_to_capture(),
        )

    def _operations(self) -> tuple[Refusal, ...]:
        """What the operations outside attention do not cover; plain torch covers everything."""
        if self.arch.ops != triton_ops.NAME:
            return ()
        experts = self.facts.experts
        return triton_ops.covers(
            self.config.dtype,
            self.facts.hidden,
            experts.count if experts else 0,
            experts.per_token if experts else 0,
        )

    def _too_many_ranks(self) -> tuple[Refusal, ...]:
        ranks = self.config.tensor_parallel_size
        if ranks <= RUNNABLE_RANKS:
            return ()
        flag, value = BY_NAME["tensor_parallel_size"].flag, str(RUNNABLE_RANKS)
        return (
            Refusal(
                "engine",
                "tensor_parallel_size",
                f"{ranks} ranks",
                "1: this version runs one rank, more can only be planned for",
                f"use {flag} {value}",
                flag,
                value,
            ),
        )

    @property
    def prepared(self) -> bool:
        """Whether steps run in prepared shapes: padded, over memory taken at start-up."""
        return self.arch.is_gpu and self.backend in PREPARED

    def _graphs_to_capture(self) -> tuple[Refusal, ...]:
        """Steps of some backends cannot be recorded in this version."""
        if not self.graphs or self.prepared:
            return ()
        flag = BY_NAME["enforce_eager"].flag
        return (
            Refusal(
                self.backend,
                "enforce_eager",
                f"{len(self.graphs)} graphs to capture",
                "on: this version runs steps of this backend without graphs",
                f"use {flag}",
                flag,
                "True",
            ),
        )

    def _runs_with(self, backend: str) -> bool:
        asked = replace(_reopened(self.config, self.facts), attention_backend=backend)
        plan, _ = settle_or_refuse(
            asked, self.facts, self.arch, device_bytes=self.memory.device_bytes
        )
        return plan is not None and plan.runnable

    def _too_large_for(self, host_bytes: int) -> tuple[Refusal, ...]:
        """On a CPU the plan has no budget of its own, but the machine has an end."""
        memory = self.memory
        if memory.weight_bytes + memory.kv_bytes <= host_bytes:
            return ()
        flag, left = BY_NAME["kv_cache_memory"].flag, host_bytes - memory.weight_bytes
        fits = pages_that_fit(left, memory.page_bytes) > DUMMY_PAGES
        return (
            Refusal(
                "memory",
                "host memory",
                f"weights {human_bytes(memory.weight_bytes)}, KV {human_bytes(memory.kv_bytes)}",
                f"{human_bytes(host_bytes)}, all of this machine",
                f"use {flag} {left}" if fits else "",
                flag if fits else "",
                str(left) if fits else "",
            ),
        )

    def require_runnable(self, host_bytes: int | None = None) -> None:
        """Refuse what is not in this version, not installed, or larger than the host.

        Args:
            host_bytes: memory of the machine whose own memory it runs in; None does not ask.

        Raises:
            RefusedError: carries every obstacle; field ``implementation``, ``installation``,
                ``tensor_parallel_size`` or ``host memory``.
        """
        obstacles = self.obstacles()
        if host_bytes is not None:
            obstacles += self._too_large_for(host_bytes)
        if obstacles:
            raise RefusedError(
                f"{self.facts.name} is planned on {self.arch.name}, but cannot run here", obstacles
            )


def plan_for(
    options: Options, facts: ModelFacts, arch: Arch, *, device_bytes: int | None = None
) -> ExecutionPlan:
    """Resolve and settle: what ``serve``, ``generate`` and ``explain`` call.

    Args:
        options: what was asked for.
        facts: the model.
        arch: what to plan for.
        device_bytes: memory of the device at hand; None takes the arch's.

    Raises:
        RefusedError: carries every refusal, those of settings and those of kernels and memory.
    """
    plan, refusals = plan_or_refuse(options, facts, arch, device_bytes=device_bytes)
    if plan is None:
        raise RefusedError(f"{facts.name} cannot be served on {arch.name} as asked", refusals)
    return plan


def plan_or_refuse(
    options: Options,
    facts: ModelFacts,
    arch: Arch,
    *,
    device_bytes: int | None = None,
    features: Features = PLAIN,
) -> tuple[ExecutionPlan | None, tuple[Refusal, ...]]:
    """As :func:`plan_for`, but the refusals are returned; exactly one of the two is empty.

    If settings are refused, kernels and memory are still judged, with the refused settings replaced
    by what their remedies say: one run shows all there is to change.

    Args:
        options: what was asked for.
        facts: the model.
        arch: what to plan for.
        device_bytes: memory of the device at hand; None takes the arch's.
        features: what the model's attention asks for beyond sizes.
    """
    config, refusals = resolve_or_refuse(options, facts, arch)
    if config:
        return settle_or_refuse(config, facts, arch, device_bytes=device_bytes, features=features)
    mended = dict(options.values)
    for refusal in refusals:
        mended[refusal.field] = BY_NAME[refusal.field].checked(refusal.value)
    config, more = resolve_or_refuse(Options(mended, options.sources), facts, arch)
    if config:
        _, more = settle_or_refuse(
            config, facts, arch, device_bytes=device_bytes, features=features
        )
    return None, (*refusals, *(r for r in more if r not in refusals))


def settle(
    config: Config, facts: ModelFacts, arch: Arch, *, device_bytes: int | None = None
) -> ExecutionPlan:
    """The plan of a configuration.

    Args:
        config: from :func:`minuet.planning.resolve.resolve`.
        facts: the model.
        arch: the arch the config was resolved for.
        device_bytes: memory of the device at hand; None takes the arch's.

    Raises:
        RefusedError: carries every refusal.
    """
    plan, refusals = settle_or_refuse(config, facts, arch, device_bytes=device_bytes)
    if plan is None:
        raise RefusedError(f"{facts.name} cannot be served on {arch.name} as asked", refusals)
    return plan


def settle_or_refuse(
    config: Config,
    facts: ModelFacts,
    arch: Arch,
    *,
    device_bytes: int | None = None,
    features: Features = PLAIN,
) -> tuple[ExecutionPlan | None, tuple[Refusal, ...]]:
    """As :func:`settle`, but the refusals are returned; exactly one of the two is empty.

    Args:
        config: see :func:`settle`.
        facts: the model.
        arch: the arch the config was resolved for.
        device_bytes: memory of the device at hand; None takes the arch's.
        features: what the model's attention asks for beyond sizes.
    """
    settling = Settling(config, facts, arch, device_bytes or arch.memory_bytes, features)
    settled, refusals = settling.attempt()
    if settled is None:
        return None, tuple(r if r.remedy else settling.with_remedy(r) for r in refusals)
    plan = ExecutionPlan(
        config=settled.config,
        facts=facts,
        arch=arch,
        shapes=settled.shapes,
        form=settled.kernels.form,
        layouts=MappingProxyType(dict(settled.layouts)),
        choices=MappingProxyType(dict(settled.kernels.choices)),
        steps=tuple(_step(settled, shape, arch) for shape in settled.shapes.all),
        workspace=settled.scratch.layout,
        memory=settled.memory,
    )
    return plan, ()


def _step(settled: Settled, shape: StepShape, arch: Arch) -> StepPlan:
    mine = {kind: settled.scratch.demands[kind, shape] for kind in settled.layouts}
    places = settled.scratch.layout.slices
    ends = (place.end for place in places[shape].values())
    captured = arch.is_gpu and not settled.config.enforce_eager
    return StepPlan(
        shape=shape,
        workspace_bytes=max(ends, default=0),
        score_bytes=max(demand.score_bytes for demand in mine.values()),
        query_chunk=min(demand.query_chunk for demand in mine.values()),
        graph=captured and shape.phase is Phase.DECODE,
        splits={kind: demand.split for kind, demand in mine.items()},
    )


def _reopened(config: Config, facts: ModelFacts) -> Config:
    """The configuration before a plan decided pages and length, ready to settle differently."""
    sources = dict(config.sources)
    change: dict[str, Any] = {
        name: 0 for name in ("kv_cache_pages", "kv_cache_memory") if sources[name] is Source.PLAN
    }
    if sources["max_model_len"] is Source.PLAN:
        sources["max_model_len"] = Source.MODEL
        change["max_model_len"] = facts.max_positions
    return replace(config, sources=sources, **change)
