"""Paged attention in Triton: which kernel runs with which arguments. Kernels are in ``kernels/``.

:class:`~minuet.attention.backends.triton.step.Planner` is made once per prepared step shape (see
:func:`planner`); :func:`plan` makes one for a single step.

``select`` of a decode step returns block scores (:class:`Scores`), from which every part of
``attend`` chooses for itself: cheaper than a launch in between. A prefill step, and a batch whose
scores exceed their budget, gets lists. :func:`block_lists` turns either into lists.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minuet.attention.backends.triton.config import TARGETS, Merge, Target, Tuning
from minuet.attention.backends.triton.kernels import attend as attend_kernels
from minuet.attention.backends.triton.kernels import choose as choose_kernels
from minuet.attention.backends.triton.kernels import write as write_kernels
from minuet.attention.backends.triton.spec import MAX_QUERY_LEN, SPLIT
from minuet.attention.backends.triton.step import Plan, Planner, StepShape
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.attention.runtime import PreparedSizes
from minuet.errors import ContractError
from minuet.kv.cache import LayerCache
from minuet.kv.layout import LaneName
from minuet.kv.write import HeadNorms
from minuet.platform.triton import Launch, arch_name

# T query tokens, S sequences, H query heads, K KV heads, D head dim, I index dim

_INTERPRETED_UNITS = 4  # a few parts per sequence, so that merging is exercised
_NARROWEST = 16  # rows of a matrix instruction
_WIDE = 32  # query vectors from which ``config.Target.wide`` applies
_LOG2_E = 1.4426950408889634
_OPERANDS = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
_OPERAND_OF = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Block scores of a decode step, not yet turned into a choice.

    Attributes:
        values: [K, T, blocks] float32; undefined beyond the blocks a token sees.
        selection: how blocks are chosen.
    """

    values: Tensor
    selection: Selection


def target_of(device: torch.device) -> Target:
    """Launch numbers of a device; Triton's interpreter stands for the CPU."""
    return TARGETS[arch_name(device)]


# --- planning ------------------------------------------------------------------------------------


def prepare(
    sizes: PreparedSizes, device: torch.device, scratch: Mapping[str, Tensor] | None = None
) -> Planner:
    """As :func:`planner`, for an engine, which knows no backend's own types."""
    return planner(StepShape(**asdict(sizes)), device, scratch)


def planner(
    shape: StepShape, device: torch.device, scratch: Mapping[str, Tensor] | None = None
) -> Planner:
    """The planner of one prepared step shape.

    Args:
        shape: sizes.
        device: where the kernels run.
        scratch: uint8 workspace slices ``partial_out``, ``partial_lse``, ``scores``, ``blocks``;
            None allocates on first use.
    """
    return Planner(shape, device, target_of(device), scratch)


def plan(batch: AttentionBatch, page_size: int, *, num_kv_heads: int = 8, group: int = 16) -> Plan:
    """Plan a single step, sized by itself; it allocates. Serving uses :func:`planner`.

    Args:
        batch: the step.
        page_size: tokens per page.
        num_kv_heads: KV heads of the cache; a wrong one costs speed, nothing else.
        group: query heads per KV head; likewise.
    """
    device = batch.positions.device
    lens = set(batch.query_lens)
    query_len = lens.pop() if len(lens) == 1 else 0
    units = _INTERPRETED_UNITS
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    shape = StepShape(
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        group=group,
        max_seqs=max(1, batch.num_seqs),
        max_tokens=max(1, batch.num_tokens),
        max_length=max(1, *batch.seq_lens, 1),
        query_len=query_len if query_len <= MAX_QUERY_LEN else 0,
        compute_units=units,
    )
    return planner(shape, device).plan(batch, page_size)


# --- write ---------------------------------------------------------------------------------------


