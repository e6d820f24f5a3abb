"""Config x model x arch -> :class:`ExecutionPlan`, or every refusal at once. No torch, no device.

The plan is what the engine then does, not a description of it: the kernels it loads, the one
scratch allocation and the slices in it, the graphs it captures, the pages it allocates. What is
reserved comes first and KV pages get what is left, so nothing can be missing from the account.

Nothing is refused one reason at a time. A remedy that is more than the reading of a limit (another
``--tensor-parallel-size``) is found by settling again with it, so it holds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from minuet.attention.backends import PREFERENCE
from minuet.attention.capability import missing_artefacts
from minuet.attention.contract import LayerKind, Op, Phase
from minuet.attention.dispatch import Choice
from minuet.attention.plan import Split
from minuet.attention.workspace import WorkspaceLayout
from minuet.config import BY_NAME, Config, Options, Source
from minuet.dtypes import DType
from minuet.errors import Refusal, RefusedError
from minuet.kv.layout import Form, KVLayout
from minuet.planning import memory
from minuet.planning.kernels import (
    PLAIN,
    Call,
    Features,
    Limits,
    Scratch,
    choose_kernels,
    layer_kinds,
    layouts,
    scratch,
)
from minuet.planning.memory import human_bytes
from minuet.planning.model import ModelFacts
from minuet.planning.resolve import (
    ASKED,
    CACHE_DTYPES,
    resolve_or_refuse,
    tensor_parallel_sizes,
)
from minuet.planning.shapes import ShapeSet, StepShape, shape_set
from minuet.platform.arch import Arch


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
        workspace: places of the slices; keys are ``(layer kind, shape)``.
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
    memory: memory.MemoryPlan

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
        """Whether this version contains every chosen kernel."""
        return all(choice.runnable for choice in self.choices.values())

    @property
    def graphs(self) -> tuple[StepShape, ...]:
        """Shapes for which a graph is captured."""
        return tuple(step.shape for step in self.steps if step.graph)

    def layer_layouts(self) -> tuple[KVLayout, ...]:
        """Cache layout of every layer, in order: what the pool is allocated from."""
        return tuple(self.layouts[kind] for kind in self.facts.layer_kinds)

    def obstacles(self) -> tuple[Refusal, ...]:
        """Why a plan that holds cannot run here: kernels or packages that are not installed."""
        found = [refusal for choice in self.choices.values() for refusal in choice.against()]
        for choice in self.choices.values():
            if choice.kernel and choice.runnable:
                found += missing_artefacts(choice.kernel)
        others = (b for b in PREFERENCE[self.arch.name] if b != self.backend)
        backend = next((b for b in others if self._runs_with(b)), "") if found else ""
        flag, remedy = "--attention-backend", f"use --attention-backend {backend}"
        return tuple(
            replace(r, remedy=remedy, flag=flag, value=backend) if backend and not r.remedy else r
            for r in dict.fromkeys(found)
        )

    def _runs_with(self, backend: str) -> bool:
        asked = replace(self.config, attention_backend=backend)
        plan, _ = settle_or_refuse(asked, self.facts, self.arch)
        return plan is not None and plan.runnable

    def require_runnable(self) -> None:
        """Refuse if a chosen kernel is declared but not in this version, or not installed.

        Raises:
            RefusedError: carries a refusal per kernel; field ``implementation`` or
                ``installation``.
        """
        obstacles = self.obstacles()
        if obstacles:
            raise RefusedError(
                f"{self.facts.name} is planned on {self.arch.name}, but cannot run here", obstacles
            )

    def summary(self) -> list[str]:
        """What start-up prints: at most 12 lines."""
        from minuet.planning.explain import summary  # explain shows plans: the other direction

        return summary(self)


def plan_for(options: Options, facts: ModelFacts, arch: Arch) -> ExecutionPlan:
    """Resolve and settle: what ``serve``, ``generate`` and ``explain`` call.

    Raises:
        RefusedError: carries every refusal, those of settings and those of kernels and memory.
    """
    plan, refusals = plan_or_refuse(options, facts, arch)
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


def settle(config: Config, facts: ModelFacts, arch: Arch) -> ExecutionPlan:
    """The plan of a configuration.

    Args:
        config: from :func:`minuet.planning.resolve.resolve`.
        facts: the model.
        arch: the arch the config was resolved for.

    Raises:
        RefusedError: carries every refusal.
    """
    plan, refusals = settle_or_refuse(config, facts, arch)
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
    settling = _Settling(config, facts, arch, device_bytes or arch.memory_bytes, features)
    plan, refusals = settling.plan()
    if plan is None and any(not r.remedy for r in refusals):
        refusals = tuple(r if r.remedy else settling.with_remedy(r) for r in refusals)
    return plan, refusals


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Everything taken before KV pages, for one length of the longest request."""

    scratch: Scratch
    ledger: memory.Ledger


