"""Run the FlyDSL backend's launchers with the simulator for a device."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch

from minuet.attention.backends.flydsl import compile as fly_compile
from minuet.attention.backends.flydsl.calls import Call
from minuet.attention.backends.flydsl.compile import Compiled
from minuet.attention.backends.flydsl.signatures import SIGNATURES, Key
from minuet.kv.layout import LaneName
from minuet.testing.amdgpu import Geometry, Memory, Module, Pointer, launch, parse
from minuet.testing.amdgpu.state import TARGETS

ARCHS = ("gfx942", "gfx950", "gfx1250")
SCRATCH = ("partial_out", "partial_lse", "scores")  # hold nothing when a launcher is called
LANES = tuple(name.value for name in LaneName)
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "flydsl"  # keyed by source and versions

_done: dict[Key, Compiled] = {}


def compiled(*keys: Key) -> list[Compiled]:
    """Specialisations; keys of one arch given together share the compiler's start."""
    missing = [key for key in keys if key not in _done]
    if missing:
        _done.update(fly_compile.compile_all(missing, CACHE))
    return [_done[key] for key in keys]


@cache
def module(key: Key, edit=None) -> Module:
    """Parsed IR, changed by ``edit`` (a function of the text) for a mutation."""
    text = _done[key].ir
    if edit is not None:
        changed = edit(text)
        assert changed != text, "the mutation changes nothing"
        text = changed
    return parse(text)


def array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as numpy; BF16 and FP8 as their bits."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


@dataclass
class SimRunner:
    """A :class:`minuet.attention.backends.flydsl.calls.Runner`.

    Attributes:
        arch: which.
        compute_units: few, so that a small batch is divided and merged.
        order: None for waves in step, or the seed of a random order.
        edits: kernel name to a change of its IR.
        shift: pages that the cache is imagined to have in front of those it has: pointers start
            that much earlier and page ids are that much larger, so offsets need 64 bits.
        calls: what was run.
    """

    arch: str
    compute_units: int = 8
    order: int | None = None
    edits: dict = field(default_factory=dict)
    shift: int = 0
    calls: list[Call] = field(default_factory=list)

    def __call__(self, calls) -> None:
        """Copy tensors in, run, copy what was written out."""
        self.calls += calls
        compiled(*(call.key for call in calls))
        written = {name for call in calls for name in SIGNATURES[call.key.kernel].outputs}
        memory, pointers, tensors = Memory(), {}, {}
        for call in calls:
            for name, value in call.arguments.items():
                if torch.is_tensor(value) and name not in pointers and value.numel():
                    assert value.is_contiguous(), name
                    tensors[name] = value
                    pointers[name] = self._place(memory, name, value, name not in written)
        for call in calls:
            self._run(call, memory, pointers)
        for name in written & set(pointers):
            raw = torch.from_numpy(memory.fetch(pointers[name]))
            tensors[name].copy_(raw.view(tensors[name].dtype).view(tensors[name].shape))

    def _place(self, memory: Memory, name: str, value: torch.Tensor, readonly: bool) -> Pointer:
        if name == "page_table":
            value = torch.where(value < 0, value, value + self.shift)
        pointer = memory.place(name, array(value), readonly=readonly, unwritten=name in SCRATCH)
        if name in LANES:
            pointer += -self.shift * (value.nbytes // value.shape[0])
        return pointer

    def _run(self, call: Call, memory: Memory, pointers: dict) -> None:
        (code,), signature = compiled(call.key), SIGNATURES[call.key.kernel]
        values = [
            pointers.get(name) if kind.endswith("*") else call.arguments[name]
            for name, kind in signature.params
        ]
        launch(
            module(call.key, self.edits.get(call.key.kernel)),
            code.report.kernel,
            values,
            memory,
            Geometry(call.grid, (signature.waves * TARGETS[self.arch].wave, 1, 1)),
            arch=self.arch,
            order=self.order,
        )
