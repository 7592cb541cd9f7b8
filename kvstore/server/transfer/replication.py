"""Takes replicas of chosen blocks from other stores, by order of whoever places them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from kvstore import metrics
from kvstore.server.shared.context import StoreContext
from kvstore.server.transfer.pacing import RateLimit
from kvstore.server.transfer.prefix_read import PrefixRead
from springtide.errors import InvalidRequest
from springtide.ids import AttemptId, BlockKey, new_id
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.storage import Replicated
from springtide.supervision import end

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 2
"""The number of orders that are carried out at a time; others wait."""


class Replicator:
    """The replicas of a node. Serving comes first: few orders at a time, all of them together at no more than `kv.replication_rate`."""

    def __init__(self, shared: StoreContext) -> None:
        self._shared = shared
        self._rate = RateLimit(shared.options.replication_bytes_per_s)
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._in_flight: dict[BlockKey, asyncio.Task[Replicated]] = {}
        """Each by the order's last key, which stands for all of them."""

    async def replicate(self, keys: Sequence[BlockKey], sources: Sequence[PrefixSource]) -> Replicated:
        """Takes a replica. The first sources are the best. What is here already is not fetched; the same order twice at once is carried out
        once, and to its end whoever waits for it. Raises PoolFull, QuotaExceeded, InvalidRequest, or the error of the sources when none
        could be read."""
        if not keys:
            raise InvalidRequest("keys is empty: there is nothing to replicate", param="keys")
        task = self._in_flight.get(keys[-1])
        if task is None:
            task = self._in_flight[keys[-1]] = asyncio.create_task(self._replicate(keys, sources), name="replicate")
            task.add_done_callback(lambda ended: self._ended(keys[-1], ended))
        return await asyncio.shield(task)

    async def close(self) -> None:
        await end(*self._in_flight.values())

    def _ended(self, key: BlockKey, task: asyncio.Task[Replicated]) -> None:
        del self._in_flight[key]
        if not task.cancelled():
            task.exception()  # told to those who still wait

    async def _replicate(self, keys: Sequence[BlockKey], sources: Sequence[PrefixSource]) -> Replicated:
        async with self._places:
            held = self._shared.pool.num_held(keys)
            if held == len(keys):
                return Replicated(held, 0)
            start = time.perf_counter()
            read = PrefixRead(self._shared, keys, sources, rate=self._rate)
            try:
                available = await read.open(held)
                if available > held:
                    fetched = await self._fetch(read, keys[:available])
                elif read.failure is not None:
                    raise read.failure
                else:
                    fetched = 0
            finally:
                await read.close()
            metrics.REPLICATED_BLOCKS.inc(fetched)
            held = self._shared.pool.num_held(keys)
            logger.info("replicated %d blocks in %.3f s; %d of %d are here", fetched, time.perf_counter() - start, held, len(keys))
            return Replicated(held, fetched)

    async def _fetch(self, read: PrefixRead, keys: Sequence[BlockKey]) -> int:
        pool, attempt_id = self._shared.pool, AttemptId(new_id("replica"))
        acquired = pool.admit_replica(attempt_id, keys, read.tenant or "")
        local = valid = acquired.local_blocks
        try:
            if local < len(keys):
                slots = pool.begin_fetch(attempt_id, range(local, len(keys)))
                try:
                    valid = await read.run(local, slots, _nobody_computes)
                finally:
                    pool.end_fetch(attempt_id, valid)
        finally:
            pool.end_replica(attempt_id)
            self._shared.changed()
        return valid - local


def _nobody_computes(layers: int) -> None:
    """Nobody waits for single layers of a replica."""