def write(
    cache: LayerCache,
    packed: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms,
) -> tuple[Tensor, Tensor | None]:
    """Normalise, rotate, quantise and store a step in one launch: :func:`minuet.kv.write.write`.

    Args:
        cache: the layer's lanes; written.
        packed: [T, (H + 2K) * D + K * I + I].
        slots: [T] int64; -1 is skipped.
        cos: [T, half] float32.
        sin: [T, half] float32.
        norms: per-head norm weights.

    Returns:
        q [T, H, D] and index_q [T, K, I] (None on a dense layer).
    """
    layout, num_tokens = cache.layout, packed.shape[0]
    heads, dim, index_dim = layout.num_kv_heads, layout.head_dim, layout.index_dim
    index_width = (heads + 1) * index_dim
    q_heads, rest = divmod(packed.shape[1] - 2 * heads * dim - index_width, dim)
    if rest or q_heads < heads or q_heads % heads:
        raise ContractError(
            "packed q/k/v width",
            got=packed.shape[1],
            expected=f"(H + 2K) * D + (K + 1) * I with K = {heads}, D = {dim}, I = {index_dim}",
        )
    q = packed.new_empty(num_tokens, q_heads, dim)
    index_q = packed.new_empty(num_tokens, heads, index_dim) if index_dim else None
    if num_tokens:
        write_launch(cache, packed, slots, cos, sin, norms, (q, index_q))()
    return q, index_q


def write_launch(
    cache: LayerCache,
    packed: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms,
    queries: tuple[Tensor, Tensor | None],
    target: Target | None = None,
) -> Launch:
    """The launch of :func:`write`; ``queries`` are its outputs."""
    layout, target = cache.layout, target or target_of(packed.device)
    q, index_q = queries
    k_scale, v_scale = _scales(cache)
    index_k = cache.index_k if layout.index_dim else cache.k.flatten(1, 2)
    index_fp8 = bool(layout.index_dim) and layout.index_dtype.is_fp8
    args = dict(
        packed_ptr=packed,
        q_out_ptr=q,
        index_q_out_ptr=q if index_q is None else index_q,
        slots_ptr=slots,
        cos_ptr=cos,
        sin_ptr=sin,
        q_norm_ptr=norms.q,
        k_norm_ptr=norms.k,
        index_q_norm_ptr=norms.q if norms.index_q is None else norms.index_q,
        index_k_norm_ptr=norms.k if norms.index_k is None else norms.index_k,
        k_ptr=cache.k,
        v_ptr=cache.v,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        index_k_ptr=index_k,
        stride_packed=packed.stride(0),
        stride_cos=cos.stride(0),
        **_strides(cache.k, cache.v, k_scale),
        stride_k_token=cache.k.stride(2),
        stride_v_token=cache.v.stride(2),
        stride_index_page=index_k.stride(0),
        stride_index_token=index_k.stride(1),
        eps=norms.eps,
        H=q.shape[1],
        H_PAD=_power_of_2(q.shape[1]),
        K=layout.num_kv_heads,
        K_PAD=_power_of_2(layout.num_kv_heads),
        D=layout.head_dim,
        I=layout.index_dim or layout.head_dim,
        HALF=cos.shape[1],
        PAGE=layout.page_size,
        MAX=layout.kv_dtype.max_value,
        SCALED=layout.has_scales,
        INDEX_MAX=layout.index_dtype.max_value,
        INDEX_FP8=index_fp8,
        KEPT=_OPERAND_OF[packed.dtype],
        PDL=target.pdl,
    )
    grid = (packed.shape[0], 5 if layout.index_dim else 3)
    # no fused multiply-add: the stored bytes are those of the definition in kv/write.py
    options = _options(target, Tuning(0, 4, 1), enable_fp_fusion=False)
    return Launch(write_kernels.write_step, grid, args, options)


# --- select --------------------------------------------------------------------------------------


