"""What the server and the engine process say to each other: msgpack over two ZeroMQ pipes.

Both processes come from the same source tree, so messages carry no version; they are arrays, read
by position. Times are ``time.perf_counter`` seconds, which the processes of one machine share.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from minuet.config import Options, Source
from minuet.engine.types import SamplingParams, TokenLogprobs
from minuet.settings import BY_NAME


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must look like.

    Attributes:
        kind: json_schema, json_object, regex, ebnf or structural_tag.
        source: the schema (JSON), pattern, grammar or tag (JSON); empty for json_object.
        param: the request field it came from.
        start_after: the grammar applies after this token; None: from the first token.
    """

    kind: str
    source: str
    param: str
    start_after: int | None = None


# --- to the engine -------------------------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True, array_like=True, tag="configure"):
    """The first message: what to start.

    Attributes:
        values: the options, as parsed.
        sources: where each came from.
        factory: ``module:function`` that makes the engine from options.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    factory: str

    @classmethod
    def of(cls, options: Options, factory: str) -> "Configure":
        """The message for these options."""
        sources = {name: source.value for name, source in options.sources.items()}
        # keys are the server's business alone
        return cls({**options.values, "api_key": ()}, sources, factory)

    def options(self) -> Options:
        """The options again; lists become the tuples they were."""
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.values.items()
            if name in BY_NAME
        }
        return Options(values, {name: Source(text) for name, text in self.sources.items()})


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Serve this request; answered by Accepted or Rejected."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    grammar: GrammarSpec | None = None
    skip_special_tokens: bool = True
    keep_token_ids: tuple[int, ...] = ()


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Nobody waits for these any more; unknown ids are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Forget every cached prefix; answered by Done."""

    call_id: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End the process."""


# --- from the engine -----------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Start-up is done.

    Attributes:
        pid: of the engine process.
        max_model_len: prompt and output tokens of one request, that also fit the pages.
        vocab_size: token ids are below it.
        num_pages: KV pages that requests can use.
        settings: rows (setting, value, source).
        report: the plan as ``minuet explain --json`` shows it; empty without a plan.
        timings_s: seconds per start-up stage.
    """

    pid: int
    max_model_len: int
    vocab_size: int
    num_pages: int
    settings: list[tuple[str, str, str]]
    report: dict[str, Any]
    timings_s: dict[str, float]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Start-up failed; the process ends."""

    message: str
    exit_code: int


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The request is in the queue."""

    request_id: str


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The request can never be served as asked."""

    request_id: str
    message: str
    param: str


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What is new of one request.

    Attributes:
        request_id: whose.
        token_ids: new tokens.
        text: new text that is certain.
        logprobs: one per new token, when asked for.
        prompt_logprobs: of the whole prompt, once, when asked for.
        finish_reason: set in the last one.
        stop_reason: token id or string that ended it.
        error: what went wrong when ``finish_reason`` is error.
        num_cached_tokens: prompt tokens found in the prefix cache.
        arrived_s: when the engine took it.
        scheduled_s: when it was first part of a step; None before.
        first_token_s: when its first token was drawn; None before.
        finished_s: when it ended; None before.
    """

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str
    num_cached_tokens: int
    arrived_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float | None


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A step ran.

    Attributes:
        deltas: one per request that has something new.
        num_tokens: query tokens of the step; 0 when only ends are reported.
    """

    deltas: list[Delta]
    num_tokens: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Answer to a call.

    Attributes:
        call_id: of the call.
        error: empty if it worked.
    """

    call_id: int
    error: str = ""


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's counters and gauges.

    Attributes:
        num_running: requests in the batch.
        num_waiting: requests in the queue.
        used_pages: KV pages held by requests.
        cached_pages: KV pages held by nobody but kept for their content.
        num_pages: KV pages in all.
        prefix_queries: prompt tokens looked up since start.
        prefix_hits: prompt tokens found since start.
        num_preemptions: since start.
        num_steps: since start.
        nonfinite: requests ended because their logits were not finite.
        failed_steps: steps that raised.
        compilations: kernels compiled after ready.
        growth_bytes: device memory taken after ready.
        bandwidth: bytes/s that the last decode step must have moved; 0 before the first.
    """

    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    num_pages: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    nonfinite: int = 0
    failed_steps: int = 0
    compilations: int = 0
    growth_bytes: int = 0
    bandwidth: float = 0.0


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Sent several times a second by a thread of its own, whatever the loop does.

    Attributes:
        step_age_s: how long the step under way has been running; 0 between steps.
        busy: whether there is work.
        stats: as of the end of the last step.
    """

    step_age_s: float
    busy: bool
    stats: Stats


type_of_request = Configure | Submit | Abort | ResetPrefixCache | Stop
type_of_report = Ready | Failed | Accepted | Rejected | StepDone | Done | Heartbeat

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(type_of_request).decode
decode_report = msgspec.msgpack.Decoder(type_of_report).decode


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with nothing but what msgpack knows; for reports from other modules."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values, enc_hook=str))
    return found
