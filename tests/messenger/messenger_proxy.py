"""Proxies on the way to a tcp peer that pass everything on, until one begins to make it up, or holds up one connection of several."""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class _Proxy(ABC):
    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, int(self._port))
        for source, sink, direction in ((reader, there[1], "requests"), (there[0], writer, "answers")):
            pump = asyncio.create_task(self._pump(source, sink, direction))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                num_bytes += len(data)
                writer.write(await self._passed(data, direction, num_bytes))
                await writer.drain()
        writer.close()

    @abstractmethod
    async def _passed(self, data: bytes, direction: str, num_bytes: int) -> bytes:
        """What goes on in place of `data`, with which so many bytes have come on this connection in this direction."""


class GarblingProxy(_Proxy):
    def __init__(self, target: str, direction: str, rng: random.Random) -> None:
        super().__init__(target)
        self._direction = direction
        self._rng = rng
        self._garbles = False

    def begin(self) -> None:
        """From now on what goes in that direction is random bytes, as many as there would have been."""
        self._garbles = True

    async def _passed(self, data: bytes, direction: str, num_bytes: int) -> bytes:
        return self._rng.randbytes(len(data)) if self._garbles and direction == self._direction else data


class HoldingProxy(_Proxy):
    """Whatever connection brings more than `most_bytes` is held up from there on, until `let_go`; the others are not."""

    def __init__(self, target: str, most_bytes: int) -> None:
        super().__init__(target)
        self._most_bytes = most_bytes
        self._open = asyncio.Event()
        self.holds = asyncio.Event()
        """Set once there is one that is held up."""

    def let_go(self) -> None:
        self._open.set()

    async def _passed(self, data: bytes, direction: str, num_bytes: int) -> bytes:
        if num_bytes > self._most_bytes:
            self.holds.set()
            await self._open.wait()
        return data
