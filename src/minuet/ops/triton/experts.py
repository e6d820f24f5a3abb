"""The routed FFN in Triton: scores, sorting, and the two products over experts."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from minuet.errors import ContractError
from minuet.ops.moe import Experts
from minuet.ops.triton.common import (
    cut,
    operand,
    options_of,
    power_of_2,
    product_launch,
    target_of,
)
from minuet.ops.triton.config import Router, Sorting, Target, Tiling
from minuet.ops.triton.kernels import experts as expert_kernels
from minuet.ops.triton.kernels import route as route_kernels
from minuet.platform.triton import Launch

# T tokens, H hidden, E experts, K experts of a token, I expert width

# token tiles that the layout of a large step takes at once, and its warps: fewer would spill
_LAYOUT_TILES, _LAYOUT_WARPS = 32, 8


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a routed FFN adds to the residual, expert by expert, not yet summed.

    Attributes:
        values: [T, K + 1, H]: of a token's experts, best first, and of the shared expert.
        shares: [T, K] float32; the shared expert's is 1.
    """

    values: Tensor
    shares: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A step's rows sorted by expert, in tiles of one expert each.

    Attributes:
        shares: [T, K] float32, scaled.
        tiles: [capacity] int32; expert of each routed tile, -1 beyond the last.
        rows: [capacity, M] int32; ``token * (K + 1) + k``, -1 where a tile is not full.
        flags: [...] int32 zeros, for the first product.
    """

    shares: Tensor
    tiles: Tensor
    rows: Tensor
    flags: Tensor


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
    flags = num_flags(num_tokens, experts, tiling)
    routing = route(x, experts, tiling.rows, target, batch_invariant, flags)
    for launch in expert_launches(x, experts, routing, values, tiling, target):
        launch()
    return Parts(values, routing.shares)


def tiling_for(num_tokens: int, target: Target, batch_invariant: bool) -> Tiling:
    """The tiling of a step."""
    if batch_invariant:
        return target.invariant
    return cut(target.tilings, num_tokens)


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
    flags: int = 0,
) -> Routing:
    """Choose experts as :func:`minuet.ops.moe.route`, ties to the lowest, and sort rows by expert.

    Args:
        x: [T, H], T > 0.
        experts: the FFN.
        rows: of a tile.
        target: launch numbers; the device's by default.
        batch_invariant: one tile of tokens, whatever T.
        flags: how many zeros the products need.
    """
    target = target or target_of(x.device)
    num_tokens, device = x.shape[0], x.device
    tiles = capacity(num_tokens, experts, rows)
    routing = Routing(
        shares=torch.empty((num_tokens, experts.top_k), device=device),
        tiles=torch.empty(tiles, dtype=torch.int32, device=device),
        rows=torch.empty((tiles, rows), dtype=torch.int32, device=device),
        flags=torch.empty(flags, dtype=torch.int32, device=device),
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
    router = target.invariant_router if batch_invariant else cut(target.routers, num_tokens)
    scores, logits = router_launch(x, experts.router, router, target)
    sorting = cut(target.sorts, num_tokens)
    choose = dict(
        logits_ptr=logits,
        bias_ptr=experts.bias,
        shares_ptr=routing.shares,
        num_tokens=num_tokens,
        routed_scale=experts.routed_scale,
        E=num_experts,
        E_PAD=power_of_2(num_experts),
        K=experts.top_k,
        K_PAD=power_of_2(experts.top_k),
        S=logits.shape[0],
        BM=sorting.tokens,
        PDL=target.pdl,
    )
    if sorting.launches > 1:
        return scores, *_sort_launches(routing, choose, sorting, target)
    args = choose | dict(
        tiles_ptr=routing.tiles,
        rows_ptr=routing.rows,
        flags_ptr=routing.flags,
        capacity=routing.tiles.shape[0],
        SLOTS=experts.top_k + 1,
        TILE=routing.rows.shape[1],
        num_flags=routing.flags.shape[0],
    )
    return scores, Launch(route_kernels.route_step, (1,), args, options_of(target, sorting.warps))


def router_launch(x: Tensor, router: Tensor, how: Router, target: Target) -> tuple[Launch, Tensor]:
    """The launch of the scores, and where it leaves their partial sums: [S, T, E] float32."""
    (num_tokens, hidden), num_experts = x.shape, router.shape[0]
    chunk = min(how.channels, power_of_2(hidden))
    if how.sums:
        chunk *= triton.cdiv(triton.cdiv(hidden, chunk), how.sums)
    sums = triton.cdiv(hidden, chunk)
    logits = torch.empty((sums, num_tokens, num_experts), device=x.device)
    args = dict(
        x_ptr=x,
        router_ptr=router,
        logits_ptr=logits,
        num_tokens=num_tokens,
        H=hidden,
        E=num_experts,
        CHUNK=chunk,
        BM=how.tokens,
        BE=how.experts,
        PDL=target.pdl,
    )
    grid = (triton.cdiv(num_tokens, how.tokens), triton.cdiv(num_experts, how.experts), sums)
    options = options_of(target, how.warps, how.stages)
    if not how.sums:
        return Launch(route_kernels.router_logits_few, grid, args, options), logits
    args |= dict(
        BK=min(how.channels, power_of_2(hidden)),
        TERMS=target.terms and x.dtype == torch.bfloat16,
        STAGES=how.stages,
    )
    return Launch(route_kernels.router_logits, grid, args, options), logits


def _sort_launches(
    routing: Routing, choose: dict[str, Any], sorting: Sorting, target: Target
) -> tuple[Launch, ...]:
    """Choose in many programs; then one program places, or one lays out and many place."""
    num_tokens, device = choose["num_tokens"], routing.rows.device
    tiles, tile = routing.rows.shape
    token_tiles = triton.cdiv(num_tokens, sorting.tokens)
    chosen = torch.empty((num_tokens, choose["K"]), dtype=torch.int32, device=device)
    counts = chosen
    if sorting.launches == 3:
        counts = torch.empty((token_tiles, choose["E_PAD"]), dtype=torch.int32, device=device)
    first = choose | dict(chosen_ptr=chosen, counts_ptr=counts, COUNTS=sorting.launches == 3)
    place = dict(
        chosen_ptr=chosen,
        rows_ptr=routing.rows,
        num_tokens=num_tokens,
        K=choose["K"],
        K_PAD=choose["K_PAD"],
        SLOTS=choose["K"] + 1,
        E_PAD=choose["E_PAD"],
        PDL=target.pdl,
    )
    lists = dict(
        tiles_ptr=routing.tiles,
        flags_ptr=routing.flags,
        capacity=tiles,
        TILE=tile,
        num_flags=routing.flags.shape[0],
    )
    options = options_of(target, sorting.place_warps)
    chooser = Launch(
        route_kernels.route_tokens, (token_tiles,), first, options_of(target, sorting.warps)
    )
    if sorting.launches == 2:
        one = place | lists | dict(BM=power_of_2(sorting.upto))
        return chooser, Launch(route_kernels.route_place, (1,), one, options)
    layout = lists | dict(
        counts_ptr=counts,
        rows_ptr=routing.rows,
        num_tiles=token_tiles,
        longest=triton.cdiv(num_tokens, tile),
        E_PAD=choose["E_PAD"],
        AT_ONCE=_LAYOUT_TILES,
        PDL=target.pdl,
    )
    return (
        chooser,
        Launch(route_kernels.route_layout, (1,), layout, options_of(target, _LAYOUT_WARPS)),
        Launch(
            route_kernels.route_rows,
            (token_tiles,),
            place | dict(first_ptr=counts, BM=sorting.tokens),
            options,
        ),
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
        OPERAND=operand(x.dtype, target),
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
            out_ptr=inner,
            flags_ptr=routing.flags,
            alpha=experts.alpha,
            limit=experts.limit,
            EARLY=tiling.early,
        )
        down = both | dict(
            x_ptr=inner, down_ptr=experts.down, shared_ptr=experts.shared_down, out_ptr=values
        )
        first = _first(up, tiling, routed, target)
        sizes = (tiles, x.shape[1], width)
        second = product_launch(expert_kernels.experts_down, down, tiling.down, sizes, target)
        launches += _joined(first, second, tiling.by_tile and len(shapes) == 1)
    return tuple(launches)


def num_flags(num_tokens: int, experts: Experts, tiling: Tiling) -> int:
    """Zeros that the products need: per partial sum of the shared expert, and per tile."""
    shared = int(triton.cdiv(num_tokens, tiling.rows))
    pieces = int(triton.cdiv(experts.shared_down.shape[1], tiling.up.n))
    sums = (tiling.shared_parts - 1) * shared * pieces
    return sums + tiling.by_tile * (shared + capacity(num_tokens, experts, tiling.rows))


def _first(args: dict[str, Any], tiling: Tiling, routed: int, target: Target) -> Launch:
    """The launch of the first product: parts of the shared expert, then the ``routed`` tiles."""
    parts = tiling.shared_parts if args["shared_tiles"] else 1
    sizes = (args["shared_tiles"] * parts + routed, args["I"], args["H"])
    made = product_launch(expert_kernels.experts_up, args, tiling.up, sizes, target)
    sums = args["flags_ptr"]
    if parts > 1:
        n = made.args["N"]
        pieces = args["shared_tiles"] * triton.cdiv(args["I"], n)
        shape = (parts - 1, pieces, 2, n, tiling.rows)
        sums = torch.empty(shape, device=args["x_ptr"].device)
    return replace(made, args={**made.args, "parts_ptr": sums, "SHARED": parts})


def _joined(first: Launch, second: Launch, by_tile: bool) -> tuple[Launch, Launch]:
    """Both products; programs of the second wait for their tile, or for all of the first."""
    ready, pieces = first.args["flags_ptr"], 0
    if by_tile:
        ready = ready[-first.args["out_ptr"].shape[0] :]
        pieces = int(triton.cdiv(first.args["I"], first.args["N"]))
    args = dict(ready_ptr=ready, READY=pieces)
    return (
        replace(first, args={**first.args, **args}),
        replace(second, args={**second.args, **args}),
    )
