"""What flows through the engine: requests in, steps across, outputs out. Plain data, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from minuet.errors import RequestError

# Shares and draws are named tuples: one of each is made per row and step, and a frozen dataclass
# costs three times as much to make.
#
# S  sequences of a step;  T  query tokens of a step;  V  vocabulary

NOT_FINITE = "the model produced non-finite logits for this request"


class GrammarState(Protocol):
    """Where a request stands in the grammar its answer must keep to; see ``engine/grammar.py``."""

    def allowed(self, ahead: Sequence[int] = ()) -> Any:
        """What may come after ``ahead``: [words] int32, a bit per token; None: anything."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by a drawn token; False if the grammar does not allow it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request wants its tokens drawn; names and defaults as the OpenAI API and vLLM.

    Attributes:
        max_tokens: output tokens at most.
        min_tokens: no stop of any kind before this many output tokens.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        presence_penalty: subtracted once from the logit of every token of the output so far.
        frequency_penalty: subtracted once per occurrence in the output so far.
        repetition_penalty: logits of tokens in prompt or output are divided (positive) or
            multiplied (negative) by it (Keskar et al. 2019, arXiv 1909.05858).
        logit_bias: token id to an amount added to its logit.
        stop_token_ids: end the request when one is drawn; kept in ``token_ids``, not in the text.
        stop: end the request when one of these strings appears in the text; cut from the text.
        ignore_eos: the model's end-of-sequence tokens do not end the request.
        seed: makes the draw reproducible, whoever else is in the batch; None: the engine's seed
            and the request's number.
        logprobs: alternatives reported per output token besides the chosen one; None: none at all.
        prompt_logprobs: the same for prompt tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, None)
        _check_range("top_k", self.top_k, 0, None)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, None, open_low=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 0, None)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on which tokens came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _check_range(
    name: str, value: float, low: float, high: float | None, *, open_low: bool = False
) -> None:
    # `not (a <= b)` instead of `a > b`: NaN must fail too
    below = not (value > low) if open_low else not (value >= low)
    if below or (high is not None and not (value <= high)):
        text = f"> {low}" if open_low else f">= {low}"
        if high is not None:
            text += f" and <= {high}"
        raise RequestError(f"{name} is out of range", param=name, got=value, expected=text)


class FinishReason(Enum):
    """Why a request ended. The first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its natural log-probability under the model, before temperature and filters.
        rank: 1 for the most likely token.
        top: the most likely tokens and their log-probabilities, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Request:
    """One request and everything the scheduler knows of it.

    Tokens in the cache are always ``all_token_ids[:num_computed]``: the invariant that makes
    preemption, prefix hits and rollback the same operation - setting ``num_computed``.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one token.
        params: how to draw.
        arrival: order of admission; kept over preemption, so that a preempted request is first.
        output_token_ids: tokens drawn so far.
        draft_token_ids: guesses at what follows, to be verified by the next step; never shown.
        page_ids: pages held, in position order: entry i holds positions ``i * page_size ..``.
        num_computed: tokens whose keys and values are in the pages.
        num_cached: prompt tokens found in the prefix cache at first admission.
        num_preemptions: how often the pages were taken away.
        finish_reason: set once.
        error: what went wrong when ``finish_reason`` is ERROR.
        stop_reason: the token id or string that ended it.
        eos_token_ids: the model's end-of-sequence tokens.
        grammar: what the answer must keep to; None: anything.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    stop_reason: int | str | None = None
    eos_token_ids: tuple[int, ...] = ()
    grammar: GrammarState | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end the request when drawn."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos else own | frozenset(self.eos_token_ids)

    @property
    def needs_history(self) -> bool:
        """Whether a draw needs the tokens before it on the host, and not only in the cache."""
        return self.grammar is not None or self.params.penalised

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together; drafts are not counted."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Tokens when it runs to its length limit."""
        return len(self.prompt_token_ids) + self.params.max_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions ``start .. stop - 1``, over prompt, output and drafts."""
        split, known = len(self.prompt_token_ids), self.num_tokens
        head = list(self.prompt_token_ids[start : min(stop, split)])
        head += self.output_token_ids[max(start - split, 0) : max(stop - split, 0)]
        return head + self.draft_token_ids[max(start - known, 0) : max(stop - known, 0)]


class ScheduledRequest(NamedTuple):
    """The share of one request in a step.

    Attributes:
        request: whose.
        start: first position computed in this step; everything before is in the cache.
        num_tokens: tokens computed, ``start .. start + num_tokens - 1``.
        samples: whether this step reaches the request's last known token and draws a new one;
            drafts are verified in the rows after that token.
        follows: set when its single token is not known yet, as the step before has still to draw
            it: the index, in that step's ``scheduled``, of the share that does.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    follows: int | None = None

    @property
    def num_output(self) -> int:
        """Output tokens before the one that follows the last known token, by position.

        One more than the request has when that token is still to be drawn by the step before.
        """
        known = self.start + self.num_tokens - len(self.request.draft_token_ids)
        return known - len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """What to run next: requests with their token ranges, and the tokens they stand for.

    Attributes:
        scheduled: decoding requests first, then prefills, each by arrival.
        preempted: requests whose pages were taken to make room.
        num_decodes: ``scheduled[:num_decodes]`` are the decoding ones: prompt computed, and no more
            tokens each than one plus the drafts a request may have.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()
    num_decodes: int = 0

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(s.num_tokens for s in self.scheduled)


class Sampled(NamedTuple):
    """What a step drew for one request.

    Attributes:
        token_id: the token; None when the logits were not finite, and when the step did not
            reach the request's last known token.
        logprobs: when asked for.
        prompt_logprobs: of the prompt positions this step computed, when asked for.
        error: set when the request must end.
        num_accepted: drafts accepted before ``token_id``, which then follows the last of them.
        accepted_logprobs: one entry per accepted draft, when asked for.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    error: str = ""
    num_accepted: int = 0
    accepted_logprobs: tuple[TokenLogprobs | None, ...] = ()


class Pending(Protocol):
    """A step that an executor took; what it draws, sooner or later."""

    @property
    def done(self) -> bool:
        """Whether :meth:`results` would return, or raise, at once."""
        ...

    def results(self) -> Sequence[Sampled]:
        """One entry per scheduled request; waits until the device has drawn them.

        Raises:
            Exception: the step failed; none of its results count.
        """
        ...


@dataclass(frozen=True, slots=True)
class Answered:
    """A step whose results were there when it was submitted.

    Attributes:
        sampled: one entry per scheduled request.
    """

    sampled: Sequence[Sampled]

    @property
    def done(self) -> bool:
        """Always."""
        return True

    def results(self) -> Sequence[Sampled]:
        """One entry per scheduled request."""
        return self.sampled


class Executor(Protocol):
    """Carries steps out in the order they were submitted: a runner, or a fake in tests."""

    @property
    def depth(self) -> int:
        """Steps it takes beyond the one that runs.

        0: results are there when :meth:`submit` returns. 1: the device runs one step while the
        host prepares and submits the next.
        """
        ...

    def submit(self, step: Step) -> Pending:
        """Start a step. Whatever it needs of the requests it reads before it returns.

        The step before may have no results yet: a share that ``follows`` one of it takes its input
        token from there, on the device.
        """
        ...