class _Settling:
    """One attempt at a plan."""

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        arch: Arch,
        device_bytes: int | None,
        features: Features,
    ) -> None:
        self.config, self.facts, self.arch = config, facts, arch
        self.device_bytes, self.features = device_bytes, features
        self.budget = int(device_bytes * config.gpu_memory_utilization) if device_bytes else None
        self.shapes = shape_set(
            config.cudagraph_capture_sizes,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.num_speculative_tokens,
        )
        self.weights = memory.weights_per_rank(facts, config.dtype, config.tensor_parallel_size)
        self.weight_bytes = sum(row.bytes for row in self.weights)

    def plan(self) -> tuple[ExecutionPlan | None, tuple[Refusal, ...]]:
        """The plan, or every reason against it; no remedy is searched for."""
        kernels, refusals = choose_kernels(self.config, self.facts, self.arch, self.features)
        if refusals:
            return None, (*refusals, *self._weights_alone())
        self.kernels = kernels
        self.layouts = layouts(self.config, self.facts, kernels.form)
        self.page_bytes = memory.page_bytes(self.layouts[k] for k in self.facts.layer_kinds)
        length, refusals = self._length()
        if refusals:
            return None, refusals
        reserved = self._reserve(length)
        pages = self._pages(reserved)
        account = memory.MemoryPlan(
            device_bytes=self.device_bytes,
            budget_bytes=self.budget,
            weights=self.weights,
            workspace_bytes=reserved.ledger.taken["workspace"],
            graph_bytes=reserved.ledger.taken["graphs"],
            activation_bytes=reserved.ledger.taken["activations"],
            page_bytes=self.page_bytes,
            page_size=self.config.block_size,
            num_pages=pages,
            max_model_len=length,
        )
        plan = ExecutionPlan(
            config=self._final_config(length, account),
            facts=self.facts,
            arch=self.arch,
            shapes=self.shapes,
            form=kernels.form,
            layouts=MappingProxyType(self.layouts),
            choices=MappingProxyType(dict(kernels.choices)),
            steps=tuple(self._step(shape, reserved.scratch) for shape in self.shapes.all),
            workspace=reserved.scratch.layout,
            memory=account,
        )
        return plan, ()

    # --- what is taken before KV pages ---

    def _reserve(self, length: int) -> _Reservation:
        """Take everything but KV pages, in the order in which the engine allocates."""
        config, facts, gpu = self.config, self.facts, self.arch.is_gpu
        limits = Limits(length, config.index_score_memory, config.batch_invariant)
        needed = scratch(self.kernels, self.shapes, limits)
        ledger = memory.Ledger(self.budget)
        ledger.take("weights", self.weight_bytes)
        ledger.take("workspace", needed.layout.total_bytes)
        # on a CPU nothing is captured, and the host's memory has no budget to keep within
        graphs = len(self.shapes.decode_shapes) if gpu and not config.enforce_eager else 0
        ledger.take("graphs", memory.graph_bytes(facts, graphs))
        ranks = config.tensor_parallel_size
        activations = memory.activation_bytes(facts, self.shapes, config.dtype, ranks) if gpu else 0
        ledger.take("activations", activations)
        return _Reservation(needed, ledger)

    def _step(self, shape: StepShape, needed: Scratch) -> StepPlan:
        mine = {kind: needed.demands[kind, shape] for kind in layer_kinds(self.facts)}
        ends = (place.end for kind in mine for place in needed.layout.slices[kind, shape].values())
        graph = shape.phase is Phase.DECODE and self.arch.is_gpu and not self.config.enforce_eager
        return StepPlan(
            shape=shape,
            workspace_bytes=max(ends, default=0),
            score_bytes=max(demand.score_bytes for demand in mine.values()),
            query_chunk=min(demand.query_chunk for demand in mine.values()),
            graph=graph,
            splits={kind: demand.split for kind, demand in mine.items()},
        )

    # --- KV pages and the longest request ---

    def _pages(self, reserved: _Reservation) -> int:
        """Pages of the pool: what the settings say, else what is left."""
        if self.config.kv_cache_pages:
            return self.config.kv_cache_pages
        left = self.config.kv_cache_memory or reserved.ledger.left or 0
        return memory.pages_that_fit(left, self.page_bytes)

    def _length(self) -> tuple[int, tuple[Refusal, ...]]:
        """The longest request, or why the memory does not hold it."""
        wanted, page, free = (
            self.config.max_model_len,
            self.config.block_size,
            self._length_is_free(),
        )
        least = self._reserve(min(page, wanted) if free else wanted)
        refusals = self._reserve(wanted).scratch.refusals + self._overdrawn(least)
        if refusals:
            return 0, refusals

        def tokens_that_fit(length: int) -> int:
            reserved = self._reserve(length)
            if self._overdrawn(reserved):
                return 0
            return (self._pages(reserved) - memory.DUMMY_PAGES) * page

        longest = _longest(tokens_that_fit, wanted, page)
        if longest >= min(wanted, page) and (free or longest >= wanted):
            return longest, ()
        return 0, (self._too_long(longest),)

    def _length_is_free(self) -> bool:
        """Whether nobody asked for this length: it came from the model's maximum."""
        return self.config.sources["max_model_len"] is Source.MODEL

    def _too_long(self, longest: int) -> Refusal:
        config = self.config
        needed = memory.pages_needed(config.max_model_len, config.block_size)
        got = f"{config.max_model_len} tokens"
        if longest >= config.block_size:
            return Refusal(
                "memory",
                "max_model_len",
                got,
                f"up to {longest}: the KV pages hold no longer request",
                f"use --max-model-len {longest}",
                "--max-model-len",
                str(longest),
            )
        for name, value in (
            ("kv_cache_pages", needed),
            ("kv_cache_memory", needed * self.page_bytes),
        ):
            if getattr(config, name):
                flag = BY_NAME[name].flag
                accepts = f">= {needed} pages of {human_bytes(self.page_bytes)}"
                return Refusal(
                    "memory",
                    name,
                    str(getattr(config, name)),
                    accepts,
                    f"use {flag} {value}",
                    flag,
                    str(value),
                )
        return Refusal(
            "memory", "kv_pages", "0 pages left", f">= {needed} for one request of {got}"
        )

    def _overdrawn(self, reserved: _Reservation) -> tuple[Refusal, ...]:
        """Whether what is reserved, or the pool that was asked for, exceeds the budget."""
        left, config = reserved.ledger.left, self.config
        if left is None or self.budget is None:
            return ()
        if left < 0:
            taken = ", ".join(
                f"{name} {human_bytes(size)}"
                for name, size in reserved.ledger.taken.items()
                if size
            )
            return (self._over_budget(taken),)
        fit = memory.pages_that_fit(left, self.page_bytes)
        asked = config.kv_cache_pages * self.page_bytes or config.kv_cache_memory
        if asked <= left:
            return ()
        name, value = (
            ("kv_cache_pages", fit) if config.kv_cache_pages else ("kv_cache_memory", left)
        )
        flag = BY_NAME[name].flag
        enough = fit > memory.DUMMY_PAGES
        return (
            Refusal(
                "memory",
                name,
                str(getattr(config, name)),
                f"up to {value}: {human_bytes(left)} are left of the device",
                f"use {flag} {value}" if enough else "",
                flag if enough else "",
                str(value) if enough else "",
            ),
        )

    def _weights_alone(self) -> tuple[Refusal, ...]:
        """Without kernels scratch is unknown, but weights that do not fit can be said already."""
        if self.budget is None or self.weight_bytes <= self.budget:
            return ()
        return (self._over_budget(f"weights {human_bytes(self.weight_bytes)}"),)

    def _over_budget(self, taken: str) -> Refusal:
        share, device = self.config.gpu_memory_utilization, human_bytes(self.device_bytes or 0)
        accepts = f"{human_bytes(self.budget or 0)} per rank: {share:g} of {device}"
        return Refusal("memory", "budget", taken, accepts)

    def _final_config(self, length: int, account: memory.MemoryPlan) -> Config:
        config, sources = self.config, dict(self.config.sources)
        if length != config.max_model_len:
            sources["max_model_len"] = Source.PLAN
        if not config.kv_cache_memory or config.kv_cache_pages:
            sources["kv_cache_memory"] = Source.PLAN
        (backend,) = self.kernels.backends
        if backend != config.attention_backend:
            sources["attention_backend"] = Source.ARCH
        return replace(
            config,
            attention_backend=backend,
            max_model_len=length,
            kv_cache_pages=account.num_pages,
            kv_cache_memory=account.kv_bytes,
            sources=MappingProxyType(sources),
        )

    # --- remedies found by trying ---

    def with_remedy(self, refusal: Refusal) -> Refusal:
        """The refusal with the first single change under which the configuration is served."""
        if refusal.kernel != "memory":
            flag, value = "--dtype", self._compute_types().get(refusal.kernel.partition(".")[0], "")
            if not value or refusal.field not in ("q_dtype", "kv_dtype", "index_dtype"):
                return refusal
            return replace(refusal, remedy=f"use {flag} {value}", flag=flag, value=value)
        for flag, value, change in self._changes():
            attempt = _Settling(
                replace(self.config, **change),
                self.facts,
                self.arch,
                self.device_bytes,
                self.features,
            )
            plan, refusals = attempt.plan()
            # not served yet, but memory is no longer the reason
            if plan or not any(r.kernel == "memory" for r in refusals):
                return replace(
                    refusal, remedy=f"use {flag} {value}".strip(), flag=flag, value=value
                )
        return refusal

    def _compute_types(self) -> dict[str, str]:
        """Backends that take every call with another ``--dtype``, and the first such type.

        Caches that nobody gave a type follow it, so one flag changes what several refusals name.
        """
        found: dict[str, str] = {}
        follow = [name for name in CACHE_DTYPES if self.config.sources[name] not in ASKED]
        for dtype in (DType.BF16, DType.FP16, DType.FP32):
            change: dict[str, Any] = {"dtype": dtype, **dict.fromkeys(follow, dtype)}
            config = replace(self.config, **change)
            kernels, refusals = choose_kernels(config, self.facts, self.arch, self.features)
            if not refusals:
                found.setdefault(kernels.backends[0], dtype.value)
        return found

    def _changes(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        config = self.config
        for size in tensor_parallel_sizes(self.facts):
            if size > config.tensor_parallel_size:
                yield "--tensor-parallel-size", str(size), {"tensor_parallel_size": size}
        if config.gpu_memory_utilization < 1.0:
            yield "--gpu-memory-utilization", "1.0", {"gpu_memory_utilization": 1.0}
        if not config.enforce_eager:
            yield "--enforce-eager", "", {"enforce_eager": True}


def _longest(tokens_that_fit: Callable[[int], int], wanted: int, page: int) -> int:
    """The longest request, at most ``wanted``, that fits beside the scratch it needs itself.

    ``tokens_that_fit`` falls as its argument grows, since scratch grows with the longest request.
    So what fits beside the scratch of a longer request fits, and nothing longer than what fits
    beside the scratch of a shorter one does.
    """
    fit = tokens_that_fit(wanted)
    if fit >= wanted:
        return wanted
    low = max(fit, 0) // page
    most = max(tokens_that_fit(max(low, 1) * page), 0) // page
    high = min((wanted - 1) // page, most)
    while low < high:
        middle = (low + high + 1) // 2
        if tokens_that_fit(middle * page) >= middle * page:
            low = middle
        else:
            high = middle - 1
    return low * page
