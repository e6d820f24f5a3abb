"""How many kernels and graphs this process has compiled, whoever compiled them, and their names.

Triton tells by a hook, torch's compiler by a counter, and what compiles by itself (FlyDSL) calls
:func:`note`. Nothing is imported for it: a compiler that was never loaded has compiled nothing.
"""

import sys
from collections.abc import Callable
from typing import Any

_names: list[str] = []
_hooked: list[Any] = []


def note(name: str) -> None:
    """Count one compilation.

    Args:
        name: of the kernel, for people.
    """
    _names.append(name)


def count() -> int:
    """Compilations of this process so far; call :func:`watch` once Triton is loaded."""
    watch()
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = int(dynamo.counters["stats"].get("unique_graphs", 0)) if dynamo else 0
    return graphs + len(_names)


def names(first: int = 0) -> tuple[str, ...]:
    """Kernels compiled, in order, from the ``first``-th on; torch's graphs have no names."""
    return tuple(_names[first:])


def watch() -> None:
    """Hook into Triton if it is loaded; every new specialisation counts, from disk or not.

    A kernel that is found in the cache on disk still stops the step that meets it: it is loaded
    onto the device and takes memory there.
    """
    knobs = sys.modules.get("triton.knobs")
    if knobs is None or _hooked:
        return
    runtime = knobs.runtime
    _hooked.append(runtime)
    runtime.jit_post_compile_hook = _after(runtime.jit_post_compile_hook)


def _after(before: Callable[..., Any] | None) -> Callable[..., Any]:
    def hook(**said: Any) -> Any:
        info = said.get("fn")
        note(f"triton {getattr(info, 'module', '')}.{getattr(info, 'name', '?')}")
        return before(**said) if before is not None else None

    return hook
