"""The forward pass in prepared shapes: what a GPU runs, settled and recorded before ready.

A step is cut into parts, each of one shape of the plan's closed set: requests that decode, padded
to a rung, and requests that prefill, padded to a bucket. So a decoding token is always computed by
the decode kernels of its rung, whoever prefills beside it. Decode parts are graphs (unless
``--enforce-eager``); prefill parts are launched one by one, over memory that start-up has already
taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minuet.attention.batch import AttentionBatch, PreparedSizes
from minuet.attention.contract import Phase
from minuet.attention.runtime import StepKernels
from minuet.attention.workspace import Slice, Workspace
from minuet.engine import sampler
from minuet.engine.inputs import Inputs, Views
from minuet.engine.runner import Model
from minuet.engine.types import ScheduledRequest, Step
from minuet.kv.cache import KVCache
from minuet.ops.embedding import Follows
from minuet.planning.execution import ExecutionPlan
from minuet.planning.shapes import ShapeSet, StepShape
from minuet.platform.device import Facility

# T query tokens (padded), S sequences (padded), R rows with logits, V vocabulary, W hidden width


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of a step that run in one shape.

    Attributes:
        shape: the shape.
        indices: of the shares, in the step.
        shares: the requests.
    """

    shape: StepShape
    indices: tuple[int, ...]
    shares: tuple[ScheduledRequest, ...]


class Greedy(NamedTuple):
    """The most likely token of each row.

    Attributes:
        tokens: [R] int64.
        finite: [R] bool: whether every logit of the row is a number.
    """

    tokens: Tensor
    finite: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """What a part computed. Only what is queued before the next part may read it.

    Attributes:
        logits: [R, V] float32; per request that samples, its last token's row and one per draft.
        greedy: the most likely token of each row, already computed.
        hidden: [T, W] of a prefill, after the final norm; None where a graph keeps it to itself.
    """

    logits: Tensor
    greedy: Greedy
    hidden: Tensor | None


def parts(step: Step, shapes: ShapeSet) -> Iterator[Part]:
    """Cut a step: decoding requests by query length, then the rest together."""
    longest = shapes.query_lens[-1]
    by_query_len: dict[int, list[int]] = {1: [], longest: [], 0: []}
    for index, share in enumerate(step.scheduled):
        stop, count = share.start + share.num_tokens, share.num_tokens
        query_len = 1 if count == 1 else longest if longest <= stop else 0
        by_query_len[query_len if index < step.num_decodes else 0].append(index)
    for query_len, indices in by_query_len.items():
        if not indices:
            continue
        shares = tuple(step.scheduled[i] for i in indices)
        if query_len:
            shape = shapes.decode(len(indices), query_len)
        else:
            shape = shapes.prefill(sum(share.num_tokens for share in shares))
        yield Part(shape, tuple(indices), shares)


