"""The node's SSD tier: its blocks and their bytes, kept in step."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore import metrics
from kvstore.core.ssd import BlockCopy, SsdBlocks
from kvstore.ssd.disk import aligned_memory
from kvstore.ssd.tier import PutBlock, SsdTier, TierCounts, ended
from springtide.errors import SpringtideError
from springtide.ids import BlockKey, Slot

if TYPE_CHECKING:
    import numpy as np

VERIFY_BYTES = 16 << 20
"""The part that `verify` reads at a time."""


@dataclass(frozen=True, slots=True)
class SsdOptions:
    """The options of the SSD tier."""

    directory: Path
    """This node's own."""
    capacity_bytes: int
    fingerprint: str
    """What names whatever makes blocks unfit for each other, beyond their size."""
    demote_below: float = 0.2
    demote_until: float = 0.3
    """The shares of the arena's slots; see kvstore.server.transfer.demotion."""
    flush_s: float = 0.5
    """The longest that an orderly stop goes on copying."""


class Ssd:
    """The tier and the blocks that it holds. Who calls what changes the blocks calls `StoreContext.changed` too. `arena` is all of its
    memory, uint8 [slots * bytes_per_slot]."""

    def __init__(self, tier: SsdTier, blocks: SsdBlocks, arena: np.ndarray, bytes_per_slot: int) -> None:
        self.tier = tier
        self.blocks = blocks
        self._arena = arena.data
        self._bytes_per_slot = bytes_per_slot
        blocks.added(tier.blocks())

    def slot(self, slot: Slot) -> memoryview:
        """The bytes of a slot of the arena."""
        return self._arena[slot * self._bytes_per_slot : (slot + 1) * self._bytes_per_slot]

    @property
    def read_us_per_block(self) -> int:
        """The estimate for a block that is read now; a power of two, so that it does not change all the time, and within a uint32."""
        return min(1 << max(1, round(self.tier.estimated_read_s(1) * 1e6)).bit_length() - 1, 1 << 31)

    def counts(self) -> TierCounts:
        return self.tier.counts()

    def worth_reading(self, keys: Sequence[BlockKey], first: int, recompute_us_per_block: int | None) -> int:
        """The block up to which a prompt is to be read from here, from block `first` on: all that is held, or nothing where computing it
        anew is expected to be sooner. None: nobody says how long that takes."""
        end = self.blocks.num_held(keys)
        if end <= first:
            return first
        num_blocks = end - first
        if recompute_us_per_block is not None and self.tier.estimated_read_s(num_blocks) > num_blocks * recompute_us_per_block / 1e6:
            metrics.SSD_DECLINED.inc(num_blocks)
            return first
        return end

    async def read(self, keys: Sequence[BlockKey], first: int, slots: Sequence[Slot]) -> int:
        """Reads blocks [first, len(keys)) of a prompt into `slots`. Returns how many of its blocks are right then: those before the first
        that could not be read, which is given up with all that continues it. Once begun it goes on to the end, whoever cancels it."""
        return await ended(asyncio.create_task(self._read(keys, first, slots)))

    async def _read(self, keys: Sequence[BlockKey], first: int, slots: Sequence[Slot]) -> int:
        errors = await self.tier.get(keys[first:], [self.slot(slot) for slot in slots])
        valid = next((first + i for i, error in enumerate(errors) if error is not None), len(keys))
        await self._give_up_failed(keys[first:], errors)
        self.blocks.used(keys[:valid])
        metrics.SSD_PROMOTED.inc(valid - first)
        return valid

    async def give_up(self, keys: Collection[BlockKey]) -> None:
        """Drops these and what continues them."""
        await self.tier.remove(self.blocks.lost(frozenset(keys)))

    async def _give_up_failed(self, keys: Sequence[BlockKey], errors: Sequence[SpringtideError | None]) -> list[BlockKey]:
        """Returns those that were lost by failing; the others had made room meanwhile."""
        failed = [key for key, error in zip(keys, errors, strict=True) if error is not None and key in self.blocks]
        if failed:
            await self.give_up(failed)
        return failed

    async def put(self, copies: Sequence[BlockCopy], staging: memoryview, after: asyncio.Task[int] | None = None) -> int:
        """Writes copies of blocks whose bytes lie one after another in `staging`, parents first, chosen in this turn of the event loop.
        Returns how many are there now. `after` is an earlier `put` of blocks that these may continue: they are written beside each
        other."""
        size, losses = self._bytes_per_slot, self.blocks.losses
        parts = [PutBlock(copy.key, copy.parent, staging[i * size : (i + 1) * size]) for i, copy in enumerate(copies)]
        held = await self.tier.put(parts)
        if after is not None:
            await asyncio.wait([after])
        kept = [(copy.key, copy.parent) for copy, there in zip(copies, held, strict=True) if there]
        refused = self.blocks.added(kept, losses)
        if refused:
            await self.tier.remove(reversed(refused))
        gone = {copy.parent for copy in copies if copy.parent is not None and copy.parent in self.blocks and copy.parent not in self.tier}
        if gone:  # else what continues them would be refused for ever
            await self.give_up(gone)
        return len(kept) - len(refused)

    async def verify(self) -> list[BlockKey]:
        """Reads everything. Returns the blocks that could not be read right, which are given up."""
        keys, step = self.blocks.keys(), max(1, VERIFY_BYTES // self._bytes_per_slot)
        scratch, size = aligned_memory(step * self._bytes_per_slot), self._bytes_per_slot
        bad: list[BlockKey] = []
        for begin in range(0, len(keys), step):
            part = [key for key in keys[begin : begin + step] if key in self.blocks]
            memories = [scratch[i * size : (i + 1) * size] for i in range(len(part))]
            bad += await ended(asyncio.create_task(self._verify(part, memories)))
        return bad

    async def _verify(self, keys: Sequence[BlockKey], memories: Sequence[memoryview]) -> list[BlockKey]:
        return await self._give_up_failed(keys, await self.tier.get(keys, memories))

    async def close(self) -> None:
        await self.tier.close()
        self._arena.release()
