"""Each prepared decode shape, before ready: the graph against eager, attention against FP32.

Memory is as hostile as service can make it: every slot that holds no token and the whole workspace
are NaN, pages are shared between requests and out of order, the batch is not full. A graph must
give the logits of the eager run to the bit; attention of a layer of each kind must agree with
:mod:`minuet.attention.reference`, computed on the host.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.attention import reference
from minuet.attention.batch import AttentionBatch
from minuet.attention.contract import LayerKind
from minuet.attention.runtime import LayerKernels, StepKernels
from minuet.engine.prepared import Part, Prepared
from minuet.engine.types import Request, SamplingParams, ScheduledRequest
from minuet.errors import PreparationError
from minuet.kv.cache import KVCache, LayerCache
from minuet.kv.layout import LaneName
from minuet.planning.execution import ExecutionPlan
from minuet.planning.shapes import StepShape

MIN_COSINE = 0.999  # of a row's attention: the conformance bound of FP8 caches
_COMPARED = 8  # sequences of a shape compared with the reference, which goes row by row
_IDLE_S = 0.5  # a device that slept must still find its graph


@dataclass(slots=True)
class Call:
    """One attention call of a layer, as the model made it."""

    cache: LayerCache
    q: Tensor
    scale: float
    out: Tensor
    index_q: Tensor | None = None
    selection: reference.Selection | None = None


@dataclass(slots=True)
class Recorder:
    """Stands between a model and its kernels, and keeps a call of each layer kind when asked.

    Attributes:
        active: whether calls are kept.
        calls: the last call of each layer kind.
    """

    active: bool = False
    calls: dict[LayerKind, Call] = field(default_factory=dict)

    def over(self, kernels: StepKernels) -> StepKernels:
        """The same kernels, watched."""
        layers = {kind: self._watched(kind, layer) for kind, layer in kernels.layers.items()}
        return replace(kernels, layers=layers)

    def _watched(self, kind: LayerKind, layer: LayerKernels) -> LayerKernels:
        chosen: dict[str, Any] = {}

        def select(index_q: Tensor, cache: LayerCache, plan: Any, selection: Any) -> Any:
            assert layer.select is not None
            if self.active:
                chosen.update(index_q=index_q, selection=selection)
            return layer.select(index_q, cache, plan, selection)

        def attend(q: Tensor, cache: LayerCache, plan: Any, blocks: Any, scale: float) -> Tensor:
            out = layer.attend(q, cache, plan, blocks, scale)
            if self.active:
                self.calls[kind] = Call(cache, q, scale, out, **chosen)
            return out

        return replace(layer, select=select if layer.select else None, attend=attend)


def check(
    prepared: Prepared,
    cache: KVCache,
    plan: ExecutionPlan,
    recorder: Recorder,
    each: Callable[[StepShape], None] = lambda shape: None,
) -> None:
    """Test every decode shape; the pages that were used are zero again afterwards.

    Args:
        prepared: the shapes.
        cache: the pool.
        plan: what was settled.
        recorder: around the kernels that the model calls.
        each: called after each shape.

    Raises:
        PreparationError: names the shape and what differs.
    """
    scene = _Scene(prepared, cache, plan)
    try:
        for shape in plan.shapes.decode_shapes:
            part = scene.part(shape)
            contents = scene.fill(part)
            scene.poison(contents)
            eager = scene.logits(part, eager=True, recorder=recorder)
            _against_reference(shape, part, recorder, plan)
            scene.poison(contents)
            _equal(shape, "the graph", scene.logits(part), eager)
            each(shape)
        time.sleep(_IDLE_S)
        _equal(shape, "the first graph after a pause", scene.logits(part), eager)
    finally:
        scene.clear()


def _equal(shape: StepShape, what: str, got: Tensor, wanted: Tensor) -> None:
    if not bool(torch.isfinite(wanted).all()):
        raise PreparationError(
            f"self-test of {shape}: logits are not finite",
            got=f"{int((~torch.isfinite(wanted)).any(-1).sum())} rows with NaN or inf",
            expected="none: something reads memory that nobody wrote",
        )
    if not torch.equal(got, wanted):
        rows = int((got != wanted).any(-1).sum())
        raise PreparationError(
            f"self-test of {shape}: {what} differs from the eager run",
            got=f"{rows} of {len(got)} rows",
            expected="the same bits",
            remedy="run with --enforce-eager, and report this: it is a bug",
        )


class _Scene:
    """Requests and pages of the test."""

    def __init__(self, prepared: Prepared, cache: KVCache, plan: ExecutionPlan):
        self._prepared, self._cache, self._plan = prepared, cache, plan
        index, config = plan.facts.index, plan.config
        self._page = config.block_size
        # one request sees more blocks than it may choose, if the pool and the model allow it
        wanted = (index.top_blocks if index else 1) + 2
        longest = (config.max_model_len - 1) // self._page
        self._shared = max(0, min(wanted, longest, (cache.num_pages - 2) // 2))
        self._generator = torch.Generator().manual_seed(config.seed)

    @property
    def _used(self) -> int:
        """Pages touched, the dummy page included."""
        return min(self._cache.num_pages, 1 + self._shared + self._plan.config.max_num_seqs)

    def part(self, shape: StepShape) -> Part:
        """Requests for most of the shape's places.

        Each has 0, 1, 2 or all of the shared pages, and a part of a page of its own.
        """
        own = self._used - 1 - self._shared
        count = max(1, min(shape.num_seqs - shape.num_seqs // 8, own))
        shares = [self._share(number, shape.query_len) for number in range(count)]
        return Part(shape, tuple(range(count)), tuple(shares))

    def _share(self, number: int, query_len: int) -> ScheduledRequest:
        shared = self._shared if number == 0 else min(number % 3, self._shared)
        # lengths around the edges of a page: one token of it, all of it, and between
        tail = (query_len, self._page, self._page - 1, self._page // 2 + number)[number % 4]
        tail = max(query_len, min(tail, self._page))
        length = min(shared * self._page + tail, self._plan.config.max_model_len)
        pages = [*range(self._shared, self._shared - shared, -1), 1 + self._shared + number]
        vocab = self._plan.facts.vocab
        ids = torch.randint(vocab, (length,), generator=self._generator).tolist()
        request = Request(
            f"self-test {number}", tuple(ids), SamplingParams(), arrival=-1 - number, page_ids=pages
        )
        request.draft_token_ids = ids[length - query_len + 1 :]
        request.prompt_token_ids = tuple(ids[: length - query_len + 1])
        return ScheduledRequest(request, length - query_len, query_len, samples=True)

    def fill(self, part: Part) -> dict[LaneName, Tensor]:
        """What the pages in reach hold: random tokens where the requests have some, else NaN."""
        contents: dict[LaneName, Tensor] = {}
        for layer in self._cache.layers:
            for name, lane in layer.lanes.items():
                if name not in contents:
                    contents[name] = self._values(name, lane, part)
        return contents

    def _values(self, name: LaneName, lane: Tensor, part: Part) -> Tensor:
        def fresh(shape: torch.Size) -> Tensor:
            drawn = torch.rand(shape, generator=self._generator)
            return drawn + 0.5 if name in _SCALES else drawn * 2 - 1

        token_axis = 0 if name is LaneName.INDEX_K else 1  # of a page
        values = torch.full(lane[: self._used].shape, float("nan"))
        shared = values[1 : 1 + self._shared]
        shared.copy_(fresh(shared.shape))
        for share in part.shares:
            pages = share.request.page_ids
            filled = max(0, share.start - (len(pages) - 1) * self._page)
            tokens = values[pages[-1]].narrow(token_axis, 0, filled)
            tokens.copy_(fresh(tokens.shape))
        return values.to(lane.dtype).to(lane.device)

    def poison(self, contents: dict[LaneName, Tensor]) -> None:
        """Put the pages in place, and NaN into the whole workspace."""
        workspace = self._prepared.workspace
        workspace.buffer.fill_(0xFF)
        for place in workspace.layout.zeroed:
            workspace.buffer[place.offset : place.end].zero_()
        for layer in self._cache.layers:
            for name, lane in layer.lanes.items():
                lane[: self._used].copy_(contents[name])

    def logits(
        self, part: Part, *, eager: bool = False, recorder: Recorder | None = None
    ) -> Tensor:
        """[R, V] of the requests' rows."""
        self._prepared.forget()
        if recorder is not None:
            recorder.active = True
        try:
            rows = self._prepared.run(part, [-1] * len(part.shares), eager=eager)
            return rows.logits.clone()
        finally:
            if recorder is not None:
                recorder.active = False

    def clear(self) -> None:
        """Zeros, as a pool begins."""
        for layer in self._cache.layers:
            for lane in layer.lanes.values():
                lane[: self._used].zero_()
        self._prepared.drawn.zero_()


