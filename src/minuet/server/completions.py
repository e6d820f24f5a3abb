"""``/v1/completions``: prompts in, continuations out; also scores texts by log-probabilities."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minuet.engine.ipc import Delta, Submit
from minuet.engine.types import SamplingParams, TokenLogprobs
from minuet.errors import RequestError
from minuet.server import logprobs as shapes
from minuet.server import sampling, sse
from minuet.server.errors import GenerationError
from minuet.server.protocol import CompletionRequest
from minuet.server.service import Generation, Job, Service


@dataclass(slots=True)
class _Choice:
    """One continuation so far.

    Attributes:
        index: place in the answer.
        prompt: its prompt, in tokens.
        echo: text of the prompt to put in front; empty without echo.
        streamed: tokens already given out; ``token_ids`` are those after.
        offset: characters given out.
    """

    index: int
    prompt: list[int]
    echo: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reports: list[TokenLogprobs] = field(default_factory=list)
    prompt_reports: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    began: bool = False
    offset: int = 0
    streamed: int = 0


class Completions:
    """One request.

    Args:
        service: the served model.
        request: as it came.

    Raises:
        RequestError: a field that cannot be honoured.
        UnknownModelError: another model.
    """

    def __init__(self, service: Service, request: CompletionRequest):
        self._service, self._request = service, request
        self._model = service.check_model(request.model)
        sampling.check_unsupported(request)
        if request.suffix:
            raise RequestError(
                "this model does not fill in", param="suffix", got=request.suffix, expected="none"
            )
        self._n = request.n or 1
        if request.best_of not in (None, self._n):
            raise RequestError(
                "candidates are not ranked",
                param="best_of",
                got=request.best_of,
                expected=f"n, {self._n}",
            )
        if request.echo and request.stream and request.logprobs is not None:
            raise RequestError(
                "prompt log-probabilities do not stream",
                param="echo",
                got=True,
                expected="echo with logprobs only without stream",
            )
        asked = 16 if request.max_tokens is None else request.max_tokens
        # scoring a text alone: one token is drawn, and left out of the answer
        self._drop_output = bool(request.echo) and asked == 0
        self._params = sampling.params_of(
            request,
            service.defaults,
            max_tokens=1 if self._drop_output else asked,
            logprobs=request.logprobs,
            prompt_logprobs=self._prompt_logprobs(),
        )
        self._grammar = sampling.grammar_of(request, None)
        self._created = int(time.time())

    def _prompt_logprobs(self) -> int | None:
        request = self._request
        if request.echo and request.logprobs is not None:
            return max(request.logprobs, request.prompt_logprobs or 0)
        return request.prompt_logprobs

    # --- prompts ---------------------------------------------------------------------------------

    async def prepare(self) -> tuple[list[Job], list[_Choice]]:
        """What to generate.

        Raises:
            RequestError: a prompt that cannot be encoded.
        """
        jobs: list[Job] = []
        choices: list[_Choice] = []
        for prompt in self._prompts():
            if isinstance(prompt, str):
                ids, text = await self._service.encode(prompt, "prompt"), prompt
            else:
                ids, text = prompt, self._decoded(prompt) if self._request.echo else ""
            echo = text if self._request.echo else ""
            for number in range(self._n):
                params = sampling.seeded(self._params, number)
                jobs.append(Job(ids, self._submit(params)))
                choices.append(_Choice(len(choices), ids, echo))
        return jobs, choices

    def _prompts(self) -> Sequence[str | list[int]]:
        prompt: Any = self._request.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("no prompt", param="prompt", got=[], expected="at least one")
        one = isinstance(prompt[0], int)
        return [prompt] if one else list(prompt)

    def _submit(self, params: SamplingParams) -> Submit:
        shown = self._request.skip_special_tokens is not False
        return Submit("", [], params, self._grammar, shown)

    def _decoded(self, ids: list[int]) -> str:
        tokenizer = self._service.tokenizer
        return tokenizer.decode(ids, skip_special=False) if tokenizer else ""

    # --- answers ---------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        jobs, choices = await self.prepare()
        async with self._service.generate(jobs, "cmpl") as generation:
            async for batch in generation.batches():
                for number, delta in batch:
                    self._take(choices[number], delta)
        return {
            **self._head(generation),
            "choices": [self._choice(choice) for choice in choices],
            "usage": self._usage(choices),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as events; the first is empty and says that the request was accepted."""
        jobs, choices = await self.prepare()
        async with self._service.generate(jobs, "cmpl") as generation:
            yield b""
            head, options = self._head(generation), self._request.stream_options
            async for batch in generation.batches():
                for number, delta in batch:
                    choice = choices[number]
                    self._take(choice, delta)
                    part = self._part(choice)
                    if part is None:
                        continue
                    content = {**head, "choices": [part]}
                    if options and options.continuous_usage_stats:
                        content["usage"] = self._usage(choices)
                    yield sse.chunk(content)
            if options and options.include_usage:
                yield sse.chunk({**head, "choices": [], "usage": self._usage(choices)})
            yield sse.DONE

    def _head(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": generation.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def _take(self, choice: _Choice, delta: Delta) -> None:
        """Add what is new.

        Raises:
            GenerationError: the engine gave this sequence up.
        """
        if delta.finish_reason == "error":
            raise GenerationError(delta.error)
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.reports += delta.logprobs or ()
        choice.prompt_reports = delta.prompt_logprobs or choice.prompt_reports
        choice.cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            if self._request.include_stop_str_in_output and isinstance(delta.stop_reason, str):
                choice.text += delta.stop_reason
            if self._drop_output:
                choice.text, choice.token_ids, choice.reports = "", [], []
                choice.finish_reason, choice.stop_reason = "length", None

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        request = self._request
        found: dict[str, Any] = {
            "index": choice.index,
            "text": choice.echo + choice.text,
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if request.prompt_logprobs is not None and choice.prompt_reports is not None:
            tokenizer = self._service.tokenizer
            found["prompt_logprobs"] = shapes.prompt_logprobs(tokenizer, choice.prompt_reports)
        if request.return_token_ids:
            found |= {"prompt_token_ids": choice.prompt, "token_ids": choice.token_ids}
        return found

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        top = self._request.logprobs
        if top is None:
            return None
        reports: list[TokenLogprobs | None] = list(choice.reports)
        ids = choice.token_ids
        if self._request.echo:
            reports, ids = [*(choice.prompt_reports or [None]), *reports], choice.prompt + ids
        return shapes.completion_logprobs(self._service.tokenizer, reports, ids, 0, top)

    def _part(self, choice: _Choice) -> dict[str, Any] | None:
        """What a stream says of one step; None: nothing."""
        request = self._request
        text, choice.text = choice.text, ""
        echo = "" if choice.began else choice.echo
        ids, choice.token_ids = choice.token_ids, []
        reports, choice.reports = choice.reports, []
        ended = choice.finish_reason is not None
        said = echo + text
        wants_tokens = request.logprobs is not None or request.return_token_ids
        choice.offset += 0 if choice.began else len(choice.echo)
        is_first, choice.began = not choice.began, True
        choice.streamed += len(ids)
        if not (said or ended or (wants_tokens and ids)):
            return None
        part: dict[str, Any] = {
            "index": choice.index,
            "text": said,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if request.logprobs is not None:
            part["logprobs"] = shapes.completion_logprobs(
                self._service.tokenizer, reports, ids, choice.offset, request.logprobs
            )
            choice.offset += sum(map(len, part["logprobs"]["tokens"]))
        if request.return_token_ids:
            part["token_ids"] = ids
            if is_first:
                part["prompt_token_ids"] = choice.prompt
        return part

    def _usage(self, choices: Sequence[_Choice]) -> dict[str, Any]:
        prompts = choices[:: self._n]
        return usage(
            prompt=sum(len(choice.prompt) for choice in prompts),
            cached=sum(choice.cached_tokens for choice in prompts),
            completion=sum(len(choice.token_ids) + choice.streamed for choice in choices),
        )


def usage(
    *, prompt: int, cached: int, completion: int, reasoning: int | None = None
) -> dict[str, Any]:
    """Token counts as clients read them."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return found
