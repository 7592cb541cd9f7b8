"""Copies to the SSD, ahead of need, what the arena is going to drop.

The bytes are staged: copied out of the arena in one turn of the event loop and written from there. So no slot is ever held for the disk's
sake, an allocation finds every block as evictable as without an SSD, and a block that goes while it is written is not lost. The price is
one copy in memory of what is written to a disk that is many times slower.
"""

from __future__ import annotations

import asyncio
import logging
import time

from kvstore import metrics
from kvstore.core.ssd import Copy
from kvstore.core.tenants import Tenant
from kvstore.server.node import Node
from kvstore.server.ssd import Ssd, SsdOptions
from kvstore.ssd.disk import aligned_memory
from kvstore.ssd.health import TierState

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
STAGED_BYTES = 16 << 20
"""Or one block, if that is more: some milliseconds of copying."""
FREE_BATCHES = 2
"""The SSD keeps room for so many."""
SSD_SHARE = 0.5
"""Of what the SSD can hold, the most that is kept spare in the arena: else copies of the arena's own blocks would push out each other."""
BATCHES = 8
"""Into so many, at least, an SSD is divided."""


class Demotion:
    """When fewer than `demote_below` of the arena's slots are free or spare, blocks are copied until `demote_until` are; and likewise of a
    tenant's quota, for what goes first there is its own."""

    def __init__(self, node: Node, ssd: Ssd, options: SsdOptions) -> None:
        self._node, self._ssd, self._options = node, ssd, options
        self._batch = max(1, STAGED_BYTES // node.options.spec.bytes_per_slot)
        self._staging = aligned_memory(self._batch * node.options.spec.bytes_per_slot)
        self._wanting: list[Tenant | None] = []
        """Whose blocks are copied until there are enough; None: everybody's."""

    async def run(self) -> None:
        """For ever, unless it breaks: then the store goes on without it."""
        try:
            while True:
                if not await self._step():
                    await asyncio.sleep(LOOK_EVERY_S)
        except Exception:
            logger.exception("demotion broke: what leaves the arena is lost from now on")

    async def flush(self) -> None:
        """Before an orderly stop: copies what is not on the SSD yet, for `flush_s` at most."""
        end = time.monotonic() + self._options.flush_s
        while time.monotonic() < end and await self._step(to_the_last=True):
            pass

    async def _step(self, to_the_last: bool = False) -> bool:
        """False when there is nothing to do just now."""
        counts = self._ssd.counts()
        if counts.state is TierState.FAILING and not counts.free:
            return False
        room = counts.held + counts.free
        self._wanting = [None] if to_the_last else self._short(room)
        if not self._wanting:
            return False
        batch = max(1, min(self._batch, room // BATCHES))
        await self._make_room(FREE_BATCHES * batch - counts.free)
        copies = next((copies for tenant in self._wanting if (copies := self._ssd.blocks.next_copies(batch, tenant))), None)
        if copies is None:
            return False
        self._stage(copies)
        written = await self._ssd.put(copies, self._staging)
        metrics.SSD_DEMOTED.inc(written)
        self._node.changed()
        return written > 0

    def _short(self, room: int) -> list[Tenant | None]:
        """Who has too little that can go without a loss. `room`: blocks that the SSD can hold as things are."""
        pool, most = self._node.pool, int(SSD_SHARE * room)
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

    def _stage(self, copies: list[Copy]) -> None:
        size = self._node.options.spec.bytes_per_slot
        for i, copy in enumerate(copies):
            self._staging[i * size : (i + 1) * size] = self._ssd.slot(copy.slot)

    async def _make_room(self, missing: int) -> None:
        if missing > 0:
            victims = self._ssd.blocks.make_room(missing)
            self._node.changed()
            await self._ssd.tier.remove(victims)