def select(index_q: Tensor, cache: LayerCache, plan: Plan, selection: Selection) -> Scores | Tensor:
    """Choose the blocks each row attends to; see :func:`minuet.attention.reference.select`.

    Args:
        index_q: [T, K, I], normalised and rotated.
        cache: the layer's lanes; this step's index keys already written.
        plan: of this step.
        selection: how blocks are chosen.

    Returns:
        What :func:`attend` takes as ``blocks``: scores of a decode step, or lists
        [T, K, top_blocks] int32, ascending, -1 at the tail. Scratch memory either way: valid until
        the next layer selects.
    """
    num_tokens, heads, _ = index_q.shape
    width = plan.shape.max_blocks
    if plan.shape.scores_at_once:
        values = plan.scratch.take("scores", (heads, num_tokens, width), torch.float32)
        if num_tokens:
            score_launch(index_q, cache, plan, values)()
        return Scores(values, selection)
    lists = plan.scratch.take("blocks", (num_tokens, heads, selection.top_blocks), torch.int32)
    for chunk in plan.score_chunks:
        tokens = (chunk[2], chunk[3] - chunk[2])
        values = plan.scratch.take("scores", (heads, tokens[1], width), torch.float32)
        score_launch(index_q, cache, plan, values, chunk)()
        list_launch(values, lists, plan, selection, tokens)()
    return lists


def block_lists(blocks: Scores | Tensor, plan: Plan) -> Tensor:
    """Lists [T, K, top_blocks] int32, ascending, -1 at the tail, from what :func:`select` returned.

    Args:
        blocks: from :func:`select`.
        plan: of this step.
    """
    if isinstance(blocks, Tensor):
        return blocks
    heads, num_tokens, _ = blocks.values.shape
    shape = (num_tokens, heads, blocks.selection.top_blocks)
    lists = torch.empty(shape, dtype=torch.int32, device=blocks.values.device)
    list_launch(blocks.values, lists, plan, blocks.selection, (0, num_tokens))()
    return lists


