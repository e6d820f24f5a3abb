"""Sampling in Triton: which kernel runs with which arguments. Meanings: ``ops/sampling/reference``.

Nothing here waits for the device. Scratch comes from torch's allocator; its largest amount is
:func:`minuet.ops.sampling.sizes.scratch_bytes`.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
from torch import Tensor

from minuet.ops.sampling import columns, sizes
from minuet.ops.sampling.reference import Report
from minuet.ops.triton.kernels import filters
from minuet.ops.triton.kernels import report as report_kernels
from minuet.ops.triton.kernels import sampling as kernels
from minuet.platform.triton import Launch, arch_name

# R rows, V vocabulary

_ENTRY_BLOCK = 256
_MASK_TILE = 1024
_PIVOT_BITS = 24  # of the pivot's 32: what is left cannot tell many candidates apart


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that a test makes smaller, so that small rows take every path.

    Attributes:
        scan_tile: logits at a time for the largest.
        draw_tile: logits at a time for a draw, and for the search in a row.
        report_tile: logits at a time for log-probabilities.
        candidates: room for candidates of a filtered row.
        group_size: tokens per group of the pivot's choice.
        columns: groups per program.
        searchers: programs that search together; each waits for those of its row, so the device
            must hold them all. 1 where programs run one after another.
        native: take logarithms by the instruction that NVIDIA's chips have.
        pdl: the largest is looked for by launches that overlap with the kernel before.
        list_warps: warps of the program that draws among the candidates.
        list_registers: registers a thread of it may have; 0: as the compiler likes.
    """

    scan_tile: int = sizes.SCAN_TILE
    draw_tile: int = sizes.DRAW_TILE
    report_tile: int = sizes.REPORT_TILE
    candidates: int = sizes.CANDIDATES
    group_size: int = sizes.GROUP_SIZE
    columns: int = sizes.GROUP_COLUMNS
    searchers: int = sizes.SEARCH_PROGRAMS
    native: bool = False
    pdl: bool = False
    list_warps: int = 8
    list_registers: int = 0

    def options(self, warps: int) -> dict[str, int | bool]:
        """Compiler options of a launch that may overlap with the kernel before."""
        return {"num_warps": warps, "launch_pdl": True} if self.pdl else {"num_warps": warps}

    @property
    def list_options(self) -> dict[str, int]:
        """Compiler options of the program that draws among the candidates."""
        registers = {"maxnreg": self.list_registers} if self.list_registers else {}
        return {"num_warps": self.list_warps, **registers}


# Two programs of a search fit into each of at least 132 units. With 16 warps the compiler spills
# unless it is told that it need not.
_HOPPER = Tuning(native=True, pdl=True, list_warps=16, list_registers=128, searchers=256)
TUNINGS: Mapping[str, Tuning] = MappingProxyType({"sm90": _HOPPER, "sm100": _HOPPER})


@functools.cache
def tuning_of(device: torch.device) -> Tuning:
    """The sizes for a device; those of ``Tuning`` where nobody has measured others."""
    return TUNINGS.get(arch_name(device), Tuning())


