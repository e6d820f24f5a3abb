"""The faults themselves: each patches one function or constant of the library."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minuet.attention import backends, capability, dispatch, plan, workspace
from minuet.attention.backends.cpu import launch
from minuet.attention.capability import WorkspaceSpec
from minuet.errors import ContractError
from minuet.kv import layout
from minuet.kv import write as kv_write
from minuet.ops import quant
from tests.attention import merge_model
from tests.mutants.harness import rewrite

Patch = pytest.MonkeyPatch


# --- plans and scratch ---------------------------------------------------------------------------


def plan_cached_by_rows(patch: Patch) -> None:
    original, kept = plan.DecodePlans.for_batch, {}

    def for_batch(self: plan.DecodePlans, num_seqs: int, lane: int = 0) -> plan.DecodePlan:
        if (num_seqs, lane) not in kept:
            shape = original(self, num_seqs, lane).shape
            kept[num_seqs, lane] = plan.DecodePlan.over(shape, np.zeros(shape.size, np.int32))
            self._lanes.append([kept[num_seqs, lane]])
        return kept[num_seqs, lane]

    patch.setattr(plan.DecodePlans, "for_batch", for_batch)


def scratch_allocated_on_first_use(patch: Patch) -> None:
    def init(self: Any, layout: Any, allocate: Any, zero: Any = None) -> None:
        self.layout, self.buffer, self.allocate = layout, None, allocate

    def slice_(self: Any, key: Any, name: str, lane: int = 0) -> workspace.Slice:
        if self.buffer is None:
            self.buffer = self.allocate(self.layout.total_bytes)
        return self.layout.slice(key, name, lane)

    patch.setattr(workspace.Workspace, "__init__", init)
    patch.setattr(workspace.Workspace, "slice", slice_)


def scratch_keyed_by_shape_only(patch: Patch) -> None:
    rewrite(patch, workspace.WorkspaceLayout, "slice", "lane * self.lane_bytes", "0")


def plan_fixed_to_one_batch(patch: Patch) -> None:
    original = plan.DecodePlan.refresh

    def refresh(self: plan.DecodePlan, lengths: Any) -> plan.DecodePlan:
        if len(lengths) != self.shape.max_seqs:
            raise ContractError("batch", got=len(lengths), expected=str(self.shape.max_seqs))
        return original(self, lengths)

    patch.setattr(plan.DecodePlan, "refresh", refresh)


def plan_limited_to_4096(patch: Patch) -> None:
    rewrite(
        patch, plan.DecodePlan, "_checked", "self.shape.max_seqs", "min(self.shape.max_seqs, 4096)"
    )


def plan_of_the_scheduled_batch_only(patch: Patch) -> None:
    rewrite(patch, plan.DecodePlan, "refresh", "self.rows[num_seqs:] = 0", "pass")


def plan_kept_while_the_batch_is_the_same(patch: Patch) -> None:
    original = plan.DecodePlan.refresh

    def refresh(self: plan.DecodePlan, lengths: Any) -> plan.DecodePlan:
        if np.count_nonzero(self.lengths) == len(lengths):
            return self
        return original(self, lengths)

    patch.setattr(plan.DecodePlan, "refresh", refresh)


def split_made_from_the_longest_allowed_context(patch: Patch) -> None:
    def part_counts(self: plan.PlanShape, tiles: plan.Int64Array) -> plan.Int64Array:
        step = max(1, -(-self.max_tiles * self.max_seqs // self.budget))
        return np.minimum(-(-tiles // step), self.max_parts)

    patch.setattr(plan.PlanShape, "part_counts", part_counts)


def merge_of_every_slot(patch: Patch) -> None:
    rewrite(
        patch, merge_model, "merge", "slice(first, first + parts)", "slice(0, len(partial_lse))"
    )


def scratch_of_another_kernel(patch: Patch) -> None:
    for name in ("triton", "flydsl"):
        spec = backends.SPECS[name]
        table = tuple(
            replace(kernel, workspace=lambda problem, sizes: (WorkspaceSpec("splits", 2**26),))
            for kernel in spec.CAPABILITIES
        )
        patch.setattr(spec, "CAPABILITIES", table)


def scores_of_all_queries_at_once(patch: Patch) -> None:
    rewrite(patch, workspace, "score_chunk_tokens", "budget_bytes //", "2**40 //")


def parts_of_a_fixed_split_from_the_budget(patch: Patch) -> None:
    rewrite(patch, plan.PlanShape, "part_counts", "if self.part_tiles:", "if False:")


def last_tile_lost_in_rounding(patch: Patch) -> None:
    rewrite(patch, plan.DecodePlan, "refresh", "checked + shape.tile_tokens - 1", "checked")


def shares_rounded_up_one_by_one(patch: Patch) -> None:
    each = "-(-tiles * left // total)"
    rewrite(patch, plan.PlanShape, "part_counts", "np.diff(dealt, prepend=0)", each)


# --- choice --------------------------------------------------------------------------------------


def limits_tested_at_the_call_only(patch: Patch) -> None:
    patch.setattr(capability, "_violations", lambda *_: iter(()))


def scale_kind_complained_of_before_the_switch(patch: Patch) -> None:
    original = capability._violations

    def violations(kernel: Any, problem: Any, arch: Any, want: str) -> Any:
        if problem.kv_dtype.is_fp8:
            yield capability._Violation("kv_scale", "per-token scales", "per-tensor scales")
        else:
            yield from original(kernel, problem, arch, want)

    patch.setattr(capability, "_violations", violations)


def first_reason_only(patch: Patch) -> None:
    original = capability._violations

    def violations(*question: Any) -> Any:
        yield from list(original(*question))[:1]

    patch.setattr(capability, "_violations", violations)


def advice_given_unchecked(patch: Patch) -> None:
    rewrite(patch, capability, "_remedy", "if not any(", "if True or any(")


def launcher_forwards_to_another(patch: Patch) -> None:
    _append_to_sources(
        patch, "launch.py", "from minuet.attention.backends.triton import launch as faster\n"
    )


def limit_copied_into_the_planner(patch: Patch) -> None:
    _append_to_sources(
        patch, "shapes.py", "def check(page_size):\n    return page_size in (16, 64, 128)\n"
    )


def _append_to_sources(patch: Patch, file_name: str, text: str) -> None:
    original = Path.read_text

    def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        return original(self, *args, **kwargs) + (text if self.name == file_name else "")

    patch.setattr(Path, "read_text", read_text)


def chosen_again_at_every_call(patch: Patch) -> None:
    rewrite(patch, dispatch, "choose", "_choose(", "_choose.__wrapped__(")


def limits_copied_at_import(patch: Patch) -> None:
    frozen = {name: backends.capabilities(name) for name in backends.NAMES}
    patch.setattr(backends, "capabilities", frozen.__getitem__)


def index_type_taken_from_the_kv_lanes(patch: Patch) -> None:
    rewrite(patch, layout.KVLayout, "lanes", "self.index_dtype", "self.kv_dtype")


# --- layout, writer, readers ---------------------------------------------------------------------


def pages_step_by_one(patch: Patch) -> None:
    rewrite(patch, plan, "fold_page_list", "pages * num_kv_heads", "pages")


def own_block_not_last(patch: Patch) -> None:
    rewrite(patch, launch, "_choose", "num_blocks).sort(dim=-1).values", "num_blocks)")


def scale_plane_without_heads(patch: Patch) -> None:
    rewrite(patch, layout.KVLayout, "address", "(head, token)\n", "(0, token)\n")


def scales_gathered_without_heads(patch: Patch) -> None:
    rewrite(
        patch, launch, "_gather", "[flat][..., None]", "[flat // layout.num_kv_heads][..., None]"
    )


def one_scale_for_all_tokens(patch: Patch) -> None:
    rewrite(patch, launch, "_gather", "[flat][..., None]", "[flat][:, :1, None]")


def shuffled_v_addressed_as_plain(patch: Patch) -> None:
    plain = "(head, 0, 0, channel * self.page_size + token)"
    rewrite(patch, layout.KVLayout, "address", "(head, token // x, channel, token % x)", plain)


def shuffled_v_read_as_plain(patch: Patch) -> None:
    rewrite(patch, launch, "_gather", "picked.permute(0, 1, 3, 2)", "picked")


def bf16_quantised_as_well(patch: Patch) -> None:
    rewrite(patch, kv_write, "store", "if layout.has_scales:", "if True:")


def fp8_maximum_written_as_240(patch: Patch) -> None:
    rewrite(patch, quant, "quantize_per_token", "torch.finfo(dtype).max", "240.0")


def zero_vector_stored_with_scale_zero(patch: Patch) -> None:
    rewrite(patch, quant, "quantize_per_token", "ones_like", "zeros_like")
