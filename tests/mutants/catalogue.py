"""The faults: M1 to M22, each with the tests that must catch it, and those not written yet.

The numbers are those of a study of a system that had, or nearly had, all of them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minuet.attention import backends, capability, dispatch, plan, workspace
from minuet.attention.backends.cpu import launch
from minuet.attention.capability import WorkspaceSpec
from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.kv import layout
from minuet.kv import write as kv_write
from minuet.kv.layout import Form
from minuet.ops import quant
from tests.attention import merge_model
from tests.mutants.harness import Killer, Mutant, rewrite

Patch = pytest.MonkeyPatch
_ATTENTION = "tests.attention."


def _killers(*tests: str, **params: Any) -> tuple[Killer, ...]:
    return tuple(Killer(_ATTENTION + test, params) for test in tests)


STEPS = "test_steady_state:test_five_thousand_steps_of_any_length_allocate_and_plan_nothing"
ONE_ENGINE = {"arch_name": "sm90", "num_kv_heads": 1}


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
    rewrite(
        patch,
        plan.DecodePlan,
        "refresh",
        "-(-checked // shape.tile_tokens)",
        "checked // shape.tile_tokens",
    )


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


FP8_SHUFFLE = {"form": Form.SHUFFLE, "kv_dtype": DType.FP8_E4M3FN, "kv_heads": 2}
DENSE_CPU = "test_conformance_cpu:test_dense_decode_equals_reference_at_length_edges"

MUTANTS = (
    Mutant(
        "M1",
        "Plans are cached by the number of rows and never dropped.",
        plan_cached_by_rows,
        _killers(STEPS, **ONE_ENGINE),
    ),
    Mutant(
        "M2",
        "Scratch is allocated on first use, after the KV cache was sized.",
        scratch_allocated_on_first_use,
        (
            *_killers(STEPS, **ONE_ENGINE),
            *_killers(
                "test_steady_state:test_the_kv_sizer_sees_memory_less_exactly_what_was_declared",
                in_flight=1,
            ),
        ),
    ),
    Mutant(
        "M3",
        "Scratch is found by shape alone, so two equal steps in flight share it.",
        scratch_keyed_by_shape_only,
        _killers(
            "test_workspace:test_two_steps_in_flight_never_share_a_byte",
            "test_steady_state:test_two_micro_batches_in_flight_share_neither_scratch_nor_plan",
        ),
    ),
    Mutant(
        "M4a",
        "The planner is compiled for one batch size.",
        plan_fixed_to_one_batch,
        (
            *_killers(STEPS, **ONE_ENGINE),
            *_killers("test_plan:test_one_plan_serves_every_batch_up_to_its_size"),
        ),
    ),
    Mutant(
        "M4b",
        "The planner takes 4,096 sequences at most.",
        plan_limited_to_4096,
        _killers("test_plan:test_one_plan_serves_every_batch_up_to_its_size"),
    ),
    Mutant(
        "M5",
        "Limits are tested when a kernel is called, not when it is chosen.",
        limits_tested_at_the_call_only,
        _killers(
            "test_capability:test_a_kernel_without_an_object_for_the_arch_is_never_chosen",
            "test_capability:test_every_violated_fact_is_refused_at_once",
            "test_dispatch:test_the_cpu_backend_is_automatic_on_the_cpu_only",
        ),
    ),
    Mutant(
        "M6a",
        "The general kernel's complaint about scales hides that a switch is off.",
        scale_kind_complained_of_before_the_switch,
        _killers("test_capability:test_a_backend_switched_off_is_the_one_thing_advised"),
    ),
    Mutant(
        "M6b",
        "Only the first reason is reported.",
        first_reason_only,
        _killers(
            "test_capability:test_every_violated_fact_is_refused_at_once",
            "test_capability:test_sinks_and_windows_are_named_and_nothing_is_advised",
        ),
    ),
    Mutant(
        "M6c",
        "Advice is given without checking that it suffices.",
        advice_given_unchecked,
        _killers(
            "test_capability:test_an_unsupported_page_is_named_and_the_switch_not_advised",
            "test_capability:test_advice_followed_alone_makes_the_kernel_cover_the_problem",
        ),
    ),
    Mutant(
        "M7",
        "A launcher hands the call to another backend's launcher.",
        launcher_forwards_to_another,
        _killers("test_sources:test_a_launcher_knows_no_other_backend_no_flag_and_no_capability"),
    ),
    Mutant(
        "M8",
        "The choice is evaluated again wherever it is needed.",
        chosen_again_at_every_call,
        _killers(
            "test_dispatch:test_a_hundred_steps_of_sixty_layers_evaluate_each_problem_once",
            "test_dispatch:test_the_same_question_has_the_same_answer",
            "test_dispatch:test_a_repeated_question_costs_less_than_five_microseconds",
        ),
    ),
    Mutant(
        "M10a",
        "Limits are copied out of the specs at import.",
        limits_copied_at_import,
        _killers("test_dispatch:test_a_limit_changed_in_the_spec_is_changed_for_everybody"),
    ),
    Mutant(
        "M10b",
        "A kernel's page set is written again in the planning layer.",
        limit_copied_into_the_planner,
        _killers("test_sources:test_no_limit_of_a_kernel_is_written_in_the_engine"),
    ),
    Mutant(
        "M11",
        "The writer quantises whatever the cache's type.",
        bf16_quantised_as_well,
        _killers(
            "test_conformance_cpu:test_written_lanes_read_back_at_the_layouts_addresses",
            kv_dtype=DType.BF16,
        ),
        crashes=(KeyError,),  # there is no scale plane to write to
    ),
    Mutant(
        "M12",
        "The largest FP8 value is the literal 240 for every flavour.",
        fp8_maximum_written_as_240,
        _killers(
            "test_conformance_cpu:test_written_lanes_read_back_at_the_layouts_addresses",
            kv_dtype=DType.FP8_E4M3FN,
        ),
    ),
    Mutant(
        "M13",
        "A zero vector is stored with scale 0.",
        zero_vector_stored_with_scale_zero,
        _killers(
            "test_conformance_cpu:test_a_zero_vector_is_stored_with_scale_one_and_a_large_one_saturates"
        ),
    ),
    Mutant(
        "M14",
        "Every kernel gets the scratch of one particular kernel.",
        scratch_of_another_kernel,
        _killers(
            "test_workspace:test_scratch_is_asked_for_by_the_kernel_that_uses_it_and_no_other"
        ),
    ),
    Mutant(
        "M15a",
        "Page ids of a folded cache step by 1 instead of the number of KV heads.",
        pages_step_by_one,
        _killers(
            "test_layout_views:test_golden_page_table_rows",
            "test_layout_views:test_pages_equal_to_blocks_fold_to_page_times_heads_plus_head",
        ),
    ),
    Mutant(
        "M15b",
        "Chosen blocks stay in the order of their scores, the query's own not last.",
        own_block_not_last,
        _killers("test_conformance_cpu:test_exact_ties_go_to_the_lowest_block"),
    ),
    Mutant(
        "M16a",
        "Scale planes are addressed without their head.",
        scale_plane_without_heads,
        _killers(
            "test_layout_views:test_head_major_and_scale_addresses_are_row_major",
            "test_layout_views:test_a_cache_seen_with_one_head_per_page_is_the_same_memory",
        ),
    ),
    Mutant(
        "M16b",
        "The cache is folded to one head per page, its scales are not.",
        scales_gathered_without_heads,
        _killers(DENSE_CPU, **FP8_SHUFFLE),
    ),
    Mutant(
        "M17",
        "The plan covers the scheduled batch, not the padded one.",
        plan_of_the_scheduled_batch_only,
        _killers(
            "test_plan:test_every_draft_pass_plans_the_padded_batch_with_its_new_lengths",
            "test_plan:test_empty_and_padded_rows_have_no_part_and_length_zero",
        ),
    ),
    Mutant(
        "M18",
        "The plan is not refreshed between draft passes.",
        plan_kept_while_the_batch_is_the_same,
        _killers("test_plan:test_every_draft_pass_plans_the_padded_batch_with_its_new_lengths"),
    ),
    Mutant(
        "M19",
        "One scale is used for every token of a page.",
        one_scale_for_all_tokens,
        _killers(DENSE_CPU, **FP8_SHUFFLE),
    ),
    Mutant(
        "M20",
        "Work is divided by the longest context allowed, all that a captured graph knows.",
        split_made_from_the_longest_allowed_context,
        (
            *_killers("test_plan:test_work_follows_real_lengths_and_not_the_longest_allowed"),
            *_killers(
                "test_plan:test_a_decode_step_fills_the_machine_or_uses_every_tile",
                arch_name="gfx1250",
                num_kv_heads=1,
            ),
        ),
    ),
    Mutant(
        "M21a",
        "V in the shuffle form is addressed as a plain transpose.",
        shuffled_v_addressed_as_plain,
        _killers(
            "test_layout_views:test_shuffle_addresses_are_the_published_formulas",
            "test_layout_views:test_v_in_the_shuffle_form_is_not_a_plain_transpose",
        ),
    ),
    Mutant(
        "M21b",
        "V in the shuffle form is read as if it were plain.",
        shuffled_v_read_as_plain,
        _killers(DENSE_CPU, **FP8_SHUFFLE),
    ),
    Mutant(
        "M22",
        "The merge reads every slot instead of the row's own.",
        merge_of_every_slot,
        _killers("test_merge:test_split_and_merge_equal_a_single_pass_on_poisoned_scratch"),
    ),
    # Faults outside the numbered list that the same tests exist for.
    Mutant(
        "F-11c",
        "The index key takes its type from the K and V lanes.",
        index_type_taken_from_the_kv_lanes,
        _killers("test_capability:test_the_index_dtype_is_its_own_fact"),
    ),
    Mutant(
        "F-11l",
        "Block scores of all queries are held at once.",
        scores_of_all_queries_at_once,
        _killers(
            "test_workspace:test_block_scores_stay_within_their_budget_at_any_context",
            tokens=16384,
            max_length=2**20,
        ),
    ),
    Mutant(
        "rounding",
        "A partly filled last tile is not counted.",
        last_tile_lost_in_rounding,
        _killers(
            "test_plan:test_published_check_values",
            "test_plan:test_every_tile_is_covered_exactly_once_within_capacity",
        ),
    ),
    Mutant(
        "telescoping",
        "Shares are rounded up sequence by sequence, so their sum can exceed the capacity.",
        shares_rounded_up_one_by_one,
        _killers(
            "test_plan:test_published_check_values",
            "test_plan:test_every_tile_is_covered_exactly_once_within_capacity",
        ),
    ),
    Mutant(
        "batch-invariance",
        "The batch-invariant form divides a budget among batch-mates.",
        parts_of_a_fixed_split_from_the_budget,
        _killers("test_plan:test_a_fixed_partition_does_not_depend_on_batch_mates"),
    ),
)

# Faults of the numbered list that this catalogue does not hold, and why.
ELSEWHERE = {
    "M9": "documentation names a fallback that does not exist: with the generated documentation",
}
