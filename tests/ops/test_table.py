"""The table of operations: chosen by name, plain torch by default, prepared by its rungs."""

import subprocess
import sys

import pytest
import torch

from minuet.errors import ContractError
from minuet.ops.norm import gemma_rms_norm
from minuet.ops.table import REFERENCE, ops_for
from minuet.platform.arch import ARCHS


def test_an_unknown_table_is_named_with_the_known_ones():
    with pytest.raises(ContractError, match=r"no-such-table.*reference.*triton"):
        ops_for("no-such-table")


def test_the_cpu_computes_with_plain_torch_and_every_gpu_with_kernels():
    assert {name: arch.ops for name, arch in ARCHS.items() if not arch.is_gpu} == {"cpu": REFERENCE}
    assert {arch.ops for arch in ARCHS.values() if arch.is_gpu} == {"triton"}


def test_plain_torch_brings_no_compiler_along():
    program = (
        "import sys; from minuet.ops.table import ops_for; ops_for('reference'); "
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_sum_of_the_reference_is_the_sum_of_torch():
    x, delta = torch.randn(3, 8), torch.randn(3, 8)
    ops = ops_for(REFERENCE)
    total, normed = ops.add_norm(x, delta, torch.zeros(8), 1e-6)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, gemma_rms_norm(x + delta, torch.zeros(8), 1e-6))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("arch", ["sm90", "gfx950"])
def test_between_two_rungs_nothing_but_the_number_of_tokens_changes(arch, batch_invariant):
    """What a kernel is compiled for is met by a step of every rung."""
    pytest.importorskip("triton")
    from minuet.ops.triton import config
    from minuet.ops.triton import experts as moe
    from tests.ops.triton_compile import experts

    target, mine = config.TARGETS[arch], experts()
    prepared = ops_for("triton", batch_invariant=batch_invariant).rungs

    def compiled(tokens: int) -> set[tuple]:
        x = torch.empty(tokens, 6144, dtype=torch.bfloat16, device="meta")
        tiling = moe.tiling_for(tokens, target, batch_invariant)
        tiles = moe.capacity(tokens, mine, tiling.rows)
        index = torch.empty((tiles, tiling.rows), dtype=torch.int32, device="meta")
        flags = torch.empty(moe.num_flags(tokens, mine, tiling), dtype=torch.int32, device="meta")
        routing = moe.Routing(torch.empty(tokens, 4, device="meta"), index[:, 0], index, flags)
        values = torch.empty(tokens, 5, 6144, dtype=torch.bfloat16, device="meta")
        made = (
            *moe.route_launches(x, mine, routing, target, batch_invariant),
            *moe.expert_launches(x, mine, routing, values, tiling, target),
        )
        return {
            (one.kernel.__name__, str(sorted(one.options.items())), str(constants(one)))
            for one in made
        }

    def constants(made) -> list:
        names = [p.name for p in made.kernel.params if p.is_constexpr]
        return [(name, made.args[name]) for name in names]

    met = {tokens: compiled(tokens) for tokens in prepared}
    for tokens in (2, 15, 16, 18, 63, 64, 66, 127, 128, 255, 1000, 1024, 2048, 4000, 9000):
        rung = max(r for r in prepared if r <= tokens)
        assert compiled(tokens) == met[rung], (tokens, rung)


def test_no_integer_of_a_step_specialises_a_kernel():
    """Arguments that change with the step are marked, so that no value of theirs compiles anew."""
    pytest.importorskip("triton")
    from tests.ops.triton_compile import launches

    few, more = launches("sm90", 70), launches("sm90", 128)
    for name, made in few.items():
        for parameter in made.kernel.params:
            value, other = made.args[parameter.name], more[name].args[parameter.name]
            if isinstance(value, int) and value != other:
                assert parameter.do_not_specialize, (name, parameter.name)
