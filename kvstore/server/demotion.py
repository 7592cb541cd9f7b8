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
    """When fewer than `demote_below` of the arena's slots are free or spare, blocks are copied until `demote_until` are."""

    def __init__(self, node: Node, ssd: Ssd, options: SsdOptions) -> None:
        self._node, self._ssd, self._options = node, ssd, options
        self._batch = max(1, STAGED_BYTES // node.options.spec.bytes_per_slot)
        self._staging = aligned_memory(self._batch * node.options.spec.bytes_per_slot)
        self._under_way = False

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
        if not to_the_last and not self._wanted(room):
            return False
        batch = max(1, min(self._batch, room // BATCHES))
        await self._make_room(FREE_BATCHES * batch - counts.free)
        copies = self._ssd.blocks.next_copies(batch)
        if not copies:
            return False
        self._stage(copies)
        written = await self._ssd.put(copies, self._staging)
        metrics.SSD_DEMOTED.inc(written)
        self._node.changed()
        return written > 0

    def _wanted(self, room: int) -> bool:
        """`room`: blocks that the SSD can hold as things are."""
        pool = self._node.pool
        most = int(SSD_SHARE * room)
        until = min(int(self._options.demote_until * pool.num_slots), most)
        below = min(int(self._options.demote_below * pool.num_slots), until)
        self._under_way = pool.num_free_or_spare < (until if self._under_way else below)
        return self._under_way

    def _stage(self, copies: list[Copy]) -> None:
        size = self._node.options.spec.bytes_per_slot
        for i, copy in enumerate(copies):
            self._staging[i * size : (i + 1) * size] = self._ssd.slot(copy.slot)

    async def _make_room(self, missing: int) -> None:
        if missing > 0:
            victims = self._ssd.blocks.make_room(missing)
            self._node.changed()
            await self._ssd.tier.remove(victims)
