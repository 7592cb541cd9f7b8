"""The bodies of requests: received within bounds of size, time and memory, read beside the event loop, and those of HTTP as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from springtide.errors import InvalidRequest, Overloaded, SpringtideError

PATIENCE_S = 30.0
"""Within which a body comes, and a second more for each LEAST_BYTES_A_S of it that have come."""
LEAST_BYTES_A_S = 64 << 10
SMALL_BYTES = 4096
"""Bodies up to here are not counted among what is held: connections are limited."""
AT_ONCE_S = 0.02
"""What has not come as a whole within this time after it was asked for is still being sent."""
_RETRY_AFTER_S = 1.0
_HELD_BODIES = 8
"""How many of the largest bodies may be held at once; of smaller ones, more."""

MAX_DEPTH = 128
"""Of lists and objects in what a field of a body may be."""
INLINE_BYTES = 4096
"""Requests up to here are done with sooner than a thread takes to begin."""
UNKNOWN_BYTES = INLINE_BYTES + 1
"""Of work whose size nobody knows: it may be large, so it is done beside the loop, before what is known to be."""
MOST_REST_S = 0.2

BodyT = TypeVar("BodyT", bound=BaseModel)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ClientDisconnected(SpringtideError):
    """The client has gone: nobody waits for the answer any more."""

    http_status = 499


class BodyTooLarge(InvalidRequest):
    http_status = 413


class BodyTimeout(InvalidRequest):
    http_status = 408


class BodyEncoded(InvalidRequest):
    http_status = 415


@dataclass(slots=True, eq=False)
class _Receiving:
    patience: asyncio.Timeout
    num_bytes: int = 0
    complete: bool = False
    outbid: bool = False
    """Gave its room to another body."""


class Bodies:
    """The bodies that are held at the moment. Those that are still coming in, who began first before the others, make room for others when
    it is short: who sends slowly keeps nobody out."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` is of one body, however it comes."""
        self._max_bytes = max_bytes
        self._max_held_bytes = _HELD_BODIES * max_bytes
        self._held: dict[_Receiving, None] = {}
        """In the order of their arrival."""
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @contextlib.asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[bytes]:
        """The body of `request`, which counts as held until the context is left. Raises BodyTooLarge, BodyTimeout, Overloaded and
        ClientDisconnected."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise self._too_large()
        with self._holding(PATIENCE_S) as receiving:
            yield await self._receive(request, receiving)

    @contextlib.asynccontextmanager
    async def read(self, read: Callable[[], Awaitable[bytes | None]], max_bytes: int) -> AsyncIterator[bytes | None]:
        """What `read` returns, of at most `max_bytes`, which counts as held until the context is left. How much of it is there shows only
        when all of it is: until then it counts, unless it comes at once, as as large as it may be. Raises BodyTimeout and Overloaded."""
        patience_s = PATIENCE_S + max_bytes / LEAST_BYTES_A_S
        with self._holding(patience_s) as receiving:
            expecting = asyncio.get_running_loop().call_later(AT_ONCE_S, self._expect, receiving, max_bytes)
            try:
                async with receiving.patience:
                    message = await read()
            except TimeoutError:
                raise self._broken_off(receiving, f"the message has not come in {patience_s:.0f} s") from None
            finally:
                expecting.cancel()
            receiving.complete = True
            self._grow(receiving, len(message or b"") - receiving.num_bytes)
            yield message

    @contextlib.contextmanager
    def _holding(self, patience_s: float) -> Iterator[_Receiving]:
        receiving = _Receiving(asyncio.timeout(patience_s))
        self._held[receiving] = None
        try:
            yield receiving
        finally:
            self._release(receiving)

    def _expect(self, receiving: _Receiving, max_bytes: int) -> None:
        try:
            self._grow(receiving, max_bytes)
        except SpringtideError:
            self._outbid(receiving)

    async def _receive(self, request: Request, receiving: _Receiving) -> bytes:
        chunks = []
        started = asyncio.get_running_loop().time()
        try:
            async with receiving.patience:
                async for chunk in request.stream():
                    self._grow(receiving, len(chunk))
                    chunks.append(chunk)
                    if not receiving.patience.expired():
                        receiving.patience.reschedule(started + PATIENCE_S + receiving.num_bytes / LEAST_BYTES_A_S)
        except TimeoutError:
            message = f"{receiving.num_bytes} bytes of the body have come in {PATIENCE_S + receiving.num_bytes / LEAST_BYTES_A_S:.0f} s"
            raise self._broken_off(receiving, message) from None
        except ClientDisconnect:
            raise ClientDisconnected("the client has closed the connection") from None
        receiving.complete = True
        return b"".join(chunks)

    def _release(self, receiving: _Receiving) -> None:
        if receiving in self._held:
            del self._held[receiving]
            self._held_bytes -= _counted(receiving.num_bytes)

    def _grow(self, receiving: _Receiving, num_bytes: int) -> None:
        if receiving.outbid:
            raise self._full()
        self._held_bytes -= _counted(receiving.num_bytes)
        receiving.num_bytes += num_bytes
        self._held_bytes += _counted(receiving.num_bytes)
        if receiving.num_bytes > self._max_bytes:
            raise self._too_large()
        while self._held_bytes > self._max_held_bytes:
            oldest = next((other for other in self._held if not other.complete and _counted(other.num_bytes)), receiving)
            if oldest is receiving:
                raise self._full()
            self._outbid(oldest)

    def _outbid(self, receiving: _Receiving) -> None:
        receiving.outbid = True
        self._release(receiving)
        if not receiving.patience.expired():
            receiving.patience.reschedule(asyncio.get_running_loop().time())

    def _broken_off(self, receiving: _Receiving, message: str) -> SpringtideError:
        """Why no more of it was waited for: others wanted its room, or it took too long."""
        return self._full() if receiving.outbid else BodyTimeout(message, code="body_timeout")

    def _too_large(self) -> BodyTooLarge:
        message = f"the body is longer than {self._max_bytes} bytes, and so than anything that the model's context could hold"
        return BodyTooLarge(message, code="body_too_large")

    @staticmethod
    def _full() -> Overloaded:
        return Overloaded("too many large bodies are being received at once", retry_after_s=_RETRY_AFTER_S, reason="bodies")


def _counted(num_bytes: int) -> int:
    return num_bytes if num_bytes > SMALL_BYTES else 0


class SideThread:
    """A thread for what would hold up every stream on the event loop: reading large bodies and tokenising them. A single one, so that
    whoever sends much at once competes with itself, not with the streams; the shortest waiting request comes first."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gateway-prepare")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._busy = False

    async def run(self, num_bytes: int, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """What `work` returns or raises, for a request of so many bytes."""
        if num_bytes <= INLINE_BYTES:
            return work(*args, **kwargs)
        await self._turn(num_bytes)
        loop = asyncio.get_running_loop()
        began = loop.time()
        job = self._executor.submit(work, *args, **kwargs)
        # However the waiting ends, it is the next one's turn when the thread is free, not before.
        job.add_done_callback(lambda _: _call_soon(loop, self._rest, loop.time() - began))
        try:
            return await asyncio.wrap_future(job)
        finally:
            # An error knows this frame: a frame that knows it too would keep all that it held until the collector comes round.
            del job

    def close(self) -> None:
        """Begins nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, num_bytes: int) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (num_bytes, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _rest(self, worked_s: float) -> None:
        """As long as it has worked: whoever sends much has half of the interpreter's time at most, and others get it in between."""
        asyncio.get_running_loop().call_later(min(worked_s, MOST_REST_S), self._next)

    def _next(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[float], None], argument: float) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, argument)