class Prepared:
    """Every shape of a plan, ready to run.

    Args:
        model: weights and kernels; see ``models/m3/model.py``.
        cache: the pool.
        plan: what was settled.
        kernels: the chosen launchers.
        facility: the device.

    Attributes:
        shapes: the closed set.
        drawn: [max rows] int64: tokens the last step drew; the next step's inputs are read there.
        workspace: the scratch.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        plan: ExecutionPlan,
        kernels: StepKernels,
        facility: Facility,
    ):
        assert kernels.prepare is not None  # the plan says which backends have one
        self.shapes, self._plan = plan.shapes, plan
        self._model, self._cache, self._facility = model, cache, facility
        config, device = plan.config, facility.device
        self.workspace = Workspace(plan.workspace, self._scratch_memory, _clear)
        rows = self.shapes.rungs[-1] * self.shapes.query_lens[-1]
        self.drawn = torch.zeros(rows, dtype=torch.int64, device=device)
        self._logits = torch.zeros(rows, plan.facts.vocab, dtype=torch.float32, device=device)
        self._greedy = Greedy(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
        )
        sizes = dict(
            max_seqs=config.max_num_seqs,
            max_rows=rows,
            max_length=config.max_model_len,
            page_size=config.block_size,
        )
        self._inputs = {
            Phase.DECODE: Inputs(facility, max_tokens=rows, **sizes),
            Phase.PREFILL: Inputs(facility, max_tokens=self.shapes.buckets[-1], **sizes),
        }
        self._planners = {
            shape: kernels.prepare(self._sizes(shape), device, self._scratch(shape))
            for shape in self.shapes.all
        }
        self._bodies: dict[StepShape, Callable[[], None]] = {}
        self._replays: dict[StepShape, Callable[[], None]] = {}  # of graphs, or the bodies

    # --- start-up --------------------------------------------------------------------------------

    def prepare(self, shape: StepShape) -> None:
        """Compile what a shape needs, make the allocator take its memory, capture its graph."""
        if shape.phase is Phase.PREFILL:
            self._rehearse(shape)
            return
        body = self._bodies[shape] = self._decode_body(shape)
        if self._plan.step_of[shape].graph:
            self._replays[shape] = self._facility.capture(body, str(shape))
        else:
            body()
            self._replays[shape] = body

    def forget(self) -> None:
        """Nothing of an earlier step is left where a step leaves what it computed."""
        self._logits.fill_(float("nan"))
        self._greedy.tokens.fill_(-1)
        self._greedy.finite.zero_()

    def _decode_body(self, shape: StepShape) -> Callable[[], None]:
        views = self._views(shape)
        self._inputs[Phase.DECODE].blank(shape.num_tokens)
        query_len, rows = shape.query_len, shape.num_tokens
        batch = _batch(views, (query_len,) * shape.num_seqs, (query_len,) * shape.num_seqs)
        # made once: later plans of the same shape rewrite the same tables in place
        plan = self._planners[shape].plan(batch, self._plan.config.block_size)

        def body() -> None:
            self._keep(self._forward(views, batch, plan), rows)

        return body

    def _rehearse(self, shape: StepShape) -> None:
        longest, left = self._plan.config.max_model_len, shape.num_tokens
        lens: list[int] = []
        while left and len(lens) < self._plan.config.max_num_seqs:
            lens.append(min(longest, left))
            left -= lens[-1]
        views = self._views(shape)
        self._inputs[Phase.PREFILL].blank(shape.num_tokens)
        self._forward_prefill(shape, views, tuple(lens), tuple(lens), len(lens))

    # --- serving ---------------------------------------------------------------------------------

    def run(self, part: Part, drawn_at: Sequence[int], *, eager: bool = False) -> Rows:
        """Queue a part: inputs, plan, forward pass, logits.

        Args:
            part: from :func:`parts`.
            drawn_at: per share, where its input token stands in :attr:`drawn`; -1: the host knows.
            eager: launch what the shape's graph was captured from, and not the graph.
        """
        shape = part.shape
        decodes = shape.phase is Phase.DECODE
        lengths = self._inputs[shape.phase].fill(
            part.shares, drawn_at, shape.num_tokens, shape.query_len if decodes else 0
        )
        views = self._views(shape)
        if not decodes:
            sampling = sum(share.samples for share in part.shares)
            return self._forward_prefill(
                shape, views, lengths.query_lens, lengths.seq_lens, sampling
            )
        batch = _batch(views, lengths.query_lens, lengths.seq_lens)
        self._planners[shape].plan(batch, self._plan.config.block_size)
        (self._bodies if eager else self._replays)[shape]()
        if shape.query_len == 1:
            return self._rows(len(part.shares), None)
        return self._picked(views, sum(share.num_tokens for share in part.shares))

    def again(self, part: Part) -> Callable[[], None]:
        """What queues a part once more with the inputs it has now; for measurements."""
        self.run(part, [-1] * len(part.shares))
        if part.shape.phase is Phase.DECODE:
            return self._replays[part.shape]
        views = self._views(part.shape)
        queries = tuple(share.num_tokens for share in part.shares)
        lens = tuple(share.start + share.num_tokens for share in part.shares)
        sampling = sum(share.samples for share in part.shares)

        def prefill() -> None:
            self._forward_prefill(part.shape, views, queries, lens, sampling)

        return prefill

    def _forward_prefill(
        self,
        shape: StepShape,
        views: Views,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        sampling: int,
    ) -> Rows:
        batch = _batch(views, query_lens, seq_lens)
        plan = self._planners[shape].plan(batch, self._plan.config.block_size)
        hidden = self._forward(views, batch, plan)
        if sampling:
            # as many rows as a rung: no size that was not met at start-up
            padded = self.shapes.decode(sampling, 1).num_seqs
            self._keep(hidden[views.sample_rows[:padded]], padded)
        return self._rows(sampling, hidden)

    def _picked(self, views: Views, rows: int) -> Rows:
        """Rows of shares that may have fewer drafts than the shape."""
        picked = views.sample_rows[:rows]
        tokens, finite = self._greedy
        return Rows(self._logits[picked], Greedy(tokens[picked], finite[picked]), None)

    def _forward(self, views: Views, batch: AttentionBatch, plan: Any) -> Tensor:
        follows = Follows(views.follows, self.drawn)
        return self._model.forward(views.token_ids, batch, self._cache, plan, follows)

    def _keep(self, hidden: Tensor, rows: int) -> None:
        """Leave the logits of rows, and the most likely tokens, where steps are read."""
        logits = self._model.logits(hidden, out=self._logits[:rows])
        tokens, finite = self._greedy
        sampler.greedy(logits, out=Greedy(tokens[:rows], finite[:rows]))

    def _rows(self, rows: int, hidden: Tensor | None) -> Rows:
        tokens, finite = self._greedy
        return Rows(self._logits[:rows], Greedy(tokens[:rows], finite[:rows]), hidden)

    # --- sizes -----------------------------------------------------------------------------------

    def _views(self, shape: StepShape) -> Views:
        seqs = shape.num_seqs or self._plan.config.max_num_seqs
        return self._inputs[shape.phase].views(shape.num_tokens, seqs)

    def _sizes(self, shape: StepShape) -> PreparedSizes:
        plan, config = self._plan, self._plan.config
        layout = next(iter(plan.layouts.values()))
        decodes = shape.phase is Phase.DECODE
        return PreparedSizes(
            page_size=layout.page_size,
            num_kv_heads=layout.num_kv_heads,
            group=plan.facts.num_q_heads // plan.facts.num_kv_heads,
            max_seqs=shape.num_seqs or config.max_num_seqs,
            max_tokens=shape.num_tokens,
            max_length=config.max_model_len,
            query_len=shape.query_len if decodes else 0,
            compute_units=plan.arch.compute_units,
            score_bytes=config.index_score_memory,
            kv_fp8=layout.has_scales,
            batch_invariant=config.batch_invariant,
        )

    def _scratch_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._facility.device)

    def _scratch(self, shape: StepShape) -> Mapping[str, Tensor]:
        places: Mapping[str, Slice] = self._plan.workspace.slices[shape]
        buffer = self.workspace.buffer
        return {name: buffer[place.offset : place.end] for name, place in places.items()}


def _clear(buffer: Tensor, place: Slice) -> None:
    buffer[place.offset : place.end].zero_()


def _batch(views: Views, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> AttentionBatch:
    return AttentionBatch(query_lens, seq_lens, views.positions, views.slots, views.page_table)
