"""The OpenAI-compatible HTTP API."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import metrics
from gateway.answer import AnswerStream, ApiBackend, Delta
from gateway.bodies import ClientDisconnected, check_media_type, parse_body
from gateway.openai_answers import ChatFormat, CompletionFormat, Format, dump, error_body, error_json
from gateway.openai_requests import ChatCompletionRequest, CompletionRequest, OpenAIRequest
from gateway.prepare import Origin, PreparedRequest
from gateway.tenancy import ApiKeys
from springtide.errors import Overloaded, SpringtideError, Unauthenticated, Unavailable
from springtide.ids import new_id

logger = logging.getLogger(__name__)

TENANT_HEADER = "x-springtide-tenant"
REQUEST_ID_HEADER = "x-request-id"
"""Of every answer to a generation: under it, the log has what became of the request."""
_GUARDED = "/v1/"
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_PIECES_AT_ONCE = 4
_SCHEMAS = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One way of asking for text: what is sent, and how it is answered."""

    path: str
    id_prefix: str
    body: type[OpenAIRequest]
    format: type[ChatFormat | CompletionFormat]


_CHAT = _Endpoint("/v1/chat/completions", "chatcmpl", ChatCompletionRequest, ChatFormat)
_COMPLETION = _Endpoint("/v1/completions", "cmpl", CompletionRequest, CompletionFormat)


