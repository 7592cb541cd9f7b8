"""Our Messenger between two processes, over the transport named first on the command line: timed is `Connection.write` or `read`."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.drivers.protocol import Target, run
from benchmarks.drivers.slices import Slices, Transfer
from messenger.arena_memory import SharedMemory
from messenger.base import Endpoint, Slice
from messenger.options import ShmOptions
from messenger.registry import TransportOptions, TransportSite, make_transport
from messenger.router import Messenger
from springtide.ids import new_incarnation

TIMEOUT_S = 30.0


class Side:
    """One process's Messenger; a cell of the slices is a granule."""

    def __init__(self, transport: str, slices: Slices, directory: Path) -> None:
        incarnation = new_incarnation()
        self.memory = SharedMemory.create(slices.count, slices.cell, incarnation)
        self.memory.region.generations[:] = 1
        site = TransportSite(self.memory, "127.0.0.1", directory / f"{incarnation}.sock")
        made = make_transport(transport, site, TransportOptions(shm=ShmOptions(populate=True)))
        self.messenger = Messenger([made], self.memory.region, "benchmark", incarnation, lambda peer, payload: None)


class MessengerTransfer(Transfer):
    def __init__(self, arguments: Sequence[str]) -> None:
        self.slices = slices = Slices.from_arguments(arguments)
        self._directory = tempfile.TemporaryDirectory(prefix="springtide-")
        self._loop = uvloop.new_event_loop()
        self._target = Target("benchmarks.drivers.messenger_pair", [arguments[0], self._directory.name, *slices.arguments])
        self._side = self._loop.run_until_complete(self._open(arguments[0]))
        self.memory = self._side.memory.region.memory
        self._batch = [Slice(here, there, slices.size, 1) for here, there in zip(slices.here, slices.there, strict=True)]

    async def _open(self, transport: str) -> Side:
        side = Side(transport, self.slices, Path(self._directory.name))
        await side.messenger.start()
        self._connection = await side.messenger.connect(Endpoint.from_json(self._target.announced["endpoint"]))
        return side

    def measure(self, operation: str, times: int) -> list[float]:
        return self._loop.run_until_complete(self._measure(operation, times))

    async def _measure(self, operation: str, times: int) -> list[float]:
        move, batch = getattr(self._connection, operation), self._batch
        durations = []
        for _ in range(times):
            started = time.perf_counter()
            completion = await move(batch, TIMEOUT_S)
            durations.append(time.perf_counter() - started)
            assert completion.num_bytes == self.slices.count * self.slices.size
        return durations

    def close(self) -> None:
        self._loop.run_until_complete(self._side.messenger.close())
        self._target.close()
        self._directory.cleanup()


def serve_target(arguments: Sequence[str]) -> tuple[dict[str, Any], object]:
    transport, directory = arguments[0], Path(arguments[1])
    endpoint: Future[str] = Future()

    async def serve() -> None:
        try:
            side = Side(transport, Slices.from_arguments(arguments), directory)
            endpoint.set_result((await side.messenger.start()).to_json())
        except Exception as error:
            endpoint.set_exception(error)
        await asyncio.Event().wait()

    threading.Thread(target=uvloop.run, args=(serve(),), daemon=True).start()
    return {"endpoint": endpoint.result()}, None


if __name__ == "__main__":
    run(MessengerTransfer, serve_target)
