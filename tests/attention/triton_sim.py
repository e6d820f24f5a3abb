"""Run launches of the Triton backend with the simulator for a device."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton

from minuet.attention.backends.triton import config, step
from minuet.platform.triton import Launch
from minuet.testing.amdgpu import Geometry, Memory, Module, launch, parse
from minuet.testing.amdgpu.state import TARGETS
from tests.attention.conformance import World
from tests.attention.flydsl_sim import array
from tests.attention.triton_compile import compile_launch

# What each kernel writes; the rest is placed read-only.
OUTPUTS = {
    "write_step": ("k_ptr", "v_ptr", "k_scale_ptr", "v_scale_ptr", "index_k_ptr"),
    "merge_parts": ("out_ptr",),  # rows of one part were written before and stay
    "unite_lists": ("lists_ptr", "unions_ptr"),  # may be one
    "attend_rows": ("out_ptr",),  # each writes the tiles that are its own
    "attend_tiles": ("out_ptr",),
}
# Of that, what holds nothing before: placed as memory that was never written.
UNDEFINED = {
    "write_step": ("q_out_ptr", "index_q_out_ptr"),
    "score_blocks": ("orders_ptr",),
    "list_blocks": ("lists_ptr",),
    "unite_lists": ("pages_ptr",),
    "attend_dense": ("out_ptr", "partial_ptr", "lse_ptr"),
    "attend_prefill": ("out_ptr",),
    "attend_blocks": ("out_ptr", "partial_ptr", "lse_ptr"),
}


@dataclass(frozen=True)
class Build:
    """A kernel as the simulator takes it.

    Attributes:
        module: parsed IR.
        name: of the kernel in it.
        parameters: names of the arguments that are not constants, in order.
        threads: of a program.
        lds_bytes: dynamic LDS.
    """

    module: Module
    name: str
    parameters: tuple[str, ...]
    threads: int
    lds_bytes: int


@cache
def _parsed(text: str) -> Module:
    return parse(text)


def _stop_at_llvm_ir(*call: Any) -> tuple[str, str] | None:
    """Triton's hook on its stages: no machine code, which the simulator has no use for."""
    if not call:
        return "stop at LLVM IR", "stop at LLVM IR"  # told apart in Triton's cache
    _, stages, *_ = call

    def assembly(source: Any, metadata: dict[str, Any]) -> str:
        metadata["name"] = "not assembled"
        return ""

    stages["amdgcn"], stages["hsaco"] = assembly, lambda source, metadata: b""
    return None


def build(made: Launch, arch: str) -> Build:
    """Compile a launch for an arch; Triton keeps what it compiled."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _stop_at_llvm_ir
        code = compile_launch(made, arch).kernel
    module = _parsed(code.asm["llir"])
    (function,) = module.kernels.values()
    constants = {path[0] for path in code.src.constants}
    names = [p.name for n, p in enumerate(made.kernel.params) if n not in constants]
    return Build(
        module,
        function.name,
        tuple(names),
        code.metadata.num_warps * TARGETS[arch].wave,
        code.metadata.shared,
    )


def callees(made: Launch, arch: str) -> set[str]:
    """Names of what a kernel calls, without the type suffix of a vector."""
    (function,) = build(made, arch).module.kernels.values()
    called = {i.extra for block in function.blocks for i in block.code if i.op == "call"}
    return {name.rpartition(".v")[0] or name for name in called}


def target(arch: str) -> config.Target:
    """Launch numbers of an arch."""
    return config.TARGETS[arch]


def plan(world: World, arch: str, compute_units: int) -> step.Plan:
    """A step of the world's batch, planned for a device of a few units."""
    case, batch = world.case, world.batch
    lens = set(batch.query_lens)
    shape = step.StepShape(
        page_size=case.page,
        num_kv_heads=case.kv_heads,
        group=case.group,
        max_seqs=batch.num_seqs,
        max_tokens=batch.num_tokens,
        max_length=max(batch.seq_lens),
        query_len=lens.pop() if len(lens) == 1 else 0,
        compute_units=compute_units,
        kv_fp8=case.kv_dtype.is_fp8,
    )
    planner = step.Planner(shape, torch.device("cpu"), target(arch))
    return planner.plan(batch, case.page)


def run(launches: Iterable[Launch], arch: str, order: int | None = None) -> None:
    """Copy tensors in, run launches one after another, copy what they wrote out."""
    for made in launches:
        _run(made, arch, order)


def _run(made: Launch, arch: str, order: int | None) -> None:
    built, kernel = build(made, arch), made.kernel.fn.__name__
    memory, placed = Memory(), {}
    undefined = UNDEFINED.get(kernel, ())
    written = {*OUTPUTS.get(kernel, ()), *undefined}
    tensors = {n: x for n in built.parameters if torch.is_tensor(x := made.args[n])}
    for name, tensor in tensors.items():
        if (at := tensor.data_ptr()) in placed:
            continue
        # what a launcher has no use for may stand for something else: lengths for partial results
        names = {n for n, x in tensors.items() if x.data_ptr() == at}
        placed[at] = memory.place(
            name, _span(tensor), readonly=not names <= written, unwritten=names <= {*undefined}
        )
    arguments = [
        placed[tensors[n].data_ptr()] if n in tensors else made.args[n] for n in built.parameters
    ]
    (function,) = built.module.kernels.values()
    scratch = [None] * (len(function.params) - len(arguments))  # of the compiler, unused
    shape = Geometry((*made.grid, 1, 1)[:3], (built.threads, 1, 1), built.lds_bytes)
    launch(built.module, built.name, [*arguments, *scratch], memory, shape, arch=arch, order=order)
    for pointer in placed.values():
        if pointer.name in written:
            _span(tensors[pointer.name])[...] = memory.fetch(pointer)


def _span(tensor: torch.Tensor) -> np.ndarray:
    """The bytes a tensor spans, as a view."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return array(tensor.as_strided((span,), (1,)))
