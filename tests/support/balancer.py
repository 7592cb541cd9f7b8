"""A TCP balancer as stands before gateways: a connection goes to one that is ready, by /ready, and to the next where that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType

CONNECT_S, LOOK_EVERY_S = 1.0, 0.25
_ASK = b"GET /ready HTTP/1.1\r\nhost: balancer\r\nconnection: close\r\n\r\n"


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Balancer:
    """`with Balancer(["10.0.0.1:8000", …]) as balancer`: at `balancer.url` while entered, in a thread of its own."""

    def __init__(self, backends: Sequence[str]) -> None:
        self._backends = tuple(backends)
        self._ready: set[str] = set()
        self._turn = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="balancer", daemon=True)
        self.connections = dict.fromkeys(self._backends, 0)
        """How many each has been given."""
        self.url = ""

    def __enter__(self) -> Balancer:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def ready(self) -> frozenset[str]:
        return frozenset(self._ready)

    async def _start(self) -> str:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._looking = [asyncio.create_task(self._look(backend)) for backend in self._backends]
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, backend: str) -> None:
        while True:
            status = b""
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(*_place(backend))
                    with contextlib.closing(writer):
                        writer.write(_ASK)
                        status = await reader.readline()
            (self._ready.add if b" 200 " in status else self._ready.discard)(backend)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            there = await self._connected()
            if there is None:
                return
            await splice((reader, writer), there)

    async def _connected(self) -> Stream | None:
        self._turn += 1
        in_turn = [self._backends[(self._turn + i) % len(self._backends)] for i in range(len(self._backends))]
        for backend in sorted(in_turn, key=lambda each: each not in self._ready):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    connected = await asyncio.open_connection(*_place(backend))
                self.connections[backend] += 1
                return connected
        return None


def _place(backend: str) -> tuple[str, int]:
    host, _, port = backend.rpartition(":")
    return host, int(port)


async def splice(near: Stream, far: Stream) -> None:
    """Has what comes from one go to the other until either has ended; closes the far one."""
    with contextlib.closing(far[1]):
        pumps = [asyncio.create_task(_pump(near[0], far[1])), asyncio.create_task(_pump(far[0], near[1]))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(64 << 10):
            writer.write(piece)
            await writer.drain()
