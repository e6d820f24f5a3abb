"""What a kernel covers, as data, and :func:`covers`: the one evaluation of it.

A :class:`Capability` lives in its backend's ``spec.py``, which owns every number in it. Nobody
else states a limit: documents, refusals, skips of tests and start-up checks all come from here.

:func:`covers` returns **every** reason against, never the first one only. A reason carries a
remedy ("set --x y") only if that one flag **alone** makes the kernel cover the problem; it is
found by evaluating the problem again with the flag changed, so advice cannot be wrong.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from importlib.util import find_spec
from typing import Any

from minuet.attention.contract import LayerKind, Op, Phase, Problem
from minuet.dtypes import DType
from minuet.errors import ContractError, Refusal
from minuet.kv.layout import Form
from minuet.platform.arch import Arch

AUTO = "auto"


class Level(IntEnum):
    """How far a (kernel, arch) pair has been verified. The docs claim one of these words."""

    DECLARED = 0  # limits are stated, the kernel is not in this version: plan for it, do not run it
    REFERENCE = 1  # is the FP32 definition, checked against transformers
    CONFORMANCE = 2  # agrees with the reference on every layout, dtype and length edge
    COMPILED = 3  # ... and compiles to machine code for the arch, without spills
    SIMULATED = 4  # ... and was executed from the compiler's IR
    DEVICE = 5  # ... and ran on the device, results committed


@dataclass(frozen=True, slots=True)
class Accepted:
    """The values of one number that a kernel accepts: a closed list, or a range.

    Attributes:
        values: the list, ascending; empty for a range.
        low: smallest value of the range.
        high: largest value of the range; None for no limit.
    """

    values: tuple[int, ...] = ()
    low: int = 1
    high: int | None = None

    def __contains__(self, value: int) -> bool:
        """Whether ``value`` is accepted."""
        if self.values:
            return value in self.values
        return self.low <= value and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        """For people: ``16, 64, 128``, ``1..8`` or ``>= 1``."""
        if self.values:
            return ", ".join(map(str, self.values))
        return f">= {self.low}" if self.high is None else f"{self.low}..{self.high}"

    def nearest(self, value: int) -> int:
        """The largest accepted value not above ``value``, else the smallest accepted one."""
        if self.values:
            below = [v for v in self.values if v <= value]
            return max(below) if below else min(self.values)
        return max(self.low, value if self.high is None else min(value, self.high))


def one_of(*values: int) -> Accepted:
    """A closed list."""
    return Accepted(values=tuple(sorted(values)))


def up_to(high: int) -> Accepted:
    """``1 .. high``."""
    return Accepted(high=high)


ANY = Accepted()  # every number from 1 on


# Operations of a layer run in this order; a slice's lifetime is a range of it.
_STAGE = {Op.WRITE: 0, Op.SELECT: 1, Op.ATTEND: 2}


@dataclass(frozen=True, slots=True)
class WorkspaceSpec:
    """One slice that a kernel asks for.

    Attributes:
        name: what a launcher looks it up by; unique within a step of one layer.
        bytes: size, not rounded.
        zeroed: must be zero before the first use, and every user leaves it zero (counters). Such
            a slice keeps its bytes to itself for good.
        first: the operation that writes it.
        last: the operation that reads it last.
    """

    name: str
    bytes: int
    zeroed: bool = False
    first: Op = Op.ATTEND
    last: Op = Op.ATTEND

    def __post_init__(self) -> None:
        if self.bytes < 0 or _STAGE[self.first] > _STAGE[self.last]:
            raise ContractError(
                f"WorkspaceSpec {self.name}",
                got=(self.bytes, self.first.value, self.last.value),
                expected="bytes >= 0 and first <= last",
            )

    def overlaps(self, other: "WorkspaceSpec") -> bool:
        """Whether both are alive during some operation."""
        return _STAGE[self.first] <= _STAGE[other.last] and _STAGE[other.first] <= _STAGE[self.last]

    def covering(self, other: "WorkspaceSpec") -> "WorkspaceSpec":
        """The slice that serves as both: the larger size, alive whenever one of them is."""
        return WorkspaceSpec(
            self.name,
            max(self.bytes, other.bytes),
            self.zeroed or other.zeroed,
            first=min(self.first, other.first, key=_STAGE.__getitem__),
            last=max(self.last, other.last, key=_STAGE.__getitem__),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The largest step of one shape bucket: what workspace formulas are computed from.

    Attributes:
        num_seqs: sequences of the padded batch.
        query_tokens: query tokens of the padded batch; ``num_seqs * query_len`` in a decode step.
        max_length: longest context in tokens, this step's tokens included.
        slots: partial results per KV head, from the split (``PlanShape.slots``,
            ``RowSplit.slots``); 0 where every row is written directly.
        score_bytes: budget of the block-score buffer; longer steps are scored in chunks.
    """

    num_seqs: int
    query_tokens: int
    max_length: int
    slots: int = 0
    score_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPolicy:
    """A kernel's numbers for dividing work; tuned with the kernel, owned by its ``spec.py``.

    Attributes:
        tile_tokens: tokens a worker handles per step of its loop.
        parts_per_unit: parts the balanced form aims for, per compute unit, over all KV heads.
        fixed_part_tiles: tiles per part of the fixed form, until ``fixed_max_parts`` is reached.
        fixed_max_parts: parts per sequence of the fixed form at most; longer parts beyond.
        row_max_parts: parts of a sparse decode row at most.
        fixed_row_parts: parts of every sparse decode row of the batch-invariant form.
        longest_first: order work by falling size, so that no long part starts last.
    """

    tile_tokens: int
    parts_per_unit: int
    fixed_part_tiles: int
    fixed_max_parts: int
    row_max_parts: int
    fixed_row_parts: int
    longest_first: bool = False


