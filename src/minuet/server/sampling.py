"""Request fields to what the engine takes; what cannot be honoured is refused with its name."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from minuet.engine.ipc import GrammarSpec, Submit
from minuet.engine.types import SamplingParams
from minuet.errors import RequestError
from minuet.models.tokenizer import GenerationDefaults
from minuet.server.protocol import ResponseFormat, SamplingFields, StructuredOutputs
from minuet.server.schemas import check_tag, dump, schema_text

# beyond these, logits in single precision overflow
_SINGLE_PRECISION = (("temperature", 1e-4, 1e4), ("repetition_penalty", 1e-3, 1e3))
_MAX_SCHEMA_BYTES = 128 * 1024


def check_unsupported(fields: SamplingFields) -> None:
    """Refuse what no part of this server does.

    Raises:
        RequestError: names the field.
    """
    if fields.priority not in (None, 0):
        _refuse("priority", fields.priority, "0: requests are served first come, first served")
    for name in ("cache_salt", "request_id"):
        if getattr(fields, name) is not None:
            _refuse(name, getattr(fields, name), "no value: this server does not have it")
    if fields.service_tier not in (None, "auto", "default"):
        _refuse("service_tier", fields.service_tier, "auto or default")
    if fields.add_special_tokens:
        _refuse("add_special_tokens", True, "false: nothing is ever added to a prompt")
    if fields.stream_options is not None and not fields.stream:
        _refuse("stream_options", "set", "only with stream: true")
    if fields.stream and fields.prompt_logprobs is not None:
        _refuse("prompt_logprobs", fields.prompt_logprobs, "only without stream")


def _refuse(param: str, got: object, expected: str) -> None:
    raise RequestError(f"{param} cannot be honoured", param=param, got=got, expected=expected)


def params_of(
    fields: SamplingFields,
    defaults: GenerationDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """How to draw.

    Args:
        fields: the request.
        defaults: of the model, for what the request leaves out.
        max_tokens: output tokens at most.
        logprobs: alternatives per output token.
        prompt_logprobs: alternatives per prompt token.

    Raises:
        RequestError: a value out of its range, by name.
    """
    chosen: dict[str, Any] = {"max_tokens": max_tokens}
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(fields, name)
        chosen[name] = getattr(defaults, name) if value is None else value
    for name in (
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "seed",
    ):
        chosen[name] = getattr(fields, name)
    for name, low, high in _SINGLE_PRECISION:
        if chosen[name] and not low <= chosen[name] <= high:
            _refuse(name, chosen[name], f"from {low:g} to {high:g}")
    if chosen["top_k"] == -1:
        chosen["top_k"] = 0
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    chosen |= {
        "stop": tuple(stop),
        "stop_token_ids": tuple(fields.stop_token_ids or ()),
        "logit_bias": _bias(fields.logit_bias or {}),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    # what nobody says is the dataclass's own default
    return SamplingParams(**{name: v for name, v in chosen.items() if v is not None})


def seeded(params: SamplingParams, number: int) -> SamplingParams:
    """The same for the ``number``-th of n choices: equal seeds would give equal answers."""
    if params.seed is None or number == 0:
        return params
    return replace(params, seed=(params.seed + number * 0x9E3779B97F4A7C15) % 2**63)


def with_params(submit: Submit, params: SamplingParams) -> Submit:
    """The same request, drawn another way."""
    return msgspec.structs.replace(submit, params=params)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not key.isdecimal() or len(key) > 10 or not -100.0 <= value <= 100.0:
            raise RequestError(
                "logit_bias maps token ids to amounts",
                param="logit_bias",
                got={key: value},
                expected="ids as decimal strings, amounts from -100 to 100",
            )
        bias[int(key)] = value
    return bias


# --- structured output ---------------------------------------------------------------------------


def grammar_of(fields: SamplingFields, start_after: int | None) -> GrammarSpec | None:
    """What the answer must look like; None for free text.

    Args:
        fields: the request.
        start_after: the token after which the grammar applies; None: from the first.

    Raises:
        RequestError: a schema that would not be enforced in full, or two demands at once.
    """
    found = [
        *_of_response_format(fields.response_format),
        *_of_structured_outputs(fields.structured_outputs),
    ]
    if not found:
        return None
    if len(found) > 1:
        _refuse("structured_outputs", [param for _, _, param in found], "one demand per request")
    if fields.ignore_eos:
        _refuse("ignore_eos", True, "false: a structured answer ends where its grammar ends")
    kind, source, param = found[0]
    if len(source.encode(errors="replace")) > _MAX_SCHEMA_BYTES:
        _refuse(param, f"{len(source)} characters", f"at most {_MAX_SCHEMA_BYTES} bytes")
    return GrammarSpec(kind, source, param, start_after)


def _of_response_format(wanted: ResponseFormat | None) -> list[tuple[str, str, str]]:
    param = "response_format"
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("json_object", "", param)]
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise RequestError("no schema", param=param, got=None, expected="json_schema")
        return [("json_schema", schema_text(wanted.json_schema.schema_, param), param)]
    if wanted.format is None:
        raise RequestError("no structural tag", param=param, got=None, expected="format")
    tag = {"type": "structural_tag", "format": wanted.format}
    check_tag(tag, param)
    return [("structural_tag", dump(tag, param), param)]


def _of_structured_outputs(wanted: StructuredOutputs | None) -> list[tuple[str, str, str]]:
    if wanted is None:
        return []
    param, found = "structured_outputs", []
    if wanted.json_ is not None:
        found.append(("json_schema", schema_text(_parsed(wanted.json_, param), param), param))
    if wanted.json_object:
        found.append(("json_object", "", param))
    if wanted.regex is not None:
        found.append(("regex", wanted.regex, param))
    if wanted.choice is not None:
        if not wanted.choice:
            _refuse(param, [], "at least one choice")
        words = " | ".join(dump(word, param) for word in wanted.choice)
        found.append(("ebnf", f"root ::= {words}", param))
    if wanted.grammar is not None:
        found.append(("ebnf", wanted.grammar, param))
    if wanted.structural_tag is not None:
        check_tag(_parsed(wanted.structural_tag, param), param)
        found.append(("structural_tag", wanted.structural_tag, param))
    if not found:
        _refuse(param, "nothing", "json, json_object, regex, choice, grammar or structural_tag")
    return found


def _parsed(schema: dict[str, Any] | str, param: str) -> Any:
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        raise RequestError("the schema is not JSON", param=param) from None
