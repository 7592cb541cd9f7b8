"""Brings blocks from the SSD into the arena because a peer wants to read them there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvstore.core.tenants import QuotaExceeded
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.ssd import Ssd
from springtide.errors import InvalidRequest, PoolFull
from springtide.ids import AttemptId, BlockKey, new_id
from springtide.supervision import end

logger = logging.getLogger(__name__)

PATIENCE_S = 0.5
"""The time that a reader waits: what is estimated to take longer is not promised, and what does take longer not waited for: the reader
waits for the answer."""


class Promotion:
    """The blocks on their way into the arena."""

    def __init__(self, shared: StoreContext) -> None:
        self._shared = shared
        self._in_flight: dict[BlockKey, asyncio.Task[None]] = {}
        """Each by its last key, which stands for all of them: several readers of the same blocks wait for one reading."""

    async def promote(self, keys: Sequence[BlockKey], tenant: str | None) -> None:
        """Brings the blocks of this prefix that are on the SSD, as far as that can be done soon; what is late is there for the next reader.
        `tenant` says whose they are; None: whose those in the arena are, and where there are none it is not known (a restart forgets it),
        so nothing is brought."""
        pool, ssd = self._shared.pool, self._shared.ssd
        owner = pool.tenant_of(keys)
        tenant = owner if tenant is None else tenant
        if ssd is None or tenant is None or (owner is not None and owner != tenant):
            return
        end = _within_patience(ssd, pool.num_held(keys), ssd.blocks.num_held(keys))
        if end <= pool.num_held(keys):
            return
        task = self._in_flight.get(keys[end - 1])
        if task is None:
            task = self._in_flight[keys[end - 1]] = asyncio.create_task(self._promote(ssd, keys[:end], tenant), name="promote")
            task.add_done_callback(lambda _: self._in_flight.pop(keys[end - 1]))
        done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)  # whatever was estimated: a disk may stall in the middle of a read
        if done:
            task.result()

    async def close(self) -> None:
        await end(*self._in_flight.values())

    async def _promote(self, ssd: Ssd, keys: Sequence[BlockKey], tenant: str) -> None:
        pool, attempt_id = self._shared.pool, AttemptId(new_id("promotion"))
        try:
            acquired = pool.admit_replica(attempt_id, keys, tenant)
        except (PoolFull, QuotaExceeded, InvalidRequest) as error:
            logger.info("%d blocks stay on the SSD though a peer asks for them: %s", len(keys), error)
            return
        local = valid = acquired.local_blocks
        try:
            if local < len(keys):
                slots = pool.begin_fetch(attempt_id, range(local, len(keys)))
                try:
                    valid = await ssd.read(keys, local, slots)
                finally:
                    pool.end_fetch(attempt_id, valid)
        finally:
            pool.end_replica(attempt_id)
            self._shared.changed()


def _within_patience(ssd: Ssd, first: int, end: int) -> int:
    while end > first and ssd.estimated_read_s(end - first) > PATIENCE_S:
        end = first + (end - first) // 2
    return end