def no_workspace(problem: Problem, sizes: StepSizes) -> tuple[WorkspaceSpec, ...]:
    """Formula of a kernel that needs no scratch."""
    return ()


# Compared by identity: one row of one backend's table.
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Capability:
    """What one kernel covers. None in a dtype or form tuple: the kernel does not touch it.

    Attributes:
        name: the kernel's name in plans, traces and metrics: ``triton.attend``.
        backend: ``cpu``, ``triton``, ``flydsl`` or ``aiter``.
        op: the operation it carries out.
        level: arch name to verification level; an arch that is missing is not covered.
        target: ``module:attribute`` of the launcher, imported by :meth:`load` only.
        automatic_on: archs on which ``--attention-backend auto`` may choose it; None for all.
        layer_kinds: dense, sparse or both.
        phases: prefill, decode or both.
        forms: page arrangements, the one the backend prefers first.
        q_dtypes: types of queries and outputs, preferred first.
        kv_dtypes: storage types of K and V, preferred first. FP8 flavours are those of the arch
            unless ``software_fp8``.
        index_dtypes: storage types of the index key, preferred first.
        software_fp8: FP8 is converted in software, so any flavour is read on any arch.
        head_dims: channels per head.
        index_dims: channels of the index key.
        page_sizes: tokens per page.
        max_group: query heads per KV head at most; None for no limit.
        query_lens: query tokens per request of a decode step.
        max_top_blocks: blocks per sparse row at most; None for no limit.
        windows: sliding windows are covered.
        sinks: attention sink logits are covered.
        sums: it takes a product that is not added up yet (:class:`minuet.ops.sums.Sums`).
        max_rows: rows (query tokens x KV heads) of one call at most; None for no limit.
        split: how a decode step is divided over workers; None where the operation does not split.
        workspace: bytes one call needs, from the problem and the largest step.
        requires: Python packages the launcher imports.
        probe: ``module:function`` that says, without importing them, what of the installed
            packages does not fit; empty for nothing to ask.
    """

    name: str
    backend: str
    op: Op
    level: Mapping[str, Level]
    target: str
    automatic_on: tuple[str, ...] | None = None
    layer_kinds: tuple[LayerKind, ...] = (LayerKind.DENSE, LayerKind.SPARSE)
    phases: tuple[Phase, ...] = (Phase.PREFILL, Phase.DECODE)
    forms: tuple[Form, ...]
    q_dtypes: tuple[DType, ...]
    kv_dtypes: tuple[DType, ...] | None
    index_dtypes: tuple[DType, ...] | None
    software_fp8: bool = False
    head_dims: Accepted = ANY
    index_dims: Accepted = ANY
    page_sizes: Accepted = ANY
    max_group: int | None = None
    query_lens: Accepted = ANY
    max_top_blocks: int | None = None
    windows: bool = False
    sinks: bool = False
    sums: bool = False
    max_rows: int | None = None
    split: SplitPolicy | None = None
    workspace: Callable[[Problem, StepSizes], tuple[WorkspaceSpec, ...]] = no_workspace
    requires: tuple[str, ...] = ()
    probe: str = ""

    @property
    def archs(self) -> tuple[str, ...]:
        """Archs it is written for."""
        return tuple(self.level)

    def runs_on(self, arch: Arch) -> bool:
        """Whether this version contains the kernel for the arch."""
        return self.level.get(arch.name, Level.DECLARED) > Level.DECLARED

    def load(self) -> Callable[..., Any]:
        """Import the launcher. The only place where a backend's code is reached from data.

        Raises:
            ContractError: the kernel is declared only; start-up should have refused.
        """
        if not any(level > Level.DECLARED for level in self.level.values()):
            raise ContractError(f"{self.name} is declared only", got="load", expected="a refusal")
        module, _, attribute = self.target.partition(":")
        launcher: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return launcher


