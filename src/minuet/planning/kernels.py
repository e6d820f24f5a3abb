"""Which kernel runs each operation of each layer kind, and what scratch each step shape needs.

The two halves of :mod:`minuet.planning.execution` that know of kernels. Everything is worked out
from numbers, so equal questions are answered from a cache: a start-up asks each once, a test that
tries ten thousand configurations asks few different ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from minuet.attention.backends import PREFERENCE
from minuet.attention.capability import AUTO, StepSizes, WorkspaceSpec
from minuet.attention.contract import LayerKind, Op, Phase, Problem
from minuet.attention.dispatch import Choice, choose, preferred_form
from minuet.attention.plan import Split, split_for
from minuet.attention.workspace import WorkspaceLayout, covers_step, lay_out
from minuet.config import Config
from minuet.dtypes import DType
from minuet.errors import Refusal
from minuet.kv.layout import Form, KVLayout
from minuet.planning.model import IndexFacts, ModelFacts
from minuet.planning.shapes import ShapeSet, StepShape
from minuet.platform.arch import Arch

# Scratch of a prefill step besides the block scores, which have a budget of their own. Longer steps
# run their attention in chunks of queries, so it does not follow the length of a prompt.
PREFILL_WORKSPACE_BYTES = 8 * 2**20

Item = TypeVar("Item")

_OPS = {
    LayerKind.DENSE: (Op.WRITE, Op.ATTEND),
    LayerKind.SPARSE: (Op.WRITE, Op.SELECT, Op.ATTEND),
}


@dataclass(frozen=True, slots=True)
class Features:
    """What an attention layer asks for beyond sizes.

    Attributes:
        window: sliding window in tokens, 0 for none.
        sinks: whether attention sink logits enter the softmax.
    """

    window: int = 0
    sinks: bool = False


PLAIN = Features()


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of attention call an engine makes: the key of its :class:`Choice`.

    Attributes:
        layer_kind: dense or sparse.
        op: write, select or attend.
        phase: prefill or decode.
        query_len: query tokens per request in decode; 1 in prefill.
    """

    layer_kind: LayerKind
    op: Op
    phase: Phase
    query_len: int

    def __str__(self) -> str:
        """As tables show it: ``sparse attend, decode x4``."""
        length = f" x{self.query_len}" if self.phase is Phase.DECODE else ""
        return f"{self.layer_kind.value} {self.op.value}, {self.phase.value}{length}"


# Compared by identity, which is what caches of what follows from it need.
@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernels of an engine: one backend and one page arrangement for all calls.

    Attributes:
        form: arrangement of the pages.
        choices: every call to its choice.
    """

    form: Form
    choices: Mapping[Call, Choice]

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends of the chosen kernels; exactly one if the choice is complete."""
        return _unique(c.kernel.backend for c in self.choices.values() if c.kernel)

    @property
    def complete(self) -> bool:
        """Whether every call has a kernel, all of them of one backend.

        A step is planned once, by the backend whose kernels read the plan.
        """
        return len(self.backends) == 1 and all(c.kernel for c in self.choices.values())

    def of_layer(self, kind: LayerKind, phase: Phase, query_len: int) -> tuple[Choice, ...]:
        """Choices of one layer's operations in a kind of step, in the order in which they run."""
        calls = (Call(kind, op, phase, query_len) for op in _OPS[kind])
        return tuple(self.choices[call] for call in calls)


def layer_kinds(facts: ModelFacts) -> tuple[LayerKind, ...]:
    """Layer kinds a model has, dense first."""
    return tuple(kind for kind in LayerKind if kind in facts.layer_kinds)


