"""Kernel calls as values, and who carries them out.

Launchers build :class:`Call` objects and hand them to a :class:`Runner`. On a machine with ROCm
that is :class:`RocmRunner`; in tests it is one that runs the same calls in the simulator, so what a
launcher passes is tested without a device.
"""

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minuet.attention.backends.flydsl import compile as fly_compile
from minuet.attention.backends.flydsl.signatures import SIGNATURES, Key
from minuet.errors import ConfigError

_HIP_LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_PACKAGE = "minuet.attention.backends.flydsl.kernels"


Arguments = dict[str, Tensor | float | int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One kernel launch, not yet made.

    Attributes:
        key: the specialisation.
        arguments: every parameter by name: a tensor, None for a null pointer, or a number.
        grid: workgroups per axis.
    """

    key: Key
    arguments: Arguments
    grid: tuple[int, int, int]


class Runner(Protocol):
    """Carries out calls in order.

    Attributes:
        arch: of the device.
        compute_units: of the device.
    """

    arch: str
    compute_units: int

    def __call__(self, calls: Sequence[Call]) -> None:
        """Run them; outputs are in the tensors of the arguments afterwards."""


def require_rocm() -> None:
    """Refuse to launch where FlyDSL would end the process.

    Raises:
        ConfigError: torch is not a ROCm build, or the HIP runtime cannot be loaded.
    """
    if torch.version.hip is None:
        raise ConfigError(
            "kernels of the flydsl backend run on ROCm",
            got=f"torch {torch.__version__} without HIP",
            expected="a ROCm build of torch on an AMD GPU",
            remedy="pass --attention-backend auto, or use tests and the simulator here",
        )
    for name in _HIP_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return
    raise ConfigError(
        "the HIP runtime cannot be loaded; launching would end the process",
        got="none of " + ", ".join(_HIP_LIBRARIES),
        expected="one of them on the library path",
        remedy="install ROCm, or set LD_LIBRARY_PATH",
    )


class RocmRunner:
    """Launches on the current ROCm device and stream. Not run on hardware yet: docs/amd.md."""

    def __init__(self, cache_dir: Path):
        """Look at the device.

        Args:
            cache_dir: where :func:`minuet.attention.backends.flydsl.compile.compile_all` keeps
                results.

        Raises:
            ConfigError: no ROCm; see :func:`require_rocm`.
        """
        require_rocm()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.arch = str(properties.gcnArchName).partition(":")[0]
        self.compute_units = properties.multi_processor_count
        self._cache_dir = cache_dir
        self._launchers: dict[Key, Any] = {}
        from flydsl.utils import env as options

        # the library's own option object: what it compiled apart is what it loads
        options.runtime.cache_dir = str(fly_compile.object_cache(self.arch, cache_dir))

    def prepare(self, keys: Sequence[Key]) -> None:
        """Compile apart, judge, then load; start-up calls it with everything it settled on.

        Raises:
            CompileError: see :func:`minuet.attention.backends.flydsl.compile.compile_all`.
        """
        fly_compile.compile_all(keys, self._cache_dir, objects=True)
        for key in keys:
            self._launchers[key] = self._load(key)

    def _load(self, key: Key) -> Any:
        module = importlib.import_module(f"{_PACKAGE}.{SIGNATURES[key.kernel].module}")
        device = importlib.import_module(f"{_PACKAGE}.device")
        return module.build(device.TRAITS[key.arch], **dict(key.options))

    def __call__(self, calls: Sequence[Call]) -> None:
        """Launch on the current stream."""
        import flydsl.expr as fx

        stream = fx.Stream(torch.cuda.current_stream().cuda_stream)
        for call in calls:
            if call.key not in self._launchers:
                self.prepare([call.key])
            self._launchers[call.key](*_values(call), stream)


def _values(call: Call) -> list[Any]:
    """Arguments in order, pointers typed, then the grid."""
    import flydsl.compiler as flyc

    from minuet.attention.backends.flydsl.compile_worker import element_types

    signature, types = SIGNATURES[call.key.kernel], element_types(dict(call.key.options))
    values: list[Any] = []
    for name, kind in signature.params:
        given = call.arguments[name]
        if not kind.endswith("*"):
            values.append(given)
        else:
            address = given.data_ptr() if isinstance(given, Tensor) else 0
            values.append(flyc.from_c_void_p(types[kind[:-1]], address))
    axes = {"grid_x": call.grid[0], "grid_y": call.grid[1], "grid_z": call.grid[2]}
    return [*values, *(axes[name] for name in signature.grid)]
