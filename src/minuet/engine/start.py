"""From options to a running engine: resolve, settle, load, reserve, prepare, self-test, seal.

In this order and nowhere else. What cannot be served is refused before weights are read. What was
planned is what is allocated: the pool's bytes are compared with the plan's to the byte.
"""

import hashlib
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minuet.attention.contract import LayerKind, Op
from minuet.attention.dispatch import Choice
from minuet.attention.runtime import StepKernels, load
from minuet.config import Options
from minuet.engine.core import Core, Limits
from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache, lane_salt
from minuet.engine.preparation import Preparation
from minuet.engine.queued import QueuedRunner
from minuet.engine.runner import Model, Runner
from minuet.engine.scheduler import Scheduler
from minuet.engine.seal import Seal
from minuet.engine.selftest import Recorder
from minuet.errors import ConfigError, IntegrityError
from minuet.kv.cache import KVCache
from minuet.log import get_logger
from minuet.models import registry
from minuet.models.registry import ModelSource
from minuet.models.tokenizer import Tokenizer, read_generation_defaults
from minuet.ops.table import ops_for
from minuet.planning import explain
from minuet.planning.execution import ExecutionPlan, plan_for
from minuet.platform import arch as arch_table
from minuet.platform.detect import detect
from minuet.platform.device import Facility, facility
from minuet.platform.torch import (
    device_for,
    device_memory_bytes,
    host_memory_bytes,
    keep_freed_memory,
)
from minuet.settings import AUTO

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A prepared engine and what it was prepared from.

    Attributes:
        core: takes requests and runs steps.
        plan: what was settled.
        source: the model.
        tokenizer: None where the model has none.
        timings_s: seconds per start-up stage.
        runner: carries out the steps of ``core``.
        seal: counts what happens after ready.
    """

    core: Core
    plan: ExecutionPlan
    source: ModelSource
    tokenizer: Tokenizer | None
    timings_s: dict[str, float]
    runner: Runner | QueuedRunner
    seal: Seal


def start(
    options: Options,
    announce: Callable[[str], None] = log.info,
    *,
    watch: Callable[[StepKernels], StepKernels] | None = None,
) -> Engine:
    """Prepare an engine.

    Args:
        options: what was asked for.
        announce: receives the plan's summary, line by line, before weights are read.
        watch: receives the chosen kernels and returns what the model calls instead; for audits
            that look at what the kernels are called with.

    Raises:
        RefusedError: the configuration cannot be served; nothing was loaded.
        ConfigError: no such model, arch or value.
        CheckpointError: the weights are not the model.
    """
    clock = _Clock()
    source = registry.find(options["model"])
    arch = detect() if options["arch"] == AUTO else arch_table.get(options["arch"])
    plan = plan_for(options, source.facts, arch, device_bytes=device_memory_bytes(arch))
    plan.require_runnable(None if arch.is_gpu else host_memory_bytes())
    device = facility(device_for(arch))
    if not arch.is_gpu:
        keep_freed_memory()
    for line in explain.summary(plan):
        announce(line)
    clock.lap("settle")
    weights = _weights(source, plan, device.device)
    clock.lap("load")
    cache = KVCache(plan.layer_layouts(), plan.memory.num_pages, device.device)
    if cache.num_bytes != plan.memory.kv_bytes:
        raise IntegrityError(
            f"the pool took {cache.num_bytes} bytes, the plan says {plan.memory.kv_bytes}"
        )
    device.trim()  # what loading needed for a moment
    clock.lap("reserve")
    runner, seal = _runner(source, weights, cache, plan, watch, device, clock)
    tokenizer = _tokenizer(source.folder)
    core = Core(_scheduler(plan, source), runner, _limits(plan, source), tokenizer)
    log.info("ready after %s", ", ".join(f"{k} {v:.1f} s" for k, v in clock.laps.items()))
    return Engine(core, plan, source, tokenizer, clock.laps, runner, seal)


def _runner(
    source: ModelSource,
    weights: Any,
    cache: KVCache,
    plan: ExecutionPlan,
    watch: Callable[[StepKernels], StepKernels] | None,
    device: Facility,
    clock: "_Clock",
) -> tuple[Runner | QueuedRunner, Seal]:
    """What carries out steps: as they come, or in prepared shapes where the plan says so."""
    kernels, recorder = load(_one_kernel_each(plan)), Recorder()
    kernels = watch(kernels) if watch else kernels
    if plan.prepared:
        kernels = recorder.over(kernels)
    ops = ops_for(plan.arch.ops, batch_invariant=plan.config.batch_invariant)
    model_class = importlib.import_module(source.package + ".model").Model
    model: Model = model_class(source.spec, weights, kernels, ops)
    if plan.prepared:
        preparation = Preparation(model, cache, plan, kernels, recorder, device)
        queued = preparation.run(clock.lap)
        return queued, queued.seal
    runner, seal = Runner(model, cache, plan.config.seed), Seal(device, plan.config.seal)
    clock.lap("prepare")
    seal.close()
    return runner, seal


def _one_kernel_each(plan: ExecutionPlan) -> dict[tuple[LayerKind, Op], Choice]:
    """The plan's choices by layer kind and operation: one kernel serves every phase and length.

    Raises:
        IntegrityError: the plan chose several, which the model's layers could not tell apart.
    """
    folded: dict[tuple[LayerKind, Op], Choice] = {}
    for call, choice in plan.choices.items():
        first = folded.setdefault((call.layer_kind, call.op), choice)
        if first.kernel is not choice.kernel:
            raise IntegrityError(f"{call} has another kernel than {first.problem.phase.value}")
    return folded


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        # a stage that is resumed goes on
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


def _weights(source: ModelSource, plan: ExecutionPlan, device: Any) -> Any:
    config = plan.config
    if config.load_format == "dummy":
        dummy = importlib.import_module(source.package + ".dummy")
        return dummy.dummy_weights(source.spec, config.dtype, device, config.seed)
    if source.folder is None:
        raise ConfigError(
            f"{source.name} is a config without weights",
            got=f"--load-format {config.load_format}",
            expected="a checkpoint folder",
            remedy="name a folder with safetensors, or use --load-format dummy for random weights",
        )
    weights = importlib.import_module(source.package + ".weights")
    return weights.load_weights(source.folder, source.spec, config.dtype, device)


def _tokenizer(folder: Path | None) -> Tokenizer | None:
    if folder is None or not (folder / "tokenizer.json").is_file():
        log.warning("no tokenizer.json: prompts must be token ids, and answers have no text")
        return None
    return Tokenizer.load(folder)


def _limits(plan: ExecutionPlan, source: ModelSource) -> Limits:
    defaults = read_generation_defaults(source.folder, source.spec.eos_token_ids)
    return Limits(plan.facts.vocab, plan.config.max_logprobs, defaults.eos_token_ids)


def _scheduler(plan: ExecutionPlan, source: ModelSource) -> Scheduler:
    config = plan.config
    pool = PagePool(plan.memory.num_pages, config.block_size)
    prefix = None
    if config.enable_prefix_caching:
        lanes = {
            f"{kind.value}.{lane.name.value}": f"{lane.dtype} {layout.form.value}"
            for kind, layout in plan.layouts.items()
            for lane in layout.lanes.values()
        }
        salt = lane_salt(
            model_fingerprint=_fingerprint(source, config.load_format, config.seed),
            lane_dtypes=lanes,
            page_size=config.block_size,
        )
        prefix = PrefixCache(pool, salt)
    return Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        pool=pool,
        prefix=prefix,
        num_speculative_tokens=config.num_speculative_tokens,
    )


def _fingerprint(source: ModelSource, load_format: str, seed: int) -> str:
    """Names the weights: one cache never outlives its process, so the folder and config suffice."""
    facts = [str(source.folder), dict(source.config), load_format, seed]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
