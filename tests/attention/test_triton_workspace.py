"""The slices that start-up plans hold every step of their shape: arithmetic, nothing runs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from minuet.attention.backends.triton import attending, selecting
from minuet.attention.backends.triton.config import TARGETS
from minuet.attention.backends.triton.step import Planner, StepShape, no_finer_than_useful
from minuet.attention.batch import AttentionBatch
from minuet.attention.contract import LayerKind, Phase
from minuet.attention.plan import PlanShape
from minuet.attention.reference import Selection
from minuet.errors import ContractError
from minuet.kv.cache import LayerCache
from minuet.platform.torch import to_torch
from tests.planning.helpers import plan as planned
from tests.planning.helpers import tiny

META = torch.device("meta")
MIB = 2**20
CONFIGS = {
    "default": {},
    "one-rank": {"tensor_parallel_size": 1},
    "two-ranks": {"tensor_parallel_size": 2},
    "a-million-tokens": {"max_model_len": 1 << 20, "max_num_batched_tokens": 32768},
    "short-contexts": {"max_model_len": 1000, "max_num_batched_tokens": 2048},
    "few-scores": {"max_model_len": 131072, "index_score_memory": 2 * MIB},
    "drafts": {"num_speculative_tokens": 7, "max_num_seqs": 256},
    "invariant": {"batch_invariant": True, "num_speculative_tokens": 3},
    "bfloat16": {"kv_cache_dtype": "bfloat16", "max_num_seqs": 7},
    "tiny": {"facts": tiny(), "max_num_seqs": 3},
    "tiny-few-scores": {"facts": tiny(), "index_score_memory": 1024},
}


def planner(plan, shape, slices):
    """As an engine makes it."""
    layout = next(iter(plan.layouts.values()))
    config = plan.config
    sizes = StepShape(
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
    return Planner(sizes, torch.device("cpu"), TARGETS["sm90"], slices)


def whole_batch(plan, shape):
    """The largest step of a shape."""
    longest = plan.config.max_model_len
    if shape.phase is Phase.DECODE:
        lens = (shape.query_len,) * shape.num_seqs
        contexts = (longest,) * shape.num_seqs
    else:
        first = min(longest, shape.num_tokens - 1)
        lens = contexts = (first, 1)  # what a context cannot hold pads the step
    width = -(-longest // plan.config.block_size)
    return AttentionBatch(
        lens,
        contexts,
        torch.empty(shape.num_tokens, dtype=torch.int64, device=META),
        torch.empty(shape.num_tokens, dtype=torch.int64, device=META),
        torch.empty(len(lens), width, dtype=torch.int32, device=META),
    )


def launches(plan, shape, kind, step):
    """Every launch of a layer's selection and attention, on tensors without memory."""
    layout = plan.layouts[kind]
    lanes = {
        name: torch.empty((4, *lane.shape), dtype=to_torch(lane.dtype), device=META)
        for name, lane in layout.lanes.items()
    }
    cache = LayerCache(layout, lanes)
    group = plan.facts.num_q_heads // plan.facts.num_kv_heads
    heads, dtype = layout.num_kv_heads, torch.bfloat16
    q = torch.empty(shape.num_tokens, heads * group, layout.head_dim, dtype=dtype, device=META)
    made, chosen = [], None
    if kind is LayerKind.SPARSE:
        index_q = torch.empty(shape.num_tokens, heads, layout.index_dim, dtype=dtype, device=META)
        index = plan.facts.index
        selection = Selection(index.top_blocks, index.init_blocks, index.local_blocks)
        chosen, launch = selecting.select_launch(index_q, cache, step, selection)
        made += [launch] if launch else []
    return made + list(attending.attend_launches(q, q, cache, step, chosen, 0.1))


def slices_of(plan, shape, short_by=0):
    return {
        name: torch.empty(place.bytes - short_by, dtype=torch.uint8, device=META)
        for name, place in plan.workspace.slices[shape].items()
    }


