"""The HTTP APIs, each in a package of its own, and what is beside them: health, metrics, whose request it is, what becomes of errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import model_cards
from gateway.accounts.accounts import KEY_HEADERS, RATE_HEADERS, Accounts
from gateway.answer import ApiBackend, internal_error
from gateway.anthropic import routes as anthropic
from gateway.anthropic.answers import error_json as anthropic_error
from gateway.compression import Gzip
from gateway.console import routes as console_page
from gateway.console.routes import Console
from gateway.described import SCHEMAS, Json, in_plain_words, one_of, operation, record, refusals
from gateway.exchange import REQUEST_ID_HEADER, error_response, their_id
from gateway.gemini import routes as gemini
from gateway.gemini.answers import error_json as gemini_error
from gateway.gemini.described import ERROR as GOOGLE_ERROR
from gateway.kimi import routes as kimi
from gateway.openai import batches, files, responses
from gateway.openai import routes as openai
from gateway.openai.answers import error_body as openai_error
from gateway.openai.described import ERROR as OPENAI_ERROR
from springtide import __version__
from springtide.errors import InvalidRequest, SpringtideError, Unavailable
from springtide.ids import new_id
from springtide.trace_context import TRACE_HEADER

logger = logging.getLogger(__name__)

TENANT_HEADER = "x-springtide-tenant"
_EXPOSED = [REQUEST_ID_HEADER, TRACE_HEADER, "retry-after", *RATE_HEADERS]
"""Headers that pages of other origins may read."""
_OPEN = frozenset(("/health", "/ready", "/metrics", "/ping", "/version", "/openapi.json", *console_page.OPEN))
"""Paths that anybody may ask for."""
ERRORS = {"OpenAIError": OPENAI_ERROR, "AnthropicError": anthropic.ERROR, "GoogleError": GOOGLE_ERROR}
"""By their names in the API's own description."""
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(backend: ApiBackend, console: Console) -> FastAPI:
    app = FastAPI(title="Springtide", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(SpringtideError, _on_springtide_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(TenantGuard, accounts=backend.accounts)
    app.add_middleware(TrailingSlash)
    if backend.server.gzip:
        app.add_middleware(Gzip, side_thread=backend.side_thread)
    if backend.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=backend.server.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    app.add_middleware(RequestIds)
    for routes in (
        openai.routes,
        responses.routes,
        files.routes,
        batches.routes,
        anthropic.routes,
        gemini.routes,
        kimi.routes,
        model_cards.routes,
    ):
        app.include_router(routes(backend))
    app.include_router(console_page.routes(console))

    @app.get("/health", openapi_extra=operation(record({"status": one_of("ok")})))
    @app.head("/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        """This process is alive."""
        return {"status": "ok"}

    @app.get("/ping", openapi_extra=operation(record({})))
    @app.head("/ping", include_in_schema=False)
    @app.post("/ping", openapi_extra=operation(record({})))
    async def ping() -> dict[str, str]:
        """The same, as SageMaker asks for it."""
        return {}

    @app.get("/version", openapi_extra=operation(record({"version": {"const": __version__}})))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/ready", openapi_extra=operation(record({"ready": one_of(True)})))
    @app.head("/ready", include_in_schema=False)
    async def ready() -> dict[str, bool]:
        """The cluster can take requests."""
        if not await backend.ready():
            raise Unavailable("the cluster has no prefill group or no decode node yet", code="not_ready")
        return {"ready": True}

    @app.get("/metrics", response_class=_Metrics)
    async def prometheus() -> Response:
        return _Metrics(generate_latest(_ForEverybody()))

    _describe(app, [*openai.BODIES, *responses.BODIES, *batches.BODIES, *anthropic.BODIES, *gemini.BODIES, *kimi.BODIES])
    return app


class _Metrics(Response):
    media_type = CONTENT_TYPE_LATEST


class _ForEverybody(Collector):
    """The process's metrics but those that name tenants: no key is asked for here. The whole is at its metrics port."""

    def collect(self) -> Iterator[Metric]:
        return (family for family in REGISTRY.collect() if not any("tenant" in sample.labels for sample in family.samples))


def _describe(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Has `/openapi.json` say what the bodies are like, and the refusals."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=SCHEMAS)
            description = get_openapi(title=app.title, version=app.version, routes=app.routes)
            description["components"] = {"schemas": {**in_plain_words(definitions["$defs"]), **ERRORS}}
            for path, operations in description["paths"].items():
                for described in operations.values():
                    described["responses"] = {"200": described["responses"]["200"], **refusals(path, _error_at(path))}
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of doing it


def _error_at(path: str) -> Json:
    """The schema of errors there, of clients that do not say by a header which API they speak: `_told`."""
    if gemini.speaks(path, {}):
        return {"$ref": SCHEMAS.format(model="GoogleError")}
    return {"$ref": SCHEMAS.format(model="AnthropicError" if anthropic.speaks(path, {}) else "OpenAIError")}


class TrailingSlash:
    """ASGI middleware. A path means the same with a slash behind it. To be sent there again would make a GET of many clients' POST."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1:
            scope["path"] = scope["path"].removesuffix("/")
        await self._app(scope, receive, send)


class RequestIds:
    """ASGI middleware. Each answer has an id in its headers, its generation's or one of its own (`request.state.request_id`), under which
    the log has why it was refused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["request_id"] = new_id("req")

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                _name(MutableHeaders(scope=message), Request(scope))
            await send(message)

        await self._app(scope, receive, named)


def _name(answer: MutableHeaders, request: Request) -> None:
    request_id: str = request.state.request_id
    answer.setdefault(REQUEST_ID_HEADER, their_id(request.headers) or request_id)
    if anthropic.speaks(request.url.path, request.headers):
        answer.setdefault(anthropic.MESSAGES.id_header, request_id)


class TenantGuard:
    """ASGI middleware. Refuses API requests before their bodies are read; the others find whose they are in `request.state.caller`, and
    their tenant in `request.state.tenant`."""

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            headers = Headers(scope=scope)
            try:
                authorization = _authorization(scope["path"], headers, scope["query_string"])
                caller = self._accounts.caller(authorization, headers.get(TENANT_HEADER, ""))
            except SpringtideError as error:
                await _refused(error, Request(scope), logging.DEBUG)(scope, receive, send)
                return
            scope["state"].update(caller=caller, tenant=caller.tenant)
        await self._app(scope, receive, send)


def _refused(error: SpringtideError, request: Request, level: int) -> Response:
    """DEBUG is the level of what anybody can have as often as he likes: no line of the log, but for those who look for one."""
    request_id: str = request.state.request_id
    logger.log(level, "answered %d: %s", error.http_status, error.message, extra={"request_id": request_id})
    return error_response(error, _told(error, request.url.path, request.headers, request_id))


def _authorization(path: str, headers: Headers, query: bytes) -> str:
    """The `Authorization` header, or what other APIs' clients send in its place."""
    if authorization := headers.get("authorization"):
        return authorization
    key = next((headers[name] for name in KEY_HEADERS if headers.get(name)), None)
    if not key and gemini.speaks(path, headers):
        key = QueryParams(query).get("key")
    return f"Bearer {key}" if key else ""


def _told(error: SpringtideError, path: str, headers: Headers, request_id: str) -> Json:
    """The error in the words of the API that a request is of."""
    if gemini.speaks(path, headers):
        return gemini_error(error, request_id)
    if anthropic.speaks(path, headers):
        return anthropic_error(error, request_id)
    return openai_error(error, request_id)


async def _on_springtide_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpringtideError)
    return _refused(error, request, logging.DEBUG if request.url.path in _OPEN else logging.INFO)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = InvalidRequest(f"{error.detail}: {request.method} {request.url.path}", code=_HTTP_CODES.get(error.status_code))
    refusal.http_status = error.status_code
    answer = _refused(refusal, request, logging.DEBUG)
    answer.headers.update(error.headers or {})
    return answer


async def _on_bug(request: Request, error: Exception) -> Response:
    # Starlette raises it again afterwards, so that the server logs it with its traceback.
    answer = _refused(internal_error(), request, logging.ERROR)
    _name(answer.headers, request)
    return answer
