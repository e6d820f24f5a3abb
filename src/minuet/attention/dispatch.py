"""The only place where a kernel is chosen: :func:`choose`.

The answer is a frozen :class:`Choice` with every other kernel's refusals attached. It is asked at
start-up, once per problem, and kept; a step plans and runs. :func:`evaluations` counts how often
the question was really worked out, so that a test can hold the step to zero.

A kernel's name in a plan, a trace or a metric is ``Choice.kernel.name`` and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from minuet.attention import backends
from minuet.attention.capability import AUTO, Capability, Level, covers
from minuet.attention.contract import Problem
from minuet.errors import ConfigError, Refusal
from minuet.kv.layout import Form
from minuet.platform.arch import Arch


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The kernel for one problem, and why the others are not.

    Attributes:
        problem: the demand.
        arch: where.
        want: the backend asked for, or ``auto``.
        kernel: the first kernel in the arch's order that covers the problem; None if none does.
        refusals: every other kernel of the operation and layer kind to its reasons, in the arch's
            order. An empty tuple: it covers the problem too, but stands further down.
    """

    problem: Problem
    arch: Arch
    want: str
    kernel: Capability | None
    refusals: Mapping[str, tuple[Refusal, ...]]

    @property
    def level(self) -> Level | None:
        """Verification level of the chosen kernel on this arch; None without a kernel."""
        return self.kernel.level[self.arch.name] if self.kernel else None

    @property
    def runnable(self) -> bool:
        """Whether a kernel was chosen and this version contains it."""
        return self.kernel is not None and self.kernel.runs_on(self.arch)

    def against(self) -> tuple[Refusal, ...]:
        """Why this choice cannot be served: empty if it can.

        Without a kernel: every reason of every candidate. With one that is declared only: that.
        """
        if self.kernel is None:
            return tuple(refusal for reasons in self.refusals.values() for refusal in reasons)
        if self.runnable:
            return ()
        return (
            Refusal(
                self.kernel.name,
                "implementation",
                f"{self.arch.name}: limits declared, kernel not in this version",
                "an implemented kernel",
            ),
        )


_evaluations = 0


def choose(problem: Problem, arch: Arch, want: str = AUTO) -> Choice:
    """The kernel for a problem. Pure; the same question is worked out once and remembered.

    Args:
        problem: the demand.
        arch: where.
        want: ``auto``, or the only backend allowed.

    Raises:
        ConfigError: ``want`` names no backend.
    """
    return _choose(problem, arch, want)


# Problems are settled at start-up, so the cache holds as many entries as there are layer kinds,
# operations and phases; the bound only keeps a fuzzing process small.
@lru_cache(maxsize=4096)
def _choose(problem: Problem, arch: Arch, want: str) -> Choice:
    global _evaluations
    _evaluations += 1
    if want != AUTO and want not in backends.NAMES:
        raise ConfigError(
            "unknown attention backend",
            got=want,
            expected="one of " + ", ".join((AUTO, *backends.NAMES)),
            remedy="set --attention-backend auto",
        )
    kernel = None
    refusals: dict[str, tuple[Refusal, ...]] = {}
    for candidate in backends.candidates(arch):
        if candidate.op is not problem.op or problem.layer_kind not in candidate.layer_kinds:
            continue  # another kernel's job, not a refusal
        reasons = covers(candidate, problem, arch, want)
        if not reasons and kernel is None:
            kernel = candidate
        else:
            refusals[candidate.name] = reasons
    return Choice(problem, arch, want, kernel, MappingProxyType(refusals))


def evaluations() -> int:
    """How often :func:`choose` had to work out an answer since the process started."""
    return _evaluations


def forget() -> None:
    """Drop remembered answers; for tests that change a capability table."""
    _choose.cache_clear()


def preferred_form(arch: Arch, want: str = AUTO) -> Form:
    """How pages are arranged on an arch: as its first backend, or the one asked for, prefers.

    All kernels of an engine share one cache, so this is asked once and put into every Problem.

    Raises:
        ConfigError: ``want`` names no backend.
    """
    return backends.preferred_form(arch, want)