@pytest.mark.parametrize("name", list(CONFIGS))
def test_planned_slices_hold_every_step(name):
    plan = planned("sm90", attention_backend="triton", **CONFIGS[name])
    for shape in plan.shapes.all:
        step = planner(plan, shape, slices_of(plan, shape)).plan(
            whole_batch(plan, shape), plan.config.block_size
        )
        for kind in plan.layouts:
            made = launches(plan, shape, kind, step)
            assert made, (shape, kind)
            for launch in made:
                assert all(extent > 0 for extent in launch.grid), launch.kernel
        assert [chunk.end for chunk in step.chunks[:-1]] == [c.first for c in step.chunks[1:]]
        if step.chunks:
            assert step.chunks[-1].end == shape.num_tokens


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"max_model_len": 1 << 20}, "scores"),
        ({"tensor_parallel_size": 1, "max_model_len": 4096}, "lists"),
    ],
)
def test_a_long_step_is_taken_in_the_chunks_that_were_planned(settings, bound):
    plan = planned("sm90", attention_backend="triton", max_num_batched_tokens=32768, **settings)
    shape = plan.shapes.all[-1]
    made = planner(plan, shape, slices_of(plan, shape))
    step = made.plan(whole_batch(plan, shape), plan.config.block_size)
    budget = plan.config.index_score_memory // made.shape.score_row_bytes
    chunk = {"scores": budget, "lists": plan.step_of[shape].query_chunk}[bound]
    assert chunk < shape.num_tokens
    assert [c.end - c.first for c in step.chunks] == [chunk] * (shape.num_tokens // chunk)


def test_a_slice_that_holds_not_even_one_token_is_an_error_before_any_launch():
    plan = planned("sm90", attention_backend="triton")
    shape = plan.shapes.decode(8, 1)
    slices = slices_of(plan, shape) | {"partial_out": torch.empty(8, dtype=torch.uint8)}
    step = planner(plan, shape, slices).plan(whole_batch(plan, shape), plan.config.block_size)
    with pytest.raises(ContractError, match="workspace slice partial_out"):
        launches(plan, shape, LayerKind.DENSE, step)


@pytest.mark.parametrize("name", ["default", "drafts", "few-scores"])
def test_what_a_decode_plan_launches_depends_on_its_shape_alone(name):
    """A graph is captured once and replayed for every later batch of its shape."""
    plan = planned("sm90", attention_backend="triton", **CONFIGS[name])
    longest = plan.config.max_model_len
    for shape in plan.shapes.decode_shapes:
        made = planner(plan, shape, slices_of(plan, shape))
        page_table = torch.empty(
            shape.num_seqs, -(-longest // plan.config.block_size), dtype=torch.int32, device=META
        )
        positions = torch.empty(shape.num_tokens, dtype=torch.int64, device=META)
        seen = []
        for lens in ((longest,) * shape.num_seqs, (shape.query_len,), (longest, 0, 700)):
            lens = lens[: shape.num_seqs]
            batch = AttentionBatch(
                (shape.query_len,) * len(lens), lens, positions, positions, page_table
            )
            step = made.plan(batch, plan.config.block_size)
            seen.append([
                (made.kernel.fn.__name__, made.grid, made.options, _fingerprint(made.args))
                for kind in plan.layouts
                for made in launches(plan, shape, kind, step)
            ])  # fmt: skip
        assert seen[0] == seen[1] == seen[2], shape


def _fingerprint(args):
    """Arguments as a graph keeps them: addresses of the planner's tables, and values."""
    return {
        name: (value.data_ptr(), value.shape) if isinstance(value, torch.Tensor) else value
        for name, value in args.items()
    }


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=40),
    st.integers(1, 300),
    st.integers(1, 140),
)
def test_a_step_is_divided_no_finer_than_its_longest_part_needs(lengths, budget, most):
    division = PlanShape(
        max_seqs=len(lengths), max_length=9000, tile_tokens=128, max_parts=most, budget=budget
    )
    tiles = -(-np.array(lengths, np.int64) // 128)
    balanced = division.part_counts(tiles)
    counts = no_finer_than_useful(division, np.array(lengths)).part_counts(tiles)
    assert (counts <= balanced).all()
    assert ((counts > 0) == (tiles > 0)).all()
    longest = [int((-(-tiles // np.maximum(n, 1))).max()) for n in (balanced, counts)]
    assert longest[1] <= longest[0]


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariant_rows_share_no_tile(invariant):
    """Which query tokens meet in a tile depends on how a prompt was cut into steps."""
    plan = planned("sm90", attention_backend="triton", batch_invariant=invariant)
    shape = plan.shapes.all[-1]
    step = planner(plan, shape, slices_of(plan, shape)).plan(
        whole_batch(plan, shape), plan.config.block_size
    )
    unite, *_ = (
        made
        for made in launches(plan, shape, LayerKind.SPARSE, step)
        if made.kernel.fn.__name__ == "unite_lists"
    )
    in_lists = unite.args["TOKENS"] * unite.args["TOP"]
    assert (unite.args["row_blocks_per_step"] > in_lists) is invariant