def create_app(backend: ApiBackend) -> FastAPI:
    app = FastAPI(title="Springtide", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(SpringtideError, _on_springtide_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(TenantGuard, api_keys=backend.api_keys)
    created = int(time.time())
    preparer = backend.preparer

    def model_card() -> dict[str, Any]:
        return {
            "id": preparer.model_name,
            "object": "model",
            "created": created,
            "owned_by": "springtide",
            "max_model_len": preparer.context_length,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        preparer.check_model(model_id)
        return model_card()

    @app.post(_CHAT.path, openapi_extra=_takes(_CHAT))
    async def chat_completions(request: Request) -> Response:
        return await _Exchange(backend, request, _CHAT).run()

    @app.post(_COMPLETION.path, openapi_extra=_takes(_COMPLETION))
    async def completions(request: Request) -> Response:
        return await _Exchange(backend, request, _COMPLETION).run()

    @app.get("/health")
    async def health() -> dict[str, str]:
        """This process is alive."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, bool]:
        """The cluster can take requests."""
        if not await backend.ready():
            raise Unavailable("the cluster has no prefill group or no decode node yet", code="not_ready")
        return {"ready": True}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    _describe(app, [_CHAT, _COMPLETION])
    return app


def _takes(endpoint: _Endpoint) -> dict[str, Any]:
    """For the API's own description: bodies are read by us."""
    schema = {"$ref": _SCHEMAS.format(model=endpoint.body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe(app: FastAPI, endpoints: list[_Endpoint]) -> None:
    """Has `/openapi.json` say what the bodies are like."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, definitions = models_json_schema([(endpoint.body, "validation") for endpoint in endpoints], ref_template=_SCHEMAS)
            description = get_openapi(title=app.title, version=app.version, routes=app.routes)
            description.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of doing it


class TenantGuard:
    """ASGI middleware. Refuses API requests before their bodies are read; the others find their tenant in `request.state.tenant`."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED):
            headers = Headers(scope=scope)
            try:
                tenant = self._api_keys.of(headers.get("authorization", ""), headers.get(TENANT_HEADER, ""))
            except SpringtideError as error:
                await _error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Order:
    """A valid request, and how its answer is wanted."""

    request: PreparedRequest
    format: Format
    stream: bool


class _Exchange:
    """One request and its answer, with whatever has to be undone at its end however it ends."""

    def __init__(self, backend: ApiBackend, request: Request, endpoint: _Endpoint) -> None:
        self._backend = backend
        self._request = request
        self._endpoint = endpoint
        request_id, traceparent = new_id(endpoint.id_prefix), request.headers.get("traceparent", "")
        self._origin = Origin(request_id, backend.clock.now(), request.state.tenant, traceparent)
        self._answer: AnswerStream | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ended = False
        metrics.IN_FLIGHT.labels(self._endpoint.path).inc()

    async def run(self) -> Response:
        try:
            order = await self._ordered()
            answer = self._answer = self._backend.start(order.request)
            self._watcher = asyncio.create_task(self._watch(answer))
            # Nothing is sent before the first token: a refusal at the last admission check is still a plain 429.
            await answer.started()
            if order.stream:
                return _EventStream(lambda: self._events(answer, order), self._end, self._headers)
            deltas: list[Delta] = []
            async for batch in answer.batches():
                deltas += batch
            response = Response(
                await _written(order.format.whole(deltas, answer.usage)), media_type="application/json", headers=self._headers
            )
        except SpringtideError as error:
            self._end(self._outcome(error))
            logger.info("answered %d: %s", error.http_status, error.message, extra={"request_id": self._origin.request_id})
            return _error_response(error, self._origin.request_id)
        except BaseException:
            self._end("500")
            raise
        self._end("200")
        return response

    @property
    def _headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self._origin.request_id}

    async def _ordered(self) -> _Order:
        check_media_type(self._request)
        async with self._backend.bodies.received(self._request) as raw:
            return await self._backend.side_thread.run(len(raw), self._read, raw)

    def _read(self, raw: bytes) -> _Order:
        preparer, tokenizer = self._backend.preparer, self._backend.tokenizer
        body = parse_body(raw, self._endpoint.body, preparer.bounds.max_values)
        prepared, wants_logprobs = body.prepared(preparer, self._origin), body.num_top_logprobs is not None
        answer_format = self._endpoint.format(prepared.request_id, preparer.model_name, wants_logprobs, body.include_usage, tokenizer)
        return _Order(prepared, answer_format, body.stream)

    async def _events(self, answer: AnswerStream, order: _Order) -> AsyncIterator[bytes]:
        """The stream's bytes; the last thing yielded is `[DONE]` or an error."""
        try:
            async for batch in answer.batches():
                chunks = [chunk for delta in batch for chunk in order.format.chunks(delta)]
                if chunks:
                    yield b"".join(map(_event, chunks))
            for chunk in order.format.last_chunks(answer.usage):
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
            self._end("200")
        except SpringtideError as error:
            yield _event(error_body(error, self._origin.request_id))
            self._end(self._outcome(error))

    async def _watch(self, answer: AnswerStream) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        answer.disconnect()

    def _outcome(self, error: SpringtideError) -> str:
        if isinstance(error, ClientDisconnected):
            metrics.DISCONNECTS.labels(self._endpoint.path).inc()
        return str(error.http_status)

    def _end(self, status: str) -> None:
        """The first call counts."""
        if self._ended:
            return
        self._ended = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._answer is not None:
            self._answer.close()
        metrics.IN_FLIGHT.labels(self._endpoint.path).dec()
        metrics.REQUESTS.labels(self._endpoint.path, status).inc()


class _EventStream(Response):
    """Server-sent events. Unlike Starlette's StreamingResponse it does not watch for the client's going: the exchange does already."""

    media_type = "text/event-stream"

    def __init__(self, events: Callable[[], AsyncIterator[bytes]], on_end: Callable[[str], None], headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end("499")


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + dump(data).encode() + b"\n\n"


async def _written(pieces: Iterator[str]) -> str:
    """All of a long answer, with everybody else served in between."""
    text = []
    for piece in pieces:
        text.append(piece)
        if len(text) % _PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return "".join(text)


def _error_response(error: SpringtideError, request_id: str = "") -> JSONResponse:
    headers = {REQUEST_ID_HEADER: request_id} if request_id else {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error, request_id), status_code=error.http_status, headers=headers)


async def _on_springtide_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SpringtideError)
    return _error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    what = f"{error.detail}: {request.method} {request.url.path}"
    body = error_json(what, "invalid_request_error", _HTTP_CODES.get(error.status_code))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_bug(_: Request, error: Exception) -> JSONResponse:
    # Starlette raises it again afterwards, so that the server logs it with its traceback.
    return _error_response(SpringtideError("internal error; the server's log has more", code="internal_error"))
