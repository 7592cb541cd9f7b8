"""One HTTP request for an answer of the model, and that answer: received, ordered, run and written, whichever API it is of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from gateway import metrics
from gateway.accounts.allowance import Caller
from gateway.answer import AnswerStream, ApiBackend, Traced, internal_error
from gateway.api_request import ApiRequest
from gateway.bodies import ClientDisconnected, check_media_type
from gateway.caching.context import Use
from gateway.output import Answer, Delta, gathered
from gateway.prepare import Origin, PreparedRequest
from springtide.errors import Overloaded, SpringtideError, Unauthenticated
from springtide.ids import new_id
from springtide.protocol.usage import Usage
from springtide.trace_context import TRACE_HEADER

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
"""Of every answer to a generation: under it, the log has what became of the request."""
EVENT_STREAM = "text/event-stream"
PING = b": ping\n\n"
"""A comment, which clients pass over."""
_PIECES_AT_ONCE = 4
_BYTES_AT_ONCE = 16 << 10
_UNICODE_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
_THEIR_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
"""What of an id that a client gives its request is given back."""

Json = dict[str, Any]
ReadT = TypeVar("ReadT")


@dataclass(frozen=True, slots=True)
class Call:
    """What a façade may know of the HTTP request, beside its body."""

    origin: Origin
    headers: Mapping[str, str]
    """By their names in lower case."""
    path_params: Mapping[str, str]
    query: Mapping[str, str]


class Format(Protocol):
    """How one answer is written. Made for one request."""

    media_type: str
    """Of a stream."""
    pings: bool
    """Whether who reads the stream passes over comments in it, which keep its connection awake."""

    def begin(self) -> Iterable[bytes]:
        """What of a stream goes out with its headers."""
        ...

    def delta(self, delta: Delta, usage: Usage) -> Iterable[bytes]:
        """What of a stream a delta is, possibly nothing. `usage` is that of all choices so far."""
        ...

    def end(self, usage: Usage) -> Iterable[bytes]:
        """The end of the stream of a whole answer."""
        ...

    def failed(self, error: SpringtideError) -> Iterable[bytes]:
        """The end of the stream of one that failed."""
        ...

    def whole(self, answer: Answer) -> Iterator[str]:
        """The JSON text of the whole answer, in pieces each of which takes a millisecond or so: with log-probabilities, all of it may take
        seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """A valid request, and how its answer is wanted."""

    request: ApiRequest
    stream: bool
    format: Format
    hand_over: Callable[[PreparedRequest, Callable[[], None]], Awaitable[Response]] | None = None
    """Has it run by itself, and answers in the place of the exchange. What it is given is to be called when the answer has ended."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A valid body whose request needs what is kept elsewhere."""

    look_up: Callable[[], Awaitable[tuple[int, Callable[[], Order]]]]
    """What makes the order of it, beside the event loop, and how many bytes that reads."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way of asking for answers: what is sent, and how it is answered."""

    path: str
    id_prefix: str
    body: type[BaseModel]
    """For the API's own description."""
    order: Callable[[bytes, Call, ApiBackend], Order | Pending]
    """Reads a body, beside the event loop. Raises InvalidRequest, naming the field."""
    error: Callable[[SpringtideError, str], Json]
    """The body of the answer to a request, of this id, that fails."""
    id_header: str = REQUEST_ID_HEADER
    """Where the API's own clients look for the id; it is in `x-request-id` too."""
    after: Callable[[Order, Answer], Awaitable[None]] | None = None
    """What is done with a whole answer before its end goes out: to keep it, for example."""
    cache_headers: Callable[[Use, Usage | None], Mapping[str, str]] | None = None
    """What the answer's headers say of the context cache that the request begins with; without the usage, before there is any."""
    operation: str = "chat"
    """What it does, by OpenTelemetry's name (`gen_ai.operation.name`)."""


async def exchange(backend: ApiBackend, request: Request, endpoint: Endpoint) -> Response:
    """The answer to `request`, whole or as a stream."""
    return await _Exchange(backend, request, endpoint).run()


def their_id(headers: Mapping[str, str]) -> str:
    """What the client calls its request, if that is given back."""
    said = headers.get(REQUEST_ID_HEADER, "")
    return said if _THEIR_ID.fullmatch(said) else ""


