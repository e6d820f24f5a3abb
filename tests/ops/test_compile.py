"""Every operation compiles for every arch it is written for, at M3's sizes, without spills."""

import pytest

pytest.importorskip("triton")

from minuet.platform.arch import get
from tests.attention.triton_compile import compile_launch
from tests.ops.triton_compile import TOP, launches

pytestmark = pytest.mark.compile

MATRIX = ("router_logits", "experts_up", "experts_down")
# sine and cosine of large angles: the library keeps a table of 2 / pi on the stack
STACK_BYTES = {"embed": 64}

FEW = ("router_logits_few", "route_step", "experts_up", "experts_down", "add_norm_parts")
MANY = ("router_logits", "route_layout", "route_rows", "experts_up", "experts_down")
STEPS = [
    *(
        ("sm90", 4, name)
        for name in (*FEW, "project_part", "add_parts", "add_norm", "gate", "embed")
    ),
    *(("sm90", 16, name) for name in ("router_logits_few", "route_step", "experts_up")),
    *(("sm90", 64, name) for name in ("router_logits", "route_tokens", "route_place")),
    *(("sm90", 8192, name) for name in MANY),
    *(
        (arch, tokens, name)
        for arch in ("gfx942", "gfx950", "gfx1250")
        for tokens, names in (
            (4, ("route_step", "experts_up", "experts_down")),
            (8192, ("router_logits", "route_rows")),
        )
        for name in names
    ),
    # of what hardly differs between archs, one stands for the others
    *(("gfx942", 4, name) for name in ("router_logits_few", "add_norm_parts", "embed", "gate")),
    ("gfx950", 64, "route_place"),
]


@pytest.mark.parametrize(("arch", "tokens", "name"), STEPS)
def test_an_operation_compiles_within_its_limits(arch, tokens, name):
    found = compile_launch(launches(arch, tokens)[name], arch).resources
    allowed = STACK_BYTES.get(name, 0)
    assert found["stack_bytes"] <= allowed, "spills to memory"
    if not allowed:
        assert found["local"] == 0, "local memory"
    assert found["shared_bytes"] <= get(arch).shared_memory_bytes
    if name in MATRIX:
        assert found["matrix"] > 0, "no matrix instructions"
    if arch == "sm90" and name.startswith("experts"):
        assert found["shared_byte_loads"] == 0
        assert found["async_copies"] > 0, "weights do not come through the pipeline"


def test_a_projection_loads_its_first_weights_before_it_waits():
    found = compile_launch(launches("sm90", 4)["project_part"], "sm90")
    before, _, after = found.assembly.partition("ACQBULK")
    # 64 x 512 weights of 2 bytes, 16 bytes a load of 128 threads
    assert before.count("LDG.E.128") == 32
    assert "PREEXIT" in before, "the next kernel may start as soon as they are there"
    assert "LDGSTS" not in before
    assert "LDGSTS" in after


def test_a_norm_issues_all_its_loads_before_it_needs_the_first():
    found = compile_launch(launches("sm90", 4)["add_norm_parts"], "sm90")
    _, _, waited = found.assembly.partition("ACQBULK")
    loads, _, sums = waited.partition("PREEXIT")
    assert loads.count("LDG.E") >= 1 + (TOP + 1) + TOP  # residual, results, shares
    assert "LDG.E" not in sums


# The lists of the routing are written while only the router may still run; programs of the second
# product by tile are the one kernel that goes by counts of the first.
WRITES_EARLY = {4: {"route_step", "experts_down"}, 64: {"route_place"}, 8192: set()}


@pytest.mark.parametrize("tokens", WRITES_EARLY)
def test_nothing_else_is_written_before_the_kernels_before_are_done(tokens):
    made = launches("sm90", tokens)
    early = {k for k in made if not compile_launch(made[k], "sm90").waits_before_it_writes}
    assert early == WRITES_EARLY[tokens]


@pytest.mark.parametrize(("tokens", "name"), [(4, "router_logits_few"), (64, "router_logits")])
def test_the_router_waits_before_it_lets_the_routing_start(tokens, name):
    """Then the routing may clear its lists, and the shared expert read its tokens, at once."""
    before, _, after = compile_launch(launches("sm90", tokens)[name], "sm90").assembly.partition(
        "ACQBULK"
    )
    assert "PREEXIT" not in before
    assert "PREEXIT" in after