def layouts(config: Config, facts: ModelFacts, form: Form) -> dict[LayerKind, KVLayout]:
    """One rank's cache layout per layer kind.

    KV heads are split over ranks as far as they go and replicated beyond; index keys are on every
    rank.
    """
    made = {}
    for kind in layer_kinds(facts):
        index = facts.index if kind is LayerKind.SPARSE else None
        made[kind] = KVLayout(
            page_size=config.block_size,
            num_kv_heads=max(1, facts.num_kv_heads // config.tensor_parallel_size),
            head_dim=facts.head_dim,
            kv_dtype=config.kv_cache_dtype,
            index_dim=index.dim if index else 0,
            index_dtype=config.index_kv_cache_dtype,
            form=form,
        )
    return made


def choose_kernels(
    config: Config, facts: ModelFacts, arch: Arch, features: Features = PLAIN
) -> tuple[Kernels, tuple[Refusal, ...]]:
    """The kernels of a configuration, and every reason against it; empty if it can be planned.

    With ``--attention-backend auto`` the arch's backends are tried in order of preference, each
    with the page arrangement it prefers. If none takes every call, the reasons shown are those of
    the first arrangement: every candidate's, for every call.
    """
    want, ranks = config.attention_backend, config.tensor_parallel_size
    backends = PREFERENCE[arch.name] if want == AUTO else (want,)
    question = _Question(
        layer_kinds(facts),
        facts.head_dim,
        facts.index,
        arch,
        want,
        preferred_form(arch, want),
        max(1, facts.num_q_heads // ranks),
        max(1, facts.num_kv_heads // ranks),
        config.block_size,
        config.num_speculative_tokens,
        (config.dtype, config.kv_cache_dtype, config.index_kv_cache_dtype),
        features,
    )
    for form in _unique(preferred_form(arch, backend) for backend in backends):
        kernels = _kernels(replace(question, form=form))
        if kernels.complete:
            return kernels, ()
    first = _kernels(question)
    reasons = _unique(r for c in first.choices.values() if c.kernel is None for r in c.against())
    return first, reasons or (_mixed(first, question),)


def _mixed(kernels: Kernels, question: "_Question") -> Refusal:
    """Every call has a kernel, but not of one backend."""
    for backend in kernels.backends:
        form = preferred_form(question.arch, backend)
        if _kernels(replace(question, want=backend, form=form)).complete:
            flag, remedy = "--attention-backend", f"set --attention-backend {backend}"
            break
    else:
        flag, remedy, backend = "", "", ""
    names = ", ".join(kernels.backends)
    accepts = "one backend for all calls: a step is planned once"
    return Refusal("attention", "attention_backend", names, accepts, remedy, flag, backend)


@dataclass(frozen=True, slots=True)
class _Question:
    """All that the choice of kernels depends on; a hashable key."""

    kinds: tuple[LayerKind, ...]
    head_dim: int
    index: IndexFacts | None
    arch: Arch
    want: str
    form: Form
    num_q_heads: int
    num_kv_heads: int
    page_size: int
    num_speculative_tokens: int
    dtypes: tuple[DType, DType, DType]  # compute, KV, index keys
    features: Features


@lru_cache(maxsize=4096)
def _kernels(question: _Question) -> Kernels:
    q = question
    query_lens = sorted({1, q.num_speculative_tokens + 1})
    choices = {}
    for kind in q.kinds:
        for phase, lengths in ((Phase.DECODE, query_lens), (Phase.PREFILL, (1,))):
            for query_len in lengths:
                for op in _OPS[kind]:
                    call = Call(kind, op, phase, query_len)
                    choices[call] = choose(_problem(q, call), q.arch, q.want)
    return Kernels(q.form, choices)


def _problem(question: _Question, call: Call) -> Problem:
    q = question
    index = q.index if call.layer_kind is LayerKind.SPARSE else None
    compute, kv_dtype, index_dtype = q.dtypes
    return Problem(
        op=call.op,
        layer_kind=call.layer_kind,
        phase=call.phase,
        num_q_heads=q.num_q_heads,
        num_kv_heads=q.num_kv_heads,
        head_dim=q.head_dim,
        page_size=q.page_size,
        q_dtype=compute,
        kv_dtype=kv_dtype,
        query_len=call.query_len,
        form=q.form,
        index_dim=index.dim if index else 0,
        # each KV head selects for itself, so index heads are split as KV heads are
        index_heads=q.num_kv_heads if index else 0,
        index_dtype=index_dtype,
        top_blocks=index.top_blocks if index else 0,
        window=q.features.window,
        sinks=q.features.sinks,
    )


# --- scratch of a step shape ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scratch of a step depends on besides its shape.

    Attributes:
        max_model_len: longest context.
        score_bytes: budget of the block scores.
        batch_invariant: whether a division may depend on a request's own length only.
    """

    max_model_len: int
    score_bytes: int
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class Demand:
    """What one layer of one kind needs in one step shape.

    Attributes:
        specs: the slices of scratch.
        score_bytes: the share of them that ``score_bytes`` of :class:`Limits` bounds.
        query_chunk: query tokens that select and attend take at once; the whole step in decode.
        split: how attention is divided over workers; None if the kernel does not say.
        refusals: why the largest such step does not fit a kernel.
    """

    specs: tuple[WorkspaceSpec, ...]
    score_bytes: int
    query_chunk: int
    split: Split | None
    refusals: tuple[Refusal, ...]

    @property
    def other_bytes(self) -> int:
        """Scratch besides the block scores."""
        return sum(spec.bytes for spec in self.specs) - self.score_bytes


@dataclass(frozen=True, slots=True)
class Scratch:
    """The one scratch allocation of an engine.

    Attributes:
        demands: what each layer kind needs in each step shape.
        layout: where the slices lie, by shape: one place per name, whatever the layer kind.
        refusals: why the largest steps do not fit the kernels.
    """

    demands: Mapping[tuple[LayerKind, StepShape], Demand]
    layout: WorkspaceLayout
    refusals: tuple[Refusal, ...]


@lru_cache(maxsize=4096)
def scratch(kernels: Kernels, shapes: ShapeSet, limits: Limits) -> Scratch:
    """Scratch of every step shape, laid out in one allocation.

    Args:
        kernels: complete ones.
        shapes: the closed set.
        limits: what else it depends on.
    """
    layers = {
        key: kernels.of_layer(*key)
        for key in dict.fromkeys((c.layer_kind, c.phase, c.query_len) for c in kernels.choices)
    }
    demands = {
        (kind, shape): _layer_demand(choices, shape, limits)
        for (kind, phase, query_len), choices in layers.items()
        for shape in shapes.all
        if (shape.phase, shape.query_len) == (phase, query_len)
    }
    refusals = _unique(r for needed in demands.values() for r in needed.refusals)
    layout = lay_out({shape: _of_all_kinds(demands, shape) for shape in shapes.all})
    return Scratch(demands, layout, refusals)


def _of_all_kinds(
    demands: Mapping[tuple[LayerKind, StepShape], Demand], shape: StepShape
) -> tuple[WorkspaceSpec, ...]:
    """One slice per name that serves every layer kind: a step's kernels are given names only."""
    merged: dict[str, WorkspaceSpec] = {}
    for (_, of), needed in demands.items():
        for spec in needed.specs if of == shape else ():
            known = merged.get(spec.name)
            merged[spec.name] = spec if known is None else known.covering(spec)
    return tuple(merged.values())


@lru_cache(maxsize=65536)
def _layer_demand(choices: tuple[Choice, ...], shape: StepShape, limits: Limits) -> Demand:
    if shape.phase is Phase.DECODE:
        return _demand(choices, shape, limits, shape.num_tokens)
    heads = choices[0].problem.num_kv_heads
    caps = [c.kernel.max_rows // heads for c in choices if c.kernel and c.kernel.max_rows]
    chunk = max(1, min([shape.num_tokens, *caps]))
    while True:
        needed = _demand(choices, shape, limits, chunk)
        if needed.other_bytes <= PREFILL_WORKSPACE_BYTES or chunk == 1:
            return needed
        chunk = -(-chunk // 2)


def _demand(
    choices: tuple[Choice, ...], shape: StepShape, limits: Limits, query_chunk: int
) -> Demand:
    specs: list[WorkspaceSpec] = []
    refusals: list[Refusal] = []
    split: Split | None = None
    for choice in choices:
        kernel, problem = choice.kernel, choice.problem
        assert kernel is not None  # only complete Kernels get here
        if kernel.split:
            split = split_for(
                kernel.split,
                problem,
                compute_units=choice.arch.compute_units,
                num_seqs=max(shape.num_seqs, 1),
                query_tokens=query_chunk,
                max_length=limits.max_model_len,
                batch_invariant=limits.batch_invariant,
            )
        sizes = StepSizes(
            num_seqs=max(shape.num_seqs, 1),
            query_tokens=query_chunk,
            max_length=limits.max_model_len,
            slots=split.slots if kernel.split and split else 0,
            score_bytes=limits.score_bytes,
        )
        refusals += covers_step(kernel, problem, sizes)
        specs += kernel.workspace(problem, sizes)
    # by name, as covers_step: some kernels keep the scores beyond select
    scores = sum(spec.bytes for spec in specs if spec.name == "scores")
    return Demand(tuple(specs), scores, query_chunk, split, tuple(refusals))


def forget() -> None:
    """Drop remembered answers; for tests that change a capability or a limit."""
    for remembered in (_kernels, scratch, _layer_demand):
        remembered.cache_clear()


def _unique(items: Iterable[Item]) -> tuple[Item, ...]:
    """Without repeats, in order."""
    return tuple(dict.fromkeys(items))
