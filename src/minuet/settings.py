"""Every setting: its name, flags, parser, default and meaning. Nothing here is resolved.

:data:`SETTINGS` is the one list from which flags, settings files, ``docs/flags.md`` and the fields
of :class:`minuet.config.Config` follow. Adding a setting is adding one entry here and one field
there; a test holds the two equal.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from minuet.dtypes import CACHE_DTYPE_CHOICES, COMPUTE_DTYPE_CHOICES
from minuet.errors import ConfigError

AUTO = "auto"

# --- parsers: text (or a JSON/TOML value) to a checked value -------------------------------------


def parse_count(text: object) -> int:
    """A token or item count: ``2048``, ``8k`` = 8,000, ``8K`` = 8,192, ``1M`` = 1,048,576.

    Raises:
        ValueError: anything else, and negative numbers.
    """
    word = str(text).strip().replace(",", "").replace("_", "")
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}.get(word[-1:], 1)
    number = float(word[:-1] if factor != 1 else word) * factor
    if number < 0 or number != int(number):
        raise ValueError(text)
    return int(number)


_BYTE_UNITS = {"": 1, "b": 1}
_BYTE_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
_BYTE_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def parse_bytes(text: object) -> int:
    """A size: ``1073741824``, ``1GiB`` (powers of 1024) or ``1GB`` (powers of 1000).

    Raises:
        ValueError: anything else, and negative numbers.
    """
    word = str(text).strip().lower().replace(",", "").replace("_", "")
    digits = word.rstrip("bikmgt")
    number = float(digits) * _BYTE_UNITS[word[len(digits) :].strip()] if digits else -1.0
    if number < 0:
        raise ValueError(text)
    return int(number)


def _parse_fraction(text: object) -> float:
    value = float(str(text))
    if not 0.0 < value <= 1.0:
        raise ValueError(text)
    return value


def _parse_positive(text: object) -> int:
    value = parse_count(text)
    if value < 1:
        raise ValueError(text)
    return value


def _parse_bool(text: object) -> bool:
    if isinstance(text, bool):
        return text
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
        str(text).lower()
    ]


def _parse_sizes(text: object) -> tuple[int, ...]:
    parts = text if isinstance(text, list | tuple) else str(text).split(",")
    sizes = tuple(sorted({_parse_positive(p) for p in parts}))
    if not sizes:
        raise ValueError(text)
    return sizes


def _parse_names(text: object) -> tuple[str, ...]:
    parts = text if isinstance(text, list | tuple) else str(text).split(",")
    return tuple(name for part in parts if (name := str(part).strip()))


class Secret(str):
    """A text that is not shown: printing gives stars, ``reveal`` the text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "***"

    __repr__ = __str__

    def reveal(self) -> bytes:
        """The text, to compare with."""
        return self.encode()


def _parse_secrets(text: object) -> tuple[Secret, ...]:
    names = [text] if isinstance(text, Secret) else _parse_names(text)
    return tuple(Secret(name) for name in names)


def _parse_json_object(text: object) -> str:
    value = text if isinstance(text, dict) else json.loads(str(text))
    if not isinstance(value, dict):
        raise TypeError(text)
    return json.dumps(value, sort_keys=True)


def _parse_seconds(text: object) -> float:
    value = float(str(text))
    if not 0.0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _parse_text(text: object) -> str:
    return str(text)


# --- the list ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        name: field of :class:`Config`, and key in a settings file.
        flags: command-line spellings; the first is the one shown in messages.
        parse: text to value; raises on what it does not accept.
        default: value when nobody says otherwise; ``auto`` is settled by ``planning.resolve``.
        accepts: accepted forms, for people.
        help: one or two sentences for ``--help`` and ``docs/flags.md``.
        group: heading in ``--help`` and the docs.
        choices: closed set, where there is one.
    """

    name: str
    flags: tuple[str, ...]
    parse: Callable[[object], Any]
    default: Any
    accepts: str
    help: str
    group: str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The spelling shown in messages."""
        return self.flags[0]

    @property
    def is_switch(self) -> bool:
        """Whether it is written ``--x`` / ``--no-x``."""
        return self.parse is _parse_bool

    def checked(self, raw: object) -> Any:
        """The parsed value.

        Raises:
            ConfigError: names the flag, the value and the accepted forms.
        """
        if raw == AUTO and self.default == AUTO:
            return AUTO
        try:
            value = self.parse(raw)
            if self.choices and value not in self.choices:
                raise ValueError(raw)
        except (ValueError, KeyError, TypeError, OverflowError):
            raise ConfigError(
                f"bad value for {self.flag}", got=raw, expected=self.accepts
            ) from None
        return value


def _choice(
    name: str, flag: str, choices: tuple[str, ...], default: str, group: str, text: str
) -> Setting:
    return Setting(name, (flag,), _parse_text, default, ", ".join(choices), text, group, choices)


_SECONDS = "seconds"
_COUNT, _BYTES = "a count (8k = 8,000, 8K = 8,192)", "bytes (512MiB, 4GiB, 1GB)"

