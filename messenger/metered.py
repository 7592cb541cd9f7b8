"""A connection that counts what goes through it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter

from messenger import metrics
from messenger.base import Completion, Connection, CorruptBytes, InvalidSlice, Slice, TransferTimeout
from springtide.errors import PeerLost

_FAILURE_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (PeerLost, "peer_lost"),
    (TransferTimeout, "deadline"),
    (InvalidSlice, "invalid"),
    (asyncio.CancelledError, "cancelled"),
)


class MeteredConnection(Connection):
    def __init__(self, inner: Connection, transport: str) -> None:
        self._inner = inner
        self.transport = transport
        self._read = metrics.meter(transport, "read")
        self._written = metrics.meter(transport, "write")

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        start = perf_counter()
        try:
            completion = await self._inner.read(batch, timeout_s)
        except BaseException as error:
            self._failed(error, self._read, start)
            raise
        return self._moved(completion, self._read, start)

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        start = perf_counter()
        try:
            completion = await self._inner.write(batch, timeout_s, notify)
        except BaseException as error:
            self._failed(error, self._written, start)
            raise
        return self._moved(completion, self._written, start)

    async def drain(self) -> None:
        await self._inner.drain()

    async def close(self) -> None:
        await self._inner.close()

    def _moved(self, completion: Completion, meter: metrics.Meter, start: float) -> Completion:
        meter.count(completion.num_bytes, perf_counter() - start)
        for error in completion.failed.values():
            self._count_failure("corrupt_slice" if isinstance(error, CorruptBytes) else "stale_slice")
        return completion

    def _failed(self, error: BaseException, meter: metrics.Meter, start: float) -> None:
        meter.count(0, perf_counter() - start)
        self._count_failure(next((kind for of, kind in _FAILURE_KINDS if isinstance(error, of)), "other"))

    def _count_failure(self, kind: str) -> None:
        metrics.FAILURES.labels(self.transport, kind).inc()
