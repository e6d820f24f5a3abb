"""What a plan must be able to do: a simulated engine walks its reachable steps."""

from collections.abc import Iterator
from functools import lru_cache

from minuet.attention.backends import NAMES, capabilities
from minuet.attention.capability import StepSizes, covers
from minuet.attention.contract import Op, Phase
from minuet.attention.dispatch import Choice
from minuet.attention.workspace import covers_step
from minuet.errors import Refusal
from minuet.planning.execution import ExecutionPlan
from minuet.planning.kernels import Call
from minuet.planning.shapes import StepShape

_KERNELS = [kernel for name in NAMES for kernel in capabilities(name)]
LAUNCHED = {kernel.target: kernel.name for kernel in _KERNELS}
assert len(LAUNCHED) == len(_KERNELS)  # one launcher per kernel, or a label could not tell


def reachable_steps(plan: ExecutionPlan) -> Iterator[StepShape]:
    """Shapes of steps at and around every edge of what a scheduler may build."""
    config = plan.config
    for query_len in {1, config.num_speculative_tokens + 1}:
        for num_seqs in _around(plan.shapes.rungs, config.max_num_seqs):
            yield plan.shapes.decode(num_seqs, query_len)
    for num_tokens in _around(plan.shapes.buckets, config.max_num_batched_tokens):
        yield plan.shapes.prefill(num_tokens)


def _around(edges: tuple[int, ...], largest: int) -> list[int]:
    near = {edge + step for edge in edges for step in (-1, 0, 1)}
    return sorted(n for n in near if 1 <= n <= largest)


def calls_of(plan: ExecutionPlan, shape: StepShape) -> list[Call]:
    """Calls of one step, in the order of the layers' operations."""
    return [
        Call(kind, op, shape.phase, shape.query_len)
        for kind in plan.layouts
        for op in Op
        if Call(kind, op, shape.phase, shape.query_len) in plan.choices
    ]


class FakeEngine:
    """Launches what the plan says and writes down a trace: label and kernel that really ran."""

    def __init__(self, plan: ExecutionPlan):
        self.plan = plan
        self.trace: list[tuple[str, str]] = []

    def step(self, shape: StepShape) -> None:
        """Run one step of one layer of each kind: it must be one that was prepared."""
        assert self.plan.step_of[shape].shape == shape
        for call in calls_of(self.plan, shape):
            kernel = self.plan.choices[call].kernel
            # what is launched is found by the target, as Capability.load does
            self.trace.append((kernel.name, LAUNCHED[kernel.target]))


def assert_accepted(plan: ExecutionPlan) -> None:
    """Every reachable step is covered by the kernels the plan gives it; asked of the tables."""
    for shape in set(reachable_steps(plan)):
        step = plan.step_of[shape]
        calls = calls_of(plan, shape)
        assert calls, shape
        for call in calls:
            choice = plan.choices[call]
            assert choice.kernel is not None
            tokens = step.query_chunk if shape.phase is Phase.PREFILL else shape.num_tokens
            sizes = StepSizes(
                num_seqs=max(1, shape.num_seqs),
                query_tokens=tokens,
                max_length=plan.config.max_model_len,
                score_bytes=plan.config.index_score_memory,
            )
            assert _reasons(choice, sizes) == ()


@lru_cache(maxsize=2**16)
def _reasons(choice: Choice, sizes: StepSizes) -> tuple[Refusal, ...]:
    kernel = choice.kernel
    assert kernel is not None
    return (
        *covers(kernel, choice.problem, choice.arch, choice.want),
        *covers_step(kernel, choice.problem, sizes),
    )
