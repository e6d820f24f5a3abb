"""What the size of a batch may change about a row's attention, and what it may not."""

import pytest
import torch

pytest.importorskip("triton")

from minuet.attention.backends.triton import attending, config, selecting
from minuet.attention.backends.triton.step import Plan, Planner, StepShape
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import LayerCache
from minuet.kv.layout import KVLayout
from minuet.platform.torch import to_torch
from minuet.platform.triton import Launch

BATCHES = (1, 4, 8, 16, 64)


def plan_of(num_seqs: int, batch_invariant: bool, kv_dtype: DType, max_length: int = 65536) -> Plan:
    sizes = StepShape(
        page_size=128, num_kv_heads=1, group=16, max_seqs=num_seqs, max_tokens=num_seqs,
        max_length=max_length, query_len=1, compute_units=132, kv_fp8=kv_dtype.is_fp8,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    meta = torch.empty(num_seqs, dtype=torch.int64, device="meta")
    table = torch.empty(num_seqs, sizes.max_blocks, dtype=torch.int32, device="meta")
    batch = AttentionBatch((1,) * num_seqs, (max_length,) * num_seqs, meta, meta, table)
    return Planner(sizes, torch.device("cpu"), config.TARGETS["sm90"]).plan(batch, 128)


def attention_of(
    num_seqs: int, batch_invariant: bool, kv_dtype: DType, top: int
) -> tuple[Launch, ...]:
    """The launches over chosen blocks of a step of ``num_seqs``, on tensors without memory."""
    layout = KVLayout(128, 1, 128, kv_dtype, 128, DType.BF16)
    lanes = {
        name: torch.empty((8, *lane.shape), dtype=to_torch(lane.dtype), device="meta")
        for name, lane in layout.lanes.items()
    }
    plan = plan_of(num_seqs, batch_invariant, kv_dtype)
    q = torch.empty(num_seqs, 16, 128, dtype=torch.bfloat16, device="meta")
    scores = selecting.Scores.room(plan, num_seqs, 1, Selection(top))
    return tuple(attending.attend_launches(q, q, LayerCache(layout, lanes), plan, scores, 0.1))


def compiled(launch: Launch) -> dict[str, object]:
    """What the machine code of a launch depends on."""
    constants = {p.name for p in launch.kernel.params if p.is_constexpr}
    return {k: v for k, v in launch.args.items() if k in constants} | dict(launch.options)


@pytest.mark.parametrize("kv_dtype", [DType.BF16, DType.FP8_E4M3FN])
@pytest.mark.parametrize("top", [2, 4, 16])
def test_batch_invariant_rows_are_attended_to_by_one_code_in_every_batch(kv_dtype, top):
    first, *rest = [
        [compiled(launch) for launch in attention_of(n, True, kv_dtype, top)] for n in BATCHES
    ]
    assert len(first) == 2, "attention and the merge of its parts"
    assert all(other == first for other in rest)


@pytest.mark.parametrize("num_seqs", BATCHES)
def test_a_part_lists_as_many_blocks_as_it_attends_to_at_most(num_seqs):
    args = attention_of(num_seqs, False, DType.BF16, 16)[0].args
    parts = args["PARTS"]
    most = max((p + 1) * n // parts - p * n // parts for p in range(parts) for n in range(17))
    assert most <= args["MINE"] < 2 * most
    assert args["EARLY"] == (most == 1)


@pytest.mark.parametrize(("blocks", "most", "few"), [(5, 8, 8), (68, 128, 128), (512, 512, 256)])
def test_the_ranking_is_compiled_for_the_longest_context(blocks, most, few):
    ranking = selecting.ranking_of(plan_of(4, False, DType.BF16, blocks * 128))
    assert (ranking["MOST"], ranking["FEW"]) == (most, few)
    assert ranking["STEP"] <= few
