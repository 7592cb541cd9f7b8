"""The OpenAI-compatible HTTP API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import Receive, Scope, Send

from conductor.gateway import http_errors, metrics
from conductor.gateway.backend import Backend
from conductor.gateway.body_limit import BodyLimit
from conductor.gateway.openai_format import ChatFormat, CompletionFormat, Format
from conductor.gateway.reply import ClientDisconnected, Delta, Reply, Work
from conductor.gateway.schema import ChatCompletionRequest, CompletionRequest
from conductor.gateway.tenancy import TenantGuard
from springtide.errors import SpringtideError, Unavailable
from springtide.ids import new_id

_SEPARATORS = (",", ":")


def create_app(backend: Backend) -> FastAPI:
    app = FastAPI(title="Springtide", docs_url=None, redoc_url=None, redirect_slashes=False)
    http_errors.install(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(TenantGuard, tenants=backend.tenants)
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

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        request_id = new_id("chatcmpl")
        answer_format = ChatFormat(
            request_id, preparer.model_name, body.num_top_logprobs is not None, body.include_usage, backend.tokenizer
        )
        work = preparer.chat(body, request_id, request.state.tenant, request.headers.get("traceparent", ""))
        return await _Exchange(backend, request, request_id, answer_format).run(work, body.stream, body.include_usage)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        request_id = new_id("cmpl")
        answer_format = CompletionFormat(
            request_id, preparer.model_name, body.num_top_logprobs is not None, body.include_usage, backend.tokenizer
        )
        work = preparer.completion(body, request_id, request.state.tenant, request.headers.get("traceparent", ""))
        return await _Exchange(backend, request, request_id, answer_format).run(work, body.stream, body.include_usage)

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

    return app


class _Exchange:
    """One request and its answer, with whatever has to be undone at its end however it ends."""

    def __init__(self, backend: Backend, request: Request, request_id: str, answer_format: Format) -> None:
        self._backend = backend
        self._request = request
        self._request_id = request_id
        self._endpoint = request.url.path
        self._format = answer_format
        self._reply: Reply | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ended = False
        metrics.IN_FLIGHT.labels(self._endpoint).inc()

    async def run(self, preparing: Coroutine[Any, Any, Work], stream: bool, include_usage: bool) -> Response:
        try:
            reply = self._reply = self._backend.start(await preparing)
            self._watcher = asyncio.create_task(self._watch(reply))
            # Nothing is sent before the first token: a refusal at the last door is still a plain 429.
            await reply.started()
            if stream:
                return _EventStream(lambda: self._events(reply, include_usage), self._end)
            deltas: list[Delta] = []
            async for batch in reply.batches():
                deltas += batch
            response = JSONResponse(self._format.whole(deltas, reply.usage))
        except SpringtideError as error:
            self._end(self._outcome(error))
            return http_errors.error_response(error, self._request_id)
        except BaseException:
            self._end("500")
            raise
        self._end("200")
        return response

    async def _events(self, reply: Reply, include_usage: bool) -> AsyncIterator[bytes]:
        """The stream's bytes; the last thing yielded is `[DONE]` or an error."""
        try:
            async for batch in reply.batches():
                chunks = [chunk for delta in batch for chunk in self._format.chunks(delta)]
                if chunks:
                    yield b"".join(_event(chunk) for chunk in chunks)
            if include_usage:
                yield _event(self._format.usage_chunk(reply.usage))
            yield b"data: [DONE]\n\n"
            self._end("200")
        except SpringtideError as error:
            yield _event(http_errors.error_body(error, self._request_id))
            self._end(self._outcome(error))

    async def _watch(self, reply: Reply) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        reply.disconnect()

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
        if self._reply is not None:
            self._reply.close()
        metrics.IN_FLIGHT.labels(self._endpoint).dec()
        metrics.REQUESTS.labels(self._endpoint, status).inc()


class _EventStream(Response):
    """Server-sent events. Unlike Starlette's StreamingResponse it does not watch for the client's going: the exchange does already."""

    media_type = "text/event-stream"

    def __init__(self, events: Callable[[], AsyncIterator[bytes]], on_end: Callable[[str], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
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
    return b"data: " + json.dumps(data, separators=_SEPARATORS, ensure_ascii=False).encode() + b"\n\n"
