"""Proxies on the way to a tcp peer that pass everything on, until one begins to make it up, or holds up one connection of several."""

from __future__ import annotations

import asyncio
import contextlib
import random
from types import TracebackType
from typing import Self


class GarblingProxy:
    def __init__(self, target: str, direction: str, rng: random.Random) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._direction = direction
        self._rng = rng
        self._garbles = False
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""

    def begin(self) -> None:
        """From now on what goes in that direction is random bytes, as many as there would have been."""
        self._garbles = True

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
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                if self._garbles and direction == self._direction:
                    data = self._rng.randbytes(len(data))
                writer.write(data)
                await writer.drain()
        writer.close()


class HoldingProxy:
    """On the way to a tcp peer. Whatever connection brings more than `most_bytes` is held up from there on, until `let_go`; the others are
    not."""

    def __init__(self, target: str, most_bytes: int) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._most_bytes = most_bytes
        self._open = asyncio.Event()
        self.holds = asyncio.Event()
        """Set once there is one that is held up."""
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""

    def let_go(self) -> None:
        self._open.set()

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
        for source, sink in ((reader, there[1]), (there[0], writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                num_bytes += len(data)
                if num_bytes > self._most_bytes:
                    self.holds.set()
                    await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
