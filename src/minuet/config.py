"""From what was asked for to what is so: :class:`Options`, then :class:`Config`.

:func:`read_options` merges flags over a settings file over the environment over the defaults into
Options, in which a value may still be ``auto``. ``planning.resolve`` turns Options into a Config,
in which nothing is ``auto`` any more, nothing is written after, and every value remembers where
it came from. What settings there are is :mod:`minuet.settings`.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minuet import env
from minuet.dtypes import DType
from minuet.errors import ConfigError
from minuet.settings import BY_NAME, SETTINGS, Secret


class Source(Enum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    FILE = "file"
    ENV = "environment"
    MODEL = "config.json"
    ARCH = "arch"
    PLAN = "plan"  # settled by planning: from the memory that is left
    DEFAULT = "default"


@dataclass(frozen=True)
class Options:
    """What was asked for: parsed and checked one by one, ``auto`` not settled yet.

    Attributes:
        values: one entry per setting.
        sources: where each came from.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, Source]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def read_options(flags: Mapping[str, object], file: Path | None = None) -> Options:
    """Merge flags over a settings file over the environment over the defaults.

    Args:
        flags: setting name to raw value; None means "not given".
        file: TOML or JSON object of setting names (hyphens allowed).

    Raises:
        ConfigError: unknown name, value that does not parse, unreadable file.
    """
    values: dict[str, Any] = {s.name: s.default for s in SETTINGS}
    sources = dict.fromkeys(values, Source.DEFAULT)
    layers = (
        (Source.ENV, _from_environment()),
        (Source.FILE, _from_file(file) if file else {}),
        (Source.FLAG, {k: v for k, v in flags.items() if v is not None}),
    )
    for source, layer in layers:
        for name, raw in layer.items():
            if name not in BY_NAME:
                raise ConfigError(
                    f"unknown setting in {source.value}",
                    got=name,
                    expected=", ".join(sorted(BY_NAME)),
                )
            values[name], sources[name] = BY_NAME[name].checked(raw), source
    return Options(MappingProxyType(values), MappingProxyType(sources))


def _from_environment() -> dict[str, object]:
    seen = env.values()
    named = {"arch": seen.arch, "attention_backend": seen.force_backend}
    return {name: value for name, value in named.items() if value}


def _from_file(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"cannot read settings file {path}",
            got=str(problem),
            expected="a TOML table or a JSON object",
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"settings file {path}", got=type(data).__name__, expected="an object of settings"
        )
    return {str(key).replace("-", "_"): value for key, value in data.items()}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting, settled. Built by ``planning.resolve.resolve`` and never written again.

    Fields are those of :data:`SETTINGS` with ``auto`` replaced by a value; see there for meanings.
    """

    model: str
    load_format: str
    dtype: DType
    max_model_len: int
    seed: int
    arch: str
    attention_backend: str
    tensor_parallel_size: int
    gpu_memory_utilization: float
    kv_cache_memory: int
    kv_cache_pages: int
    kv_cache_dtype: DType
    index_kv_cache_dtype: DType
    block_size: int
    enable_prefix_caching: bool
    index_score_memory: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    cudagraph_capture_sizes: tuple[int, ...]
    enforce_eager: bool
    batch_invariant: bool
    seal: str
    max_logprobs: int
    host: str
    port: int
    api_key: tuple[Secret, ...]
    served_model_name: tuple[str, ...]
    chat_template: str
    default_chat_template_kwargs: str
    reasoning_parser: str
    tool_call_parser: str
    enable_auto_tool_choice: bool
    generation_config: str
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_body_size: int
    body_timeout: float
    write_timeout: float
    request_timeout: float
    drain_timeout: float
    step_timeout: float
    engine_restarts: int
    access_log: bool
    sources: Mapping[str, Source]

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows ``(setting, value, source)`` in the order of :data:`SETTINGS`."""
        rows = []
        for setting in SETTINGS:
            value = getattr(self, setting.name)
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            rows.append((setting.name, shown, self.sources[setting.name].value))
        return rows


def config_field_names() -> tuple[str, ...]:
    """Names of Config's settings, for the test that holds the two lists equal."""
    return tuple(f.name for f in fields(Config) if f.name != "sources")
