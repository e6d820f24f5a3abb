"""A plan as plain data for people and programs: no decision is taken here, no figure made up.

:func:`report` is the whole plan as JSON-ready dictionaries, the form in which ``minuet explain``
prints it and other programs read it; :func:`summary` is the dozen lines that start-up prints.
"""

from collections.abc import Iterable
from typing import Any

from minuet.attention.contract import LayerKind
from minuet.attention.dispatch import Choice
from minuet.errors import Refusal
from minuet.planning import roofline
from minuet.planning.execution import ExecutionPlan, StepPlan
from minuet.planning.kernels import Call
from minuet.planning.memory import (
    ACTIVATION_REASON,
    DUMMY_PAGES,
    GRAPH_REASON,
    human_bytes,
)
from minuet.planning.model import ModelFacts
from minuet.platform.arch import Arch
from minuet.settings import BY_NAME

Json = dict[str, Any]

_PLAIN = ("implementation", "installation")  # obstacles whose `got` says it all


def report(plan: ExecutionPlan, *, batch: int, context: int, query_len: int = 1) -> Json:
    """The whole plan.

    Args:
        plan: the plan.
        batch: requests of the decode step whose roofline is shown.
        context: tokens in the cache of each.
        query_len: query tokens of each.

    Returns:
        Only dictionaries, lists, strings, numbers, booleans and None. Sizes in bytes, times in
        seconds; ``servable`` is true, ``runnable`` says whether this version holds every kernel.
    """
    obstacles = plan.obstacles()
    return {
        "servable": True,
        "runnable": not obstacles,
        "obstacles": [_refusal(r) for r in obstacles],
        "model": _model(plan.facts),
        "arch": _arch(plan.arch),
        "backend": plan.backend,
        "settings": [
            {"name": name, "flag": BY_NAME[name].flag, "value": value, "source": source}
            for name, value, source in plan.config.describe()
            if BY_NAME[name].group != "server"  # no part of a plan, and the API key is a secret
        ],
        "layouts": [_layout(plan, kind) for kind in plan.layouts],
        "calls": [_call(call, choice) for call, choice in plan.choices.items()],
        "shapes": [_step(plan, step) for step in plan.steps],
        "memory": _memory(plan),
        "roofline": _roofline(plan, batch, context, query_len),
    }


def refused(refusals: tuple[Refusal, ...], facts: ModelFacts, arch: Arch) -> Json:
    """The answer when there is no plan: every refusal."""
    return {
        "servable": False,
        "runnable": False,
        "refusals": [_refusal(r) for r in refusals],
        "model": _model(facts),
        "arch": _arch(arch),
    }


def _refusal(refusal: Refusal) -> Json:
    return {
        "kernel": refusal.kernel,
        "field": refusal.field,
        "got": refusal.got,
        "accepts": refusal.accepts,
        "remedy": refusal.remedy,
        "flag": refusal.flag,
        "value": refusal.value,
    }


def _model(facts: ModelFacts) -> Json:
    return {
        "name": facts.name,
        "architecture": facts.architecture,
        "params": facts.params,
        "layers": {kind.value: facts.count(kind) for kind in LayerKind if facts.count(kind)},
        "vocab": facts.vocab,
        "max_positions": facts.max_positions,
    }


def _arch(arch: Arch) -> Json:
    return {
        "name": arch.name,
        "card": arch.card,
        "memory_bytes": arch.memory_bytes,
        "memory_source": arch.memory_source,
        "bandwidth_bytes_per_s": arch.bandwidth_bytes_per_s,
        "bandwidth_source": arch.bandwidth_source,
        "bf16_flops_per_s": arch.bf16_flops_per_s,
        "flops_source": arch.flops_source,
    }


def _layout(plan: ExecutionPlan, kind: LayerKind) -> Json:
    layout = plan.layouts[kind]
    return {
        "layer_kind": kind.value,
        "layers": plan.facts.count(kind),
        "form": layout.form.value,
        "page_size": layout.page_size,
        "num_kv_heads": layout.num_kv_heads,
        "page_bytes": layout.page_bytes,
        "token_bytes": layout.token_bytes,
        "lanes": [
            {
                "name": lane.name.value,
                "dtype": lane.dtype.value,
                "shape": list(lane.shape),
                "page_bytes": lane.page_bytes,
            }
            for lane in layout.lanes.values()
        ],
    }


def _call(call: Call, choice: Choice) -> Json:
    kernel, level = choice.kernel, choice.level
    return {
        "layer_kind": call.layer_kind.value,
        "op": call.op.value,
        "phase": call.phase.value,
        "query_len": call.query_len,
        "kernel": kernel.name if kernel else None,
        "level": level.name.lower() if level is not None else None,
        "runnable": choice.runnable,
        # an empty list: it covers the call too, and stands further down in the arch's order
        "others": [
            {"kernel": name, "refusals": [_refusal(r) for r in reasons]}
            for name, reasons in choice.refusals.items()
        ],
    }


def _step(plan: ExecutionPlan, step: StepPlan) -> Json:
    shape = step.shape
    return {
        "shape": str(shape),
        "phase": shape.phase.value,
        "num_seqs": shape.num_seqs,
        "query_len": shape.query_len,
        "num_tokens": shape.num_tokens,
        "graph": step.graph,
        "workspace_bytes": step.workspace_bytes,
        "score_bytes": step.score_bytes,
        "query_chunk": step.query_chunk,
        "kernels": {
            f"{call.layer_kind.value} {call.op.value}": choice.kernel.name
            for call, choice in plan.choices.items()
            if choice.kernel and (call.phase, call.query_len) == (shape.phase, shape.query_len)
        },
    }


