"""The work behind :mod:`minuet.planning.execution`: one attempt at a plan, and what would help it.

Everything but KV pages is reserved first, for the longest request; pages get what is left. An
attempt says every reason against it. A remedy that is more than the reading of a limit (another
``--tensor-parallel-size``) is found by attempting again with it, so it holds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from minuet.attention.contract import LayerKind
from minuet.config import Config, Source
from minuet.dtypes import DType
from minuet.errors import Refusal
from minuet.kv.layout import KVLayout
from minuet.planning import memory
from minuet.planning.kernels import (
    Features,
    Kernels,
    Limits,
    Scratch,
    choose_kernels,
    layouts,
    scratch,
)
from minuet.planning.memory import human_bytes
from minuet.planning.model import ModelFacts
from minuet.planning.resolve import ASKED, CACHE_DTYPES, tensor_parallel_sizes
from minuet.planning.shapes import ShapeSet, shape_set
from minuet.platform.arch import Arch
from minuet.settings import BY_NAME


@dataclass(frozen=True, slots=True)
class Settled:
    """What follows from a configuration.

    Attributes:
        config: with pages, backend and, where it was ``auto``, ``max_model_len``.
        shapes: the closed set of step shapes.
        kernels: one per call.
        layouts: cache layout per layer kind.
        scratch: of every step shape.
        memory: the account.
    """

    config: Config
    shapes: ShapeSet
    kernels: Kernels
    layouts: Mapping[LayerKind, KVLayout]
    scratch: Scratch
    memory: memory.MemoryPlan


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Everything taken before KV pages, for one length of the longest request."""

    scratch: Scratch
    ledger: memory.Ledger


class Settling:
    """One attempt at a plan.

    Args:
        config: from ``resolve``.
        facts: the model.
        arch: the arch the config was resolved for.
        device_bytes: memory of the device; None without a limit.
        features: what the model's attention asks for beyond sizes.
    """

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

    def attempt(self) -> tuple[Settled | None, tuple[Refusal, ...]]:
        """What follows from the configuration, or every reason against it.

        No remedy is searched for: :meth:`with_remedy` does, by making attempts.
        """
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
        account = memory.MemoryPlan(
            device_bytes=self.device_bytes,
            budget_bytes=self.budget,
            weights=self.weights,
            workspace_bytes=reserved.ledger.taken["workspace"],
            graph_bytes=reserved.ledger.taken["graphs"],
            activation_bytes=reserved.ledger.taken["activations"],
            page_bytes=self.page_bytes,
            page_size=self.config.block_size,
            num_pages=self._pages(reserved),
            max_model_len=length,
        )
        config = self._final_config(length, account)
        return Settled(config, self.shapes, kernels, self.layouts, reserved.scratch, account), ()

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
        activations = memory.activation_bytes(
            facts, self.shapes, config.dtype, ranks, config.max_logprobs
        )
        activations += memory.input_bytes(
            self.shapes, config.max_num_seqs, length, config.block_size
        )
        ledger.take("activations", activations if gpu else 0)
        return _Reservation(needed, ledger)

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
        if not config.kv_cache_memory or sources["kv_cache_pages"] in ASKED:
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
        """The refusal with the first single change that removes it, if there is one."""
        flag = value = ""
        if refusal.kernel == "memory":
            flag, value = self._memory_remedy
        elif refusal.field in ("q_dtype", "kv_dtype", "index_dtype"):
            backend = refusal.kernel.partition(".")[0]
            flag, value = "--dtype", self._compute_types.get(backend, "")
            flag = flag if value else ""
        if not flag:
            return refusal
        return replace(refusal, remedy=f"use {flag} {value}".strip(), flag=flag, value=value)

    @cached_property
    def _memory_remedy(self) -> tuple[str, str]:
        """The first flag with which memory is no reason any more, and its value; or empty."""
        for flag, value, change in self._changes():
            attempt = Settling(
                replace(self.config, **change),
                self.facts,
                self.arch,
                self.device_bytes,
                self.features,
            )
            if attempt.budget is not None and attempt.weight_bytes > attempt.budget:
                continue  # the weights alone do not fit: nothing else needs to be worked out
            settled, refusals = attempt.attempt()
            if settled or not any(r.kernel == "memory" for r in refusals):
                return flag, value
        return "", ""

    @cached_property
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
