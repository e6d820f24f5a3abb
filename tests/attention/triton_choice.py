"""The choice of blocks from given scores, whatever they are, against its definition."""

import torch
import triton
import triton.language as tl

from minuet.attention import reference
from minuet.attention.backends.triton import launch
from minuet.attention.backends.triton.kernels.choose import order_of
from minuet.attention.backends.triton.selecting import Scores
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection

PAGE = 16
# blocks of rows, around every number at which the way of ranking changes
SHORT = (1, 2, 15, 16, 17, 33, 63, 64, 65, 100)
MIDDLE = (*SHORT, 128, 129, 255, 256, 257, 400)
LONG = (5, 256, 257, 1023, 1024, 1025, 1500)


@triton.jit
def store_orders(scores_ptr, orders_ptr, count, init_blocks, first_local, N: tl.constexpr):
    block = tl.arange(0, N)
    scores = tl.load(scores_ptr + block, mask=block < count, other=0.0)
    forced = (block < init_blocks) | (block >= first_local)
    tl.store(orders_ptr + block, order_of(scores, forced), mask=block < count)


def rows_of(counts: tuple[int, ...]) -> list[torch.Tensor]:
    """Scores with every number that is special: few values, all different, rising, not one."""
    generator = torch.Generator().manual_seed(5)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40])
    rows = []
    for count in counts:
        distinct = torch.randn(count, generator=generator)
        some = torch.randint(0, count, (count // 2,), generator=generator)
        mixed = distinct.clone()
        mixed[some] = special[torch.randint(0, len(special), some.shape, generator=generator)]
        few = torch.randint(-2, 3, (count,), generator=generator).float() * 0.0
        few[some] = 1.0
        rows += [distinct, mixed, few, torch.arange(count).float(), torch.full((count,), torch.nan)]
    return rows


def check_choice(device: torch.device, counts: tuple[int, ...], selection: Selection) -> None:
    """Lists of rows of ``counts`` blocks, all in one step."""
    rows = rows_of(counts)
    lens = tuple(len(row) * PAGE for row in rows)
    most = max(len(row) for row in rows)
    orders = torch.full((1, len(rows), most), 0x7FFFFFFF, dtype=torch.int32, device=device)
    for row, scores in enumerate(rows):
        local = len(scores) - selection.local_blocks
        given = scores.to(device)
        store_orders[(1,)](
            given, orders[0, row], len(scores), selection.init_blocks, local,
            N=triton.next_power_of_2(len(scores)),
        )  # fmt: skip
    ones = torch.zeros(len(rows), dtype=torch.int64, device=device)
    table = torch.zeros(len(rows), most, dtype=torch.int32, device=device)
    batch = AttentionBatch((1,) * len(rows), lens, ones, ones, table)
    plan = launch.plan(batch, PAGE, num_kv_heads=1)
    lists = launch.block_lists(Scores(orders, selection), plan)
    for row, scores in enumerate(rows):
        want = reference.choose_blocks(scores, selection)
        want += [-1] * (selection.top_blocks - len(want))
        assert lists[row, 0].tolist() == want, (len(scores), scores[:40])
