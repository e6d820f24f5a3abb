"""Routes beside generation: models, tokens, health, metrics, the plan, and the page."""

import asyncio
import json
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from minuet import __version__
from minuet.engine.client import State
from minuet.errors import RequestError
from minuet.server import errors
from minuet.server.conversation import template_message
from minuet.server.logprobs import token_text
from minuet.server.protocol import DetokenizeRequest, TokenizeRequest
from minuet.server.service import Service, check_text
from minuet.server.sse import json_response

_PAGE = resources.files("minuet.server") / "page"
_PAGE_TYPES = {"app.js": "text/javascript", "style.css": "text/css"}
# the page loads nothing from elsewhere and runs nothing inline
_PAGE_POLICY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def add_routes(app: FastAPI, service: Service) -> None:
    """Put them all on an application."""
    router = APIRouter()
    _add_models(router, service)
    _add_tokens(router, service)
    _add_health(router, service)
    _add_figures(router, service)
    _add_page(router)
    app.include_router(router)


def _add_models(router: APIRouter, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "minuet",
            "root": service.options["model"],
            "parent": None,
            "max_model_len": service.client.ready.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(card(service.check_model(name)))

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})


def _add_tokens(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        tokenizer = service.require_tokenizer("prompt")
        ids = await _ids_of(service, body)
        found: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": service.client.ready.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            found["token_strs"] = [token_text(tokenizer, i) for i in ids]
        return json_response(found)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        tokenizer = service.require_tokenizer("tokens")
        vocab = service.client.ready.vocab_size
        if wrong := [i for i in body.tokens if i >= vocab]:
            raise RequestError(
                "token ids outside the vocabulary",
                param="tokens",
                got=wrong[:5],
                expected=f"integers from 0 to {vocab - 1}",
            )
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return json_response(_tokenizer_info(service))


async def _ids_of(service: Service, body: TokenizeRequest) -> list[int]:
    if body.add_special_tokens:
        raise RequestError(
            "nothing is ever added to a prompt",
            param="add_special_tokens",
            got=True,
            expected="false",
        )
    if (body.prompt is None) is (body.messages is None):
        raise RequestError("either a text or a conversation", param="prompt", expected="one of two")
    if body.prompt is not None:
        return await service.encode(body.prompt, "prompt")
    if service.template is None:
        raise RequestError("this model has no chat template", param="messages", expected="prompt")
    messages = [template_message(message, i) for i, message in enumerate(body.messages or ())]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    kwargs = {**service.template_kwargs, **(body.chat_template_kwargs or {})}
    check_text(json.dumps([messages, tools, kwargs], ensure_ascii=False), "messages")
    rendered = await asyncio.to_thread(
        service.template.render,
        messages,
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
    )
    return rendered.token_ids


def _tokenizer_info(service: Service) -> dict[str, Any]:
    """What ``tokenizer_config.json`` says, and the template in force."""
    service.require_tokenizer("tokenizer_info")
    folder = service.source.folder
    path = folder / "tokenizer_config.json" if folder else None
    config: dict[str, Any] = {}
    if path is not None and path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("added_tokens_decoder", None)
    config["chat_template"] = service.template.source if service.template else None
    return config


def _add_health(router: APIRouter, service: Service) -> None:
    client = service.client

    @router.get("/health")
    async def health() -> Response:
        """200 while the engine's loop turns, idle or busy; 503 when it is dead, stuck, starting."""
        state = client.state
        content = {
            "status": state.value,
            "step_age_s": round(client.step_age_s, 3),
            "heartbeat_age_s": round(client.heartbeat_age_s, 3),
            "ranks": [{"rank": 0, "pid": client.pid, "status": state.value}],
            "restarts": client.restarts,
        }
        if client.death_reason:
            content["last_failure"] = client.death_reason
        return json_response(content, 200 if state in (State.IDLE, State.BUSY) else 503)

    @router.get("/ready")
    async def ready() -> Response:
        """200 when a request sent now would be served: not while draining."""
        is_ready = client.serves and not service.draining
        content = {"ready": is_ready, "status": client.state.value, "draining": service.draining}
        return json_response(content, 200 if is_ready else 503)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await client.reset_prefix_cache()
        return Response(status_code=200)


def _add_figures(router: APIRouter, service: Service) -> None:
    client = service.client

    @router.get("/metrics")
    async def metrics() -> Response:
        service.metrics.refresh()
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/explain")
    async def explain() -> Response:
        """The plan as served: what ``minuet explain --json`` prints, plus start-up times."""
        ready = client.ready
        return json_response({**ready.report, "timings_s": ready.timings_s})

    @router.get("/stats")
    async def stats() -> Response:
        """What the page shows: the last minute, and the engine now."""
        window, engine = service.metrics.window, client.stats
        totals = service.metrics.totals()
        return json_response(
            {
                "model": service.names[0],
                "state": client.state.value,
                "step_age_s": client.step_age_s,
                "tokens_per_s": window.rate("tokens", 5.0),
                "running": engine.num_running,
                "waiting": engine.num_waiting,
                "pages": {
                    "used": engine.used_pages,
                    "cached": engine.cached_pages,
                    "total": engine.num_pages,
                },
                "prefix": {"queries": totals.prefix_queries, "hits": totals.prefix_hits},
                "preemptions": totals.num_preemptions,
                "after_ready": {
                    "compilations": totals.compilations,
                    "growth_bytes": engine.growth_bytes,
                },
                "bandwidth": {
                    "achieved": engine.bandwidth,
                    "limit": client.ready.report.get("arch", {}).get("bandwidth_bytes_per_s"),
                },
                "latency_s": {name: window.percentiles(name) for name in ("ttft", "itl", "e2e")},
                "restarts": client.restarts,
            }
        )


def _add_page(router: APIRouter) -> None:
    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        content = (_PAGE / "index.html").read_text(encoding="utf-8")
        return Response(content, media_type="text/html", headers=_PAGE_POLICY)

    @router.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in _PAGE_TYPES:
            return errors.response(404, "no such page")
        content = (_PAGE / name).read_text(encoding="utf-8")
        return Response(content, media_type=_PAGE_TYPES[name], headers=_PAGE_POLICY)
