"""The operations of :mod:`minuet.ops.table` in Triton: which kernel with which arguments.

Nothing here waits for the device, reads a value back or depends on data: what a step changes is
the number of tokens, an argument that no kernel is specialised on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from minuet.errors import ContractError
from minuet.ops.moe import Experts
from minuet.ops.table import Ops
from minuet.ops.triton.config import MANY, TARGETS, Product, Target, Tiling
from minuet.ops.triton.kernels import experts as expert_kernels
from minuet.ops.triton.kernels import route as route_kernels
from minuet.ops.triton.kernels import rows as row_kernels
from minuet.ops.triton.linear import RUNGS as LINEAR_RUNGS
from minuet.ops.triton.linear import invariant_linear
from minuet.platform.triton import Launch, arch_name

# T tokens, H hidden, E experts, K experts of a token, I expert width

_ROUTE_TOKENS, _ROUTE_WARPS = (
    (16, 64),
    (8, 16),
)  # steps of up to so many tokens are routed by one program
_LAYOUT_TILES = 32  # token tiles that the layout of a large step takes at once
_COS_SIN_ROWS = 16
_GATE_CHANNELS = 1024
_NARROWEST = 16  # of a matrix operand
_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a routed FFN adds to the residual, expert by expert, not yet summed.

    Attributes:
        values: [T, K + 1, H]: of a token's experts, best first, and of the shared expert.
        shares: [T, K] float32; the shared expert's is 1.
    """

    values: Tensor
    shares: Tensor


def table(batch_invariant: bool) -> Ops:
    """The table ``triton`` of :func:`minuet.ops.table.ops_for`."""
    edges = {1, *(n + 1 for n in _ROUTE_TOKENS)}
    if batch_invariant:
        edges |= set(LINEAR_RUNGS)
    else:
        tilings = {tiling for target in TARGETS.values() for tiling in target.tilings}
        edges |= {tiling.upto + 1 for tiling in tilings if tiling.upto < MANY}
    return Ops(
        name="triton",
        batch_invariant=batch_invariant,
        linear=invariant_linear if batch_invariant else F.linear,
        norm=norm,
        add=add,
        add_norm=add_norm,
        cos_sin=cos_sin,
        swiglu=swiglu,
        moe=partial(moe, batch_invariant=batch_invariant),
        rungs=tuple(sorted(edges)),
    )


@cache
def target_of(device: torch.device) -> Target:
    """Launch numbers of a device; Triton's interpreter stands for the CPU."""
    return TARGETS[arch_name(device)]


# --- rows ----------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma RMSNorm: :func:`minuet.ops.norm.gemma_rms_norm`.

    Args:
        x: [T, H], rows in one piece.
        weight: [H] float32.
        eps: added to the mean square.
    """
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rows_launch(x, None, None, normed, weight, eps)()
    return normed


def add(residual: Tensor, delta: Tensor | Parts) -> Tensor:
    """``residual + delta``, a new tensor.

    Args:
        residual: [T, H].
        delta: [T, H], or parts, whose weighted sum is rounded once before it is added.
    """
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    if residual.shape[0]:
        rows_launch(residual, delta, total, None, None, 0.0)()
    return total


def add_norm(
    residual: Tensor, delta: Tensor | Parts, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``residual + delta`` and its norm, in one launch.

    Args:
        residual: [T, H].
        delta: see :func:`add`.
        weight: [H] float32.
        eps: added to the mean square.
    """
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    normed = torch.empty_like(total)
    if residual.shape[0]:
        rows_launch(residual, delta, total, normed, weight, eps)()
    return total, normed


