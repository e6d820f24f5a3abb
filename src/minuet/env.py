"""Every ``MINUET_*`` variable: typed, documented, read here and nowhere else.

A variable exists only for what cannot be a flag, or must hold before flags are read. A value that
does not parse is an error that names the variable; an unknown ``MINUET_*`` name is an error as
well, since a misspelt switch that does nothing is worse than none. ``docs/env.md`` is generated
from :data:`VARIABLES` and compared in CI.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from minuet.errors import ConfigError

PREFIX = "MINUET_"
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Attributes:
        name: the full name, ``MINUET_...``.
        field: the attribute of :class:`Values` it fills.
        default: used when unset.
        accepts: the accepted forms, for people.
        why: what it is for, and why it is not only a flag.
        parse: text to value; raises ValueError on what it does not accept.
    """

    name: str
    field: str
    default: str
    accepts: str
    why: str
    parse: Callable[[str], str]


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    return parse


VARIABLES = (
    Variable(
        "MINUET_ARCH",
        "arch",
        "",
        "an arch of the arch table (`minuet explain --help` lists them), or empty to detect",
        "decide for a machine one does not have; same meaning as `--arch`, which wins over it",
        str.strip,
    ),
    Variable(
        "MINUET_FORCE_BACKEND",
        "force_backend",
        "",
        "cpu, triton, flydsl or aiter, or empty",
        "force one attention backend in a process whose flags one does not control "
        "(a test run, a plugin in another engine); as `--attention-backend`, which wins over it",
        _one_of(("", "cpu", "triton", "flydsl", "aiter")),
    ),
    Variable(
        "MINUET_LOG_LEVEL",
        "log_level",
        "info",
        ", ".join(_LOG_LEVELS),
        "needed before flags are parsed",
        _one_of(_LOG_LEVELS),
    ),
)


@dataclass(frozen=True, slots=True)
class Values:
    """The parsed environment."""

    arch: str
    force_backend: str
    log_level: str


@cache
def values() -> Values:
    """Parse the environment once.

    Raises:
        ConfigError: a value that does not parse, or an unknown ``MINUET_*`` name.
    """
    known = {v.name for v in VARIABLES}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(
                "unknown environment variable",
                got=name,
                expected="one of " + ", ".join(sorted(known)),
                remedy=f"unset {name}",
            )
    parsed: dict[str, str] = {}
    for variable in VARIABLES:
        text = os.environ.get(variable.name, variable.default)
        try:
            parsed[variable.field] = variable.parse(text)
        except ValueError:
            raise ConfigError(
                f"bad value in environment variable {variable.name}",
                got=text,
                expected=variable.accepts,
            ) from None
    return Values(**parsed)


@contextlib.contextmanager
def override(**names_and_values: str) -> Iterator[None]:
    """Set variables for the length of a block; for tests.

    Args:
        names_and_values: full variable names and their texts.
    """
    before = {name: os.environ.get(name) for name in names_and_values}
    os.environ.update(names_and_values)
    values.cache_clear()
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
        values.cache_clear()
