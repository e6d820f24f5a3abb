"""Faults of planning and of the generated pages, each with the tests that must catch it."""

from typing import Any

import pytest

from minuet import docs
from minuet.planning import kernels, memory, resolve, settling
from minuet.planning.shapes import ShapeSet
from tests.docs import test_generated
from tests.mutants.harness import Killer, Mutant, replace_everywhere, rewrite

Patch = pytest.MonkeyPatch


def scratch_taken_after_pages_were_counted(patch: Patch) -> None:
    original = memory.Ledger.take

    def take(self: memory.Ledger, name: str, size: int) -> None:
        left = self.left
        original(self, name, size)
        if name == "workspace":
            self.left = left

    patch.setattr(memory.Ledger, "take", take)


def graphs_not_accounted_for(patch: Patch) -> None:
    replace_everywhere(patch, memory, "graph_bytes", lambda facts, num_graphs: 0)


def limits_tested_at_the_call_only(patch: Patch) -> None:
    replace_everywhere(patch, kernels, "covers_step", lambda kernel, problem, sizes: ())


def refusals_of_kernels_left_to_the_first_step(patch: Patch) -> None:
    original = kernels.choose_kernels

    def choose_kernels(*asked: Any) -> Any:
        return original(*asked)[0], ()

    replace_everywhere(patch, kernels, "choose_kernels", choose_kernels)


def prefill_scratch_as_long_as_the_step(patch: Patch) -> None:
    patch.setattr(kernels, "PREFILL_WORKSPACE_BYTES", 2**40)


def graphs_for_scheduled_batches_only(patch: Patch) -> None:
    """The largest batch is looked up as it is scheduled, not as it is padded."""

    def decode(self: ShapeSet, num_seqs: int, query_len: int) -> Any:
        return kernels.StepShape(kernels.Phase.DECODE, num_seqs, query_len, num_seqs * query_len)

    patch.setattr(ShapeSet, "decode", decode)


def the_first_wrong_setting_only(patch: Patch) -> None:
    rewrite(
        patch,
        resolve,
        "resolve_or_refuse",
        "tuple(settling.refusals)",
        "tuple(settling.refusals[:1])",
    )


def ranks_advised_without_trying(patch: Patch) -> None:
    def twice(self: settling.Settling) -> tuple[str, str]:
        return "--tensor-parallel-size", str(2 * self.config.tensor_parallel_size)

    patch.setattr(settling.Settling, "_memory_remedy", property(twice))


def index_heads_of_the_whole_model_on_every_rank(patch: Patch) -> None:
    rewrite(
        patch,
        kernels,
        "layouts",
        "max(1, facts.num_kv_heads // config.tensor_parallel_size)",
        "facts.num_kv_heads",
    )


def a_fallback_that_does_not_exist(patch: Patch) -> None:
    original = docs.outcome

    def outcome(*asked: Any) -> str:
        found = original(*asked)
        return "`triton`" if found.startswith("refused") else found

    replace_everywhere(patch, docs, "outcome", outcome)


def a_page_that_promises_a_fallback(patch: Patch) -> None:
    promised = {
        title: ["`triton`" if cell.startswith("refused") else cell for cell in cells]
        for title, cells in test_generated.OUTCOMES.items()
    }
    patch.setattr(test_generated, "OUTCOMES", promised)


def _killers(*tests: str, **params: Any) -> tuple[Killer, ...]:
    return tuple(Killer(f"tests.{test}", params) for test in tests)


_PAGES = "planning.test_execution:test_pages_get_exactly_what_is_left_after_everything_else"

MUTANTS = (
    Mutant(
        "M2",
        "Scratch is taken after the pages were counted.",
        scratch_taken_after_pages_were_counted,
        _killers(_PAGES, arch="gfx950"),
    ),
    Mutant(
        "M2b",
        "Captured graphs are missing from the account.",
        graphs_not_accounted_for,
        _killers(_PAGES, arch="gfx950"),
    ),
    Mutant(
        "M5a",
        "The largest step is not held against the kernel's limits.",
        limits_tested_at_the_call_only,
        _killers(
            "planning.test_execution:"
            "test_a_score_budget_below_one_query_is_refused_with_the_least_that_works"
        ),
    ),
    Mutant(
        "M5b",
        "A kernel that covers a call is looked for when the call is made.",
        refusals_of_kernels_left_to_the_first_step,
        _killers(
            "planning.test_matrix:test_every_cell_is_refused_or_runs_every_reachable_step",
            arch="sm90",
        ),
        crashes=(AssertionError, ValueError),
    ),
    Mutant(
        "M9a",
        "The support matrix names a fallback that does not exist.",
        a_fallback_that_does_not_exist,
        _killers("docs.test_generated:test_the_pages_are_what_would_be_written"),
    ),
    Mutant(
        "M9b",
        "The page was written by hand, and promises a fallback.",
        a_page_that_promises_a_fallback,
        _killers(
            "docs.test_generated:test_the_documented_outcome_is_what_dispatch_does", arch="gfx1250"
        ),
    ),
    Mutant(
        "M17",
        "A step is looked up by the scheduled batch, not by the padded one.",
        graphs_for_scheduled_batches_only,
        _killers("planning.test_matrix:test_the_label_of_a_call_is_the_kernel_that_runs"),
        crashes=(KeyError,),  # there is no such prepared step
    ),
    Mutant(
        "P1",
        "Prefill scratch follows the length of a step.",
        prefill_scratch_as_long_as_the_step,
        _killers(
            "planning.test_execution:test_prefill_scratch_does_not_follow_the_length_of_a_step",
            arch="gfx950",
            ranks=1,
        ),
    ),
    Mutant(
        "P2",
        "Only the first wrong setting is reported.",
        the_first_wrong_setting_only,
        _killers("planning.test_resolve:test_every_wrong_value_is_reported_at_once"),
    ),
    Mutant(
        "P3",
        "More ranks are advised without trying whether they suffice.",
        ranks_advised_without_trying,
        _killers(
            "planning.test_execution:test_weights_that_do_not_fit_name_the_ranks_on_which_they_do"
        ),
    ),
    Mutant(
        "P4",
        "Every rank caches the KV heads of the whole model.",
        index_heads_of_the_whole_model_on_every_rank,
        _killers("planning.test_memory:test_cache_bytes_of_a_token_on_a_rank"),
    ),
)
