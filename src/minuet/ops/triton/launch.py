"""The operations of :mod:`minuet.ops.table` in Triton: which kernel with which arguments.

Nothing here waits for the device, reads a value back or depends on data: what a step changes is
the number of tokens, an argument that no kernel is specialised on.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from minuet.errors import ContractError
from minuet.ops.sums import Sums, parts_of
from minuet.ops.table import Ops
from minuet.ops.triton.common import (
    operand,
    options_of,
    power_of_2,
    target_of,
)
from minuet.ops.triton.config import MANY, TARGETS, Projection, Target
from minuet.ops.triton.embedding import embed
from minuet.ops.triton.experts import Parts, moe
from minuet.ops.triton.kernels import rows as row_kernels
from minuet.ops.triton.kernels import skinny as skinny_kernels
from minuet.ops.triton.linear import RUNGS as LINEAR_RUNGS
from minuet.ops.triton.linear import invariant_linear
from minuet.platform.triton import Launch

# T tokens, H hidden, I width of an FFN

_GATE_CHANNELS = 1024
_SUM_BLOCK = 512


Delta = Tensor | Parts | Sums


def table(batch_invariant: bool) -> Ops:
    """The table ``triton`` of :func:`minuet.ops.table.ops_for`."""
    targets = TARGETS.values()
    cuts: list[Any] = [c for target in targets for c in target.sorts]
    edges = set(LINEAR_RUNGS) if batch_invariant else {1}
    if not batch_invariant:
        for target in targets:
            cuts += [*target.tilings, *target.routers, *target.projections]
    edges |= {c.upto + 1 for c in cuts if c.upto < MANY}
    return Ops(
        name="triton",
        batch_invariant=batch_invariant,
        embed=embed,
        linear=invariant_linear if batch_invariant else project,
        linear_sums=invariant_linear if batch_invariant else project_sums,
        logits=invariant_logits if batch_invariant else logits,
        add_norm=add_norm,
        swiglu=swiglu,
        moe=partial(moe, batch_invariant=batch_invariant),
        rungs=tuple(sorted(edges)),
    )


# --- rows ----------------------------------------------------------------------------------------


def add_norm(residual: Tensor, delta: Delta, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + delta`` and its norm, in one launch.

    Args:
        residual: [T, H].
        delta: [T, H], or parts or sums, added up and rounded once before they are added.
        weight: [H] float32.
        eps: added to the mean square.
    """
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    normed = torch.empty_like(total)
    if residual.shape[0]:
        rows_launch(residual, delta, total, normed, weight, eps)()
    return total, normed


def rows_launch(
    residual: Tensor,
    delta: Delta,
    total: Tensor,
    normed: Tensor,
    weight: Tensor,
    eps: float,
    target: Target | None = None,
) -> Launch:
    """The launch of :func:`add_norm`."""
    target = target or target_of(residual.device)
    values = delta.values if isinstance(delta, Parts | Sums) else delta
    shares = delta.shares if isinstance(delta, Parts) else None
    if not residual.is_contiguous() or not values.is_contiguous():
        got = residual.stride(), values.stride()
        raise ContractError("rows", got=got, expected="in one piece")
    num_tokens, hidden = residual.shape
    args = dict(
        residual_ptr=residual,
        delta_ptr=values,
        shares_ptr=residual if shares is None else shares,
        weight_ptr=weight,
        sum_ptr=total,
        normed_ptr=normed,
        num_tokens=num_tokens,
        eps=eps,
        H=hidden,
        BLOCK=power_of_2(hidden),
        PARTS=0 if shares is None else values.shape[1],
        K=0 if shares is None else shares.shape[1],
        SUMS=values.shape[0] if isinstance(delta, Sums) else 0,
        PDL=target.pdl,
    )
    options = options_of(target, target.row_warps)
    return Launch(row_kernels.add_norm, (num_tokens,), args, options)


