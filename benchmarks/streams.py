"""Streams of gRPC messages to many clients at little cost: as much of HTTP/2 (RFC 9113) as one call a connection takes.

A server of Python's gRPC spends some 50 us on each message, so that one process cannot be a thousand engines that report twenty times a
second. Here a message that is encoded already goes out as one frame. Of what is asked only the address and the method count.
"""

from __future__ import annotations

import asyncio
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import cast

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
"""Kinds of frames."""
ACK, END_STREAM, END_HEADERS = 1, 1, 4
FRAME_HEAD_BYTES = 9
LARGEST_FRAME, FIRST_WINDOW, INITIAL_WINDOW_SIZE = 16_384, 65_535, 4
"""Bytes, bytes, and the number of the setting."""
# HPACK: `:status 200` and the name `content-type` are in the static table; nothing else is indexed or compressed.
_BEGUN = b"\x88\x0f\x10\x10application/grpc"
_DONE = b"\x00\x0bgrpc-status\x010"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _watches(headers: Iterable[tuple[str | bytes, str | bytes]]) -> bool:
    return any(name == ":path" and str(value).rpartition("/")[2].startswith("Watch") for name, value in headers)


def framed(message: bytes) -> bytes:
    """A message as gRPC puts it into the frames."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class StreamConnection(asyncio.Protocol, ABC):
    """One client's connection. A call of a method that watches is answered with a stream, one at a time, and others with an empty
    message."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._stream = 0
        """Of the call that is answered; 0 while there is none."""
        self._greeted = False
        self._received = bytearray()
        self._decoder = hpack.Decoder()
        self._first_window = self._stream_window = self._window = FIRST_WINDOW
        """What the client takes in: of any new call, of the one that is answered, and over all."""
        self._widened = asyncio.Event()

    @abstractmethod
    def begun(self) -> None:
        """A call has come; from now on messages can be sent."""

    @property
    def address(self) -> str:
        """The one of ours to which the client connected."""
        return str(self._transport.get_extra_info("sockname")[0])

    @property
    def calls(self) -> bool:
        """Whether there is a call that is answered."""
        return self._stream != 0

    def abort(self) -> None:
        self._transport.abort()

    def send(self, message: bytes) -> bool:
        """A framed message, at once and in one frame; False when it was not, for the client does not take it in now."""
        size = len(message)
        if not self._stream or size > self._window or size > self._stream_window or size > LARGEST_FRAME:
            return False
        self._write(message)
        return True

    async def send_in_time(self, message: bytes) -> None:
        """A framed message of any size, as the client takes it in. Raises ConnectionError when it does no more."""
        left = memoryview(message)
        while left:
            room = min(self._window, self._stream_window, LARGEST_FRAME)
            if not self._stream:
                raise ConnectionError("the client ended the call")
            if room > 0:
                self._write(bytes(left[:room]))
                left = left[room:]
            else:
                self._widened.clear()
                await self._widened.wait()

    def _write(self, part: bytes) -> None:
        self._window -= len(part)
        self._stream_window -= len(part)
        self._transport.write(frame(DATA, 0, self._stream, part))

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(frame(SETTINGS, 0, 0))

    def connection_lost(self, error: Exception | None) -> None:
        self._ended()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if not self._greeted:
            if len(received) < len(PREFACE):
                return
            if not received.startswith(PREFACE):
                self.abort()
                return
            self._greeted = True
            del received[: len(PREFACE)]
        while len(received) >= FRAME_HEAD_BYTES:
            end = FRAME_HEAD_BYTES + int.from_bytes(received[:3], "big")
            if len(received) < end:
                return
            kind, flags, stream = received[3], received[4], int.from_bytes(received[5:9], "big") & 0x7FFFFFFF
            payload = bytes(received[FRAME_HEAD_BYTES:end])
            del received[:end]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for setting, value in struct.iter_unpack(">HI", payload):
                if setting == INITIAL_WINDOW_SIZE:
                    self._stream_window += value - self._first_window
                    self._first_window = value
            self._transport.write(frame(SETTINGS, ACK, 0))
            self._widened.set()
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
            self._widened.set()
        elif kind == HEADERS and (not _watches(self._decoder.decode(payload)) or self._stream):
            self._transport.write(
                frame(HEADERS, END_HEADERS, stream, _BEGUN)
                + frame(DATA, 0, stream, framed(b""))
                + frame(HEADERS, END_STREAM | END_HEADERS, stream, _DONE)
            )
        elif kind == HEADERS:
            self._stream, self._stream_window = stream, self._first_window
            self._transport.write(frame(HEADERS, END_HEADERS, stream, _BEGUN))
            self.begun()
        elif kind == RST_STREAM and stream == self._stream:
            self._ended()

    def _ended(self) -> None:
        self._stream = 0
        self._widened.set()
