"""Dynamo's SelectionService: choosing a worker for a prompt whose blocks are hashed already, and booking its load there.

Its workers publish no events, so its index is empty; but what it subscribes to is there, or it would try to connect all the time.
Arguments: workers, blocks of a prompt. Operations: `select`; and `empty`, the release of a reservation that it does not have, which is a
call that does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Sequence

os.environ.setdefault("DYN_LOG", "error")

import zmq
from dynamo._core import SelectionService, SelectionServiceError

from benchmarks.drivers.hashing import BLOCK_TOKENS
from benchmarks.drivers.holdings import HOT, Holdings
from benchmarks.drivers.protocol import run

FIRST_PORT = 20_000


class DynamoSelect:
    def __init__(self, arguments: Sequence[str]) -> None:
        self.holdings = Holdings(*map(int, arguments[-2:]))
        self._silent = zmq.Context().socket(zmq.PUB)
        self._silent.bind("tcp://127.0.0.1:*")
        self._runner = asyncio.Runner()
        self._runner.run(self._start())
        self._hashes = [[int.from_bytes(key[:7], "little") for key in self.holdings.keys(prompt)] for prompt in range(2 * HOT)]
        self._ids = itertools.count()

    async def _start(self) -> None:
        self._service = SelectionService()
        events = self._silent.getsockopt_string(zmq.LAST_ENDPOINT)
        for worker in range(self.holdings.workers):
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": "model",
                    "endpoint": f"http://127.0.0.1:{FIRST_PORT + worker}",
                    "kv_events_endpoints": {0: events},
                    "block_size": BLOCK_TOKENS,
                    "total_kv_blocks": 1_000_000,
                    "max_num_batched_tokens": 8192,
                }
            )

    def verify(self) -> None:
        assert self._runner.run(self._select(1))

    def measure(self, operation: str, times: int) -> list[float]:
        return self._runner.run(self._select(times) if operation == "select" else self._release_nothing(times))

    async def _select(self, times: int) -> list[float]:
        durations = []
        for number in itertools.islice(self._ids, times):
            hashes, name = self._hashes[number % len(self._hashes)], str(number)
            request = {
                "selection_id": name,
                "model_name": "model",
                "block_hashes": hashes,
                "sequence_hashes": hashes,
                "isl_tokens": len(hashes) * BLOCK_TOKENS + 1,
            }
            started = time.perf_counter()
            chosen = await self._service.select_and_reserve(request)
            durations.append(time.perf_counter() - started)
            assert 0 <= chosen["worker_id"] < self.holdings.workers
            await self._service.free_reservation(name)
        return durations

    async def _release_nothing(self, times: int) -> list[float]:
        durations = []
        for _ in range(times):
            started = time.perf_counter()
            with contextlib.suppress(SelectionServiceError):
                await self._service.free_reservation("unknown")
            durations.append(time.perf_counter() - started)
        return durations

    def close(self) -> None:
        self._service.shutdown()
        self._runner.close()
        self._silent.close()


if __name__ == "__main__":
    run(DynamoSelect)
