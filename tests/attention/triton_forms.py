"""Sparse prefill gives the same in each of its forms: by rows, by tiles, and as a tile decides."""

from dataclasses import replace

import torch

from minuet.attention import reference
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from tests.attention.conformance import (
    Backend,
    Case,
    assert_close,
    build,
    moved,
    reference_blocks,
)

ROWS_ONLY, TILES_ONLY = 1000, 0  # row_blocks_per_step: a tile never pays, always pays

_COMMON = {"index_dtype": DType.BF16, "index_dim": 64, "q_dtype": torch.bfloat16}


def cases(fp8: DType) -> dict[str, Case]:
    """Several sequences, groups that do not fill a tile, lists shorter than the choice, padding."""
    small = Case((90, 40), (23, 40), 2, 3, 64, 16, selection=Selection(3), **_COMMON)
    long = Case((700, 300, 129, 5), (40, 300, 1, 5), 1, 16, 128, 128, **_COMMON)
    many = replace(small, lens=(1400, 30), query_lens=(30, 30), kv_heads=1, group=16)
    made = {}
    for kv in (DType.BF16, fp8):
        made[f"small-{kv}"] = replace(small, kv_dtype=kv)
        made[f"few-{kv}"] = replace(small, lens=(90, 3), query_lens=(9, 3), kv_heads=1, kv_dtype=kv)
        made[f"long-{kv}"] = replace(long, kv_dtype=kv, selection=Selection(16, 1, 2))
        made[f"many-{kv}"] = replace(many, kv_dtype=kv, selection=Selection(11))
        made[f"ungrouped-{kv}"] = replace(small, kv_dtype=kv, group=1, page=64)
    return made


def check_forms(case: Case, backend: Backend) -> None:
    """Every form agrees with the reference over the same selection."""
    world = build(case)
    there = moved(world, backend.device)
    plan = backend.plan(there.batch, case)
    blocks = reference_blocks(world)
    assert blocks is not None
    want = reference.attend(world.q, world.cache, world.batch, blocks, 0.1)
    given = blocks.to(backend.device)
    for row_blocks in (ROWS_ONLY, TILES_ONLY, plan.target.row_blocks_per_step):
        target = replace(
            plan.target, row_blocks_per_step=row_blocks, row_blocks_per_step_fp8=row_blocks
        )
        forced = replace(plan, target=target)
        got = backend.launch.attend(there.q, there.cache, forced, given, 0.1)
        assert_close(got.cpu(), want, case.q_dtype)
        assert (given.cpu() == blocks).all(), "the caller's lists were written to"
        chosen = backend.launch.select(there.index_q, there.cache, forced, case.selection)
        got = backend.launch.attend(there.q, there.cache, forced, chosen, 0.1)
        lists = backend.launch.block_lists(chosen, forced).cpu()
        same = reference.attend(world.q, world.cache, world.batch, lists, 0.1)
        assert_close(got.cpu(), same, case.q_dtype)
