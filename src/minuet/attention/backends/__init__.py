"""The table of backends and their order of preference per arch: data, for ``dispatch`` to read.

Adding a backend is adding its ``spec`` here; adding an arch is adding its order.
"""

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from minuet.attention.backends.aiter import spec as aiter_spec
from minuet.attention.backends.cpu import spec as cpu_spec
from minuet.attention.backends.flydsl import spec as flydsl_spec
from minuet.attention.backends.triton import spec as triton_spec
from minuet.attention.capability import AUTO, Capability
from minuet.errors import ConfigError
from minuet.kv.layout import Form
from minuet.platform.arch import Arch

# The module, not its table: a test that changes a limit in a spec changes it for everybody.
SPECS: Mapping[str, ModuleType] = MappingProxyType(
    {"cpu": cpu_spec, "triton": triton_spec, "flydsl": flydsl_spec, "aiter": aiter_spec}
)

NAMES: tuple[str, ...] = tuple(SPECS)

# First come, first asked. The cpu backend stands last everywhere: it covers everything, and its
# own table says that it is chosen by itself on the cpu arch only.
PREFERENCE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cpu": ("cpu", "triton", "flydsl", "aiter"),
        "sm80": ("triton", "flydsl", "aiter", "cpu"),
        "sm90": ("triton", "flydsl", "aiter", "cpu"),
        "sm100": ("triton", "flydsl", "aiter", "cpu"),
        "sm120": ("triton", "flydsl", "aiter", "cpu"),
        "gfx942": ("flydsl", "triton", "aiter", "cpu"),
        "gfx950": ("flydsl", "triton", "aiter", "cpu"),
        "gfx1250": ("flydsl", "triton", "aiter", "cpu"),
    }
)

# Backends whose steps can be prepared in advance and recorded as graphs (``StepKernels.prepare``).
PREPARED: frozenset[str] = frozenset({"triton"})


def capabilities(backend: str) -> tuple[Capability, ...]:
    """The kernels of one backend.

    Raises:
        ConfigError: no such backend.
    """
    if backend not in SPECS:
        raise ConfigError("unknown attention backend", got=backend, expected=", ".join(NAMES))
    table: tuple[Capability, ...] = SPECS[backend].CAPABILITIES
    return table


def candidates(arch: Arch) -> tuple[Capability, ...]:
    """Every kernel, in the order in which an arch asks them."""
    return tuple(kernel for name in PREFERENCE[arch.name] for kernel in capabilities(name))


def preferred_form(arch: Arch, want: str = AUTO) -> Form:
    """The page arrangement of an arch's first backend, or of the one asked for.

    Raises:
        ConfigError: ``want`` names no backend.
    """
    backend = PREFERENCE[arch.name][0] if want == AUTO else want
    return capabilities(backend)[0].forms[0]
