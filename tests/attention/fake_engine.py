"""An engine of integers: prepares through the library's API, then runs steps and counts.

It does what the real one does between ``settle`` and ``serve``, with a fake allocator in place of
the device: choose, split, lay out, allocate, make plans, and only then size the KV cache.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from minuet.attention import dispatch
from minuet.attention.capability import StepSizes
from minuet.attention.contract import LayerKind, Op, Phase
from minuet.attention.plan import DecodePlans, PlanShape, split_for
from minuet.attention.workspace import Workspace, lay_out
from minuet.dtypes import DType
from minuet.platform.arch import Arch
from tests.attention.problems import DENSE, SPARSE

RUNGS = (1, 2, 4, 8, 16, 32, 64)
SCORE_BYTES = 64 * 2**20


@dataclass
class FakeMemory:
    """A device that knows how much is left."""

    total_bytes: int
    taken: list[int] = field(default_factory=list)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - sum(self.taken)

    def allocate(self, size: int) -> int:
        self.taken.append(size)
        return len(self.taken) - 1

    def allocate_int32(self, elements: int) -> np.ndarray:
        self.allocate(elements * DType.INT32.itemsize)
        return np.zeros(elements, np.int32)


class FakeEngine:
    """Prepared for decode rungs and prefill buckets of one model with dense and sparse layers."""

    def __init__(self, arch: Arch, memory: FakeMemory, *, num_kv_heads=1, max_tokens=16384,
                 max_length=131072, rungs=RUNGS, in_flight=1, want="auto"):  # fmt: skip
        self.memory = memory
        buckets = [1 << i for i in range(4, 30) if 1 << i < max_tokens] + [max_tokens]
        self.buckets = buckets[-16:]
        self.launched: list[tuple[str, tuple]] = []
        demands, shapes = {}, []
        for kind, base in ((LayerKind.DENSE, DENSE), (LayerKind.SPARSE, SPARSE)):
            problem = replace(
                base,
                num_q_heads=16 * num_kv_heads,
                num_kv_heads=num_kv_heads,
                index_heads=num_kv_heads if kind is LayerKind.SPARSE else 0,
                form=dispatch.preferred_form(arch, want),
            )
            steps = [(Phase.DECODE, n, n) for n in rungs]
            steps += [(Phase.PREFILL, 0, tokens) for tokens in self.buckets]
            for phase, num_seqs, tokens in steps:
                specs, split = self._demand(
                    arch, want, problem, phase, num_seqs, tokens, max_length
                )
                demands[kind, phase, tokens] = specs
                if isinstance(split, PlanShape):
                    shapes.append(split)
        self.workspace = Workspace(lay_out(demands, in_flight), memory.allocate)
        self.plans = DecodePlans(shapes, memory.allocate_int32, in_flight)
        self.kv_bytes = memory.free_bytes  # what the KV sizer sees
        memory.allocate(self.kv_bytes)

    def _demand(self, arch, want, problem, phase, num_seqs, tokens, max_length):
        problem = replace(problem, phase=phase)
        sizes = StepSizes(
            num_seqs=num_seqs, query_tokens=tokens, max_length=max_length, score_bytes=SCORE_BYTES
        )
        attend = dispatch.choose(problem, arch, want).kernel
        split = split_for(
            attend.split,
            problem,
            compute_units=arch.compute_units,
            num_seqs=num_seqs,
            query_tokens=tokens,
            max_length=max_length,
        )
        specs = list(attend.workspace(problem, replace(sizes, slots=split.slots)))
        if problem.layer_kind is LayerKind.SPARSE:
            chosen = replace(problem, op=Op.SELECT)
            specs += dispatch.choose(chosen, arch, want).kernel.workspace(chosen, sizes)
        return specs, split

    @property
    def declared_bytes(self) -> int:
        """What start-up reported: workspace and plans."""
        return self.workspace.layout.total_bytes + self.plans.size * DType.INT32.itemsize

    def prefill(self, tokens: int, lane: int = 0) -> list:
        """One step; returns the slices it used."""
        bucket = next(b for b in self.buckets if tokens <= b)
        return self._slices(Phase.PREFILL, bucket, lane)

    def decode(self, lengths: list[int], lane: int = 0) -> list:
        """One step; returns the slices it used."""
        plan = self.plans.for_batch(len(lengths), lane).refresh(lengths)
        return self._slices(Phase.DECODE, plan.shape.max_seqs, lane)

    def _slices(self, phase: Phase, tokens: int, lane: int) -> list:
        layout = self.workspace.layout
        return [
            self.workspace.slice((kind, phase, tokens), name, lane)
            for kind in LayerKind
            for name in layout.slices[kind, phase, tokens]
        ]
