"""The chosen kernels, loaded: what a model's layer calls. Nothing is decided here."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minuet.attention.batch import AttentionBatch
from minuet.attention.contract import LayerKind, Op
from minuet.attention.dispatch import Choice


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """Launchers of one layer kind. Signatures are those of ``attention/backends/cpu/launch.py``.

    Attributes:
        write: norm, rope, quantise and store; returns the queries.
        select: choose blocks; None on a dense layer. What it returns is for ``attend`` alone.
        attend: attention over chosen blocks or over everything.
        adds_sums: ``write`` takes packed rows that are not added up yet, too.
    """

    write: Callable[..., tuple[Tensor, Tensor | None]]
    select: Callable[..., Any] | None
    attend: Callable[..., Tensor]
    adds_sums: bool = False


@dataclass(frozen=True, slots=True)
class StepKernels:
    """All launchers of a model.

    Attributes:
        plan: ``plan(batch, page_size)``, once per step; its result goes to every layer's calls.
        layers: by layer kind.
        prepare: ``prepare(sizes, device, scratch)`` makes what plans one prepared step in place,
            for graphs and without allocating; its ``plan`` is used as ``plan`` is. None where the
            backend has no such form.
    """

    plan: Callable[[AttentionBatch, int], Any]
    layers: Mapping[LayerKind, LayerKernels]
    prepare: Callable[..., Any] | None = None


def load(choices: Mapping[tuple[LayerKind, Op], Choice]) -> StepKernels:
    """Import the launchers that start-up chose.

    Args:
        choices: one per layer kind and operation; each has a kernel, or start-up had refused.
    """
    launchers: dict[tuple[LayerKind, Op], Callable[..., Any]] = {}
    modules, kernels = set(), {}
    for key, choice in choices.items():
        assert choice.kernel is not None
        kernels[key] = choice.kernel
        launchers[key] = choice.kernel.load()
        modules.add(choice.kernel.target.partition(":")[0])
    # planning belongs to the backend whose kernels read the plan; one backend serves a whole model
    (module,) = modules
    layers = {
        kind: LayerKernels(
            write=launchers[kind, Op.WRITE],
            select=launchers.get((kind, Op.SELECT)),
            attend=launchers[kind, Op.ATTEND],
            adds_sums=kernels[kind, Op.WRITE].sums,
        )
        for kind in dict.fromkeys(kind for kind, _ in choices)
    }
    launch = importlib.import_module(module)
    return StepKernels(plan=launch.plan, layers=layers, prepare=getattr(launch, "prepare", None))
