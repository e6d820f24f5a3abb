"""Settle every ``auto``: options x model x arch -> Config, or every refusal.

What is decided here needs no kernel and no memory: types, pages, heads, lengths, step sizes. What
depends on the memory that is left (the number of KV pages, and with ``--max-model-len auto`` the
longest request) is 0, or the model's maximum, in the Config made here;
:func:`minuet.planning.execution.settle` returns the final one as ``ExecutionPlan.config``.
"""

from collections.abc import Callable
from typing import Any

from minuet.config import Config, Options, Source
from minuet.dtypes import CACHE_DTYPE_CHOICES, DType, parse_cache_dtype, parse_compute_dtype
from minuet.errors import ConfigError, Refusal, RefusedError
from minuet.planning.model import ModelFacts, Shard
from minuet.planning.shapes import default_rungs
from minuet.platform.arch import Arch
from minuet.settings import AUTO, BY_NAME

CACHE_DTYPES = ("kv_cache_dtype", "index_kv_cache_dtype")  # `auto` follows the compute type
ASKED = frozenset({Source.FLAG, Source.FILE, Source.ENV})  # a person said so
_CPU_KV_BYTES = 2**30  # a CPU has no memory of its own to fill; 1 GiB serves tests and demos
PAGE_WITHOUT_BLOCKS = 64  # tokens; only a model without sparse layers leaves the page free


def refusal(name: str, got: object, accepts: str, value: object, *, extra: str = "") -> Refusal:
    """A refusal of one setting whose way out is another value of it.

    Args:
        name: the setting.
        got: its value.
        accepts: what is accepted, for people.
        value: the value to use instead; the nearest accepted one.
        extra: appended to the remedy.
    """
    flag = BY_NAME[name].flag
    return Refusal(
        kernel="config",
        field=name,
        got=str(got),
        accepts=accepts,
        remedy=f"use {flag} {value}{extra}",
        flag=flag,
        value=str(value),
    )


def tensor_parallel_sizes(facts: ModelFacts, limit: int = 1024) -> tuple[int, ...]:
    """Every tensor-parallel size that splits this model evenly, ascending; at most ``limit``.

    A power of two that divides the query heads and every split weight group. KV heads are split as
    far as they go and replicated beyond.
    """
    sizes = []
    size = 1
    while size <= min(limit, facts.num_q_heads):
        heads = facts.num_kv_heads
        if facts.num_q_heads % size == 0 and (heads % size == 0 or size % heads == 0):
            split = (g for g in facts.weights if g.shard is Shard.SPLIT)
            if all(group.params % size == 0 for group in split):
                sizes.append(size)
        size *= 2
    return tuple(sizes)


def resolve(options: Options, facts: ModelFacts, arch: Arch) -> Config:
    """Settle every ``auto`` and check what one can check without kernels and memory.

    Args:
        options: what was asked for.
        facts: the model.
        arch: what to decide for.

    Raises:
        RefusedError: carries every refusal found, not the first.
    """
    config, refusals = resolve_or_refuse(options, facts, arch)
    if config is None:
        raise RefusedError(f"{facts.name} cannot be served on {arch.name} as asked", refusals)
    return config


def resolve_or_refuse(
    options: Options, facts: ModelFacts, arch: Arch
) -> tuple[Config | None, tuple[Refusal, ...]]:
    """As :func:`resolve`, but the refusals are returned; exactly one of the two is empty."""
    settling = _Settling(options, facts, arch)
    settling.types()
    settling.lengths()
    settling.parallel()
    settling.steps()
    settling.memory()
    if settling.refusals:
        return None, tuple(settling.refusals)
    return Config(**settling.values, sources=settling.sources), ()