def greedy(
    logits: Tensor, out: tuple[Tensor, Tensor] | None = None, tuning: Tuning | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`minuet.ops.sampling.reference.greedy`; a graph can capture it."""
    if out is None:
        rows, device = logits.shape[0], logits.device
        out = (
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.bool, device=device),
        )
    for launch in greedy_launches(logits, *out, tuning):
        launch()
    return out


def greedy_launches(
    logits: Tensor, tokens: Tensor, finite: Tensor, tuning: Tuning | None = None
) -> Iterator[Launch]:
    """The launches of :func:`greedy`."""
    tuning = tuning or tuning_of(logits.device)
    rows, vocab = logits.shape
    scratch = _parts(logits)
    parts, each = sizes.parts_of(rows, vocab, tuning.scan_tile)
    yield Launch(
        kernels.greedy_parts,
        (rows, parts),
        {
            "logits_ptr": logits, "stride": logits.stride(0), "vocab": vocab,
            "tiles_per_part": each, "parts_ptr": scratch,
            "TILE": tuning.scan_tile, "PARTS": sizes.MAX_PARTS, "PDL": tuning.pdl,
        },
        tuning.options(8),
    )  # fmt: skip
    yield Launch(
        kernels.greedy_rows,
        (rows,),
        {
            "parts_ptr": scratch, "num_parts": parts, "tokens_ptr": tokens,
            "finite_ptr": finite.view(torch.uint8), "PARTS": sizes.MAX_PARTS, "PDL": tuning.pdl,
        },
        tuning.options(1),
    )  # fmt: skip


def mask(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """See :func:`minuet.ops.sampling.reference.mask`."""
    mask_launch(logits, rows, allowed)()


def mask_launch(logits: Tensor, rows: Tensor, allowed: Tensor) -> Launch:
    """The launch of :func:`mask`."""
    vocab = logits.shape[1]
    return Launch(
        kernels.mask_rows,
        (len(rows), triton.cdiv(vocab, _MASK_TILE)),
        {
            "logits_ptr": logits, "stride": logits.stride(0), "vocab": vocab, "rows_ptr": rows,
            "allowed_ptr": allowed, "words": allowed.shape[1], "TILE": _MASK_TILE,
        },
        {"num_warps": 4},
    )  # fmt: skip


def shape(logits: Tensor, params: Tensor, entries: Tensor) -> None:
    """See :func:`minuet.ops.sampling.reference.shape`."""
    shape_launch(logits, params, entries)()


def shape_launch(logits: Tensor, params: Tensor, entries: Tensor) -> Launch:
    """The launch of :func:`shape`."""
    return Launch(
        kernels.shape_entries,
        (triton.cdiv(len(entries), _ENTRY_BLOCK),),
        {
            "logits_ptr": logits, "stride": logits.stride(0), "vocab": logits.shape[1],
            "params_ptr": params, "entries_ptr": entries, "num_entries": len(entries),
            "BLOCK": _ENTRY_BLOCK, "REPETITION": columns.REPETITION,
            "PRESENCE": columns.PRESENCE, "FREQUENCY": columns.FREQUENCY,
        },
        {"num_warps": 4},
    )  # fmt: skip


def draw(
    logits: Tensor,
    params: Tensor,
    tokens: Tensor,
    stuck: Tensor,
    modes: frozenset[int],
    tuning: Tuning | None = None,
) -> None:
    """See :func:`minuet.ops.sampling.reference.draw`.

    Args:
        logits: [R, V] float32, shaped.
        params: [R, WIDTH] int32.
        tokens: [R] int64; written.
        stuck: [R] bool; written.
        modes: those that occur in ``params``.
        tuning: sizes.
    """
    if modes & {columns.LARGEST, columns.DRAW}:
        for launch in draw_launches(logits, params, tokens, stuck, tuning):
            launch()
    if columns.FILTERED in modes:
        for launch in filter_launches(logits, params, tokens, stuck, tuning):
            launch()


def draw_launches(
    logits: Tensor, params: Tensor, tokens: Tensor, stuck: Tensor, tuning: Tuning | None = None
) -> Iterator[Launch]:
    """The launches for rows of mode LARGEST and DRAW."""
    tuning = tuning or tuning_of(logits.device)
    rows, vocab = logits.shape
    scratch = _parts(logits)
    parts, each = sizes.parts_of(rows, vocab, tuning.draw_tile)
    yield Launch(
        kernels.draw_parts,
        (rows, parts),
        {
            "logits_ptr": logits, "stride": logits.stride(0), "vocab": vocab,
            "tiles_per_part": each, "params_ptr": params, "parts_ptr": scratch,
            "TILE": tuning.draw_tile, "PARTS": sizes.MAX_PARTS, "NATIVE": tuning.native,
        },
        {"num_warps": 16},
    )  # fmt: skip
    yield Launch(
        kernels.draw_rows,
        (rows,),
        {
            "parts_ptr": scratch, "num_parts": parts, "params_ptr": params, "tokens_ptr": tokens,
            "stuck_ptr": stuck.view(torch.uint8), "PARTS": sizes.MAX_PARTS,
        },
        {"num_warps": 1},
    )  # fmt: skip


def filter_launches(
    logits: Tensor, params: Tensor, tokens: Tensor, stuck: Tensor, tuning: Tuning | None = None
) -> Iterator[Launch]:
    """The launches for rows of mode FILTERED."""
    tuning = tuning or tuning_of(logits.device)
    rows, vocab = logits.shape
    device = logits.device
    room, width = tuning.candidates, tuning.columns
    groups = triton.cdiv(triton.cdiv(vocab, tuning.group_size), width) * width
    groups = min(groups, sizes.MAX_GROUPS)
    # of so many groups, this share of maxima lets about 1.2 times as many tokens above the pivot
    wanted = 0 if vocab <= room else min(room // 2, groups // 3)
    maxima = torch.empty(rows, groups, dtype=torch.float32, device=device)
    state = torch.zeros(rows, sizes.STATE, dtype=torch.int64, device=device)
    listed = torch.empty(rows, room, dtype=torch.int64, device=device)
    source = {"logits_ptr": logits, "stride": logits.stride(0), "vocab": vocab}
    row_state = {"params_ptr": params, "state_ptr": state}
    yield Launch(
        filters.group_maxima,
        (rows, groups // width),
        {
            **source, "groups": groups, "depth": triton.cdiv(vocab, groups), "params_ptr": params,
            "maxima_ptr": maxima, "ROWS": 16, "COLUMNS": width,
        },
        {"num_warps": 4},
    )  # fmt: skip
    yield Launch(
        filters.choose_pivot,
        (rows,),
        {
            "maxima_ptr": maxima, "groups": groups, "wanted": wanted, **row_state,
            "GROUPS": triton.next_power_of_2(groups), "BITS": _PIVOT_BITS,
        },
        {"num_warps": 4},
    )  # fmt: skip
    listing = {**row_state, "list_ptr": listed, "LIST": room}
    parts, each = sizes.parts_of(rows, vocab, tuning.draw_tile)
    yield Launch(
        filters.collect_candidates,
        (rows, parts),
        {**source, **listing, "tiles_per_part": each, "TILE": tuning.draw_tile},
        {"num_warps": 8},
    )
    yield Launch(
        filters.draw_listed,
        (rows,),
        {
            **listing,
            "tokens_ptr": tokens,
            "stuck_ptr": stuck.view(torch.uint8),
            "NATIVE": tuning.native,
        },
        tuning.list_options,
    )
    searchers, each = sizes.searchers_of(rows, vocab, tuning.draw_tile, tuning.searchers)
    yield Launch(
        filters.draw_searched,
        (rows, searchers),
        {
            **source, **listing, "tokens_ptr": tokens, "splits": searchers,
            "tiles_per_split": each, "TILE": tuning.draw_tile, "NATIVE": tuning.native,
        },
        # those of a row wait for each other
        {"num_warps": 8, "launch_cooperative_grid": searchers > 1},
    )  # fmt: skip


def report(
    logits: Tensor, tokens: Tensor, wanted: Tensor, most: int, tuning: Tuning | None = None
) -> Report:
    """See :func:`minuet.ops.sampling.reference.report`."""
    rows, device = logits.shape[0], logits.device
    made = Report(
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, most, dtype=torch.int32, device=device),
        torch.empty(rows, most, dtype=torch.float32, device=device),
    )
    for launch in report_launches(logits, tokens, wanted, made, tuning):
        launch()
    return made


def report_launches(
    logits: Tensor, tokens: Tensor, wanted: Tensor, made: Report, tuning: Tuning | None = None
) -> Iterator[Launch]:
    """The launches of :func:`report`."""
    tuning = tuning or tuning_of(logits.device)
    rows, vocab = logits.shape
    most = made.top_ids.shape[1]
    chunks = triton.cdiv(vocab, tuning.report_tile)
    stats = torch.empty(rows, chunks, 3, dtype=torch.float32, device=logits.device)
    depth = max(1, min(most, tuning.report_tile))
    best = torch.empty(rows, chunks, depth, dtype=torch.int64, device=logits.device)
    shared = {
        "logits_ptr": logits, "stride": logits.stride(0), "tokens_ptr": tokens,
        "wanted_ptr": wanted, "depth": depth, "stats_ptr": stats, "best_ptr": best,
    }  # fmt: skip
    yield Launch(
        report_kernels.report_chunks,
        (rows, chunks),
        {**shared, "vocab": vocab, "TILE": tuning.report_tile},
        {"num_warps": 8},
    )
    yield Launch(
        report_kernels.report_rows,
        (rows,),
        {
            **shared, "chunks": chunks, "most": most, "logprob_ptr": made.logprob,
            "rank_ptr": made.rank, "top_ids_ptr": made.top_ids,
            "top_logprobs_ptr": made.top_logprobs, "CHUNKS": triton.next_power_of_2(chunks),
        },
        {"num_warps": 1},
    )  # fmt: skip


def _parts(logits: Tensor) -> Tensor:
    shape = logits.shape[0], sizes.MAX_PARTS
    return torch.empty(shape, dtype=torch.int64, device=logits.device)