def check_media_type(request: Request) -> None:
    """Raises InvalidRequest: a page in a browser can send other types anywhere, without asking the server first. Compressed bodies are not
    read: how large they are would show only when they are held."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"content-encoding is {encoding[:40]!r}, which is not read here; send the body as it is"
        raise BodyEncoded(message, param="content-encoding", code="unsupported_encoding")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise _not_an_object()


def parse_body(raw: bytes, model: type[BodyT], max_values: int) -> BodyT:
    """Raises InvalidRequest, naming the field."""
    if not raw:
        raise _not_an_object()
    if has_more_values(raw, max_values):
        raise InvalidRequest(f"the body has more than {max_values} numbers, texts, lists and objects", code="too_many_values")
    try:
        document = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: not UTF-8 at byte {error.start}", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} at character {error.pos}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep("the body", None) from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON here: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise _not_an_object()
    if sum(raw.count(mark) for mark in _OPENINGS) > MAX_DEPTH:
        for name, value in document.items():
            check_depth(value, name)
    return validated(document, model)


def check_depth(value: Any, name: str) -> None:
    """Raises InvalidRequest: what is written again, by templates and in answers, must be within Python's recursion."""
    nested = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (one for outer in nested for one in (outer.values() if isinstance(outer, dict) else outer))
        nested = [one for one in inner if isinstance(one, dict | list)]
        if not nested:
            return
    raise _too_deep(name, name)


