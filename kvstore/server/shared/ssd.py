"""The node's SSD tier: its blocks and their bytes, kept in step. In a bundle the bytes of a block are in pieces, on the SSD of each of its
stores: a block is there when all pieces are, and when one of them is lost the others go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore import metrics
from kvstore.core.ssd import BlockCopy, SsdBlocks
from kvstore.server.shared.stripe_ssd import Copy, OwnSsd, StripeSsd, counts_of_all
from kvstore.ssd.tier import TierCounts
from springtide.errors import SpringtideError
from springtide.ids import BlockKey, Slot
from springtide.supervision import all_of, uninterrupted

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


class CopiedOut(NamedTuple):
    """Blocks that have been copied out of the arena, or are being copied, to be written."""

    blocks: Sequence[BlockCopy]
    generations: Sequence[int]
    """Of their slots, when they were chosen."""
    losses: int
    """`SsdBlocks.losses` then."""
    copy_ids: Sequence[Awaitable[int]]
    """By which each SSD knows them, once it has copied them."""


class Ssd:
    """The tier and the blocks that it holds. Who calls what changes the blocks calls `StoreContext.changed` too."""

    def __init__(
        self, own: OwnSsd, blocks: SsdBlocks, others: Sequence[StripeSsd] = (), generations: Sequence[int] | np.ndarray = ()
    ) -> None:
        """`others` are those of the bundle's other stores, which have the same blocks as `own` (stripe_ssd.agree). `generations` are those
        of the slots: what a slot that is another block's meanwhile had, when another store came to copy it, nobody knows."""
        self.own = own
        self.blocks = blocks
        self._all: Sequence[StripeSsd] = [own, *others]
        self._others = others
        self._generations = generations
        blocks.added(own.tier.blocks())

    @property
    def read_us_per_block(self) -> int:
        """The estimate for a block that is read now; a power of two, so that it does not change all the time, and within a uint32."""
        return min(1 << max(1, round(self.estimated_read_s(1) * 1e6)).bit_length() - 1, 1 << 31)

    def counts(self) -> TierCounts:
        return counts_of_all([ssd.counts() for ssd in self._all])

    def estimated_read_s(self, num_blocks: int) -> float:
        """How long reading so many would take: as long as where it takes longest."""
        return max(ssd.estimated_read_s(num_blocks) for ssd in self._all)

    def hanging_s(self) -> float:
        """How long the oldest read in flight has not come back."""
        return max(ssd.hanging_s() for ssd in self._all)

    def worth_reading(self, keys: Sequence[BlockKey], first: int, recompute_us_per_block: int | None) -> int:
        """The block up to which a prompt is to be read from here, from block `first` on: all that is held, or nothing where computing it
        anew is expected to be sooner. None: nobody says how long that takes."""
        end = self.blocks.num_held(keys)
        if end <= first:
            return first
        num_blocks = end - first
        if recompute_us_per_block is not None and self.estimated_read_s(num_blocks) > num_blocks * recompute_us_per_block / 1e6:
            metrics.SSD_DECLINED.inc(num_blocks)
            return first
        return end

    async def read(self, keys: Sequence[BlockKey], first: int, slots: Sequence[Slot]) -> int:
        """Reads blocks [first, len(keys)) of a prompt into `slots`. Returns how many of its blocks are right then: those before the first
        that could not be read, which is given up with all that continues it. Once begun it goes on to the end, whoever cancels it."""
        return await uninterrupted(self._read(keys, first, slots))

    async def _read(self, keys: Sequence[BlockKey], first: int, slots: Sequence[Slot]) -> int:
        errors = _first_errors(await all_of([ssd.get(keys[first:], slots) for ssd in self._all]))
        valid = next((first + i for i, error in enumerate(errors) if error is not None), len(keys))
        await self._give_up_failed(keys[first:], errors)
        self.blocks.used(keys[:valid])
        metrics.SSD_PROMOTED.inc(valid - first)
        return valid

    async def remove(self, keys: Sequence[BlockKey]) -> None:
        """Removes the bytes of blocks that are held no more, children with or before their parents."""
        await all_of([ssd.remove(keys) for ssd in self._all])

    async def give_up(self, keys: Collection[BlockKey]) -> None:
        """Drops these and what continues them."""
        await self.remove(self.blocks.lost(frozenset(keys)))

    async def _give_up_failed(self, keys: Sequence[BlockKey], errors: Sequence[SpringtideError | None]) -> list[BlockKey]:
        """Returns those that were lost by failing; the others had made room meanwhile."""
        failed = [key for key, error in zip(keys, errors, strict=True) if error is not None and key in self.blocks]
        if failed:
            await self.give_up(failed)
        return failed

    def copy_out(self, blocks: Sequence[BlockCopy]) -> CopiedOut:
        """Begins to copy blocks, chosen in this turn of the event loop, parents first, for `put`, which must come. This process's slots are
        copied when this returns."""
        slots = [block.slot for block in blocks]
        generations = [int(self._generations[slot]) for slot in slots] if self._others else ()
        return CopiedOut(blocks, generations, self.blocks.losses, [ssd.copy_out(slots) for ssd in self._all])

    async def put(self, copied: CopiedOut, after: asyncio.Task[int] | None = None) -> int:
        """Writes what was copied out. Returns how many blocks are there now. `after` is an earlier `put` of blocks that these may continue:
        they are written beside each other, in a bundle one after the other."""
        copy_ids = await all_of(copied.copy_ids)
        copies = [Copy(place, block.key, block.parent) for place, block in enumerate(copied.blocks)]
        if self._others:
            # What has the same generation still was nobody else's while it was copied, wherever that was.
            copies = [copy for copy in copies if self._generations[copied.blocks[copy.place].slot] == copied.generations[copy.place]]
            if after is not None:
                await asyncio.wait([after])
        answers = await all_of([ssd.put(copy_id, copies) for ssd, copy_id in zip(self._all, copy_ids, strict=True)])
        if after is not None:
            await asyncio.wait([after])
        held = [*zip(*(held for held, _ in answers), strict=True)]
        kept = [(copy.key, copy.parent) for copy, there in zip(copies, held, strict=True) if all(there)]
        refused = self.blocks.added(kept, copied.losses)
        useless = {*refused, *(copy.key for copy, there in zip(copies, held, strict=True) if any(there) and not all(there))}
        if useless:
            await self.remove([copy.key for copy in reversed(copies) if copy.key in useless])
        gone = {parent for _, lacking in answers for parent in lacking if parent in self.blocks}
        if gone:  # else what continues them would be refused for ever
            await self.give_up(gone)
        return len(kept) - len(refused)

    async def verify(self) -> list[BlockKey]:
        """Reads everything. Returns the blocks that could not be read right, which are given up."""
        keys, step = self.blocks.keys(), max(1, VERIFY_BYTES // self.own.bytes_per_slot)
        bad: list[BlockKey] = []
        for begin in range(0, len(keys), step):
            part = [key for key in keys[begin : begin + step] if key in self.blocks]
            if part:
                bad += await uninterrupted(self._verify(part))
        return bad

    async def _verify(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return await self._give_up_failed(keys, _first_errors(await all_of([ssd.check(keys) for ssd in self._all])))

    async def close(self) -> None:
        await all_of([ssd.close() for ssd in self._all])


def _first_errors(answers: Sequence[Sequence[SpringtideError | None]]) -> list[SpringtideError | None]:
    """Of each block the first that any of the SSDs had with it."""
    return [next((error for error in errors if error is not None), None) for errors in zip(*answers, strict=True)]
