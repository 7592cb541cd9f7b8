"""Server-streaming gRPC calls that cost little to follow.

Python's gRPC takes 70 to 150 us for each message that it hands over: a Conductor of a thousand engines that report twenty times a second
would be busy with nothing else, and before long with what is out of date. This is as much of HTTP/2 (RFC 9113) as one call over one
connection takes; C cuts what comes into frames and messages, and a message costs a tenth of that. All that has come is handed over at once:
who is late is not behind when only the newest counts.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast
from urllib.parse import unquote

import grpc
import hpack

from conductor._native import split_frames, split_messages
from springtide.rpc.channels import MAX_MESSAGE_BYTES
from springtide.tls import Tls

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_ACK, _END_STREAM, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_ENABLE_PUSH, _INITIAL_WINDOW_SIZE = 2, 4
_FRAME_HEAD = struct.Struct(">BHBBI")
"""The upper and the lower part of the length, the kind, the flags, the stream."""
_MESSAGE_HEAD = struct.Struct(">?I")
"""Whether it is compressed, and its length."""
_LARGEST_FRAME = 16_384
_LARGEST_HEADERS = 64 << 10
_WINDOW = 65_535
"""Bytes that the server may send ahead."""
_CALL = 1
"""The number of the one stream."""

_CODES: dict[str, grpc.StatusCode] = {str(code.value[0]): code for code in grpc.StatusCode}

# At debug level it writes every header, and with them the cluster's token.
logging.getLogger("hpack").setLevel(logging.INFO)

Take: TypeAlias = Callable[[Sequence[bytes]], None]
"""Of messages, in order."""


class Reading:
    """Whether what comes over a connection is read; while it is not, it lies with the kernel, and with the server once that is full."""

    def __init__(self) -> None:
        self.paused = False
        self._transport: asyncio.Transport | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """It is of this connection."""
        self._transport = transport

    def pause(self) -> None:
        self.paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        self.paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


class CallFailed(ConnectionError):
    """The server ended the call with a status that is not OK."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name} {message}")
        self.code = code


async def follow(
    address: str,
    method: str,
    request: bytes,
    metadata: Sequence[tuple[str, str]],
    take: Take,
    reading: Reading | None = None,
    tls: Tls | None = None,
) -> None:
    """Calls `method` (`/PACKAGE.SERVICE/METHOD`) at `host:port` with one message, and hands the messages of the answer to `take`, together
    all that have come. Returns when the server ends the answer. Raises OSError when the connection cannot be made or is lost, CallFailed,
    which is one, and what `take` raises. `reading` is of this connection from when it is made."""
    host, _, port = address.rpartition(":")
    headers = [
        (":method", "POST"),
        (":scheme", "http" if tls is None else "https"),
        (":path", method),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    loop = asyncio.get_running_loop()
    try:
        transport, call = await loop.create_connection(
            lambda: _Call(headers, request, take, reading), host.strip("[]"), int(port), ssl=None if tls is None else tls.client_context()
        )
    except (ValueError, OverflowError) as error:
        raise ConnectionError(f"there is no address {address!r}: {error}") from error
    try:
        await call.ended
    finally:
        transport.abort()


class _Call(asyncio.Protocol):
    def __init__(self, headers: Sequence[tuple[str, str]], request: bytes, take: Take, reading: Reading | None) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._headers, self._request, self._take, self._reading = headers, request, take, reading
        self._transport: asyncio.Transport
        self._decoder = hpack.Decoder()
        self._received = bytearray()
        """Of frames, the last of which may not be whole."""
        self._messages = bytearray()
        """Of messages, the last of which may not be whole."""
        self._header_block, self._block_flags = bytearray(), 0
        """Of the headers that are coming in several frames."""
        self._not_acknowledged = 0
        """Bytes that were taken in since the windows were last widened."""
        self._goaway = ""
        """Why the server said that it would end the connection."""

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._reading is not None:
            self._reading.begin(self._transport)
        settings = struct.pack(">HIHI", _ENABLE_PUSH, 0, _INITIAL_WINDOW_SIZE, _WINDOW)
        block = hpack.Encoder().encode(self._headers)
        message = _MESSAGE_HEAD.pack(False, len(self._request)) + self._request
        self._transport.write(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, settings)
            + _frame(_HEADERS, _END_HEADERS, _CALL, block)
            + _frame(_DATA, _END_STREAM, _CALL, message)
        )

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._receive(data)
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionResetError(f"the server closed the connection{self._goaway}"))

    # ---- frames ----

    def _receive(self, data: bytes) -> None:
        received = self._received
        received += data
        frames, end = split_frames(received, _LARGEST_FRAME)
        del received[:end]
        for kind, flags, stream, payload in frames:
            if kind == _DATA and stream == _CALL:
                self._not_acknowledged += len(payload)
                self._messages += _without_padding(flags, payload)
                if flags & _END_STREAM:
                    raise ConnectionError("the answer ended without a status")
            else:
                self._take_frame(kind, flags, stream, payload)
        if self._not_acknowledged > _WINDOW // 2:
            self._widen()
        self._hand_over()

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._transport.write(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _HEADERS and stream == _CALL:
            unpadded = _without_padding(flags, payload)
            self._header_block, self._block_flags = bytearray(unpadded[5:] if flags & _PRIORITY else unpadded), flags
            self._take_headers(flags)
        elif kind == _CONTINUATION and stream == _CALL:
            self._header_block += payload
            if len(self._header_block) > _LARGEST_HEADERS:
                raise ConnectionError(f"headers of more than {_LARGEST_HEADERS} bytes came")
            self._take_headers(flags)
        elif kind == _GOAWAY:
            self._goaway = f" with HTTP/2's error {int.from_bytes(payload[4:8], 'big')}: {payload[8:].decode(errors='replace')}"
        elif kind == _RST_STREAM and stream == _CALL:
            raise ConnectionResetError(f"the server gave up the call with HTTP/2's error {int.from_bytes(payload, 'big')}")

    def _take_headers(self, flags: int) -> None:
        if not flags & _END_HEADERS:
            return
        try:
            headers = {str(name): str(value) for name, value in self._decoder.decode(bytes(self._header_block))}
        except hpack.HPACKError as error:
            raise ConnectionError(f"headers came that cannot be read: {error}") from error
        if headers.get(":status", "200") != "200":
            raise ConnectionError(f"the server answered with HTTP status {headers[':status']}")
        if not self._block_flags & _END_STREAM:
            return
        code = _CODES.get(headers.get("grpc-status", ""), grpc.StatusCode.UNKNOWN)
        self._hand_over()
        self._end(None if code is grpc.StatusCode.OK else CallFailed(code, unquote(headers.get("grpc-message", ""))))

    def _widen(self) -> None:
        more = self._not_acknowledged.to_bytes(4, "big")
        self._transport.write(_frame(_WINDOW_UPDATE, 0, 0, more) + _frame(_WINDOW_UPDATE, 0, _CALL, more))
        self._not_acknowledged = 0

    # ---- messages ----

    def _hand_over(self) -> None:
        whole, end = split_messages(self._messages, MAX_MESSAGE_BYTES)
        if whole:
            del self._messages[:end]
            self._take(whole)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _FRAME_HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _without_padding(flags: int, payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
