"""Copies to the SSD, ahead of need, what the arena is going to drop.

The bytes are staged: copied out of the arena in one turn of the event loop and written from there (in a bundle, those of its other stores
soon after; what is another block's by then is not written). So no slot is ever held for the disk's
sake, an allocation finds every block as evictable as without an SSD, and a block that goes while it is written is not lost. The price is
one copy in memory of what is written to a disk that is many times slower. One batch is staged while the one before is written, so that the
disk does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import NamedTuple

from kvstore import metrics
from kvstore.core.tenants import Tenant
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.ssd import Ssd, SsdOptions
from kvstore.ssd.health import TierState
from springtide.ids import BlockKey

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
AGAIN_AFTER_S = 1.0
STAGED_BYTES = 8 << 20
"""The size of a batch; or one block, if that is more: some milliseconds of copying, and little enough to be in the processor's cache still
when the disk fetches it."""
BATCHES_IN_FLIGHT = 2
"""The number for which the SSD keeps room."""
SSD_SHARE = 0.5
"""The share of what the SSD can hold that is kept spare in the arena at most: else copies of the arena's own blocks would push out each
other."""
BATCHES = 8
"""The least number of batches into which an SSD is divided."""


class Batch(NamedTuple):
    """Blocks that are being written together."""

    writing: asyncio.Task[int]
    keys: frozenset[BlockKey]


class Demotion:
    """The copying of blocks to the SSD. When fewer than `demote_below` of the arena's slots are free or spare, blocks are copied until
    `demote_until` are; and likewise of a tenant's quota, for what goes first there is its own."""

    def __init__(self, shared: StoreContext, ssd: Ssd, options: SsdOptions) -> None:
        self._shared, self._ssd, self._options = shared, ssd, options
        self._batch = max(1, STAGED_BYTES // shared.options.spec.bytes_per_slot)
        self._in_flight: deque[Batch] = deque()
        self._wanting: list[Tenant | None] = []
        """The tenants whose blocks are copied until there are enough; None: everybody."""

    async def run(self) -> None:
        """Copies for ever. What was not foreseen costs a batch: a machine without memory or threads has some again."""
        while True:
            try:
                if not await self._step():
                    await asyncio.sleep(LOOK_EVERY_S)
            except Exception:
                logger.exception("blocks that leave the arena were not copied to the SSD; others are, soon")
                await asyncio.sleep(AGAIN_AFTER_S)

    async def flush(self) -> None:
        """Copies what is not on the SSD yet, before an orderly stop, for `flush_s` at most."""
        end = time.monotonic() + self._options.flush_s
        while time.monotonic() < end and await self._step(to_the_last=True):
            pass
        while self._in_flight:
            await self._end_oldest()

    async def _step(self, to_the_last: bool = False) -> bool:
        """False when there is nothing to do just now."""
        if len(self._in_flight) == BATCHES_IN_FLIGHT:  # whoever waited for one of them was cancelled
            await self._end_oldest()
        begun = await self._begin(to_the_last)
        if self._in_flight and (not begun or len(self._in_flight) == BATCHES_IN_FLIGHT):
            return await self._end_oldest() > 0
        return begun

    async def _begin(self, to_the_last: bool) -> bool:
        """Begins to write a batch, if there is one that is to be written."""
        counts = self._ssd.counts()
        if counts.state is TierState.FAILING and not counts.free:
            return False
        room = counts.held + counts.free
        self._wanting = [None] if to_the_last else self._short(room)
        if not self._wanting:
            return False
        at_most = max(1, min(self._batch, room // BATCHES))
        await self._make_room(BATCHES_IN_FLIGHT * at_most - counts.free)
        busy = {key for batch in self._in_flight for key in batch.keys}
        choices = (self._ssd.blocks.next_copies(at_most, tenant, busy) for tenant in self._wanting)
        copies = next((copies for copies in choices if copies), None)
        if copies is None:
            return False
        before = self._in_flight[-1].writing if self._in_flight else None
        writing = asyncio.create_task(self._ssd.put(self._ssd.copy_out(copies), before), name="write to the SSD")
        self._in_flight.append(Batch(writing, frozenset(copy.key for copy in copies)))
        return True

    async def _end_oldest(self) -> int:
        """Returns how many blocks were written."""
        oldest = self._in_flight[0]
        await asyncio.wait([oldest.writing])
        self._in_flight.popleft()
        written = oldest.writing.result()
        metrics.SSD_DEMOTED.inc(written)
        self._shared.changed()
        return written

    def _short(self, room: int) -> list[Tenant | None]:
        """Who has too little that can go without a loss. `room`: blocks that the SSD can hold as things are."""
        pool, most = self._shared.pool, int(SSD_SHARE * room)
        short: list[Tenant | None] = []
        if pool.num_free_or_spare < self._enough(None, pool.num_slots, most):
            short.append(None)
        if sum(tenant.spare for tenant in pool.tenants) < most:
            short += [
                tenant
                for tenant in pool.tenants
                if tenant.quota is not None and tenant.num_unused_or_spare < self._enough(tenant, tenant.quota, most)
            ]
        return short

    def _enough(self, tenant: Tenant | None, num_slots: int, most: int) -> int:
        until = min(int(self._options.demote_until * num_slots), most)
        return until if tenant in self._wanting else min(int(self._options.demote_below * num_slots), until)

    async def _make_room(self, missing: int) -> None:
        if missing > 0:
            victims = self._ssd.blocks.make_room(missing)
            self._shared.changed()
            await self._ssd.remove(victims)
