"""Which JSON schemas are enforced in full.

The others are refused: an answer that only seems to keep to its schema is worse than none.
"""

import json
from typing import Any, NoReturn

from minuet.errors import RequestError

_MAX_DEPTH = 48

# keywords that the grammar compiler enforces, and those that demand nothing
_ENFORCED = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "prefixItems"),
        *("minItems", "maxItems", "enum", "const", "anyOf", "$ref", "$defs", "definitions"),
        *("minLength", "maxLength", "pattern", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum"),
    }
)
_SAYS_NOTHING = frozenset(
    {
        *("title", "description", "default", "examples", "$schema", "$id", "$comment"),
        *("deprecated", "readOnly", "writeOnly"),
    }
)
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_PLAIN_ESCAPES = frozenset("dw.-+*?()[]{}|^$/")


def schema_text(schema: Any, param: str) -> str:
    """A schema as text, every keyword of which is enforced.

    Raises:
        RequestError: names the keyword that is not, or the size that is too much.
    """
    check_schema(schema, param)
    return dump(schema, param)


def dump(value: Any, param: str) -> str:
    """JSON text.

    Raises:
        RequestError: numbers that JSON does not have.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise RequestError("not JSON", param=param, expected="finite numbers") from None


def check_tag(value: Any, param: str, depth: int = 0) -> None:
    """The schemas within a structural tag are held to the same rule.

    Raises:
        RequestError: one of them is not enforced in full.
    """
    if depth > _MAX_DEPTH:
        _refuse(param, f"{depth} levels", f"at most {_MAX_DEPTH}")
    if isinstance(value, dict):
        for word, part in value.items():
            if word in ("json_schema", "schema") and isinstance(part, dict):
                check_schema(part, param)
            else:
                check_tag(part, param, depth + 1)
    elif isinstance(value, list):
        for part in value:
            check_tag(part, param, depth + 1)


def check_schema(schema: Any, param: str, depth: int = 0) -> None:
    """Every keyword of the schema is enforced.

    Raises:
        RequestError: one is not, or it is no schema.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        _refuse(param, type(schema).__name__, "a JSON schema: an object")
    if depth > _MAX_DEPTH:
        _refuse(param, f"{depth} levels", f"at most {_MAX_DEPTH}")
    for word in schema:
        if word not in _ENFORCED and word not in _SAYS_NOTHING:
            _refuse(param, word, "only " + ", ".join(sorted(_ENFORCED)))
    if "pattern" in schema:
        _check_pattern(schema, param)
    if str(schema.get("$ref", "#")).partition("/")[0] != "#":
        _refuse(param, schema["$ref"], "references into the schema itself")
    for part in _parts(schema):
        check_schema(part, param, depth + 1)


def _parts(schema: dict[str, Any]) -> list[Any]:
    found = [schema[word] for word in _SINGLE if word in schema]
    for word in _MAPS:
        if isinstance(schema.get(word), dict):
            found += schema[word].values()
    for word in _LISTS:
        if isinstance(schema.get(word), list):
            found += schema[word]
    return found


def _check_pattern(schema: dict[str, Any], param: str) -> None:
    """The compiler puts what a pattern matches between quotes as it is, without escapes.

    So a pattern must not be able to match a quote or a backslash: no dot, no negated class, no
    class that includes them.
    """
    pattern = schema["pattern"]
    if "minLength" in schema or "maxLength" in schema:
        _refuse(param, "pattern with a length", "the length as part of the pattern")
    if not isinstance(pattern, str) or not _never_quotes(pattern):
        _refuse(param, pattern, "a pattern that cannot match a quote or a backslash")


def _never_quotes(pattern: str) -> bool:
    in_class, at = False, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            if pattern[at + 1 : at + 2] not in _PLAIN_ESCAPES or at + 1 >= len(pattern):
                return False
            at += 2
            continue
        if char == '"' or (char == "." and not in_class) or ord(char) < 0x20:
            return False
        if char == "[" and not in_class:
            if pattern[at + 1 : at + 2] == "^":
                return False
            in_class = True
        elif char == "]":
            in_class = False
        elif in_class and pattern[at + 1 : at + 2] == "-" and pattern[at + 2 : at + 3] not in "]":
            low, high = char, pattern[at + 2]
            if any(low <= banned <= high for banned in '"\\') or high == "\\":
                return False
        at += 1
    return True


def _refuse(param: str, got: object, expected: str) -> NoReturn:
    raise RequestError("this cannot be enforced in full", param=param, got=got, expected=expected)
