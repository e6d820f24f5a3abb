"""Launches of the operations on tensors without memory, for M3 on one of four ranks."""

from dataclasses import replace

import torch

from minuet.ops.embedding import Embedded, Embedding, Follows
from minuet.ops.moe import Experts
from minuet.ops.triton import config, embedding, launch
from minuet.ops.triton import experts as moe
from minuet.platform.triton import Launch

HIDDEN, EXPERTS, TOP, WIDTH, DENSE, VOCAB = 6144, 128, 4, 768, 3072, 50016


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def experts(dtype: torch.dtype = torch.bfloat16) -> Experts:
    return Experts(
        router=_empty(EXPERTS, HIDDEN, dtype=torch.float32),
        bias=_empty(EXPERTS, dtype=torch.float32),
        gate_up=_empty(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype),
        down=_empty(EXPERTS, HIDDEN, WIDTH, dtype=dtype),
        shared_gate_up=_empty(2 * WIDTH, HIDDEN, dtype=dtype),
        shared_down=_empty(HIDDEN, WIDTH, dtype=dtype),
        top_k=TOP, routed_scale=2.0, alpha=1.702, limit=7.0,
    )  # fmt: skip


def launches(arch: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Launch]:
    """Every launch of a layer with ``tokens`` tokens, by kernel."""
    target = config.TARGETS[arch]
    x, weight = _empty(tokens, HIDDEN, dtype=dtype), _empty(HIDDEN, dtype=torch.float32)
    mine = experts(dtype)
    tiling = moe.tiling_for(tokens, target, False)
    tiles = moe.capacity(tokens, mine, tiling.rows)
    routing = moe.Routing(
        _empty(tokens, TOP, dtype=torch.float32),
        _empty(tiles, dtype=torch.int32),
        _empty(tiles, tiling.rows, dtype=torch.int32),
        _empty(moe.num_flags(tokens, mine, tiling), dtype=torch.int32),
    )
    parts = moe.Parts(_empty(tokens, TOP + 1, HIDDEN, dtype=dtype), routing.shares)
    half, ids = _empty(tokens, 32, dtype=torch.float32), _empty(tokens, dtype=torch.int64)
    begins = Embedding(_empty(VOCAB, HIDDEN, dtype=dtype), weight, 1e-6, half[0])
    follows = Follows(ids, _empty(64, dtype=torch.int64))
    made = [
        embedding.embed_launch(ids, ids, begins, follows, Embedded(x, x, half, half), target),
        launch.gate_launch(_empty(tokens, 2 * DENSE, dtype=dtype), x, 1.702, 7.0, target),
        *moe.route_launches(x, mine, routing, target),
        *moe.expert_launches(x, mine, routing, parts.values, tiling, target),
    ]
    for how in target.projections[:1]:
        qkv, packed = _empty(2560, HIDDEN, dtype=dtype), _empty(tokens, 2560, dtype=dtype)
        sums = _empty(6, tokens, 2560, dtype=torch.float32)
        made += [
            launch.project_launch(x, qkv, sums, how, target),
            launch.sum_launch(sums, packed, target),
        ]
    named = {one.kernel.__name__: one for one in made}
    named["add_norm"] = launch.rows_launch(x, x, x, x, weight, 1e-6, target)
    named["add_norm_parts"] = launch.rows_launch(x, parts, x, x, weight, 1e-6, target)
    return named


def with_tiling(made: Launch, **sizes: int) -> Launch:
    """The same launch with other tile sizes (constants of the kernel)."""
    return replace(made, args={**made.args, **sizes})