_SCALES = (LaneName.K_SCALE, LaneName.V_SCALE)


def _against_reference(
    shape: StepShape, part: Part, recorder: Recorder, plan: ExecutionPlan
) -> None:
    shares = part.shares[:_COMPARED]
    rows, query_len = len(shares) * shape.query_len, shape.query_len
    pages = max(len(share.request.page_ids) for share in shares)
    table = torch.zeros(len(shares), pages, dtype=torch.int32)
    for row, share in enumerate(shares):
        table[row, : len(share.request.page_ids)] = torch.tensor(share.request.page_ids)
    lens = tuple(share.start + query_len for share in shares)
    positions = torch.cat([torch.arange(n - query_len, n) for n in lens])
    batch = AttentionBatch((query_len,) * len(shares), lens, positions, positions, table)
    used = int(table.max()) + 1
    for kind, call in recorder.calls.items():
        lanes = {name: lane[:used].cpu() for name, lane in call.cache.lanes.items()}
        host, q = LayerCache(call.cache.layout, lanes), call.q[:rows].cpu()
        blocks = None
        if call.selection is not None:
            assert call.index_q is not None
            blocks = reference.select(call.index_q[:rows].cpu(), host, batch, call.selection)
        wanted = reference.attend(q.float(), host, batch, blocks, call.scale).flatten(1)
        got = call.out[:rows].cpu().float().flatten(1)
        cosine = float(F.cosine_similarity(got, wanted, dim=-1).min())
        if not cosine >= MIN_COSINE:
            raise PreparationError(
                f"self-test of {shape}: {kind.value} attention differs from the reference",
                got=f"cosine {cosine:.6f}",
                expected=f">= {MIN_COSINE}",
                remedy=f"do not serve with {plan.backend} on this device, and report this",
            )
    recorder.calls.clear()
