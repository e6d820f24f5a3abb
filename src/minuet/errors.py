"""Every exception Minuet raises on purpose, and the data a refusal carries.

::

    MinuetError
    ├── ConfigError        a flag, a config.json or an environment variable is wrong (ValueError)
    ├── CheckpointError    the weights on disk are not the model the config describes
    ├── RequestError       one request cannot be served; the engine goes on (ValueError)
    ├── RefusedError       the configuration cannot be served; carries every Refusal
    ├── PreparationError   a step could not be prepared, or failed its self-test (ValueError)
    ├── SealError          after ready something compiled or grew, and the seal is strict
    ├── ContractError      an argument that cannot be right reached the library; a bug (ValueError)
    └── IntegrityError     our own book-keeping contradicts itself; a bug

Two kinds of "no" (docs/contract.md): a :class:`Refusal` is data - this kernel does not cover this
problem, another may. A :class:`ContractError` is raised, and nobody catches it to try something
else. Users' mistakes say what was got, what is accepted, and the way out.

This module imports nothing of ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one candidate does not cover one demand: plain data, collected and shown together.

    Attributes:
        kernel: who refuses - a kernel (``triton.attend``), or a budget (``memory``).
        field: the fact that is not covered, by the name users know (``page_size``).
        got: the value asked for, as shown to a person.
        accepts: the values that are covered, as shown to a person.
        remedy: the one change that removes this refusal; empty when no flag does.
        flag: the flag the remedy turns, empty when the remedy is not a flag.
        value: the value for ``flag``; the largest accepted one where the fact is a limit.
    """

    kernel: str
    field: str
    got: str
    accepts: str
    remedy: str = ""
    flag: str = ""
    value: str = ""

    def __str__(self) -> str:
        """One line: who, what, accepted, way out."""
        line = f"{self.kernel}: {self.field} {self.got}; accepts {self.accepts}"
        return f"{line}. {self.remedy}" if self.remedy else line


class MinuetError(Exception):
    """Root of everything Minuet raises on purpose."""


class _GotExpected(MinuetError, ValueError):
    """A message with the three parts every user-facing error has."""

    def __init__(self, message: str, *, got: object = None, expected: str = "", remedy: str = ""):
        self.message, self.got, self.expected, self.remedy = message, got, expected, remedy
        parts = [message]
        if expected:
            parts.append(f"got {got!r}, expected {expected}")
        if remedy:
            parts.append(remedy)
        super().__init__("; ".join(parts))


class ConfigError(_GotExpected):
    """A flag, a file or a variable holds a value that cannot be served."""


class CheckpointError(_GotExpected):
    """The tensors on disk are not the model that ``config.json`` describes."""


class RequestError(_GotExpected):
    """One request cannot be served as asked; ``param`` names its field."""

    def __init__(
        self,
        message: str,
        *,
        param: str,
        got: object = None,
        expected: str = "",
        remedy: str = "",
    ):
        super().__init__(message, got=got, expected=expected, remedy=remedy)
        self.param = param


class RefusedError(MinuetError):
    """The configuration as a whole is refused before anything is loaded."""

    def __init__(self, summary: str, refusals: Sequence[Refusal]):
        self.summary, self.refusals = summary, tuple(refusals)
        super().__init__("\n".join([summary, *(f"  {r}" for r in self.refusals)]))


class PreparationError(_GotExpected):
    """A step shape could not be prepared, or failed its self-test; the engine never starts."""


class SealError(MinuetError):
    """Something compiled or took device memory after ready, and ``--seal strict`` forbids it."""


class ContractError(_GotExpected):
    """A value that cannot be right: the caller has a bug, no fallback is tried."""


class IntegrityError(MinuetError):
    """Our own accounting contradicts itself; the state is not trusted any further."""