@dataclass(frozen=True, slots=True)
class _Violation:
    field: str
    got: str
    accepts: str


def covers(
    capability: Capability, problem: Problem, arch: Arch, want: str = AUTO
) -> tuple[Refusal, ...]:
    """Every reason why this kernel does not cover this problem; empty if it does.

    Args:
        capability: the kernel.
        problem: the demand.
        arch: where.
        want: the backend asked for, or ``auto``.
    """
    refusals = []
    for found in _violations(capability, problem, arch, want):
        flag, value = _remedy(capability, problem, arch, want, found.field)
        remedy = f"set {flag} {value}" if flag else ""
        refusals.append(
            Refusal(capability.name, found.field, found.got, found.accepts, remedy, flag, value)
        )
    return tuple(refusals)


# --- the evaluation ------------------------------------------------------------------------------


def _violations(
    capability: Capability, problem: Problem, arch: Arch, want: str
) -> Iterator[_Violation]:
    """Every fact of the problem outside the capability, from the most general to the details."""
    if problem.op is not capability.op:
        yield _Violation("op", problem.op.value, capability.op.value)
    if arch.name not in capability.level:
        yield _Violation("arch", arch.name, ", ".join(capability.archs))
    if want == AUTO:
        if capability.automatic_on is not None and arch.name not in capability.automatic_on:
            yield _Violation("attention_backend", AUTO, f"{capability.backend} when named")
    elif want != capability.backend:
        yield _Violation("attention_backend", want, capability.backend)
    if problem.layer_kind not in capability.layer_kinds:
        yield _Violation("layer_kind", problem.layer_kind.value, _names(capability.layer_kinds))
    if problem.phase not in capability.phases:
        yield _Violation("phase", problem.phase.value, _names(capability.phases))
    if problem.form not in capability.forms:
        yield _Violation("form", problem.form.value, _names(capability.forms))
    yield from _dtype_violations(capability, problem, arch)
    yield from _number_violations(capability, problem)
    if problem.window and not capability.windows:
        yield _Violation("window", f"{problem.window} tokens", "0 (no sliding window)")
    if problem.sinks and not capability.sinks:
        yield _Violation("sinks", "attention sinks", "none")


def _dtype_violations(capability: Capability, problem: Problem, arch: Arch) -> Iterator[_Violation]:
    demands = [("q_dtype", problem.q_dtype, capability.q_dtypes)]
    if capability.kv_dtypes is not None:
        demands.append(("kv_dtype", problem.kv_dtype, capability.kv_dtypes))
    if capability.index_dtypes is not None and problem.index_dim:
        demands.append(("index_dtype", problem.index_dtype, capability.index_dtypes))
    for field, got, declared in demands:
        accepted = _dtypes_on(capability, declared, arch)
        if got not in accepted:
            yield _Violation(field, got.value, _names(accepted))


def _dtypes_on(
    capability: Capability, declared: tuple[DType, ...], arch: Arch
) -> tuple[DType, ...]:
    """The declared types that exist on the arch: device code converts its own FP8 flavour only."""
    if capability.software_fp8:
        return declared
    return tuple(d for d in declared if not d.is_fp8 or d is arch.fp8)


