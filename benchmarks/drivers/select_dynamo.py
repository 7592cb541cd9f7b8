"""Dynamo's SelectionService: choosing a worker for a prompt whose blocks are hashed already, and booking its load there.

Its workers publish no events, so its index is empty. Arguments: workers, blocks of a prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence

os.environ.setdefault("DYN_LOG", "error")

from dynamo._core import SelectionService

from benchmarks.drivers.hashing import BLOCK_TOKENS
from benchmarks.drivers.holdings import HOT, Holdings
from benchmarks.drivers.protocol import run

FIRST_PORT = 20_000


class DynamoSelect:
    def __init__(self, arguments: Sequence[str]) -> None:
        self.holdings = Holdings(*map(int, arguments[-2:]))
        self._runner = asyncio.Runner()
        self._runner.run(self._start())
        self._hashes = [[int.from_bytes(key[:7], "little") for key in self.holdings.keys(prompt)] for prompt in range(2 * HOT)]
        self._ids = itertools.count()

    async def _start(self) -> None:
        self._service = SelectionService()
        for worker in range(self.holdings.workers):
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": "model",
                    "endpoint": f"http://127.0.0.1:{FIRST_PORT + worker}",
                    "kv_events_endpoints": {0: f"tcp://127.0.0.1:{FIRST_PORT + worker}"},
                    "block_size": BLOCK_TOKENS,
                    "total_kv_blocks": 1_000_000,
                    "max_num_batched_tokens": 8192,
                }
            )

    def verify(self) -> None:
        assert self._runner.run(self._select(1))

    def measure(self, operation: str, times: int) -> list[float]:
        assert operation == "select"
        return self._runner.run(self._select(times))

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

    def close(self) -> None:
        self._service.shutdown()
        self._runner.close()


if __name__ == "__main__":
    run(DynamoSelect)