def _memory(plan: ExecutionPlan) -> Json:
    memory = plan.memory
    return {
        "device_bytes": memory.device_bytes,
        "budget_bytes": memory.budget_bytes,
        "weights": [
            {"name": w.name, "dtype": w.dtype.value, "shards": w.shards, "bytes": w.bytes}
            for w in memory.weights
        ],
        "weight_bytes": memory.weight_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "graph_bytes": memory.graph_bytes,
        "graph_reason": GRAPH_REASON if memory.graph_bytes else "no graphs",
        "activation_bytes": memory.activation_bytes,
        "activation_reason": ACTIVATION_REASON
        if memory.activation_bytes
        else "not budgeted on cpu",
        "kv_bytes": memory.kv_bytes,
        "page_bytes": memory.page_bytes,
        "token_bytes": memory.token_bytes,
        "num_pages": memory.num_pages,
        "dummy_pages": DUMMY_PAGES,
        "num_tokens": memory.num_tokens,
        "max_model_len": memory.max_model_len,
        "concurrent_requests": memory.concurrent_requests,
        "used_bytes": memory.used_bytes,
        "unused_bytes": memory.unused_bytes,
    }


def _roofline(plan: ExecutionPlan, batch: int, context: int, query_len: int) -> Json:
    storage = roofline.storage_of(plan.config)
    step = roofline.decode(plan.facts, storage, batch=batch, context=context, query_len=query_len)
    limit = step.limit(plan.arch)
    return {
        "step": step.step,
        "batch": batch,
        "context": context,
        "query_len": query_len,
        "weights": storage.weights,
        "distinct_experts": step.distinct_experts,
        "parts": [{"name": p.name, "bytes": p.bytes, "flops": p.flops} for p in step.parts],
        "bytes": step.bytes,
        "flops": step.flops,
        "limit_s": limit.seconds if limit else None,
        "bandwidth_s": limit.bandwidth_s if limit else None,
        "compute_s": limit.compute_s if limit else None,
        "bound_by": limit.bound_by if limit else None,
        "tokens_per_s": batch * query_len / limit.seconds if limit else None,
    }


def human_params(count: int) -> str:
    """A number of parameters, in millions or billions."""
    return f"{count / 1e9:.2f} B" if count >= 10**9 else f"{count / 1e6:.2f} M"


def summary(plan: ExecutionPlan) -> list[str]:
    """What start-up prints: at most 12 lines, of which each is true before anything is loaded."""
    config, memory, arch = plan.config, plan.memory, plan.arch
    kinds = ", ".join(f"{plan.facts.count(kind)} {kind.value}" for kind in plan.layouts)
    of_budget = f" of {human_bytes(memory.budget_bytes)}" if memory.budget_bytes else ""
    lines = [
        f"{plan.facts.name}: {human_params(plan.facts.params)} parameters, {kinds} layers",
        f"arch {arch.name} ({arch.card}), {config.tensor_parallel_size} rank(s), "
        f"compute {config.dtype}, KV {config.kv_cache_dtype}, "
        f"index keys {config.index_kv_cache_dtype}",
        f"kernels {', '.join(_kernel_names(plan))}",
        f"shapes {len(plan.shapes.decode_shapes)} decode ({len(plan.graphs)} graphs), "
        f"{len(plan.shapes.prefill_shapes)} prefill; none is added later",
        f"memory {human_bytes(memory.used_bytes)}{of_budget} per rank: "
        f"weights {human_bytes(memory.weight_bytes)}, "
        f"workspace {human_bytes(memory.workspace_bytes)}, "
        f"graphs {human_bytes(memory.graph_bytes)}, "
        f"activations {human_bytes(memory.activation_bytes)}, KV {human_bytes(memory.kv_bytes)}",
        f"KV {memory.num_pages} pages of {memory.page_size} tokens = {memory.num_tokens} tokens; "
        f"longest request {memory.max_model_len}, {memory.concurrent_requests} of them at once",
    ]
    for reason, kernels in group_obstacles(plan.obstacles())[:5]:
        lines.append(f"not runnable here: {', '.join(kernels)}: {reason}")
    return lines


def group_obstacles(obstacles: Iterable[Refusal]) -> list[tuple[str, list[str]]]:
    """Each reason with the kernels it holds for."""
    groups: dict[str, list[str]] = {}
    for obstacle in obstacles:
        # "kernel not in this version; accepts an implemented kernel" would say it twice
        accepts = f"; accepts {obstacle.accepts}" if obstacle.field not in _PLAIN else ""
        reason = ". ".join(text for text in (obstacle.got + accepts, obstacle.remedy) if text)
        groups.setdefault(reason, []).append(obstacle.kernel)
    return list(groups.items())


def _kernel_names(plan: ExecutionPlan) -> list[str]:
    """Chosen kernels with their levels, each once."""
    names = {
        choice.kernel.name: choice.level.name.lower()
        for choice in plan.choices.values()
        if choice.kernel and choice.level is not None
    }
    return [f"{name} ({level})" for name, level in names.items()]
