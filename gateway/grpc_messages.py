"""The messages of gRPC calls: read when there is room for them, looked over before they are parsed, and refused by gRPC's own errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from gateway.accounts.accounts import KEY_HEADERS
from gateway.answer import internal_error, message_for_client
from gateway.bodies import SMALL_BYTES, Bodies, BodyTimeout
from springtide.errors import DeadlineExceeded, InvalidRequest, Overloaded, SpringtideError, Unauthenticated, Unavailable

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT", bound=Message)
AT_ONCE = 4
"""Messages of one connection that are held at once. Further ones stay with the client: gRPC takes in no more than a window of what is not
being read."""
_CODES: dict[type[SpringtideError], grpc.StatusCode] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    BodyTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}

Context = grpc.aio.ServicerContext[Any, Any]


def status_of(error: Exception) -> grpc.StatusCode:
    if isinstance(error, SpringtideError) and error.http_status == HTTPStatus.NOT_FOUND:
        return grpc.StatusCode.NOT_FOUND
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


async def abort(context: Context, error: Exception, request_id: str = "") -> NoReturn:
    """What nobody has foreseen is for the log, and its client learns that there is something."""
    foreseen = error if isinstance(error, SpringtideError) else internal_error()
    if foreseen is not error:
        logger.error("%s has failed", request_id or "a call", exc_info=error)
    # The context keeps the error that ends a call, that keeps this one, and that its frames: a message in them, parsed to fifty times its
    # bytes, would stay until the collector comes round.
    error.__traceback__ = error.__context__ = None
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(foreseen, Overloaded):
        trailers = (("retry-after", str(max(1, math.ceil(foreseen.retry_after_s)))),)
    await context.abort(status_of(foreseen), message_for_client(foreseen, request_id), trailing_metadata=trailers)
    raise AssertionError("abort does not return")


class Messages(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # has none when it runs
    """What calls send. gRPC reads a unary call's message by itself, however many others it has in memory; so all calls are streams here,
    whose messages come when they are asked for. To clients that is the same.

    Methods without a deserializer read by `received`; to others this gives their messages, which must be small."""

    def __init__(self, bodies: Bodies, max_bytes: int) -> None:
        """`max_bytes` is of one message."""
        self._bodies = bodies
        self._max_bytes = max_bytes
        self._turns: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        """Of each connection on which something is being read."""

    @contextlib.asynccontextmanager
    async def received(self, context: Context) -> AsyncIterator[bytes | None]:
        """The next message of a call, None when it sends no more; it counts as held until the context is left. Raises BodyTimeout and
        Overloaded."""
        turns = self._turns.setdefault(context.peer(), asyncio.Semaphore(AT_ONCE))
        async with turns, self._bodies.read(functools.partial(_read, context), self._max_bytes) as raw:
            yield raw

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(functools.partial(self._answer, handler), None, handler.response_serializer)
        answer = self._converse if handler.request_streaming else self._answer_on
        return grpc.stream_stream_rpc_method_handler(functools.partial(answer, handler), None, handler.response_serializer)

    async def _answer(self, handler: Any, _: Any, context: Context) -> Any:
        return await handler.unary_unary(await self._only_request(handler, context), context)

    async def _answer_on(self, handler: Any, _: Any, context: Context) -> None:
        await handler.unary_stream(await self._only_request(handler, context), context)

    async def _converse(self, handler: Any, _: Any, context: Context) -> AsyncIterator[Any]:
        async for reply in handler.stream_stream(self._requests(handler, context), context):
            yield reply

    async def _requests(self, handler: Any, context: Context) -> AsyncIterator[Any]:
        while (request := await self._request(handler, context)) is not None:
            yield request

    async def _only_request(self, handler: Any, context: Context) -> Any:
        request = await self._request(handler, context)
        if request is None:
            await abort(context, no_message())
        return request

    async def _request(self, handler: Any, context: Context) -> Any:
        """None when no more comes."""
        try:
            return await self._parsed(handler, context)
        except SpringtideError as error:
            await abort(context, error)

    async def _parsed(self, handler: Any, context: Context) -> Any:
        async with self.received(context) as raw:
            if raw is None:
                return None
            if len(raw) > SMALL_BYTES:
                raise InvalidRequest(f"a message of this method may have {SMALL_BYTES} bytes, not {len(raw)}", code="body_too_large")
            try:
                return handler.request_deserializer(raw)
            except DecodeError:
                raise _malformed() from None


async def _read(context: Context) -> bytes | None:
    raw = await context.read()
    return None if raw is grpc.aio.EOF else raw  # type: ignore[attr-defined]  # the stubs lack it


def parse_request(raw: bytes, kind: type[MessageT], max_fields: int) -> MessageT:
    """Raises InvalidRequest."""
    try:
        if has_more_fields(raw, _shape_of(kind.DESCRIPTOR), max_fields):
            raise InvalidRequest(f"the message has more than {max_fields} fields and elements of lists", code="too_many_values")
        return kind.FromString(raw)
    except DecodeError:
        raise _malformed() from None


def no_message() -> InvalidRequest:
    return InvalidRequest("the call has sent no message", code="invalid_body")


def _malformed() -> InvalidRequest:
    return InvalidRequest("the message is not what this method takes", code="invalid_body")


Shape: TypeAlias = "dict[int, Shape | None]"
"""Of a kind of messages: for the numbers of its fields, the shapes of what are messages themselves, None for what is packed in lists."""


def shape_of(message: Any) -> Shape:
    """`message` is a protobuf Descriptor."""
    return {
        field.number: shape_of(field.message_type) if field.message_type else None
        for field in message.fields
        if field.cpp_type != FieldDescriptor.CPPTYPE_STRING
    }


_shape_of = functools.cache(shape_of)
_OPAQUE: Shape = {}
"""Of texts, bytes and what is not known: nothing in them is looked at."""
_CONTINUED = bytes(range(0x80, 0x100))
"""Bytes that no number ends with."""


def has_more_fields(raw: bytes, shape: Shape, limit: int) -> bool:
    """Whether a serialised message has more than `limit` fields, those of the messages in it and elements of packed lists included. To
    parse takes protobuf up to 0.1 us for each, in which nobody gets the interpreter; here they do. Raises DecodeError."""
    if len(raw) <= limit:
        return False
    found = at = 0
    end = len(raw)
    around: list[tuple[int, Shape]] = []
    """Ends and shapes of the messages that the one looked at is in."""
    try:
        while found <= limit:
            if at == end:
                if not around:
                    return False
                end, shape = around.pop()
                continue
            found += 1
            tag, at = _varint(raw, at)
            match tag & 7:
                case 0:
                    _, at = _varint(raw, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(raw, at)
                    inner = shape.get(tag >> 3, _OPAQUE)
                    if inner is None:
                        found += len(raw[at : at + size].translate(None, _CONTINUED))
                    elif inner is not _OPAQUE and at + size <= end:
                        around.append((end, shape))
                        end, shape = at + size, inner
                        continue
                    at += size
                case 5:
                    at += 4
            if at > end:
                raise DecodeError
    except IndexError:
        raise DecodeError from None
    return True


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends. Raises IndexError where the bytes end before it does."""
    value = shift = 0
    while (byte := raw[at]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise DecodeError
    return value | byte << shift, at + 1


def authorization_of(context: Context) -> str:
    """As an `Authorization` header has it; empty where nobody says who it is."""
    for name in KEY_HEADERS:
        if key := metadata_of(context, name):
            return f"Bearer {key}"
    return metadata_of(context, "authorization")


def metadata_of(context: Context, name: str) -> str:
    """Empty where there is none of the name."""
    return str(dict(context.invocation_metadata() or ()).get(name, ""))