def score_launch(
    index_q: Tensor,
    cache: LayerCache,
    plan: Plan,
    values: Tensor,
    chunk: tuple[int, int, int, int] | None = None,
) -> Launch:
    """Scores of a decode step (no chunk), or of a chunk of query tiles."""
    target, heads = plan.target, index_q.shape[1]
    index_k, pairs = _paired(cache.index_k, target)
    heads_pad = _power_of_2(heads)
    if chunk is None:
        tuning, items = target.score, plan.tables["score_work"]
        vectors = _power_of_2(plan.shape.query_len) * heads_pad
        grid: tuple[int, ...] = (items.shape[0],)
    else:
        tuning, items = target.score_prefill, plan.tables["score_tiles"][chunk[0] : chunk[1]]
        vectors = plan.score_tile_tokens * heads_pad
        # enough programs to fill the device when there are few tiles
        splits = min(plan.shape.max_blocks, -(-2 * plan.shape.compute_units // items.shape[0]))
        grid = (items.shape[0], splits)
    args = dict(
        index_q_ptr=index_q,
        index_k_ptr=index_k,
        scores_ptr=values,
        items_ptr=items,
        lengths_ptr=plan.tables["lengths"],
        table_ptr=plan.page_table,
        stride_q_token=index_q.stride(0),
        stride_q_head=index_q.stride(1),
        stride_k_page=index_k.stride(0),
        STRIDE_K_TOKEN=index_k.stride(1),
        stride_table=plan.page_table.stride(0),
        stride_scores_head=values.stride(0),
        stride_scores_token=values.stride(1),
        query_len=plan.shape.query_len,
        first_score=0 if chunk is None else chunk[2],
        HEADS=heads,
        HEADS_PAD=heads_pad,
        M=max(target.min_columns, vectors),
        I=index_q.shape[2],
        C=index_k.shape[2],
        PAGE=cache.layout.page_size,
        OPERAND=_operand(cache.index_k, target),
        PAIRS=pairs,
        RAGGED=chunk is not None,
        STAGES=tuning.stages,
        PDL=target.pdl,
    )
    return Launch(choose_kernels.score_blocks, grid, args, _options(target, tuning))


def list_launch(
    values: Tensor, lists: Tensor, plan: Plan, selection: Selection, tokens: tuple[int, int]
) -> Launch:
    """Lists of ``tokens`` (first, count) from their scores."""
    target = plan.target
    ragged = not plan.shape.scores_at_once
    args = dict(
        scores_ptr=values,
        lists_ptr=lists,
        lengths_ptr=plan.tables["lengths"],
        token_sequence_ptr=plan.tables["token_sequence" if ragged else "lengths"],
        positions_ptr=plan.positions,
        table_ptr=plan.page_table,
        stride_table=plan.page_table.stride(0),
        stride_scores_head=values.stride(0),
        stride_scores_token=values.stride(1),
        query_len=plan.shape.query_len,
        first_token=tokens[0],
        init_blocks=selection.init_blocks,
        local_blocks=selection.local_blocks,
        TOP=selection.top_blocks,
        TOP_PAD=_power_of_2(selection.top_blocks),
        PAGE=plan.shape.page_size,
        FEW=target.few_blocks,
        MANY=target.many_blocks,
        RAGGED=ragged,
        PDL=target.pdl,
    )
    grid = (tokens[1], values.shape[0])
    return Launch(choose_kernels.list_blocks, grid, args, _options(target, Tuning(0, 4, 1)))


# --- attend --------------------------------------------------------------------------------------


def attend(
    q: Tensor, cache: LayerCache, plan: Plan, blocks: Scores | Tensor | None, scale: float
) -> Tensor:
    """Attention over chosen blocks or over everything: :func:`minuet.attention.reference.attend`.

    Args:
        q: [T, H, D], normalised and rotated.
        cache: the layer's lanes; this step's keys and values already written.
        plan: of this step.
        blocks: from :func:`select`; None attends to everything.
        scale: multiplies the scores.

    Returns:
        [T, H, D] in the type of ``q``.
    """
    # a ragged step may be padded with tokens of no sequence: zeros, as for one of length 0
    out = torch.empty_like(q) if plan.is_decode else torch.zeros_like(q)
    if not q.shape[0]:
        return out
    for launch in attend_launches(q, out, cache, plan, blocks, scale):
        launch()
    return out


def attend_launches(
    q: Tensor,
    out: Tensor,
    cache: LayerCache,
    plan: Plan,
    blocks: Scores | Tensor | None,
    scale: float,
) -> tuple[Launch, ...]:
    """The launches of :func:`attend`, in order."""
    if blocks is not None:
        return _blocks_launches(q, out, cache, plan, blocks, scale)
    if plan.is_decode:
        return _dense_launches(q, out, cache, plan, scale)
    return (_prefill_launch(q, out, cache, plan, scale),)


def _dense_launches(
    q: Tensor, out: Tensor, cache: LayerCache, plan: Plan, scale: float
) -> tuple[Launch, ...]:
    target, query_len = plan.target, plan.shape.query_len
    vectors = _power_of_2(query_len) * _power_of_2(q.shape[1] // cache.layout.num_kv_heads)
    tuning = target.dense_fp8 if cache.layout.has_scales else target.dense
    if vectors >= _WIDE:
        tuning = target.wide
    group, group_pad, common = _attend_args(q, out, cache, plan, scale, tuning)
    heads, slots = cache.layout.num_kv_heads, plan.slots
    partial, lse = _partials(plan, (heads, slots, query_len * group, q.shape[2]))
    args = dict(
        **common,
        partial_ptr=partial,
        lse_ptr=lse,
        work_ptr=plan.tables["work"],
        lengths_ptr=plan.tables["lengths"],
        stride_slot=slots,
        query_len=query_len,
        GROUP=group,
        GROUP_PAD=group_pad,
        M=max(_NARROWEST, vectors),
        ROW_MASK=query_len > 1,
        PLAN_TILE=SPLIT.tile_tokens,
    )
    grid = (plan.tables["work"].shape[0], heads)
    main = Launch(attend_kernels.attend_dense, grid, args, _options(target, tuning))
    merge = _merge_launch(
        out, plan, (partial, lse), (plan.num_seqs, heads, query_len * group), common, slots
    )
    return main, merge


def _blocks_launches(
    q: Tensor, out: Tensor, cache: LayerCache, plan: Plan, blocks: Scores | Tensor, scale: float
) -> tuple[Launch, ...]:
    target, num_tokens = plan.target, q.shape[0]
    tuning = target.blocks_fp8 if cache.layout.has_scales else target.blocks
    group, _, common = _attend_args(q, out, cache, plan, scale, tuning)
    heads = cache.layout.num_kv_heads
    if isinstance(blocks, Scores):
        source, top, selection = blocks.values, blocks.selection.top_blocks, blocks.selection
        stride_scores = source.stride(1)
    else:
        source, top, selection = blocks, blocks.shape[2], Selection(blocks.shape[2])
        stride_scores = 0
    parts = plan.row_parts(heads, top)
    slots = num_tokens * parts if parts > 1 else 0
    partial, lse = _partials(plan, (heads, slots, group, q.shape[2]))
    ragged = not plan.is_decode
    args = dict(
        **(common | {"TILE": min(tuning.tile, cache.layout.page_size)}),
        partial_ptr=partial,
        lse_ptr=lse,
        source_ptr=source,
        lengths_ptr=plan.tables["lengths"],
        token_sequence_ptr=plan.tables["token_sequence" if ragged else "lengths"],
        positions_ptr=plan.positions,
        stride_scores=stride_scores,
        query_len=plan.shape.query_len,
        init_blocks=selection.init_blocks,
        local_blocks=selection.local_blocks,
        GROUP=group,
        M=max(_NARROWEST, _power_of_2(group)),
        TOP=top,
        TOP_PAD=_power_of_2(top),
        PARTS=parts,
        FROM_SCORES=isinstance(blocks, Scores),
        RAGGED=ragged,
        FEW=target.few_blocks,
        MANY=target.many_blocks,
    )
    grid = (num_tokens, heads, parts)
    main = Launch(attend_kernels.attend_blocks, grid, args, _options(target, tuning))
    if parts == 1:
        return (main,)
    merge = _merge_launch(
        out, plan, (partial, lse), (num_tokens, heads, group), common, slots, static_parts=parts
    )
    return main, merge


def _partials(plan: Plan, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Partial results [K, slots, vectors, D] and their logarithms; unused memory without slots."""
    if shape[1] == 0:
        unused = plan.tables["lengths"].view(torch.float32)
        return unused, unused
    partial = plan.scratch.take("partial_out", shape, torch.float32)
    return partial, plan.scratch.take("partial_lse", shape[:3], torch.float32)


def _prefill_launch(q: Tensor, out: Tensor, cache: LayerCache, plan: Plan, scale: float) -> Launch:
    target = plan.target
    tuning = target.prefill_fp8 if cache.layout.has_scales else target.prefill
    group, group_pad, common = _attend_args(q, out, cache, plan, scale, tuning)
    args = dict(
        **common,
        tiles_ptr=plan.tables["tiles"],
        GROUP=group,
        GROUP_PAD=group_pad,
        M=plan.tile_tokens * group_pad,
    )
    grid = (plan.num_tiles, cache.layout.num_kv_heads)
    return Launch(attend_kernels.attend_prefill, grid, args, _options(target, tuning))


def _merge_launch(
    out: Tensor,
    plan: Plan,
    parts: tuple[Tensor, Tensor],
    extents: tuple[int, int, int],
    common: Mapping[str, Any],
    slots: int,
    static_parts: int = 0,
) -> Launch:
    """Merge; ``extents`` are rows of the plan, KV heads and query vectors of a row."""
    target, (rows, heads, vectors) = plan.target, extents
    how: Merge
    if static_parts:
        most = plan.shape.max_tokens * heads  # of the shape, not of the step: nothing recompiles
        how = next(m for m in target.merge_blocks if most <= m.upto)
    else:
        how = next(m for m in target.merge if -(-slots // plan.shape.max_seqs) <= m.upto)
    dim = common["D"]
    width = min(how.width, dim)
    args = dict(
        out_ptr=out,
        partial_ptr=parts[0],
        lse_ptr=parts[1],
        rows_ptr=plan.tables["lengths" if static_parts else "rows"],
        stride_out_token=out.stride(0),
        stride_out_head=out.stride(1),
        stride_slot=slots,
        query_len=1 if static_parts else plan.shape.query_len,
        GROUP=out.shape[1] // heads,
        D=dim,
        C=common["C"],
        VECTORS=how.vectors,
        WIDTH=width,
        CHUNK=min(how.chunk, _power_of_2(static_parts)) if static_parts else how.chunk,
        STATIC_PARTS=static_parts,
        PAIRS=common["PAIRS"],
        EARLY=how.early,
        PDL=target.pdl,
    )
    grid = (rows, heads, -(-vectors // how.vectors) * (dim // width))
    return Launch(attend_kernels.merge_parts, grid, args, _options(target, Tuning(0, how.warps, 1)))


def _attend_args(
    q: Tensor, out: Tensor, cache: LayerCache, plan: Plan, scale: float, tuning: Tuning
) -> tuple[int, int, dict[str, Any]]:
    """Group, padded group, and the arguments that every attention kernel has."""
    layout, target = cache.layout, plan.target
    group, rest = divmod(q.shape[1], layout.num_kv_heads)
    if rest or q.shape[2] != layout.head_dim:
        raise ContractError(
            "queries",
            got=tuple(q.shape),
            expected=f"heads a multiple of {layout.num_kv_heads}, {layout.head_dim} channels",
        )
    if q.stride() != out.stride() or q.stride(2) != 1:
        raise ContractError("strides of queries", got=q.stride(), expected=str(out.stride()))
    k, pairs = _paired(cache.k, target)
    v, _ = _paired(cache.v, target)
    k_scale, v_scale = _scales(cache)
    return (
        group,
        _power_of_2(group),
        dict(
            q_ptr=q,
            out_ptr=out,
            k_ptr=k,
            v_ptr=v,
            k_scale_ptr=k_scale,
            v_scale_ptr=v_scale,
            table_ptr=plan.page_table,
            stride_q_token=q.stride(0),
            stride_q_head=q.stride(1),
            **_strides(k, v, k_scale),
            STRIDE_K_TOKEN=k.stride(2),
            STRIDE_V_TOKEN=v.stride(2),
            stride_table=plan.page_table.stride(0),
            score_scale=scale * _LOG2_E,
            D=q.shape[2],
            C=k.shape[3],
            TILE=tuning.tile,
            PAGE=layout.page_size,
            OPERAND=_operand(cache.k, target),
            SCALED=layout.has_scales,
            PAIRS=pairs,
            STAGES=tuning.stages,
            PDL=target.pdl,
        ),
    )


# --- arguments -----------------------------------------------------------------------------------


def _paired(lane: Tensor, target: Target) -> tuple[Tensor, bool]:
    """An FP8 lane as int16 pairs of neighbouring channels where the target reads it that way."""
    pairs = target.pairs and lane.dtype.itemsize == 1
    return (lane.view(torch.int16), True) if pairs else (lane, False)


def _operand(lane: Tensor, target: Target) -> Any:
    if target.interpreted:
        return tl.float32
    return _OPERANDS[target.fp8_operand] if lane.dtype.itemsize == 1 else _OPERAND_OF[lane.dtype]


def _scales(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """The scale planes; K and V themselves, unread, where there are none."""
    if not cache.layout.has_scales:
        return cache.k, cache.v
    return cache.lanes[LaneName.K_SCALE], cache.lanes[LaneName.V_SCALE]


def _strides(k: Tensor, v: Tensor, k_scale: Tensor) -> dict[str, int]:
    return dict(
        stride_k_page=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v_page=v.stride(0),
        stride_v_head=v.stride(1),
        stride_scale_page=k_scale.stride(0),
        stride_scale_head=k_scale.stride(1),
    )


def _options(target: Target, tuning: Tuning, **more: Any) -> dict[str, Any]:
    if target.interpreted:
        return {}
    options: dict[str, Any] = {"num_warps": tuning.warps, "num_stages": tuning.stages, **more}
    if tuning.registers:
        options["maxnreg"] = tuning.registers
    if target.pdl:
        options["launch_pdl"] = True
    return options


def _power_of_2(value: int) -> int:
    return int(triton.next_power_of_2(value))
