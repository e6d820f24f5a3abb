"""Two compilers, one model of the hardware: Triton's decode and ours agree in the simulator."""

import pytest
import torch

from minuet.attention import reference
from tests.attention.conformance import assert_close, build
from tests.attention.flydsl_cases import case, main_keys, storage

pytest.importorskip("flydsl")
pytest.importorskip("triton")
from minuet.attention.backends.flydsl import launch
from tests.attention import triton_witness
from tests.attention.flydsl_sim import ARCHS, SimRunner, compiled

pytestmark = [
    pytest.mark.sim,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # Triton announces its own future
]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("arch", ARCHS)
def test_tritons_decode_agrees_with_the_reference_and_with_ours(arch, dtype):
    compiled(*main_keys(arch))
    world = build(case((1, 127, 129, 300), storage(arch, dtype), group=8))
    want = reference.attend(world.q, world.cache, world.batch, None, 128**-0.5)
    bits = torch.from_numpy(triton_witness.run(arch, world).view("int16"))
    witness = bits.view(torch.bfloat16)
    assert_close(witness, want, torch.bfloat16)
    plan = launch.plan(world.batch, 128, num_kv_heads=2, runner=SimRunner(arch))
    ours = launch.attend_dense(world.q, world.cache, plan, None, 128**-0.5)
    assert_close(ours, witness, torch.bfloat16)