def swiglu(gate_up: Tensor | Sums, alpha: float, limit: float) -> Tensor:
    """SwiGLU-OAI: :func:`minuet.ops.activation.swiglu_oai`.

    Args:
        gate_up: [T, 2 * I] in one piece, or what adds up to it.
        alpha: gain inside the sigmoid.
        limit: the clamp.
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=parts_of(gate_up)[0].device)
    if num_tokens:
        gate_launch(gate_up, out, alpha, limit)()
    return out


def gate_launch(
    gate_up: Tensor | Sums, out: Tensor, alpha: float, limit: float, target: Target | None = None
) -> Launch:
    """The launch of :func:`swiglu`."""
    target = target or target_of(out.device)
    values, sums = parts_of(gate_up)
    if not values.is_contiguous():
        raise ContractError("gate and up", got=values.stride(), expected="in one piece")
    block = min(_GATE_CHANNELS, power_of_2(out.shape[1]))
    args = dict(
        gate_up_ptr=values,
        out_ptr=out,
        num_tokens=out.shape[0],
        alpha=alpha,
        limit=limit,
        I=out.shape[1],
        BLOCK=block,
        SUMS=sums,
        PDL=target.pdl,
    )
    grid = (out.shape[0], triton.cdiv(out.shape[1], block))
    return Launch(row_kernels.gate, grid, args, options_of(target, 4))


# --- projections ---------------------------------------------------------------------------------


def project(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``: few rows are a matter of bandwidth, many go to the library.

    Args:
        x: [T, IN].
        weight: [OUT, IN] in one piece.
    """
    how = _projection(x, weight)
    if how is None:
        return F.linear(x, weight)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    sums = _divided(x, weight, how)
    main = project_launch(x, weight, out if sums is None else sums, how)
    main()
    if sums is not None:
        sum_launch(sums, out)()
    return out


def project_sums(x: Tensor, weight: Tensor) -> Tensor | Sums:
    """As :func:`project`, for who adds parts up where it reads them."""
    how = _projection(x, weight)
    sums = None if how is None else _divided(x, weight, how)
    if how is None or sums is None:
        return project(x, weight)
    project_launch(x, weight, sums, how)()
    return Sums(sums, x.dtype)


def logits(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """As :func:`project`, widened to float32 where it is stored.

    Args:
        x: [R, IN].
        weight: [V, IN] in one piece.
        out: [R, V] float32 in one piece; None: a new tensor.
    """
    out = _fp32(x, weight, out)
    how = _projection(x, weight)
    if how is None or _num_parts(weight, how) > 1:
        return out.copy_(project(x, weight))
    project_launch(x, weight, out, how)()
    return out


def invariant_logits(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """As :func:`logits`, by the product whose rows do not depend on their batch."""
    return _fp32(x, weight, out).copy_(invariant_linear(x, weight))


def _fp32(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    if not out.is_contiguous():
        raise ContractError("memory of logits", got=out.stride(), expected="in one piece")
    return out


def _projection(x: Tensor, weight: Tensor) -> Projection | None:
    """How a projection is cut; None: by the library."""
    cuts = target_of(x.device).projections
    how = next((cut for cut in cuts if 0 < x.shape[0] <= cut.upto), None)
    whole = how is not None and weight.shape[1] % how.product.c == 0
    return how if whole and x.is_contiguous() and weight.is_contiguous() else None


def _divided(x: Tensor, weight: Tensor, how: Projection) -> Tensor | None:
    """Memory of the parts of a divided projection: [parts, T, OUT] float32; None: one part."""
    parts = _num_parts(weight, how)
    if parts == 1:
        return None
    return torch.empty((parts, x.shape[0], weight.shape[0]), device=x.device)


def _num_parts(weight: Tensor, how: Projection) -> int:
    """As many as divide the loop into whole steps and keep to the number of programs.

    It follows from the weight alone.
    """
    tiles, steps = triton.cdiv(weight.shape[0], how.product.n), weight.shape[1] // how.product.c
    fits = (n for n in range(1, steps + 1) if steps % n == 0 and tiles * n <= how.programs)
    return max(fits, default=1)


def project_launch(
    x: Tensor, weight: Tensor, out: Tensor, how: Projection, target: Target | None = None
) -> Launch:
    """The launch of few rows; ``out`` is the result, which may be wider than x, or its parts."""
    target = target or target_of(x.device)
    outputs, inputs = weight.shape
    parts = out.shape[0] if out.ndim == 3 else 1
    part = inputs // parts
    args = dict(
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        num_tokens=x.shape[0],
        IN=inputs,
        OUT=outputs,
        PART=part,
        M=how.rows,
        N=how.product.n,
        C=how.product.c,
        AHEAD=min(how.ahead, power_of_2(part + 1) // 2),
        OPERAND=operand(x.dtype, target),
        STAGES=how.product.stages,
        PDL=target.pdl,
    )
    grid = (triton.cdiv(outputs, how.product.n), parts)
    options = options_of(target, how.product.warps, how.product.stages)
    return Launch(skinny_kernels.project_part, grid, args, options)


def sum_launch(sums: Tensor, out: Tensor, target: Target | None = None) -> Launch:
    """The launch that adds parts [parts, T, OUT] up to ``out`` [T, OUT]."""
    target = target or target_of(out.device)
    args = dict(
        parts_ptr=sums,
        out_ptr=out,
        size=out.numel(),
        PARTS=sums.shape[0],
        BLOCK=_SUM_BLOCK,
        PDL=target.pdl,
    )
    grid = (triton.cdiv(out.numel(), _SUM_BLOCK),)
    return Launch(skinny_kernels.add_parts, grid, args, options_of(target, 4))
