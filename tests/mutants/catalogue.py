"""The faults: M1 to M22, each with the tests that must catch it, and those not written yet.

The numbers are those of a study of a system that had, or nearly had, all of them.
"""

from typing import Any

from minuet.dtypes import DType
from minuet.kv.layout import Form
from tests.mutants import faults
from tests.mutants.harness import Killer, Mutant

_ATTENTION = "tests.attention."


def _killers(*tests: str, **params: Any) -> tuple[Killer, ...]:
    return tuple(Killer(_ATTENTION + test, params) for test in tests)


STEPS = "test_steady_state:test_five_thousand_steps_of_any_length_allocate_and_plan_nothing"
ONE_ENGINE = {"arch_name": "sm90", "num_kv_heads": 1}
FP8_SHUFFLE = {"form": Form.SHUFFLE, "kv_dtype": DType.FP8_E4M3FN, "kv_heads": 2}
DENSE_CPU = "test_conformance_cpu:test_dense_decode_equals_reference_at_length_edges"

MUTANTS = (
    Mutant(
        "M1",
        "Plans are cached by the number of rows and never dropped.",
        faults.plan_cached_by_rows,
        _killers(STEPS, **ONE_ENGINE),
    ),
    Mutant(
        "M2",
        "Scratch is allocated on first use, after the KV cache was sized.",
        faults.scratch_allocated_on_first_use,
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
        faults.scratch_keyed_by_shape_only,
        _killers(
            "test_workspace:test_two_steps_in_flight_never_share_a_byte",
            "test_steady_state:test_two_micro_batches_in_flight_share_neither_scratch_nor_plan",
        ),
    ),
    Mutant(
        "M4a",
        "The planner is compiled for one batch size.",
        faults.plan_fixed_to_one_batch,
        (
            *_killers(STEPS, **ONE_ENGINE),
            *_killers("test_plan:test_one_plan_serves_every_batch_up_to_its_size"),
        ),
    ),
    Mutant(
        "M4b",
        "The planner takes 4,096 sequences at most.",
        faults.plan_limited_to_4096,
        _killers("test_plan:test_one_plan_serves_every_batch_up_to_its_size"),
    ),
    Mutant(
        "M5",
        "Limits are tested when a kernel is called, not when it is chosen.",
        faults.limits_tested_at_the_call_only,
        _killers(
            "test_capability:test_a_kernel_without_an_object_for_the_arch_is_never_chosen",
            "test_capability:test_every_violated_fact_is_refused_at_once",
            "test_dispatch:test_the_cpu_backend_is_automatic_on_the_cpu_only",
        ),
    ),
    Mutant(
        "M6a",
        "The general kernel's complaint about scales hides that a switch is off.",
        faults.scale_kind_complained_of_before_the_switch,
        _killers("test_capability:test_a_backend_switched_off_is_the_one_thing_advised"),
    ),
    Mutant(
        "M6b",
        "Only the first reason is reported.",
        faults.first_reason_only,
        _killers(
            "test_capability:test_every_violated_fact_is_refused_at_once",
            "test_capability:test_sinks_and_windows_are_named_and_nothing_is_advised",
        ),
    ),
    Mutant(
        "M6c",
        "Advice is given without checking that it suffices.",
        faults.advice_given_unchecked,
        _killers(
            "test_capability:test_an_unsupported_page_is_named_and_the_switch_not_advised",
            "test_capability:test_advice_followed_alone_makes_the_kernel_cover_the_problem",
        ),
    ),
    Mutant(
        "M7",
        "A launcher hands the call to another backend's launcher.",
        faults.launcher_forwards_to_another,
        _killers("test_sources:test_a_launcher_knows_no_other_backend_no_flag_and_no_capability"),
    ),
    Mutant(
        "M8",
        "The choice is evaluated again wherever it is needed.",
        faults.chosen_again_at_every_call,
        _killers(
            "test_dispatch:test_a_hundred_steps_of_sixty_layers_evaluate_each_problem_once",
            "test_dispatch:test_the_same_question_has_the_same_answer",
            "test_dispatch:test_a_repeated_question_costs_less_than_five_microseconds",
        ),
    ),
    Mutant(
        "M10a",
        "Limits are copied out of the specs at import.",
        faults.limits_copied_at_import,
        _killers("test_dispatch:test_a_limit_changed_in_the_spec_is_changed_for_everybody"),
    ),
    Mutant(
        "M10b",
        "A kernel's page set is written again in the planning layer.",
        faults.limit_copied_into_the_planner,
        _killers("test_sources:test_no_limit_of_a_kernel_is_written_in_the_engine"),
    ),
    Mutant(
        "M11",
        "The writer quantises whatever the cache's type.",
        faults.bf16_quantised_as_well,
        _killers(
            "test_conformance_cpu:test_written_lanes_read_back_at_the_layouts_addresses",
            kv_dtype=DType.BF16,
        ),
        crashes=(KeyError,),  # there is no scale plane to write to
    ),
    Mutant(
        "M12",
        "The largest FP8 value is the literal 240 for every flavour.",
        faults.fp8_maximum_written_as_240,
        _killers(
            "test_conformance_cpu:test_written_lanes_read_back_at_the_layouts_addresses",
            kv_dtype=DType.FP8_E4M3FN,
        ),
    ),
    Mutant(
        "M13",
        "A zero vector is stored with scale 0.",
        faults.zero_vector_stored_with_scale_zero,
        _killers(
            "test_conformance_cpu:test_a_zero_vector_is_stored_with_scale_one_and_a_large_one_saturates"
        ),
    ),
    Mutant(
        "M14",
        "Every kernel gets the scratch of one particular kernel.",
        faults.scratch_of_another_kernel,
        _killers(
            "test_workspace:test_scratch_is_asked_for_by_the_kernel_that_uses_it_and_no_other"
        ),
    ),
    Mutant(
        "M15a",
        "Page ids of a folded cache step by 1 instead of the number of KV heads.",
        faults.pages_step_by_one,
        _killers(
            "test_layout_views:test_golden_page_table_rows",
            "test_layout_views:test_pages_equal_to_blocks_fold_to_page_times_heads_plus_head",
        ),
    ),
    Mutant(
        "M15b",
        "Chosen blocks stay in the order of their scores, the query's own not last.",
        faults.own_block_not_last,
        _killers("test_conformance_cpu:test_exact_ties_go_to_the_lowest_block"),
    ),
    Mutant(
        "M16a",
        "Scale planes are addressed without their head.",
        faults.scale_plane_without_heads,
        _killers(
            "test_layout_views:test_head_major_and_scale_addresses_are_row_major",
            "test_layout_views:test_a_cache_seen_with_one_head_per_page_is_the_same_memory",
        ),
    ),
    Mutant(
        "M16b",
        "The cache is folded to one head per page, its scales are not.",
        faults.scales_gathered_without_heads,
        _killers(DENSE_CPU, **FP8_SHUFFLE),
    ),
    Mutant(
        "M17",
        "The plan covers the scheduled batch, not the padded one.",
        faults.plan_of_the_scheduled_batch_only,
        _killers(
            "test_plan:test_every_draft_pass_plans_the_padded_batch_with_its_new_lengths",
            "test_plan:test_empty_and_padded_rows_have_no_part_and_length_zero",
        ),
    ),
    Mutant(
        "M18",
        "The plan is not refreshed between draft passes.",
        faults.plan_kept_while_the_batch_is_the_same,
        _killers("test_plan:test_every_draft_pass_plans_the_padded_batch_with_its_new_lengths"),
    ),
    Mutant(
        "M19",
        "One scale is used for every token of a page.",
        faults.one_scale_for_all_tokens,
        _killers(DENSE_CPU, **FP8_SHUFFLE),
    ),
    Mutant(
        "M20",
        "Work is divided by the longest context allowed, all that a captured graph knows.",
        faults.split_made_from_the_longest_allowed_context,
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
        faults.shuffled_v_addressed_as_plain,
        _killers(
            "test_layout_views:test_shuffle_addresses_are_the_published_formulas",
            "test_layout_views:test_v_in_the_shuffle_form_is_not_a_plain_transpose",
        ),
    ),
    Mutant(
        "M21b",
        "V in the shuffle form is read as if it were plain.",
        faults.shuffled_v_read_as_plain,
        _killers(DENSE_CPU, **FP8_SHUFFLE),
    ),
    Mutant(
        "M22",
        "The merge reads every slot instead of the row's own.",
        faults.merge_of_every_slot,
        _killers("test_merge:test_split_and_merge_equal_a_single_pass_on_poisoned_scratch"),
    ),
    # Faults outside the numbered list that the same tests exist for.
    Mutant(
        "F-11c",
        "The index key takes its type from the K and V lanes.",
        faults.index_type_taken_from_the_kv_lanes,
        _killers("test_capability:test_the_index_dtype_is_its_own_fact"),
    ),
    Mutant(
        "F-11l",
        "Block scores of all queries are held at once.",
        faults.scores_of_all_queries_at_once,
        _killers(
            "test_workspace:test_block_scores_stay_within_their_budget_at_any_context",
            tokens=16384,
            max_length=2**20,
        ),
    ),
    Mutant(
        "rounding",
        "A partly filled last tile is not counted.",
        faults.last_tile_lost_in_rounding,
        _killers(
            "test_plan:test_published_check_values",
            "test_plan:test_every_tile_is_covered_exactly_once_within_capacity",
        ),
    ),
    Mutant(
        "telescoping",
        "Shares are rounded up sequence by sequence, so their sum can exceed the capacity.",
        faults.shares_rounded_up_one_by_one,
        _killers("test_plan:test_dealt_parts_never_exceed_the_budget"),
    ),
    Mutant(
        "batch-invariance",
        "The batch-invariant form divides a budget among batch-mates.",
        faults.parts_of_a_fixed_split_from_the_budget,
        _killers("test_plan:test_a_fixed_partition_does_not_depend_on_batch_mates"),
    ),
)

# Faults of the numbered list that this catalogue does not hold, and why.
ELSEWHERE = {
    "M9": "documentation names a fallback that does not exist: with the generated documentation",
}