def _number_violations(capability: Capability, problem: Problem) -> Iterator[_Violation]:
    demands = [
        ("head_dim", problem.head_dim, capability.head_dims),
        ("page_size", problem.page_size, capability.page_sizes),
        ("group", problem.group, Accepted(high=capability.max_group)),
        ("query_len", problem.query_len, capability.query_lens),
    ]
    if problem.index_dim:
        demands.append(("index_dim", problem.index_dim, capability.index_dims))
    if problem.top_blocks:
        demands.append(("top_blocks", problem.top_blocks, Accepted(high=capability.max_top_blocks)))
    for field, got, accepted in demands:
        if got not in accepted:
            yield _Violation(field, str(got), str(accepted))


def _names(members: Iterable[LayerKind | Phase | Form | DType]) -> str:
    return ", ".join(member.value for member in members)


# --- remedies ------------------------------------------------------------------------------------


def _remedy(
    capability: Capability, problem: Problem, arch: Arch, want: str, field: str
) -> tuple[str, str]:
    """The first flag setting that turns ``field`` and leaves nothing refused; empty without one."""
    for flag, value, changed, wanted in _changes(capability, problem, arch, want, field):
        if not any(_violations(capability, changed, arch, wanted)):
            return flag, value
    return "", ""


def _changes(
    capability: Capability, problem: Problem, arch: Arch, want: str, field: str
) -> Iterator[tuple[str, str, Problem, str]]:
    """What a user could set to change ``field``: flag, value, and what the question becomes."""
    if field in ("attention_backend", "form"):
        # The flag decides both: a backend's preferred arrangement is taken with it.
        changed = replace(problem, form=capability.forms[0])
        yield "--attention-backend", capability.backend, changed, capability.backend
    elif field == "page_size" and problem.layer_kind is LayerKind.DENSE:
        # A sparse layer's page is the model's block: no flag may change it.
        value = capability.page_sizes.nearest(problem.page_size)
        yield "--block-size", str(value), replace(problem, page_size=value), want
    elif field == "query_len":
        value = capability.query_lens.nearest(problem.query_len)
        yield "--num-speculative-tokens", str(value - 1), replace(problem, query_len=value), want
    elif field == "q_dtype":
        for dtype in capability.q_dtypes:
            yield "--dtype", dtype.value, replace(problem, q_dtype=dtype), want
    elif field == "kv_dtype":
        for dtype in _preferred(capability, capability.kv_dtypes, problem.kv_dtype, arch):
            yield "--kv-cache-dtype", dtype.value, replace(problem, kv_dtype=dtype), want
    elif field == "index_dtype":
        for dtype in _preferred(capability, capability.index_dtypes, problem.index_dtype, arch):
            yield "--index-kv-cache-dtype", dtype.value, replace(problem, index_dtype=dtype), want


def _preferred(
    capability: Capability, declared: tuple[DType, ...] | None, got: DType, arch: Arch
) -> list[DType]:
    """Accepted types, those as small as the one asked for first: FP8 stays FP8 where it can."""
    accepted = _dtypes_on(capability, declared or (), arch)
    return sorted(accepted, key=lambda d: d.itemsize != got.itemsize)


def missing_artefacts(capability: Capability) -> tuple[Refusal, ...]:
    """What this installation lacks to run the kernel; nothing is imported to find out.

    Asked at start-up, before anything is loaded: a launch that needs an absent file must never be
    reached, since some compilers answer one by ending the process.
    """
    lacking = [f"package {name}" for name in capability.requires if find_spec(name) is None]
    if capability.probe and not lacking:
        place, _, name = capability.probe.partition(":")
        lacking += getattr(importlib.import_module(place), name)()
    module = capability.target.partition(":")[0]
    # find_spec imports the parents of what it looks for: ask for them first
    if find_spec(module.rpartition(".")[0]) is None or find_spec(module) is None:
        lacking.append(f"module {module}")
    return tuple(
        Refusal(
            capability.name,
            "installation",
            f"no {what}",
            "a complete installation",
            f"install what {capability.backend} needs: {', '.join(capability.requires)}",
        )
        for what in lacking
    )
