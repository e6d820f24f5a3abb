"""The operations of the layer outside attention: one table of functions, chosen once at start-up.

``reference`` is plain torch, the definition of every operation. Other tables are imported by name.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from minuet.errors import ContractError
from minuet.ops.activation import swiglu_oai
from minuet.ops.embedding import Embedded, Embedding, Follows, embed
from minuet.ops.moe import Experts, experts_forward, route
from minuet.ops.norm import gemma_rms_norm
from minuet.ops.sums import Sums

# T tokens, H hidden

REFERENCE = "reference"
"""The table of plain torch."""

# table -> "module:function" of a function ``table(batch_invariant) -> Ops``
_TABLES: Mapping[str, str] = MappingProxyType({"triton": "minuet.ops.triton.launch:table"})


@dataclass(frozen=True, slots=True)
class Ops:
    """What a decoder layer calls besides attention.

    A *delta* is what an attention block or an FFN adds to the residual stream: a [T, H] tensor, or
    what this table's ``moe`` or ``linear_sums`` returned, which its ``add_norm`` understands.

    Attributes:
        name: of the table.
        batch_invariant: a row's results do not depend, to the bit, on the other rows.
        embed: see :func:`minuet.ops.embedding.embed`.
        linear: ``linear(x [..., in], weight [out, in]) -> [..., out]``.
        linear_sums: ``linear(x [T, in], weight [W, in])``, or the :class:`minuet.ops.sums.Sums`
            that add up to it: for ``add_norm`` and ``swiglu``, and for a writer of the cache that
            knows them.
        logits: ``logits(x [R, in], weight [V, in], out) -> [R, V] float32``: what ``linear`` gives,
            widened; in ``out`` [R, V] float32 unless that is None.
        add_norm: ``add_norm(residual [T, H], delta, weight, eps) -> (sum, norm of the sum)``, both
            in the type of ``residual``; see :mod:`minuet.ops.norm`.
        swiglu: see :func:`minuet.ops.activation.swiglu_oai`.
        moe: ``moe(x [T, H], experts) -> delta``, routed and shared experts together.
        rungs: token counts from which another kernel or tiling is used, ascending. A step of each
            and one of more tokens than the last have met every kernel.
    """

    name: str
    batch_invariant: bool
    embed: Callable[[Tensor, Tensor, Embedding, Follows | None], Embedded]
    linear: Callable[[Tensor, Tensor], Tensor]
    linear_sums: Callable[[Tensor, Tensor], Tensor | Sums]
    logits: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    add_norm: Callable[[Tensor, Any, Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Any, float, float], Tensor]
    moe: Callable[[Tensor, Experts], Any]
    rungs: tuple[int, ...] = (1,)


def ops_for(name: str, *, batch_invariant: bool = False) -> Ops:
    """The table of a name.

    Args:
        name: ``reference``, or what the arch's row says (:attr:`minuet.platform.arch.Arch.ops`).
        batch_invariant: ask for rows that do not depend on their batch, where the table knows how.

    Raises:
        ContractError: no such table.
    """
    if name == REFERENCE:
        return _REFERENCE
    if name not in _TABLES:
        raise ContractError("no such operations", got=name, expected=f"{REFERENCE} or {_TABLES}")
    module, _, function = _TABLES[name].partition(":")
    table: Ops = getattr(importlib.import_module(module), function)(batch_invariant)
    return table


def _logits(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    logits = F.linear(x, weight).float()
    return logits if out is None else out.copy_(logits)


def _add_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + delta
    return total, gemma_rms_norm(total, weight, eps)


def _moe(hidden: Tensor, experts: Experts) -> Tensor:
    chosen, shares = route(hidden, experts.router, experts.bias, experts.top_k)
    routed = experts_forward(
        hidden,
        chosen,
        shares * experts.routed_scale,
        experts.gate_up,
        experts.down,
        experts.alpha,
        experts.limit,
    )
    inner = swiglu_oai(F.linear(hidden, experts.shared_gate_up), experts.alpha, experts.limit)
    return routed + F.linear(inner, experts.shared_down)


_REFERENCE = Ops(
    name=REFERENCE,
    batch_invariant=False,
    embed=embed,
    linear=F.linear,
    linear_sums=F.linear,
    logits=_logits,
    add_norm=_add_norm,
    swiglu=swiglu_oai,
    moe=_moe,
)