async def read(backend: ApiBackend, request: Request, reader: Callable[[bytes], ReadT]) -> ReadT:
    """What `reader` makes of the body of `request`, beside the event loop. Raises InvalidRequest, and what receiving it may fail with."""
    check_media_type(request)
    async with backend.bodies.received(request) as raw:
        return await backend.side_thread.run(len(raw), reader, raw)


async def read_permitted(backend: ApiBackend, request: Request, reader: Callable[[bytes], ReadT]) -> ReadT:
    """As `read`, of what concerns the model without running it. Raises ModelNotFound when the caller may not use that."""
    caller: Caller = request.state.caller
    caller.check_model(backend.preparer.model_name)
    return await read(backend, request, reader)


class _Exchange:
    """One request and its answer, with whatever has to be undone at its end however it ends."""

    def __init__(self, backend: ApiBackend, request: Request, endpoint: Endpoint) -> None:
        self._backend = backend
        self._request = request
        self._endpoint = endpoint
        self._their_id = their_id(request.headers)
        caller: Caller = request.state.caller
        given = request.headers.get(TRACE_HEADER, "")
        self._traced = Traced(backend, new_id(endpoint.id_prefix), given, endpoint.path, endpoint.operation)
        origin = replace(self._traced.origin, tenant=caller.tenant, key_id=caller.key_id)
        self._charge = backend.accounts.charge(caller)
        self._call = Call(origin, request.headers, request.path_params, request.query_params)
        self._answer: AnswerStream | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ended = False
        metrics.IN_FLIGHT.labels(self._endpoint.path).inc()

    async def run(self) -> Response:
        request_id = self._call.origin.request_id
        if self._their_id:
            logger.info("the client calls it %s", self._their_id, extra={"request_id": request_id})
        try:
            await self._charge.begin(self._backend.preparer.model_name)
            order, prepared = await self._ordered()
            self._traced.tell(prepared, order.stream)
            if order.request.cache.dry_run:
                self._end("200")
                nothing = Answer((), Usage(0, 0, 0))
                return self._json(await written(order.format.whole(nothing)), prepared.use, nothing.usage)
            prepared = replace(prepared, receipt=await self._charge.take_tokens(prepared.num_prompt_tokens))
            if order.hand_over is not None:
                try:
                    response = await order.hand_over(prepared, lambda: self._end("200"))
                except BaseException:
                    # It has not begun: what was taken of the limits for it is given back.
                    self._backend.accounts.settle(prepared.receipt, Usage(0, 0, 0))
                    raise
                response.headers.update(self._headers(prepared.use))
                return response
            answer = self._answer = self._backend.start(prepared)
            self._watcher = asyncio.create_task(self._watch(answer))
            if order.stream:
                # Headers go out before there is a token: a refusal at the last admission check is an event of the stream. So is one of who
                # waits for idle capacity longer than a stream may be silent; others are placed or refused soon.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._ping_s(order) if order.request.terms.idle else None):
                        await answer.accepted()
                return _Stream(order.format.media_type, lambda: self._streamed(answer, order), self._end, self._headers(prepared.use))
            whole = await answer.whole()
            await self._after(order, whole)
            response = self._json(await written(order.format.whole(whole)), prepared.use, whole.usage)
        except SpringtideError as error:
            self._end(self._outcome(error))
            logger.info("answered %d: %s", error.http_status, error.message, extra={"request_id": request_id})
            refusal = error_response(error, self._endpoint.error(error, request_id))
            refusal.headers.update(self._headers(None))
            return refusal
        except BaseException:
            self._end("500")
            raise
        self._end("200")
        return response

    def _json(self, text: str, use: Use | None, usage: Usage) -> Response:
        return Response(text, media_type="application/json", headers=self._headers(use, usage))

    def _headers(self, use: Use | None, usage: Usage | None = None) -> dict[str, str]:
        request_id = self._call.origin.request_id
        of_cache = {} if use is None or self._endpoint.cache_headers is None else self._endpoint.cache_headers(use, usage)
        ids = {self._endpoint.id_header: request_id, REQUEST_ID_HEADER: self._their_id or request_id}
        return {**ids, **self._traced.headers, **self._charge.headers, **of_cache}

    async def _ordered(self) -> tuple[Order, PreparedRequest]:
        found = await read(self._backend, self._request, self._read)
        if isinstance(found, Pending):
            num_bytes, late = await found.look_up()
            found = await self._backend.side_thread.run(num_bytes, lambda: self._prepared(late()))
        order, prepared = found
        return order, await self._backend.begun_with_cache(order.request, self._call.origin) if prepared is None else prepared

    def _read(self, raw: bytes) -> tuple[Order, PreparedRequest | None] | Pending:
        order = self._endpoint.order(raw, self._call, self._backend)
        return order if isinstance(order, Pending) else self._prepared(order)

    def _prepared(self, order: Order) -> tuple[Order, PreparedRequest | None]:
        """Without what is prepared, where a context cache comes before it."""
        return order, None if order.request.cache.named else self._backend.preparer.prepared(order.request, self._call.origin)

    async def _streamed(self, answer: AnswerStream, order: Order) -> AsyncIterator[bytes]:
        """The stream's bytes; the last are those of its end, or of an error."""
        kept: list[Delta] = []
        try:
            if begin := b"".join(order.format.begin()):
                yield begin
            async for batch in answer.batches(self._ping_s(order)):
                if not batch:
                    yield PING
                    continue
                usage = answer.usage
                async for data in _in_turns(piece for delta in batch for piece in order.format.delta(delta, usage)):
                    yield data
                if self._endpoint.after is not None:
                    kept += batch
            if self._endpoint.after is not None:
                await self._after(order, gathered(kept, answer.usage))
            yield b"".join(order.format.end(answer.usage))
            self._end("200")
        except SpringtideError as error:
            yield b"".join(order.format.failed(error))
            self._end(self._outcome(error))
        except Exception:
            logger.exception("a stream has failed", extra={"request_id": self._call.origin.request_id})
            yield b"".join(order.format.failed(internal_error()))
            self._end("500")

    def _ping_s(self, order: Order) -> float | None:
        return self._backend.server.stream_ping_s if order.format.pings else None

    async def _after(self, order: Order, answer: Answer) -> None:
        if self._endpoint.after is not None:
            await self._endpoint.after(order, answer)

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
        self._charge.end()
        self._traced.end(status)
        metrics.IN_FLIGHT.labels(self._endpoint.path).dec()
        metrics.REQUESTS.labels(self._endpoint.path, status).inc()