class _Settling:
    """The values so far, where they came from, and what is wrong."""

    def __init__(self, options: Options, facts: ModelFacts, arch: Arch) -> None:
        self.facts, self.arch = facts, arch
        self.values: dict[str, Any] = dict(options.values)
        self.sources: dict[str, Source] = dict(options.sources)
        self.refusals: list[Refusal] = []
        self._auto("arch", lambda: arch.name, Source.ARCH)
        self.values["arch"] = arch.name
        self.values["model"] = facts.name

    def _auto(self, name: str, value: Callable[[], Any], source: Source) -> None:
        if self.values[name] == AUTO:
            self.values[name] = value()
            self.sources[name] = source

    def types(self) -> None:
        """Compute, KV and index types."""
        asked = self.values["dtype"]
        if asked == AUTO and not self.arch.is_gpu:
            compute, self.sources["dtype"] = DType.FP32, Source.ARCH
        elif asked == AUTO:
            compute, self.sources["dtype"] = parse_compute_dtype(self.facts.dtype), Source.MODEL
        else:
            compute = parse_compute_dtype(asked)
        self.values["dtype"] = compute
        for name in CACHE_DTYPES:
            if self.values[name] == AUTO:
                follows = self.sources["dtype"]
                self.sources[name] = Source.DEFAULT if follows in ASKED else follows
            self.values[name] = self._cache_dtype(name, compute)

    def _cache_dtype(self, name: str, compute: DType) -> DType:
        asked, flag = self.values[name], BY_NAME[name].flag
        try:
            return parse_cache_dtype(asked, auto=compute, fp8=self.arch.fp8, flag=flag)
        except ConfigError:
            others = ", ".join(c for c in CACHE_DTYPE_CHOICES if not c.startswith("fp8"))
            why = f": {self.arch.name} has no FP8 type"
            self.refusals.append(refusal(name, asked, others, DType.BF16.value, extra=why))
            return compute

    def lengths(self) -> None:
        """Page size and longest request."""
        facts, block = self.facts, self.facts.index.block if self.facts.index else None
        source = Source.MODEL if block else Source.DEFAULT
        self._auto("block_size", lambda: block or PAGE_WITHOUT_BLOCKS, source)
        page = self.values["block_size"]
        if block and page != block:
            self.refusals.append(
                refusal("block_size", page, f"{block}, the sparse block of {facts.name}", block)
            )
        self._auto("max_model_len", lambda: facts.max_positions, Source.MODEL)
        length = self.values["max_model_len"]
        if not 1 <= length <= facts.max_positions:
            nearest = min(max(length, 1), facts.max_positions)
            self.refusals.append(
                refusal("max_model_len", length, f"1 to {facts.max_positions}", nearest)
            )

    def parallel(self) -> None:
        """Heads over ranks."""
        size, accepted = self.values["tensor_parallel_size"], tensor_parallel_sizes(self.facts)
        if size not in accepted:
            self.refusals.append(
                refusal(
                    "tensor_parallel_size",
                    size,
                    ", ".join(map(str, accepted)),
                    max((a for a in accepted if a <= size), default=accepted[0]),
                )
            )

    def steps(self) -> None:
        """Requests and tokens of a step, and the rungs."""
        # how many drafts a kernel verifies is its own limit, and refused by it
        drafts, seqs = self.values["num_speculative_tokens"], self.values["max_num_seqs"]
        tokens, page = self.values["max_num_batched_tokens"], self.values["block_size"]
        query_len = drafts + 1
        needed = max(page, seqs * query_len)
        if tokens < needed:
            fewer = tokens // query_len if tokens >= page else 0
            self.refusals.append(
                refusal(
                    "max_num_batched_tokens",
                    tokens,
                    f">= {needed}: a page of {page}, {seqs} requests of {query_len} query tokens",
                    needed,
                    extra=f", or --max-num-seqs {fewer}" if fewer else "",
                )
            )
        self._auto("cudagraph_capture_sizes", lambda: default_rungs(seqs), Source.DEFAULT)
        rungs = self.values["cudagraph_capture_sizes"]
        if max(rungs) > seqs:
            kept = sorted({r for r in rungs if r < seqs} | {seqs})
            self.refusals.append(
                refusal(
                    "cudagraph_capture_sizes",
                    ",".join(map(str, rungs)),
                    f"sizes up to --max-num-seqs {seqs}",
                    ",".join(map(str, kept)),
                )
            )

    def memory(self) -> None:
        """KV bytes and pages; 0 where the memory that is left decides."""
        if not self.arch.is_gpu:
            self._auto("kv_cache_memory", lambda: _CPU_KV_BYTES, Source.ARCH)
        self._auto("kv_cache_memory", int, Source.PLAN)
        self._auto("kv_cache_pages", int, Source.PLAN)