def rows_launch(
    x: Tensor,
    delta: Tensor | Parts | None,
    total: Tensor | None,
    normed: Tensor | None,
    weight: Tensor | None,
    eps: float,
    target: Target | None = None,
    ahead: tuple[Tensor, ...] = (),
) -> Launch:
    """The launch of :func:`norm`, :func:`add` and :func:`add_norm`, by which outputs are given."""
    target = target or target_of(x.device)
    programs = target.prefetch_programs if x.shape[0] <= _ROUTE_TOKENS[-1] and ahead else 0
    lines = [weight.nbytes // 128 if programs else 0 for weight in ahead] + [0] * 3
    pointers = [*ahead, x, x, x]
    values, shares = (delta.values, delta.shares) if isinstance(delta, Parts) else (delta, None)
    if x.stride(1) != 1 or (values is not None and not values.is_contiguous()):
        raise ContractError("rows", got=x.stride(), expected="rows in one piece")
    num_tokens, hidden = x.shape
    args = dict(
        x_ptr=x,
        delta_ptr=x if values is None else values,
        shares_ptr=x if shares is None else shares,
        weight_ptr=x if weight is None else weight,
        sum_ptr=x if total is None else total,
        normed_ptr=x if normed is None else normed,
        ahead_0_ptr=pointers[0],
        ahead_1_ptr=pointers[1],
        ahead_2_ptr=pointers[2],
        LINES_0=lines[0],
        LINES_1=lines[1],
        LINES_2=lines[2],
        num_tokens=num_tokens,
        stride_x=x.stride(0),
        eps=eps,
        H=hidden,
        BLOCK=_power_of_2(hidden),
        ADD=delta is not None,
        PARTS=0 if shares is None or values is None else values.shape[1],
        K=0 if shares is None else shares.shape[1],
        NORM=normed is not None,
        PDL=target.pdl,
    )
    options = _options(target, target.row_warps)
    return Launch(row_kernels.add_norm, (num_tokens + programs,), args, options)


def swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """SwiGLU-OAI: :func:`minuet.ops.activation.swiglu_oai`.

    Args:
        gate_up: [T, 2 * I] in one piece.
        alpha: gain inside the sigmoid.
        limit: the clamp.
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        gate_launch(gate_up, out, alpha, limit)()
    return out


def gate_launch(
    gate_up: Tensor, out: Tensor, alpha: float, limit: float, target: Target | None = None
) -> Launch:
    """The launch of :func:`swiglu`."""
    target = target or target_of(gate_up.device)
    if not gate_up.is_contiguous():
        raise ContractError("gate and up", got=gate_up.stride(), expected="in one piece")
    block = min(_GATE_CHANNELS, _power_of_2(out.shape[1]))
    args = dict(
        gate_up_ptr=gate_up,
        out_ptr=out,
        alpha=alpha,
        limit=limit,
        I=out.shape[1],
        BLOCK=block,
        PDL=target.pdl,
    )
    grid = (out.shape[0], triton.cdiv(out.shape[1], block))
    return Launch(row_kernels.gate, grid, args, _options(target, 4))


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of a step in one launch: :func:`minuet.ops.rope.cos_sin`.

    Args:
        positions: [T] int64.
        frequencies: [rotary_dim / 2] float32.
    """
    shape = (positions.shape[0], frequencies.shape[0])
    cos = torch.empty(shape, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    if shape[0]:
        cos_sin_launch(positions, frequencies, cos, sin)()
    return cos, sin


def cos_sin_launch(
    positions: Tensor,
    frequencies: Tensor,
    cos: Tensor,
    sin: Tensor,
    target: Target | None = None,
) -> Launch:
    """The launch of :func:`cos_sin`."""
    target = target or target_of(positions.device)
    args = dict(
        positions_ptr=positions,
        frequencies_ptr=frequencies,
        cos_ptr=cos,
        sin_ptr=sin,
        num_tokens=positions.shape[0],
        HALF=cos.shape[1],
        HALF_PAD=_power_of_2(cos.shape[1]),
        ROWS=_COS_SIN_ROWS,
        PDL=target.pdl,
    )
    grid = (triton.cdiv(positions.shape[0], _COS_SIN_ROWS),)
    return Launch(row_kernels.cos_sin, grid, args, _options(target, 4))


def prefetch_launch(weight: Tensor, target: Target | None = None) -> Launch:
    """Ask for a weight to be in L2 soon; returns before it is."""
    target = target or target_of(weight.device)
    args = dict(weight_ptr=weight, LINES=weight.nbytes // 128, BLOCK=256, PDL=target.pdl)
    return Launch(row_kernels.prefetch, (target.prefetch_programs,), args, _options(target, 4))


# --- experts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A step's rows sorted by expert, in tiles of one expert each.

    Attributes:
        shares: [T, K] float32, scaled.
        tiles: [capacity] int32; expert of each routed tile, -1 beyond the last.
        rows: [capacity, M] int32; ``token * (K + 1) + k``, -1 where a tile is not full.
    """

    shares: Tensor
    tiles: Tensor
    rows: Tensor


def moe(
    x: Tensor, experts: Experts, *, batch_invariant: bool = False, target: Target | None = None
) -> Parts:
    """Routed and shared experts of every token.

    Args:
        x: [T, H] in one piece.
        experts: the FFN.
        batch_invariant: one tiling, whatever T.
        target: launch numbers; the device's by default.
    """
    target = target or target_of(x.device)
    num_tokens, slots = x.shape[0], experts.top_k + 1
    values = torch.empty((num_tokens, slots, x.shape[1]), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return Parts(values, torch.empty((0, experts.top_k), device=x.device))
    tiling = tiling_for(num_tokens, target, batch_invariant)
    routing = route(x, experts, tiling.rows, target, batch_invariant)
    for launch in expert_launches(x, experts, routing, values, tiling, target):
        launch()
    return Parts(values, routing.shares)


def tiling_for(num_tokens: int, target: Target, batch_invariant: bool) -> Tiling:
    """The tiling of a step."""
    if batch_invariant:
        return target.invariant
    return next(tiling for tiling in target.tilings if num_tokens <= tiling.upto)


def capacity(num_tokens: int, experts: Experts, rows: int) -> int:
    """Tiles that the routed rows of a step can need, whatever is chosen.

    Every expert that is chosen has a tile that may not be full; the rest come in full tiles.
    """
    chosen = num_tokens * experts.top_k
    begun = min(chosen, experts.router.shape[0])
    return begun + (chosen - begun) // rows


def route(
    x: Tensor,
    experts: Experts,
    rows: int,
    target: Target | None = None,
    batch_invariant: bool = False,
) -> Routing:
    """Choose experts as :func:`minuet.ops.moe.route`, ties to the lowest, and sort rows by expert.

    Args:
        x: [T, H], T > 0.
        experts: the FFN.
        rows: of a tile.
        target: launch numbers; the device's by default.
        batch_invariant: one tile of tokens, whatever T.
    """
    target = target or target_of(x.device)
    num_tokens, device = x.shape[0], x.device
    tiles = capacity(num_tokens, experts, rows)
    routing = Routing(
        shares=torch.empty((num_tokens, experts.top_k), device=device),
        tiles=torch.empty(tiles, dtype=torch.int32, device=device),
        rows=torch.empty((tiles, rows), dtype=torch.int32, device=device),
    )
    for launch in route_launches(x, experts, routing, target, batch_invariant):
        launch()
    return routing


def route_launches(
    x: Tensor, experts: Experts, routing: Routing, target: Target, batch_invariant: bool = False
) -> tuple[Launch, ...]:
    """The launches of :func:`route`: two for a small step, four for a large one."""
    num_tokens, num_experts = x.shape[0], experts.router.shape[0]
    if not x.is_contiguous():
        raise ContractError("tokens", got=x.stride(), expected="in one piece")
    scores, logits = _router_launch(x, experts.router, target, batch_invariant)
    most = next((n for n in _ROUTE_TOKENS if num_tokens <= n), 0)
    expert_pad, top_pad = _power_of_2(num_experts), _power_of_2(experts.top_k)
    capacity_tiles, tile = routing.rows.shape
    common = dict(
        logits_ptr=logits,
        bias_ptr=experts.bias,
        shares_ptr=routing.shares,
        num_tokens=num_tokens,
        routed_scale=experts.routed_scale,
        E=num_experts,
        E_PAD=expert_pad,
        K=experts.top_k,
        K_PAD=top_pad,
        S=logits.shape[0],
        PDL=target.pdl,
    )
    lists = dict(tiles_ptr=routing.tiles, rows_ptr=routing.rows, capacity=capacity_tiles)
    if most:
        args = dict(**common, **lists, SLOTS=experts.top_k + 1, BM=most, TILE=tile)
        warps = _ROUTE_WARPS[_ROUTE_TOKENS.index(most)]
        return scores, Launch(route_kernels.route_step, (1,), args, _options(target, warps))
    return scores, *_large_route(x, experts, routing, common, target)


def _router_launch(
    x: Tensor, router: Tensor, target: Target, batch_invariant: bool
) -> tuple[Launch, Tensor]:
    (num_tokens, hidden), num_experts = x.shape, router.shape[0]
    step = target.router_channels
    chunk = triton.cdiv(triton.cdiv(hidden, step), target.router_sums) * step
    sums = triton.cdiv(hidden, chunk)
    logits = torch.empty((sums, num_tokens, num_experts), device=x.device)
    tokens = _ROUTE_TOKENS[num_tokens > _ROUTE_TOKENS[-1] and not batch_invariant]
    args = dict(
        x_ptr=x,
        router_ptr=router,
        logits_ptr=logits,
        num_tokens=num_tokens,
        H=hidden,
        E=num_experts,
        CHUNK=chunk,
        BM=tokens,
        BE=target.router_experts,
        BK=step,
        TERMS=target.terms and x.dtype == torch.bfloat16,
        STAGES=target.router_stages,
        PDL=target.pdl,
    )
    grid = (
        triton.cdiv(num_tokens, tokens),
        triton.cdiv(num_experts, target.router_experts),
        sums,
    )
    options = _options(target, 4, target.router_stages)
    return Launch(route_kernels.router_logits, grid, args, options), logits


def _large_route(
    x: Tensor, experts: Experts, routing: Routing, common: Mapping[str, Any], target: Target
) -> tuple[Launch, ...]:
    """Choose per tile of tokens, lay out once, place per tile."""
    num_tokens, tokens = x.shape[0], _ROUTE_TOKENS[-1]
    token_tiles = triton.cdiv(num_tokens, tokens)
    capacity_tiles, tile = routing.rows.shape
    expert_pad, pdl = common["E_PAD"], target.pdl
    chosen = torch.empty((num_tokens, experts.top_k), dtype=torch.int32, device=x.device)
    counts = torch.empty((token_tiles, expert_pad), dtype=torch.int32, device=x.device)
    first = dict(**common, chosen_ptr=chosen, counts_ptr=counts, BM=tokens)
    second = dict(
        counts_ptr=counts,
        tiles_ptr=routing.tiles,
        rows_ptr=routing.rows,
        num_tiles=token_tiles,
        capacity=capacity_tiles,
        longest=triton.cdiv(num_tokens, tile),
        E_PAD=expert_pad,
        TILE=tile,
        AT_ONCE=_LAYOUT_TILES,
        PDL=pdl,
    )
    third = dict(
        chosen_ptr=chosen,
        first_ptr=counts,
        rows_ptr=routing.rows,
        num_tokens=num_tokens,
        K=experts.top_k,
        K_PAD=common["K_PAD"],
        SLOTS=experts.top_k + 1,
        E_PAD=expert_pad,
        BM=tokens,
        PDL=pdl,
    )
    options = _options(target, _ROUTE_WARPS[-1])
    return (
        Launch(route_kernels.route_tokens, (token_tiles,), first, options),
        Launch(route_kernels.route_layout, (1,), second, options),
        Launch(route_kernels.route_rows, (token_tiles,), third, options),
    )


def expert_launches(
    x: Tensor,
    experts: Experts,
    routing: Routing,
    values: Tensor,
    tiling: Tiling,
    target: Target,
) -> tuple[Launch, ...]:
    """Both products; a shared expert of another width has two launches of its own.

    Args:
        x: [T, H].
        experts: the FFN.
        routing: from :func:`route`.
        values: [T, K + 1, H], written.
        tiling: sizes of tiles; its rows are the routing's.
        target: launch numbers.
    """
    width, shared_width = experts.down.shape[2], experts.shared_down.shape[1]
    routed, shared = routing.tiles.shape[0], triton.cdiv(x.shape[0], tiling.rows)
    common = dict(
        tiles_ptr=routing.tiles,
        rows_ptr=routing.rows,
        num_tokens=x.shape[0],
        H=x.shape[1],
        K=experts.top_k,
        SLOTS=experts.top_k + 1,
        M=tiling.rows,
        OPERAND=tl.float32 if target.interpreted else _OPERANDS[x.dtype],
        PDL=target.pdl,
    )
    shapes = [(width, routed, shared)]
    if width != shared_width:
        shapes = [(width, routed, 0), (shared_width, 0, shared)]
    launches: list[Launch] = []
    for width, routed, shared in shapes:
        tiles = routed + shared
        inner = torch.empty((tiles, tiling.rows, width), dtype=x.dtype, device=x.device)
        both = common | dict(I=width, shared_tiles=shared)
        up = both | dict(
            x_ptr=x,
            gate_up_ptr=experts.gate_up,
            shared_ptr=experts.shared_gate_up,
            shared_down_ptr=experts.shared_down,
            PREFETCH=target.prefetch_programs if shared and x.shape[0] <= _ROUTE_TOKENS[-1] else 0,
            out_ptr=inner,
            alpha=experts.alpha,
            limit=experts.limit,
        )
        down = both | dict(
            x_ptr=inner, down_ptr=experts.down, shared_ptr=experts.shared_down, out_ptr=values
        )
        sizes = (tiles, width, x.shape[1])
        launches.append(_product(expert_kernels.experts_up, up, tiling.up, sizes, target))
        sizes = (tiles, x.shape[1], width)
        launches.append(_product(expert_kernels.experts_down, down, tiling.down, sizes, target))
    return tuple(launches)


def _product(
    kernel: Any,
    args: dict[str, Any],
    product: Product,
    extents: tuple[int, int, int],
    target: Target,
) -> Launch:
    """``extents``: tiles, output channels, input channels; small ones make small programs."""
    tiles, outputs, inputs = extents
    n = min(product.n, max(_NARROWEST, _power_of_2(outputs)))
    c = min(product.c, max(_NARROWEST, _power_of_2(inputs)))
    args = args | dict(N=n, C=c, STAGES=product.stages)
    options = _options(target, product.warps, product.stages)
    return Launch(kernel, (tiles * triton.cdiv(outputs, n),), args, options)


def _options(target: Target, warps: int, stages: int = 1) -> dict[str, Any]:
    if target.interpreted:
        return {}
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if target.pdl:
        options["launch_pdl"] = True
    return options


def _power_of_2(value: int) -> int:
    return int(triton.next_power_of_2(value))
