"""Audit of the sparse selection: what the chosen blocks hold of the attention they stand for.

Runs prompts through the CPU engine and looks on at every sparse layer (``watch`` of
:func:`minuet.engine.start.start`). For some query rows it computes what the kernels do not: the
attention over *all* visible tokens, from the cache as stored, and sums it by block. Then, for each
layer and KV head:

* **recall**: the share of attention mass in the chosen blocks, mean over the KV head's query heads;
* **best**: the same for the blocks with the most mass, which no choice of as many can exceed;
* **window**: the same for the newest blocks, which need no indexer;
* **ties**: rows in which the last chosen and the first rejected block have the same score, so that
  the rule for ties (the lowest block wins) decided;
* **differing**: rows in which the kernel chose other blocks than the reference does;
* **coverage**: how far back choices reach, and how many of the blocks were ever chosen.

Rows that see no more blocks than are chosen say nothing and are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minuet.attention import reference
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.attention.runtime import LayerKernels, StepKernels
from minuet.config import Options
from minuet.engine.llm import LLM
from minuet.engine.start import Engine, start
from minuet.engine.types import SamplingParams
from minuet.errors import ConfigError, ContractError
from minuet.evals import tasks
from minuet.kv.cache import LayerCache
from minuet.server import template

# R rows looked at, H query heads, K KV heads, G group, D head dim, L visible tokens, N blocks

DEPTHS = 10  # classes of relative depth: 0 the beginning of the text, 1 the query's own block
_ROWS = 48  # looked at in one text, evenly spaced; the last ones are always among them
_LAST_ROWS = 8


@dataclass(slots=True)
class HeadAudit:
    """One layer's KV head; sums over the rows looked at.

    Attributes:
        layer: index in the model.
        head: KV head.
        recall: mass in the chosen blocks, row by row.
        best: mass in the heaviest blocks, row by row.
        window: mass in the newest blocks, row by row.
        ties: rows whose choice the rule for ties decided.
        differing: rows in which the kernel chose otherwise than the reference.
        depths: [DEPTHS] chosen blocks before the query's own, by relative depth.
        reachable: [DEPTHS] blocks that could have been chosen, likewise.
    """

    layer: int
    head: int
    recall: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    window: list[float] = field(default_factory=list)
    ties: int = 0
    differing: int = 0
    depths: list[int] = field(default_factory=lambda: [0] * DEPTHS)
    reachable: list[int] = field(default_factory=lambda: [0] * DEPTHS)

    def as_json(self) -> dict[str, Any]:
        """Means, extremes and counts."""
        return {
            "layer": self.layer,
            "kv_head": self.head,
            "rows": len(self.recall),
            "recall_mean": round(_mean(self.recall), 6),
            "recall_min": round(min(self.recall), 6),
            "best_mean": round(_mean(self.best), 6),
            "window_mean": round(_mean(self.window), 6),
            "ties": self.ties,
            "differing": self.differing,
            "chosen_by_depth": self.depths,
            "reachable_by_depth": self.reachable,
        }


@dataclass(frozen=True, slots=True)
class Audit:
    """All heads of all sparse layers.

    Attributes:
        model: as it was named.
        selection: how blocks are chosen.
        block: tokens per block.
        texts: how many were run.
        tokens: in all of them.
        heads: by layer, then KV head.
        coverage: share of the blocks that could be chosen and were, by some head in some row, by
            layer.
    """

    model: str
    selection: Selection
    block: int
    texts: int
    tokens: int
    heads: tuple[HeadAudit, ...]
    coverage: Mapping[int, float]

    def as_json(self) -> dict[str, Any]:
        """The audit and what it was made with."""
        return {
            "model": self.model,
            "top_blocks": self.selection.top_blocks,
            "init_blocks": self.selection.init_blocks,
            "local_blocks": self.selection.local_blocks,
            "block_tokens": self.block,
            "texts": self.texts,
            "tokens": self.tokens,
            "coverage": {str(layer): round(share, 6) for layer, share in self.coverage.items()},
            "heads": [head.as_json() for head in self.heads],
        }


class Watcher:
    """Stands between the model and its kernels.

    Attributes:
        heads: audits by (layer, KV head).
        selection: as the model passes it; None before the first sparse layer.
    """

    def __init__(self) -> None:
        self.heads: dict[tuple[int, int], HeadAudit] = {}
        self.selection: Selection | None = None
        self._rows: frozenset[int] = frozenset()
        self._batch: AttentionBatch | None = None
        self._index_q: Tensor | None = None
        self._layer = 0
        self._seen: dict[int, tuple[set[tuple[int, int]], set[tuple[int, int]]]] = {}
        self._text = -1

    def look_at(self, num_tokens: int) -> None:
        """Say which rows of the next text count: some all along, and the last ones."""
        step = max(1, num_tokens // _ROWS)
        last = range(max(0, num_tokens - _LAST_ROWS), num_tokens)
        self._rows = frozenset(range(step - 1, num_tokens, step)) | frozenset(last)
        self._text += 1

    def wrap(self, kernels: StepKernels) -> StepKernels:
        """Kernels that do the same and are watched."""

        def plan(batch: AttentionBatch, page_size: int) -> Any:
            self._batch, self._layer = batch, 0
            return kernels.plan(batch, page_size)

        layers = {kind: self._wrap_layer(layer) for kind, layer in kernels.layers.items()}
        return replace(kernels, plan=plan, layers=layers)

    def _wrap_layer(self, layer: LayerKernels) -> LayerKernels:
        def select(index_q: Tensor, cache: LayerCache, plan: Any, selection: Selection) -> Any:
            self._index_q, self.selection = index_q, selection
            assert layer.select is not None
            return layer.select(index_q, cache, plan, selection)

        def attend(q: Tensor, cache: LayerCache, plan: Any, blocks: Any, scale: float) -> Tensor:
            if blocks is not None:
                self._audit(q, cache, blocks, scale)
            self._layer += 1
            return layer.attend(q, cache, plan, blocks, scale)

        return replace(layer, select=select if layer.select else None, attend=attend)

    def _audit(self, q: Tensor, cache: LayerCache, blocks: Tensor, scale: float) -> None:
        batch, selection = self._batch, self.selection
        assert batch is not None
        assert selection is not None
        if len(batch.seq_lens) != 1:
            raise ContractError("sequences of a step", got=len(batch.seq_lens), expected="one")
        block = cache.layout.page_size
        positions = batch.positions.tolist()
        rows = [
            row
            for row, position in enumerate(positions)
            if position in self._rows and position // block >= selection.top_blocks
        ]
        if not rows:
            return
        k, _, index_k = reference.read(cache, batch.page_table[0], batch.seq_lens[0])
        assert index_k is not None
        assert self._index_q is not None
        for row in rows:
            position = positions[row]
            mass = block_mass(q[row], k[: position + 1], block, scale)
            scores = reference.block_scores(self._index_q[row], index_k, position, block)
            for head in range(mass.shape[0]):
                chosen = [b for b in blocks[row, head].tolist() if b >= 0]
                self._note(head, mass[head], scores[head], chosen, selection)

    def _note(
        self, head: int, mass: Tensor, scores: Tensor, chosen: list[int], selection: Selection
    ) -> None:
        key = (self._layer, head)
        audit = self.heads.setdefault(key, HeadAudit(*key))
        count, top = mass.shape[0], selection.top_blocks
        audit.recall.append(float(mass[chosen].sum()))
        audit.best.append(float(mass.topk(min(top, count)).values.sum()))
        audit.window.append(float(mass[-top:].sum()))
        audit.differing += chosen != reference.choose_blocks(scores, selection)
        audit.ties += decided_by_tie(scores, chosen, selection)
        free = range(selection.init_blocks, count - selection.local_blocks)
        reachable, taken = self._seen.setdefault(self._layer, (set(), set()))
        reachable |= {(self._text, b) for b in free}
        for b in free:
            depth = min(DEPTHS - 1, b * DEPTHS // (count - 1))
            audit.reachable[depth] += 1
            if b in chosen:
                audit.depths[depth] += 1
                taken.add((self._text, b))

    def coverage(self) -> dict[int, float]:
        """By layer: of the blocks that could be chosen freely, the share that ever was."""
        return {
            layer: len(taken) / len(reachable) if reachable else 0.0
            for layer, (reachable, taken) in sorted(self._seen.items())
        }


def block_mass(q: Tensor, k: Tensor, block: int, scale: float) -> Tensor:
    """Attention mass of each block for one query row, over all visible tokens.

    Args:
        q: [H, D], normalised and rotated.
        k: [L, K, D], the visible tokens.
        block: tokens per block.
        scale: of the scores.

    Returns:
        [K, N] float32, mean over the query heads of each KV head; rows sum to 1.
    """
    heads = k.shape[1]
    queries = q.float().view(heads, -1, q.shape[-1])  # [K, G, D]
    scores = torch.einsum("kgd,lkd->kgl", queries, k.float()) * scale
    weights = scores.softmax(-1).mean(1)
    return torch.stack([part.sum(1) for part in weights.split(block, dim=1)], dim=1)


def decided_by_tie(scores: Tensor, chosen: Sequence[int], selection: Selection) -> bool:
    """Whether a rejected block has the score of the worst block that was chosen for its score."""
    count = scores.shape[0]
    free = range(selection.init_blocks, count - selection.local_blocks)
    won = [float(scores[b]) for b in free if b in chosen]
    lost = [float(scores[b]) for b in free if b not in chosen]
    return bool(won) and bool(lost) and max(lost) == min(won)


def audit(
    options: Options,
    texts: Callable[[Engine], Sequence[Sequence[int]]],
    announce: Callable[[str], None],
) -> Audit:
    """Run texts and audit every sparse layer.

    Args:
        options: of the engine; its arch must be ``cpu``.
        texts: makes prompts in token ids for the engine.
        announce: receives the plan's summary.

    Raises:
        ConfigError: a model without sparse layers, or texts so short that nothing is left out.
    """
    watcher = Watcher()
    engine = start(options, announce, watch=watcher.wrap)
    llm, prompts = LLM.over(engine), texts(engine)
    for prompt in prompts:
        watcher.look_at(len(prompt))
        # one text at a time: rows are told apart by their position
        llm.generate([list(prompt)], SamplingParams(max_tokens=1, temperature=0.0))
    if not watcher.heads or watcher.selection is None:
        page = engine.plan.config.block_size
        top = watcher.selection.top_blocks if watcher.selection else 0
        raise ConfigError(
            "no row had more blocks than are chosen",
            got=f"texts of at most {max(map(len, prompts), default=0)} tokens",
            expected=f"more than {top * page}" if top else "a model with sparse layers",
            remedy="ask for longer texts with --length" if top else "",
        )
    return Audit(
        model=options["model"],
        selection=watcher.selection,
        block=engine.plan.config.block_size,
        texts=len(prompts),
        tokens=sum(map(len, prompts)),
        heads=tuple(watcher.heads[key] for key in sorted(watcher.heads)),
        coverage=watcher.coverage(),
    )


def needle_texts(engine: Engine, *, seed: int, count: int, length: int) -> list[list[int]]:
    """Needle questions as prompts: a text of that many tokens or so each, and one question.

    Args:
        engine: whose tokenizer and chat template are used.
        seed: of the draw.
        count: how many.
        length: of a text, in the task's units (tokens of minuet-tiny).

    Raises:
        ConfigError: a model without tokenizer or chat template.
    """
    tokenizer, folder = engine.tokenizer, engine.source.folder
    rendering = None
    if tokenizer is not None:
        rendering = template.load(folder, "", tokenizer.added_texts, tokenizer.encode)
    if rendering is None:
        raise ConfigError(
            "the audit asks in chat form", got=str(folder), expected="a tokenizer and a template"
        )
    drawn = tasks.problems("needle", "heldout", seed, count, length=length, questions=1)
    return [rendering.render(problem.messages).token_ids for problem in drawn]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
