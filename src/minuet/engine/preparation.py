"""Reserve, prepare, self-test, seal: what turns a plan into a runner on a device with a queue.

Graphs first: capturing one gives unused memory back to the device. Within a phase the largest shape
first, so that what the allocator takes for it serves the smaller ones too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm import tqdm

from minuet.attention.contract import Phase
from minuet.attention.runtime import StepKernels
from minuet.engine import sampler, selftest
from minuet.engine.prepared import Prepared
from minuet.engine.queued import QueuedRunner
from minuet.engine.runner import Model
from minuet.engine.seal import Seal
from minuet.kv.cache import KVCache
from minuet.log import get_logger
from minuet.planning.execution import ExecutionPlan
from minuet.planning.memory import SPARE_BYTES, human_bytes
from minuet.planning.shapes import StepShape
from minuet.platform.device import Facility

log = get_logger(__name__)

DEPTH = 1  # steps queued beyond the one that runs: enough to hide the host, and few to throw away


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything between loaded weights and ready.

    Attributes:
        model: weights, kernels and operations.
        cache: the pool.
        plan: what was settled.
        kernels: the launchers that the model calls.
        recorder: stands around them for the self-test.
        facility: the device.
    """

    model: Model
    cache: KVCache
    plan: ExecutionPlan
    kernels: StepKernels
    recorder: selftest.Recorder
    facility: Facility

    def run(self, lap: Callable[[str], None]) -> QueuedRunner:
        """Do all of it.

        Args:
            lap: told the name of each stage when it is over.

        Raises:
            PreparationError: a shape cannot be captured, or failed its self-test.
        """
        # weights and pages, and what others in this process hold
        held_before = self.facility.reserved_bytes()
        with torch.inference_mode():
            prepared = Prepared(self.model, self.cache, self.plan, self.kernels, self.facility)
            lap("reserve")
            self._note("workspace and inputs")
            self._prepare(prepared)
            lap("prepare")
            with _bar("self-test", len(self.plan.shapes.decode_shapes)) as step:
                selftest.check(prepared, self.cache, self.plan, self.recorder, step)
            lap("self-test")
        self.facility.idle()
        seal = Seal(self.facility, self.plan.config.seal, self._limit(held_before))
        seal.close()
        return QueuedRunner(
            self.model, self.cache, prepared, seal, depth=DEPTH, seed=self.plan.config.seed
        )

    def _prepare(self, prepared: Prepared) -> None:
        config, shapes = self.plan.config, self.plan.shapes
        rows = shapes.rungs[-1] * shapes.query_lens[-1]
        largest_first = sorted(
            shapes.all, key=lambda shape: (shape.phase is Phase.PREFILL, -shape.num_tokens)
        )
        graphs = len(shapes.decode_shapes)
        with _bar("prepare", len(largest_first)) as step:
            for number, shape in enumerate(largest_first):
                if number == graphs:
                    self.facility.trim()
                prepared.prepare(shape)
                self._note(str(shape))
                step(shape)
        sampler.rehearse(rows, self.plan.facts.vocab, config.max_logprobs, self.facility.device)
        self.facility.spare(SPARE_BYTES)
        self._note("sampling")

    def _note(self, what: str) -> None:
        log.debug("%s: allocator holds %s", what, human_bytes(self.facility.reserved_bytes()))

    def _limit(self, held_before: int) -> int:
        """Bytes the allocator may hold after ready: those declared, or those taken if more."""
        memory = self.plan.memory
        taken = self.facility.reserved_bytes() - held_before
        declared = memory.workspace_bytes + memory.graph_bytes + memory.activation_bytes
        shown = human_bytes(taken), human_bytes(declared)
        log.info("workspace, graphs and activations took %s of %s declared", *shown)
        if taken > declared:
            log.warning(
                "that is %s more than the plan's estimate; --gpu-memory-utilization leaves room "
                "for it, or does not",
                human_bytes(taken - declared),
            )
        return held_before + max(taken, declared)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[StepShape], None]]:
    """A progress bar on a terminal; called with each shape that is done."""
    with tqdm(total=total, desc=what, unit="shape", disable=None, leave=False) as bar:

        def step(shape: StepShape) -> None:
            bar.set_postfix_str(str(shape), refresh=False)
            bar.update()

        yield step
