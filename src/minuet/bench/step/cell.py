"""One step shape to measure: its settings, its requests, its bytes. No torch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from minuet.attention.contract import Phase
from minuet.config import Options, Source
from minuet.engine.types import Request, SamplingParams, ScheduledRequest, Step
from minuet.errors import ConfigError
from minuet.models.registry import ModelSource
from minuet.planning import roofline
from minuet.planning.execution import ExecutionPlan
from minuet.planning.memory import DUMMY_PAGES
from minuet.planning.resolve import PAGE_WITHOUT_BLOCKS
from minuet.planning.roofline import Roofline
from minuet.settings import AUTO


@dataclass(frozen=True, slots=True)
class Cell:
    """One step.

    Attributes:
        phase: decode or prefill.
        batch: requests in the step.
        context: tokens in the cache of each, those of this step included.
        query_len: query tokens of each; in decode, above 1 verifies that many drafts less one.
    """

    phase: Phase
    batch: int
    context: int
    query_len: int = 1

    def __post_init__(self) -> None:
        for flag, value in (("--batch-size", self.batch), ("--query-len", self.query_len)):
            if value < 1:
                raise ConfigError(f"bad value for {flag}", got=value, expected="at least 1")
        # a decode step follows a prompt of at least one token
        fewest = self.query_len + (self.phase is Phase.DECODE)
        if self.context < fewest:
            raise ConfigError(
                "bad value for --context",
                got=self.context,
                expected=f"at least {fewest}: {self.query_len} query tokens are part of it",
            )

    def __str__(self) -> str:
        """As tables show it."""
        return f"{self.phase.value} {self.batch} x {self.query_len} at {self.context}"

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return self.batch * self.query_len

    def pages(self, page_size: int) -> int:
        """Pages that its requests hold."""
        return self.batch * -(-self.context // page_size)

    def roofline(self, plan: ExecutionPlan, distinct_experts: float | None = None) -> Roofline:
        """What the step must read and compute.

        Args:
            plan: the engine's.
            distinct_experts: experts read per layer as measured; None expects uniform routing.
        """
        storage = roofline.storage_of(plan.config)
        if self.phase is Phase.PREFILL:
            return roofline.prefill(
                plan.facts,
                storage,
                tokens=self.query_len,
                context_before=self.context - self.query_len,
                requests=self.batch,
                distinct_experts=distinct_experts,
            )
        return roofline.decode(
            plan.facts,
            storage,
            batch=self.batch,
            context=self.context,
            query_len=self.query_len,
            distinct_experts=distinct_experts,
        )

    def step(self, page_ids: Sequence[int], page_size: int, vocab: int, seed: int = 0) -> Step:
        """The step over pages that are filled already; random tokens, drawn greedily.

        Args:
            page_ids: at least :meth:`pages`, each used by one request.
            page_size: tokens per page.
            vocab: token ids are below it.
            seed: of the tokens.
        """
        draw = random.Random(seed)
        each = self.pages(page_size) // self.batch
        shares = []
        for number in range(self.batch):
            mine = list(page_ids[number * each : (number + 1) * each])
            request = self._request(number, mine, vocab, draw)
            shares.append(
                ScheduledRequest(
                    request,
                    start=self.context - self.query_len,
                    num_tokens=self.query_len,
                    samples=True,
                )
            )
        num_decodes = self.batch if self.phase is Phase.DECODE else 0
        return Step(tuple(shares), num_decodes=num_decodes)

    def _request(
        self, number: int, page_ids: list[int], vocab: int, draw: random.Random
    ) -> Request:
        tokens = [draw.randrange(vocab) for _ in range(self.context)]
        split = self.context
        if self.phase is Phase.DECODE:
            split -= self.query_len  # then the last token drawn, then drafts
        return Request(
            request_id=f"step-{number}",
            prompt_token_ids=tuple(tokens[:split]),
            params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self.query_len + 1),
            arrival=number,
            output_token_ids=tokens[split : split + 1],
            draft_token_ids=tokens[split + 1 :],
            page_ids=page_ids,
            num_computed=self.context - self.query_len,
        )


def settings_for(options: Options, cells: Sequence[Cell], source: ModelSource) -> Options:
    """The options with which an engine prepares these steps and little else.

    A setting that somebody asked for stays. The others become what the steps need: a pool of their
    pages, a rung per batch size, one bucket, the longest context as the longest request; and random
    weights where the model has none.

    Args:
        options: what was asked for.
        cells: what will be measured; at least one, of one phase and query length.
        source: the model.
    """
    facts = source.facts
    page = facts.index.block if facts.index else options["block_size"]
    if page == AUTO:
        page = PAGE_WITHOUT_BLOCKS
    seqs = max(cell.batch for cell in cells)
    decodes = [cell for cell in cells if cell.phase is Phase.DECODE]
    query_len = max((cell.query_len for cell in decodes), default=1)
    longest = max(-(-(cell.context + 1) // page) * page for cell in cells)
    wanted: dict[str, Any] = {
        "load_format": "dummy" if source.folder is None else options["load_format"],
        "enable_prefix_caching": False,
        "max_num_seqs": seqs,
        "num_speculative_tokens": query_len - 1,
        "cudagraph_capture_sizes": tuple(sorted({c.batch for c in decodes} or {seqs})),
        "max_model_len": min(longest, facts.max_positions),
        "max_num_batched_tokens": max(page, seqs * query_len, *(c.num_tokens for c in cells)),
        # a page more for each: a request that went on could need it
        "kv_cache_pages": DUMMY_PAGES + max(c.pages(page) + c.batch for c in cells),
    }
    free = {name for name, came in options.sources.items() if came is Source.DEFAULT}
    if "kv_cache_memory" not in free:
        del wanted["kv_cache_pages"]
    values = {**options.values, **{name: v for name, v in wanted.items() if name in free}}
    return Options(MappingProxyType(values), options.sources)