DEFAULT_MODEL = "minuet-tiny"
"""The trained model that ships with the package: what runs where nobody names another."""

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "model",
        ("--model",),
        _parse_text,
        DEFAULT_MODEL,
        "a checkpoint folder, a config.json, or the name of a bundled model or a preset",
        "what to serve; also accepted as the first positional argument",
        "model",
    ),
    _choice(
        "load_format",
        "--load-format",
        ("auto", "dummy"),
        "auto",
        "model",
        "`dummy` fills the weights at random: shapes and speed are real, answers are not",
    ),
    _choice(
        "dtype",
        "--dtype",
        COMPUTE_DTYPE_CHOICES,
        AUTO,
        "model",
        "type of weights and activations; auto: what config.json says, float32 on cpu",
    ),
    Setting(
        "max_model_len",
        ("--max-model-len", "--context-length"),
        _parse_positive,
        AUTO,
        _COUNT,
        "longest prompt plus output of one request; auto: the model's, or what the KV pages hold",
        "model",
    ),
    Setting(
        "seed",
        ("--seed", "--random-seed"),
        parse_count,
        0,
        "a count",
        "seed of dummy weights and of requests that bring none",
        "model",
    ),
    Setting(
        "arch",
        ("--arch",),
        _parse_text,
        AUTO,
        "auto or a name of the arch table",
        "decide for this arch; auto: the device found, else cpu",
        "device",
    ),
    _choice(
        "attention_backend",
        "--attention-backend",
        ("auto", "cpu", "triton", "flydsl", "aiter"),
        AUTO,
        "device",
        "use only this backend; auto: the arch's order of preference",
    ),
    Setting(
        "tensor_parallel_size",
        ("--tensor-parallel-size", "-tp", "--tp-size"),
        _parse_positive,
        1,
        "a power of two that divides the query heads",
        "ranks over which heads and experts are split",
        "device",
    ),
    Setting(
        "gpu_memory_utilization",
        ("--gpu-memory-utilization",),
        _parse_fraction,
        0.92,
        "a fraction above 0, at most 1",
        "share of the device's memory for everything: weights, workspace, graphs, KV pages",
        "memory",
    ),
    Setting(
        "kv_cache_memory",
        ("--kv-cache-memory",),
        parse_bytes,
        AUTO,
        _BYTES,
        "bytes of KV pages per rank; auto: what is left of the device, 1 GiB on cpu",
        "memory",
    ),
    Setting(
        "kv_cache_pages",
        ("--kv-cache-pages",),
        _parse_positive,
        AUTO,
        _COUNT,
        "exact number of KV pages; wins over --kv-cache-memory",
        "memory",
    ),
    _choice(
        "kv_cache_dtype",
        "--kv-cache-dtype",
        CACHE_DTYPE_CHOICES,
        AUTO,
        "memory",
        "storage type of K and V; fp8 is the arch's flavour with one scale per token and KV head",
    ),
    _choice(
        "index_kv_cache_dtype",
        "--index-kv-cache-dtype",
        CACHE_DTYPE_CHOICES,
        AUTO,
        "memory",
        "storage type of the index keys, independent of --kv-cache-dtype; auto: the compute dtype",
    ),
    Setting(
        "block_size",
        ("--block-size", "--page-size"),
        _parse_positive,
        AUTO,
        _COUNT,
        "tokens per KV page; auto: the model's sparse block, which it must equal if there is one",
        "memory",
    ),
    Setting(
        "enable_prefix_caching",
        ("--enable-prefix-caching",),
        _parse_bool,
        True,
        "on or off",
        "reuse the pages of a prompt prefix seen before",
        "memory",
    ),
    Setting(
        "index_score_memory",
        ("--index-score-memory",),
        parse_bytes,
        64 * 2**20,
        _BYTES,
        "budget of the block-score buffer; longer steps are scored in chunks of queries",
        "memory",
    ),
    Setting(
        "max_num_seqs",
        ("--max-num-seqs", "--max-running-requests"),
        _parse_positive,
        256,
        _COUNT,
        "requests that decode in one step",
        "scheduler",
    ),
    Setting(
        "max_num_batched_tokens",
        ("--max-num-batched-tokens", "--chunked-prefill-size"),
        _parse_positive,
        2048,
        _COUNT,
        "tokens of one step; longer prompts are prefilled in chunks",
        "scheduler",
    ),
    Setting(
        "num_speculative_tokens",
        ("--num-speculative-tokens",),
        parse_count,
        0,
        "a count; each backend states how many query tokens it covers",
        "drafts verified per request and step; a decode step then has this many + 1 query tokens",
        "scheduler",
    ),
    Setting(
        "cudagraph_capture_sizes",
        ("--cudagraph-capture-sizes",),
        _parse_sizes,
        AUTO,
        "counts separated by commas",
        "decode batch sizes (rungs) that are prepared; auto: powers of two to 64, then steps of 32",
        "scheduler",
    ),
    Setting(
        "enforce_eager",
        ("--enforce-eager",),
        _parse_bool,
        False,
        "on or off",
        "prepare kernels but capture no graphs",
        "scheduler",
    ),
    Setting(
        "batch_invariant",
        ("--batch-invariant",),
        _parse_bool,
        False,
        "on or off",
        "split KV by fixed partitions: a request's result does not depend on its batch-mates",
        "scheduler",
    ),
    _choice(
        "seal",
        "--seal",
        ("warn", "strict"),
        "warn",
        "scheduler",
        "after ready nothing compiles and nothing grows; if it does, warn logs and counts it, "
        "strict fails the step",
    ),
    Setting(
        "max_logprobs",
        ("--max-logprobs",),
        parse_count,
        20,
        _COUNT,
        "largest number of alternatives a request may ask for per token",
        "scheduler",
    ),
    Setting(
        "host",
        ("--host",),
        _parse_text,
        "127.0.0.1",
        "an address or a host name",
        "address to listen on; 0.0.0.0 opens the server to the network",
        "server",
    ),
    Setting(
        "port",
        ("--port",),
        parse_count,
        8000,
        "a port number; 0 takes a free one",
        "port to listen on",
        "server",
    ),
    Setting(
        "api_key",
        ("--api-key",),
        _parse_secrets,
        (),
        "keys separated by commas",
        "bearer tokens of which clients must send one; health, metrics and the page stay open",
        "server",
    ),
    Setting(
        "served_model_name",
        ("--served-model-name",),
        _parse_names,
        (),
        "names separated by commas",
        "names that clients may use for the model, the first is shown; none: the model as given",
        "server",
    ),
    Setting(
        "chat_template",
        ("--chat-template",),
        _parse_text,
        "",
        "a Jinja file",
        "chat template; none: the one of the model",
        "server",
    ),
    Setting(
        "default_chat_template_kwargs",
        ("--default-chat-template-kwargs",),
        _parse_json_object,
        "{}",
        "a JSON object",
        "chat template variables of requests that do not set them",
        "server",
    ),
    Setting(
        "reasoning_parser",
        ("--reasoning-parser",),
        _parse_text,
        "model",
        "model, none, or the name of a parser",
        "sets reasoning apart from the answer; model: the one the model brings",
        "server",
    ),
    Setting(
        "tool_call_parser",
        ("--tool-call-parser",),
        _parse_text,
        "model",
        "model, none, or the name of a parser",
        "reads tool calls out of the answer; model: the one the model brings",
        "server",
    ),
    Setting(
        "enable_auto_tool_choice",
        ("--enable-auto-tool-choice",),
        _parse_bool,
        True,
        "on or off",
        "let requests bring tools; off: they are refused",
        "server",
    ),
    _choice(
        "generation_config",
        "--generation-config",
        ("model", "none"),
        "model",
        "server",
        "sampling defaults: those of the model's generation_config.json, or the API's own",
    ),
    Setting(
        "max_num_queued_reqs",
        ("--max-num-queued-reqs", "--max-queued-requests"),
        _parse_positive,
        1024,
        _COUNT,
        "requests that may wait; further ones are answered 429 at once",
        "server",
    ),
    Setting(
        "max_num_queued_tokens",
        ("--max-num-queued-tokens",),
        _parse_positive,
        8 * 2**20,
        _COUNT,
        "prompt tokens of waiting requests; beyond, answered 429 at once",
        "server",
    ),
    Setting(
        "max_body_size",
        ("--max-body-size",),
        parse_bytes,
        8 * 2**20,
        _BYTES,
        "largest request body; beyond, answered 413 without reading it",
        "server",
    ),
    Setting(
        "body_timeout",
        ("--body-timeout",),
        _parse_seconds,
        30.0,
        _SECONDS,
        "longest time for a client to send its request",
        "server",
    ),
    Setting(
        "write_timeout",
        ("--write-timeout",),
        _parse_seconds,
        60.0,
        _SECONDS,
        "longest time a client may take to read a part of its answer; then the request is aborted",
        "server",
    ),
    Setting(
        "request_timeout",
        ("--request-timeout",),
        _parse_seconds,
        3600.0,
        _SECONDS,
        "longest time a request may take in all; then it is aborted",
        "server",
    ),
    Setting(
        "drain_timeout",
        ("--drain-timeout",),
        _parse_seconds,
        60.0,
        _SECONDS,
        "longest time requests may go on after SIGTERM; then they are aborted",
        "server",
    ),
    Setting(
        "step_timeout",
        ("--step-timeout",),
        _parse_seconds,
        0.0,
        "seconds; 0 decides by arch",
        "a longer step is stuck: requests fail, the engine restarts; 0: 4 s on a GPU, 60 s on cpu",
        "server",
    ),
    Setting(
        "engine_restarts",
        ("--engine-restarts",),
        parse_count,
        3,
        "a count",
        "times within ten minutes that a dead engine is started again before the server gives up",
        "server",
    ),
    Setting(
        "access_log",
        ("--access-log",),
        _parse_bool,
        False,
        "on or off",
        "one line per request to stderr",
        "server",
    ),
)

BY_NAME: Mapping[str, Setting] = MappingProxyType({s.name: s for s in SETTINGS})
