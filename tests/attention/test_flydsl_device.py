"""The FlyDSL kernels on an AMD card. Nobody of us has run this yet: docs/amd.md."""

from dataclasses import replace

import pytest
import torch

from minuet.attention import reference
from minuet.kv.cache import LayerCache
from minuet.kv.write import write as reference_write
from tests.attention.conformance import (
    assert_close,
    assert_same_selection,
    build,
    norms,
    reference_blocks,
    rotation,
)
from tests.attention.flydsl_cases import EDGES, RAGGED, case, storage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (torch.version.hip and torch.cuda.is_available()), reason="needs a ROCm device"
    ),
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    pytest.importorskip("flydsl")
    from minuet.attention.backends.flydsl.calls import RocmRunner

    return RocmRunner(tmp_path_factory.mktemp("flydsl"))


def on_device(world):
    """The world's cache, batch and queries in device memory; the world itself stays."""
    lanes = {name: lane.cuda() for name, lane in world.cache.lanes.items()}
    batch = replace(
        world.batch,
        positions=world.batch.positions.cuda(),
        slots=world.batch.slots.cuda(),
        page_table=world.batch.page_table.cuda(),
    )
    return LayerCache(world.cache.layout, lanes), batch


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("lens", [EDGES, RAGGED])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_dense_decode(runner, dtype, lens, kv_heads):
    from minuet.attention.backends.flydsl import launch

    world = build(case(lens, storage(runner.arch, dtype), kv_heads=kv_heads))
    cache, batch = on_device(world)
    plan = launch.plan(batch, 128, num_kv_heads=kv_heads, runner=runner)
    got = launch.attend_dense(world.q.cuda(), cache, plan, None, 128**-0.5)
    want = reference.attend(world.q, world.cache, world.batch, None, 128**-0.5)
    assert_close(got.cpu(), want, torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("lens", [(*EDGES, 2500), RAGGED])
def test_selection_and_sparse_decode(runner, dtype, lens):
    from minuet.attention.backends.flydsl import launch

    world = build(case(lens, storage(runner.arch, dtype), sparse=True))
    cache, batch = on_device(world)
    plan = launch.plan(batch, 128, num_kv_heads=2, runner=runner)
    blocks = launch.select(world.index_q.cuda(), cache, plan, world.case.selection)
    want_blocks = reference_blocks(world)
    assert_same_selection(blocks.cpu(), want_blocks, world)
    got = launch.attend_sparse(world.q.cuda(), cache, plan, want_blocks.cuda(), 128**-0.5)
    want = reference.attend(world.q, world.cache, world.batch, want_blocks, 128**-0.5)
    assert_close(got.cpu(), want, torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_writer(runner, dtype):
    from minuet.attention.backends.flydsl import launch

    kind = storage(runner.arch, dtype)
    world = build(case((300,), kind, sparse=True))
    cache, _ = on_device(world)
    slots = torch.tensor([17, -1, 300])
    packed = torch.randn(3, 15 * 128).to(torch.bfloat16)
    cos, sin = rotation(torch.arange(3) * 37, 64)
    weights = norms(world.case)
    there = replace(
        weights,
        **{name: getattr(weights, name).cuda() for name in ("q", "k", "index_q", "index_k")},
    )
    got, _ = launch.write(cache, packed.cuda(), slots.cuda(), cos.cuda(), sin.cuda(), there, runner)
    want, _ = reference_write(world.cache, packed, slots, cos, sin, weights)
    torch.testing.assert_close(got.cpu().float(), want.float(), rtol=2**-7, atol=1e-6)
    for name, lane in world.cache.lanes.items():
        same = cache.lanes[name].cpu().view(torch.uint8) == lane.view(torch.uint8)
        assert same.float().mean() > 0.999, name


def test_the_device_planner_equals_the_hosts(runner):
    from minuet.attention.backends.flydsl import launch

    step = launch.StepShape(
        num_kv_heads=1, max_seqs=300, max_tokens=300, max_length=4096, query_len=1
    )
    planner = launch.Planner(step, runner, torch.device("cuda"))
    lengths = [2048, 0, 700] * 97
    planner.refresh_on_device(torch.tensor(lengths, dtype=torch.int32).cuda(), len(lengths))
    assert planner._host is not None
    assert planner._tables.cpu().tolist() == planner._host.refresh(lengths).buffer.tolist()
