"""aiter's two functions, imported when the first step needs them."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from minuet.attention.backends.aiter.probe import MODULE
from minuet.errors import ConfigError


class Library(NamedTuple):
    """What the adapter calls; their contracts are in ``launch.py`` where they are called."""

    pa_decode: Callable[..., None]
    plan_pa_decode: Callable[..., Any]


@cache
def library() -> Library:
    """Import aiter.

    Raises:
        ConfigError: it is there, or start-up had refused, but does not come up.
    """
    try:
        module = importlib.import_module(MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            "the aiter backend cannot import aiter",
            got=f"{type(error).__name__}: {error}",
            expected=f"{MODULE} on a machine with ROCm",
            remedy="use --attention-backend auto, or repair the installation of aiter",
        ) from error
    return Library(module.pa_decode, module.plan_pa_decode)