def _too_deep(what: str, param: str | None) -> InvalidRequest:
    return InvalidRequest(f"{what} is nested more than {MAX_DEPTH} deep", param=param, code="nested_too_deeply")


def validated(document: dict[str, Any], model: type[BodyT]) -> BodyT:
    """What is said in JSON's own types. Raises InvalidRequest, naming the field."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        invalid = explained(error.errors(include_url=False)[0])
    # From out here: the original would keep the whole document for as long as this error is known to anybody.
    document = {}
    raise invalid


def explained(problem: ErrorDetails, within: str = "") -> InvalidRequest:
    """The error for one of pydantic's problems with what is `within` the body, in words that name the field and the value."""
    kind, message = problem["type"], problem["msg"]
    param = _dotted((within, *problem["loc"]) if within else problem["loc"])
    if not param:
        # Raised by a validator of the whole body, whose words begin with the field.
        text = message.removeprefix("Value error, ")
        return InvalidRequest(text, param=text.split()[0], code="invalid_value")
    if kind == "extra_forbidden":
        return InvalidRequest(f"{param} is not a field that this server supports", param=param, code="unknown_parameter")
    if kind == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    if kind in ("value_error", "assertion_error"):
        return InvalidRequest(f"{param} {message.removeprefix('Value error, ')}", param=param, code="invalid_value")
    value = problem.get("input")
    shown = f", not {value!r}" if isinstance(value, (str, int, float, bool, type(None))) and len(repr(value)) < 100 else ""
    return InvalidRequest(f"{param}: {message[:1].lower()}{message[1:]}{shown}", param=param, code="invalid_value")


def _dotted(location: Sequence[str | int]) -> str:
    path = ""
    for part in location:
        if isinstance(part, str) and (part.startswith("<") or part == "[key]"):
            # One of several kinds that a value may be of, or what is wrong with a field's name: no field.
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _not_an_object() -> InvalidRequest:
    return InvalidRequest("the body must be a JSON object, sent with content-type application/json", code="invalid_body")


_OPENINGS = (b"[", b"{")
_MARKS = (b",", b":", *_OPENINGS)


def has_more_values(raw: bytes, limit: int) -> bool:
    """Whether a JSON document has more than `limit` separators and openings of lists and objects outside of strings, which is as many as it
    has values and keys, or more strings than go with so many. Nothing is kept of it, and whoever waits for the interpreter gets it between
    two strings."""
    if sum(raw.count(mark) for mark in _MARKS) <= limit:
        return False
    found = begin = strings = 0
    while max(found, strings - 1) <= limit:
        opening = raw.find(b'"', begin)
        end = len(raw) if opening < 0 else opening
        found += sum(raw.count(mark, begin, end) for mark in _MARKS)
        if opening < 0:
            break
        begin = _end_of_string(raw, opening) + 1
        strings += 1
    return max(found, strings - 1) > limit


def _end_of_string(raw: bytes, opening: int) -> int:
    """Where its closing quote is; the document's end when it has none."""
    quote = opening
    while (quote := raw.find(b'"', quote + 1)) >= 0:
        before = quote
        while raw[before - 1] == 0x5C:
            before -= 1
        if (quote - before) % 2 == 0:
            return quote
    return len(raw)
