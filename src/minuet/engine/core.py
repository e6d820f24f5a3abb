"""The loop: requests in, steps out, tokens back.

An executor with a ``depth`` of 1 has the next step before the results of the one that runs are
known: what the host does then - take results in, text, messages, the next step - costs the device
no time. See the scheduler for what can go ahead, and what is run in sequence.

Whatever goes wrong with one request ends that request and nothing else.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from minuet.engine.detok import Detokenizer, TextStream
from minuet.engine.scheduler import Scheduler
from minuet.engine.types import (
    NOT_FINITE,
    Answered,
    Executor,
    FinishReason,
    GrammarState,
    Pending,
    Request,
    Sampled,
    SamplingParams,
    Step,
    TokenLogprobs,
)
from minuet.errors import ContractError, RequestError


class TextCodec(Protocol):
    """The part of a tokenizer the loop needs."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of the text unless a request wants them."""
        ...

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """A new incremental decoder."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_logprobs: alternatives a request may ask for.
        eos_token_ids: end-of-sequence tokens of the model.
    """

    vocab_size: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class RequestOutput:
    """A request's answer so far; the same object is updated until ``finish_reason`` is set.

    Attributes:
        request_id: whose.
        prompt_token_ids: the prompt.
        token_ids: tokens drawn so far.
        text: their text, without a tail that may still become a stop string.
        logprobs: one entry per token, when asked for.
        prompt_logprobs: one entry per prompt token, None for the first, when asked for.
        finish_reason: None while it runs.
        stop_reason: token id or string that ended it.
        error: what went wrong when ``finish_reason`` is ERROR.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_preemptions: how often it was recomputed.
        arrived_s: ``time.perf_counter`` at arrival.
        scheduled_s: when it was first part of a step; None before.
        first_token_s: at the first token; None before.
        finished_s: at the end; None before.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrived_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class _Live:
    request: Request
    output: RequestOutput
    detok: Detokenizer | None
    hidden_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _UnderWay:
    step: Step
    pending: Pending
    submitted_s: float
    runs: bool = True  # False: it could not be submitted, and drew nothing


class Core:
    """One engine.

    Args:
        scheduler: owns requests and pages.
        executor: carries steps out.
        limits: what requests are checked against.
        codec: tokenizer; None serves token ids only.

    Attributes:
        num_nonfinite: requests ended because their logits were not finite.
        last_step_tokens: query tokens of the last step.
        last_decode: (requests, their tokens in the cache, seconds) of the last step that only
            decoded; zeros before the first. The seconds are those from the results of the step
            before, or from its own submission where that was later.

    Raises:
        ContractError: an executor that takes more than one step beyond the one that runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: Limits,
        codec: TextCodec | None = None,
    ):
        self.scheduler, self._executor, self._limits, self._codec = (
            scheduler,
            executor,
            limits,
            codec,
        )
        if executor.depth not in (0, 1):
            raise ContractError("one step may be ahead", got=executor.depth, expected="0 or 1")
        self._live: dict[str, _Live] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._results_s = 0.0
        self._arrivals = count()
        self.num_nonfinite = self.last_step_tokens = 0
        self.last_decode = (0, 0, 0.0)

    @property
    def codec(self) -> TextCodec | None:
        """The tokenizer, None where there is none."""
        return self._codec

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self._limits.eos_token_ids

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return self.scheduler.has_work

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        grammar: GrammarState | None = None,
        shown_specials: frozenset[int] = frozenset(),
    ) -> RequestOutput:
        """Accept a request.

        Args:
            request_id: not the id of a request that still runs.
            prompt_token_ids: at least one.
            params: how to draw.
            grammar: what the answer must keep to; used by this request alone.
            shown_specials: special tokens that appear in the text.

        Returns:
            the output that :meth:`step` will update.

        Raises:
            RequestError: it can never be served as asked; the engine is as before.
        """
        self._check(prompt_token_ids, params)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            arrival=next(self._arrivals),
            eos_token_ids=self._limits.eos_token_ids,
            grammar=grammar,
        )
        self.scheduler.add(request)
        output = RequestOutput(request_id, request.prompt_token_ids, arrived_s=time.perf_counter())
        if params.logprobs is not None:
            output.logprobs = []
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        live = self._live[request_id] = _Live(request, output, None)
        if self._codec is not None:
            stream = self._codec.stream(skip_special=False) if shown_specials else None
            live.detok = Detokenizer(stream or self._codec.stream(), params.stop)
            if shown_specials:
                live.hidden_ids = self._codec.special_ids - shown_specials
        return output

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing; unknown or finished ids are ignored."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self.scheduler.abort(request_id)
            self._close(live, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Take one step in; returns the outputs that changed, in scheduling order.

        The steps after it are started before that, as far as the executor and the scheduler allow.

        A failure of the step itself (out of memory, a bug) ends the requests of the step with an
        error and leaves the engine able to go on; the exception is raised again for the caller.
        """
        self._submit()
        if not self._under_way:
            return []
        under_way = self._under_way[0]
        try:
            sampled = under_way.pending.results()
        except Exception as problem:
            self._under_way.popleft()
            self._fail_step(under_way.step, problem)
            raise
        self._under_way.popleft()
        self._note(under_way)
        return self._take(under_way.step, sampled)

    def _submit(self) -> None:
        """Start what can be started; nothing after a step that could not be."""
        while len(self._under_way) <= self._executor.depth:
            ahead = bool(self._under_way)
            if ahead and not self._under_way[-1].runs:
                return
            step = self.scheduler.schedule_ahead() if ahead else self.scheduler.schedule()
            if step is None:
                return
            now = time.perf_counter()
            for share in step.scheduled[step.num_decodes :]:
                live = self._find(share.request)
                if live is not None and live.output.scheduled_s is None:
                    live.output.scheduled_s = now
            try:
                pending = self._executor.submit(step)
            except Exception as problem:  # noqa: BLE001 - raised when its turn comes
                self._under_way.append(_UnderWay(step, _Failed(problem), now, runs=False))
            except BaseException:
                lost = [Sampled(None, error="the step was interrupted")] * len(step.scheduled)
                self._under_way.append(_UnderWay(step, Answered(lost), now, runs=False))
                raise
            else:
                self._under_way.append(_UnderWay(step, pending, now))

    def _take(self, step: Step, sampled: Sequence[Sampled]) -> list[RequestOutput]:
        """Commit a step and report what it brought."""
        checked = [_checked(result) if result.prompt_logprobs else result for result in sampled]
        self.scheduler.commit(step, checked)
        changed = []
        for share, result in zip(step.scheduled, checked, strict=True):
            live = self._find(share.request)
            if live is None:
                continue  # ended while the step ran, or before it did
            if result.error:
                self.num_nonfinite += result.error == NOT_FINITE
            self._report(live, share.start, result)
            if share.request.finish_reason is not None:
                self._settle(live)
                changed.append(live.output)
            elif result.token_id is not None:
                changed.append(live.output)
        return changed

    def _fail_step(self, step: Step, problem: Exception) -> None:
        failed = f"the step failed: {type(problem).__name__}: {problem}"
        self.scheduler.commit(step, [Sampled(None, error=failed)] * len(step.scheduled))
        for share in step.scheduled:
            live = self._find(share.request)
            if live is not None:
                self._settle(live)

    def _note(self, under_way: _UnderWay) -> None:
        step, now = under_way.step, time.perf_counter()
        began, self._results_s = max(under_way.submitted_s, self._results_s), now
        self.last_step_tokens = step.num_tokens
        if step.num_decodes == len(step.scheduled):
            tokens = sum(share.start + share.num_tokens for share in step.scheduled)
            self.last_decode = (step.num_decodes, tokens, now - began)

    # --- one request -----------------------------------------------------------------------------

    def _report(self, live: _Live, start: int, result: Sampled) -> None:
        request, output = live.request, live.output
        output.num_cached_tokens = request.num_cached
        output.num_preemptions = request.num_preemptions
        if result.prompt_logprobs and output.prompt_logprobs is not None:
            # a recomputed prompt reports again: positions say where an entry belongs
            output.prompt_logprobs[start + 1 :] = result.prompt_logprobs
        if result.token_id is None:
            return
        if output.first_token_s is None:
            output.first_token_s = time.perf_counter()
        # the scheduler decided how many of the drawn tokens count: a stop may come before the last
        reports = (*result.accepted_logprobs, result.logprobs)
        known = len(output.token_ids)
        for token_id, report in zip(request.output_token_ids[known:], reports, strict=False):
            output.token_ids.append(token_id)
            if output.logprobs is not None and report is not None:
                output.logprobs.append(report)
            if request.grammar is not None and not request.grammar.accept(token_id):
                self._fail(request, "the drawn token does not fit the grammar")
                break
            if live.detok is not None and self._ends_by_text(live, token_id):
                break

    def _ends_by_text(self, live: _Live, token_id: int) -> bool:
        """Add a token to the text; whether a stop string ended the request with it."""
        request, output = live.request, live.output
        is_last = len(output.token_ids) == len(request.output_token_ids)
        if is_last and request.finish_reason is FinishReason.STOP and token_id in request.stop_ids:
            return False  # a stop token is no text
        assert live.detok is not None
        if token_id in live.hidden_ids:
            return False
        enough = len(output.token_ids) >= request.params.min_tokens
        stop = live.detok.push(token_id, may_stop=enough)
        output.text = live.detok.visible
        if stop is None:
            return False
        if self.scheduler.finish(request.request_id, FinishReason.STOP, stop) is None:
            # the token that completed it was also the last one allowed
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop
        return True

    def _fail(self, request: Request, error: str) -> None:
        request.error = error
        if self.scheduler.finish(request.request_id, FinishReason.ERROR) is None:
            request.finish_reason = FinishReason.ERROR

    def _find(self, request: Request) -> _Live | None:
        """The live entry of this very request: its id may be in use again after an abort."""
        live = self._live.get(request.request_id)
        return live if live is not None and live.request is request else None

    def _settle(self, live: _Live) -> None:
        """Close the output of a request that has ended."""
        reason = live.request.finish_reason
        assert reason is not None
        del self._live[live.request.request_id]
        self._close(live, reason)

    def _close(self, live: _Live, reason: FinishReason) -> None:
        output = live.output
        if live.detok is not None:
            live.detok.finish()
            output.text = live.detok.text
        output.finish_reason, output.finished_s = reason, time.perf_counter()
        output.stop_reason, output.error = live.request.stop_reason, live.request.error

    # --- checks ----------------------------------------------------------------------------------

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        vocab, most = self._limits.vocab_size, self._limits.max_logprobs
        named = (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        )
        for param, ids in named:
            wrong = _outside(ids, vocab)
            if wrong:
                raise RequestError(
                    f"{param} has token ids outside the vocabulary",
                    param=param,
                    got=wrong[:5],
                    expected=f"integers from 0 to {vocab - 1}",
                )
        for param, wanted in (
            ("logprobs", params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
        ):
            if wanted is not None and wanted > most:
                raise RequestError(
                    f"{param} asks for too many alternatives",
                    param=param,
                    got=wanted,
                    expected=f"at most {most}",
                    remedy="start with a larger --max-logprobs",
                )
        if params.stop and self._codec is None:
            raise RequestError(
                "stop strings need a tokenizer",
                param="stop",
                got=params.stop,
                expected="no stop strings: this model has no tokenizer",
                remedy="use stop_token_ids",
            )
        if any(not s for s in params.stop):
            raise RequestError(
                "empty stop string", param="stop", got=params.stop, expected="non-empty strings"
            )


def _outside(ids: Iterable[object], vocab: int) -> list[object]:
    # ids come from JSON as well: `1.0` and `true` are no token ids
    return [i for i in ids if type(i) is not int or not 0 <= i < vocab]


class _Failed:
    """A step that could not even be submitted."""

    done = True

    def __init__(self, problem: Exception):
        self._problem = problem

    def results(self) -> Sequence[Sampled]:
        """Say so."""
        raise self._problem


def _checked(result: Sampled) -> Sampled:
    """A result whose prompt log-probabilities are not finite is an error, as for drawn tokens."""
    if all(math.isfinite(r.logprob) for r in result.prompt_logprobs if r is not None):
        return result
    return Sampled(None, error=NOT_FINITE)