class _Stream(Response):
    """Unlike Starlette's StreamingResponse it does not watch for the client's going: the exchange does already."""

    def __init__(
        self, media_type: str, pieces: Callable[[], AsyncIterator[bytes]], on_end: Callable[[str], None], headers: dict[str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers}, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._pieces():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end("499")


def dump(data: Json | list[Any]) -> str:
    """JSON text as it goes over the wire, a line also to those for whom more ends a line than server-sent events and JSON Lines say."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text if text.isascii() else _UNICODE_LINE_ENDS.sub(lambda end: f"\\u{ord(end[0]):04x}", text)


def server_sent(data: Json, event: str = "") -> bytes:
    """A server-sent event, of a name if there is one."""
    return event_of(dump(data), event)


def event_of(line: str, event: str = "") -> bytes:
    """The same of data that are written already, in one line."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {line}\n\n".encode()


def error_response(error: SpringtideError, body: Json) -> Response:
    """A whole answer that tells of an error in an API's own words."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    # In ASCII: what it names may be what no UTF-8 can write, half a surrogate pair.
    return Response(json.dumps(body), status_code=error.http_status, headers=headers, media_type="application/json")


async def _in_turns(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, and where they are many, everybody else served in between."""
    taken, size = list[bytes](), 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size >= _BYTES_AT_ONCE:
            yield b"".join(taken)
            taken, size = [], 0
            await asyncio.sleep(0)
    if taken:
        yield b"".join(taken)


async def written(pieces: Iterator[str]) -> str:
    """All of a long answer, with everybody else served in between."""
    text = []
    for piece in pieces:
        text.append(piece)
        if len(text) % _PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return "".join(text)
