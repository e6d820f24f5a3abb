"""Steps as an engine prepares them: one workspace of the planned size, poisoned, padded batches."""

from dataclasses import replace

import torch
from torch import Tensor

from minuet.attention import reference
from minuet.attention.backends.triton import launch
from minuet.attention.backends.triton.step import Planner, StepShape
from minuet.attention.batch import AttentionBatch
from minuet.attention.contract import LayerKind, Phase
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import LayerCache
from minuet.planning.execution import ExecutionPlan
from minuet.planning.shapes import StepShape as Shape
from tests.attention.conformance import Case, World, assert_close, build, moved, reference_blocks
from tests.planning.helpers import plan as planned
from tests.planning.helpers import tiny

SCALE = 0.125


def step_shape(plan: ExecutionPlan, shape: Shape) -> StepShape:
    """Sizes of a planner of one of the plan's shapes."""
    layout, config = next(iter(plan.layouts.values())), plan.config
    return StepShape(
        page_size=layout.page_size,
        num_kv_heads=layout.num_kv_heads,
        group=plan.facts.num_q_heads // plan.facts.num_kv_heads,
        max_seqs=shape.num_seqs or config.max_num_seqs,
        max_tokens=shape.num_tokens,
        max_length=config.max_model_len,
        query_len=shape.query_len if shape.phase is Phase.DECODE else 0,
        compute_units=plan.arch.compute_units,
        score_bytes=config.index_score_memory,
        kv_fp8=layout.has_scales,
        batch_invariant=config.batch_invariant,
    )


def check_planned(device: torch.device, score_bytes: int, reduced: bool = False) -> None:
    """Shapes of a small model over exactly the planned workspace.

    Args:
        device: where.
        score_bytes: budget of block scores.
        reduced: two shapes, for a device that takes seconds for each.
    """
    plan = planned(
        "sm90", tiny(), attention_backend="triton", dtype="float16", kv_cache_dtype="fp8",
        max_model_len=700, max_num_seqs=3, max_num_batched_tokens=128,
        num_speculative_tokens=1, index_score_memory=score_bytes,
    )  # fmt: skip
    workspace = torch.full(
        (plan.workspace.total_bytes,), 0xFF, dtype=torch.uint8, device=device
    )  # NaN as a float, -1 as an integer
    shapes = [*plan.shapes.decode_shapes, *plan.shapes.prefill_shapes]
    if reduced:
        shapes = [plan.shapes.decode(3, 2), plan.shapes.prefill(32)]
    for shape in shapes:
        slices = {
            name: workspace[place.offset : place.end]
            for name, place in plan.workspace.slices[shape].items()
        }
        planner = launch.planner(step_shape(plan, shape), device, slices)
        workspace.fill_(0xFF)
        if shape.phase is Phase.DECODE:
            _check_decode(plan, shape, planner, device)
        else:
            _check_prefill(plan, planner, device, shape.num_tokens)


def _case(plan: ExecutionPlan, lens: tuple[int, ...], query_lens: tuple[int, ...]) -> Case:
    index = plan.facts.index
    assert index is not None
    layout = plan.layouts[LayerKind.SPARSE]
    return Case(
        lens, query_lens, layout.num_kv_heads, 2, layout.head_dim, layout.page_size,
        layout.index_dim, DType.FP8_E4M3FN, DType.FP16, torch.float16,
        selection=Selection(index.top_blocks, index.init_blocks, index.local_blocks),
    )  # fmt: skip


def _check_decode(
    plan: ExecutionPlan, shape: Shape, planner: Planner, device: torch.device
) -> None:
    """A plan made of the full batch serves a smaller one, over buffers that stay where they are."""
    rows, query_len = shape.num_seqs, shape.query_len
    lens = (700, 129, 0)[-rows:] if rows > 1 else (513,)
    alive = max(1, rows - 1)
    world = build(_case(plan, lens[:alive], (query_len,) * alive))
    there = moved(world, device)
    table = torch.full((rows, 6), -1, dtype=torch.int32, device=device)
    padding = torch.zeros(shape.num_tokens, dtype=torch.int64, device=device)
    full = AttentionBatch((query_len,) * rows, (700,) * rows, padding, padding, table)
    step = planner.plan(full, world.case.page)
    table[:alive, : there.batch.page_table.shape[1]] = there.batch.page_table
    planner.plan(replace(there.batch, page_table=table), world.case.page)
    q, index_q = _padded(there.q, shape.num_tokens), _padded(there.index_q, shape.num_tokens)
    _compare(world, there.cache, step, (q, index_q))


def _check_prefill(
    plan: ExecutionPlan, planner: Planner, device: torch.device, num_tokens: int
) -> None:
    """Ragged sequences, one in a long context, one that decodes, and padding."""
    longest = num_tokens // 2
    world = build(_case(plan, (700, longest // 2, 300), (longest, longest // 2, 1)))
    there = moved(world, device)
    positions = torch.full((num_tokens,), 9999, dtype=torch.int64, device=device)
    positions[: there.batch.num_tokens] = there.batch.positions
    step = planner.plan(replace(there.batch, positions=positions), world.case.page)
    q, index_q = _padded(there.q, num_tokens), _padded(there.index_q, num_tokens)
    _compare(world, there.cache, step, (q, index_q))


def _padded(values: Tensor | None, num_tokens: int) -> Tensor:
    assert values is not None
    rest = values.new_full((num_tokens - values.shape[0], *values.shape[1:]), float("nan"))
    return torch.cat([values, rest])


def _compare(
    world: World, cache: LayerCache, step: launch.Plan, queries: tuple[Tensor, Tensor]
) -> None:
    q, index_q = queries
    real = world.q.shape[0]
    assert world.case.selection is not None
    chosen = launch.select(index_q, cache, step, world.case.selection)
    for blocks, given in ((reference_blocks(world), chosen), (None, None)):
        got = launch.attend(q, cache, step, given, SCALE).cpu()
        want = reference.attend(world.q, world.cache, world.batch, blocks, SCALE)
        assert_close(got[:real], want, world.case.q_dtype)
        assert not got[real:].any(), "padding is not zero"
