"""The OpenAI-compatible HTTP API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import Receive, Scope, Send

from gateway import http_errors, metrics
from gateway.answer import AnswerStream, ApiBackend, Delta
from gateway.bodies import ClientDisconnected, check_media_type, parse_body
from gateway.openai_format import ChatFormat, CompletionFormat, Format, dump
from gateway.prepare import Origin, PreparedRequest
from gateway.schema import ChatCompletionRequest, CompletionRequest
from gateway.tenancy import TenantGuard
from springtide.errors import SpringtideError, Unavailable
from springtide.ids import new_id

logger = logging.getLogger(__name__)

_PIECES_AT_ONCE = 4
_SCHEMAS = "#/components/schemas/{model}"


def create_app(backend: ApiBackend) -> FastAPI:
    app = FastAPI(title="Springtide", docs_url=None, redoc_url=None, redirect_slashes=False)
    http_errors.install(app)
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

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        return await _Exchange(backend, request, "chatcmpl", _chat).run()

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await _Exchange(backend, request, "cmpl", _completion).run()

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

    _describe(app, [ChatCompletionRequest, CompletionRequest])
    return app


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """For the API's own description: bodies are read by us."""
    schema = {"$ref": _SCHEMAS.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Has `/openapi.json` say what `bodies` are like."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMAS)
            description = get_openapi(title=app.title, version=app.version, routes=app.routes)
            description.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of doing it


@dataclass(frozen=True, slots=True)
class _Order:
    """A valid request, and how its answer is wanted."""

    request: PreparedRequest
    format: Format
    stream: bool
    include_usage: bool


def _chat(backend: ApiBackend, raw: bytes, origin: Origin) -> _Order:
    preparer = backend.preparer
    body = parse_body(raw, ChatCompletionRequest, preparer.bounds.max_values)
    prepared = preparer.chat(body, origin)
    wants_logprobs = body.num_top_logprobs is not None
    answer_format = ChatFormat(origin.request_id, preparer.model_name, wants_logprobs, body.include_usage, backend.tokenizer)
    return _Order(prepared, answer_format, body.stream, body.include_usage)


def _completion(backend: ApiBackend, raw: bytes, origin: Origin) -> _Order:
    preparer = backend.preparer
    body = parse_body(raw, CompletionRequest, preparer.bounds.max_values)
    prepared = preparer.completion(body, origin)
    wants_logprobs = body.num_top_logprobs is not None
    answer_format = CompletionFormat(origin.request_id, preparer.model_name, wants_logprobs, body.include_usage, backend.tokenizer)
    return _Order(prepared, answer_format, body.stream, body.include_usage)


class _Exchange:
    """One request and its answer, with whatever has to be undone at its end however it ends."""

    def __init__(self, backend: ApiBackend, request: Request, kind: str, prepare: Callable[[ApiBackend, bytes, Origin], _Order]) -> None:
        """`kind` begins the request's id."""
        self._backend = backend
        self._request = request
        self._endpoint = request.url.path
        self._prepare = prepare
        self._origin = Origin(new_id(kind), backend.clock.now(), request.state.tenant, request.headers.get("traceparent", ""))
        self._answer: AnswerStream | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ended = False
        metrics.IN_FLIGHT.labels(self._endpoint).inc()

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
            return http_errors.error_response(error, self._origin.request_id)
        except BaseException:
            self._end("500")
            raise
        self._end("200")
        return response

    @property
    def _headers(self) -> dict[str, str]:
        return {http_errors.REQUEST_ID_HEADER: self._origin.request_id}

    async def _ordered(self) -> _Order:
        check_media_type(self._request)
        async with self._backend.bodies.received(self._request) as raw:
            return await self._backend.side_thread.run(len(raw), self._prepare, self._backend, raw, self._origin)

    async def _events(self, answer: AnswerStream, order: _Order) -> AsyncIterator[bytes]:
        """The stream's bytes; the last thing yielded is `[DONE]` or an error."""
        try:
            async for batch in answer.batches():
                chunks = [chunk for delta in batch for chunk in order.format.chunks(delta)]
                if chunks:
                    yield b"".join(_event(chunk) for chunk in chunks)
            if order.include_usage:
                yield _event(order.format.usage_chunk(answer.usage))
            yield b"data: [DONE]\n\n"
            self._end("200")
        except SpringtideError as error:
            yield _event(http_errors.error_body(error, self._origin.request_id))
            self._end(self._outcome(error))

    async def _watch(self, answer: AnswerStream) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        answer.disconnect()

    def _outcome(self, error: SpringtideError) -> str:
        if isinstance(error, ClientDisconnected):
            metrics.DISCONNECTS.labels(self._endpoint).inc()
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
        metrics.IN_FLIGHT.labels(self._endpoint).dec()
        metrics.REQUESTS.labels(self._endpoint, status).inc()


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
