"""Errors as OpenAI's clients expect them: ``{"error": {message, type, param, code}}``."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from minuet.engine.client import EngineError
from minuet.errors import MinuetError, RequestError
from minuet.log import get_logger

log = get_logger(__name__)

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class OverloadError(MinuetError):
    """The queue is full.

    Attributes:
        retry_after_s: when to try again.
    """

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownModelError(MinuetError):
    """The request names a model that is not served."""


class GenerationError(MinuetError):
    """The engine ended a request because of its own fault, such as non-finite logits."""


def body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The error object."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def response(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The error object as a response."""
    content = json.dumps(body(status, message, param)).encode()
    return Response(content, status, headers, "application/json")


def status_of(problem: Exception) -> tuple[int, str | None]:
    """(HTTP status, name of the field) of an exception."""
    match problem:
        case RequestError():
            return 400, problem.param
        case OverloadError():
            return 429, None
        case UnknownModelError():
            return 404, "model"
        case EngineError():
            return 503, None
        case TimeoutError():
            return 408, None
    return 500, None


def of(problem: Exception) -> Response:
    """The response for an exception raised before anything was sent."""
    status, param = status_of(problem)
    headers = {}
    if isinstance(problem, OverloadError):
        headers["retry-after"] = str(problem.retry_after_s)
    if status == 500 and not isinstance(problem, GenerationError):
        log.error("request failed", exc_info=problem)
        return response(500, "internal error")
    return response(status, str(problem), param, headers)


async def on_problem(_: Request, problem: Exception) -> Response:
    """Handler of every exception of ours."""
    return of(problem)


async def on_http(_: Request, problem: Exception) -> Response:
    """Handler of what the framework raises."""
    assert isinstance(problem, HTTPException)
    message = str(problem.detail) or HTTPStatus(problem.status_code).phrase
    return response(problem.status_code, message, headers=problem.headers)


async def on_invalid(_: Request, problem: Exception) -> Response:
    """Handler of bodies that do not fit the schema: names the field, and all others at fault."""
    assert isinstance(problem, RequestValidationError)
    found = [_field(error) for error in problem.errors()]
    message = "; ".join(f"{name}: {text}" if name else text for name, text in found[:8])
    return response(400, message, found[0][0] or None if found else None)


def _is_field(part: str) -> bool:
    """Whether it names a field: branches of a union, named after types, do not."""
    return part[:1].islower() and "[" not in part and part not in ("str", "int", "float", "bool")


def _field(error: Mapping[str, Any]) -> tuple[str, str]:
    place = [part for part in error.get("loc", ()) if part not in ("body", "query")]
    text = str(error.get("msg", "is invalid"))
    if error.get("type") == "extra_forbidden":
        text = "this server does not know this field"
    elif error.get("type") == "json_invalid":
        return "", f"the body is not JSON: {error.get('ctx', {}).get('error', '')}"
    names = [str(part) for part in place if isinstance(part, int) or _is_field(part)]
    return ".".join(names), text
