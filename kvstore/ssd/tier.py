"""The tier: blocks by key.

Every slot of a file has the same size, as blocks do, so what is removed makes room for what comes, in place: each block is written once,
and no live one is ever moved (a log would copy live blocks together to get its room back). A block goes into a free slot first and into
the segment's table afterwards, in one write for all of a batch; a removed one leaves the table before its slot is used again. So a crash
costs what was not acknowledged, and a block that is there at the restart was whole when the process ended. Nothing is synced: what a power
cut takes away is missing, or is found out by its checksum when it is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvstore import metrics
from kvstore.ssd.disk import ALIGNMENT, Disk
from kvstore.ssd.errors import BlockNotHeld, CorruptBlock, DiskError, SsdUnavailable
from kvstore.ssd.files import SegmentFiles
from kvstore.ssd.format import Entry, Layout
from kvstore.ssd.health import Health, TierState
from kvstore.ssd.recovery import Record, parents_first
from kvstore.ssd.space import SegmentSlot, Space
from springtide.clock import Clock, MonotonicClock
from springtide.errors import SpringtideError
from springtide.ids import BlockKey
from springtide.supervision import uninterrupted

logger = logging.getLogger(__name__)
T = TypeVar("T")


class PutBlock(NamedTuple):
    """A block to be put."""

    key: BlockKey
    parent: BlockKey | None
    """None: the first block of a prompt."""
    memory: memoryview


@dataclass(frozen=True, slots=True)
class TierCounts:
    """How full the tier is, and what it has lost."""

    state: TierState
    held: int
    free: int
    """Blocks that can be put now."""
    capacity: int
    """Blocks, once the tier has grown to all of its bytes."""
    retired: int
    """Slots that are not used again before the next start, as a block could not be read from them."""
    dropped: Mapping[str, int]
    """Blocks lost since the start, by reason: torn, orphan (found at the start), corrupt, disk_error (when read)."""


class SsdTier:
    """The SSD tier. Lives in one event loop. The memory of a `put` or `get` belongs to it until it returns, and is at rest then, however it
    ended. It is `bytes_per_slot` long, and aligned to pages where that is a multiple of a page, as the slots of an arena are.

    What goes is the caller's to decide: `put` refuses what finds no room. It removes children before their parents; whatever happens,
    a tier that is opened holds of each block all its ancestors.
    """

    def __init__(self, files: SegmentFiles, layout: Layout, clock: Clock) -> None:
        self._files, self._layout, self._clock = files, layout, clock
        recovered = files.recovered
        self._records = recovered.records
        self._sequence = max((record.entry.sequence for record in self._records.values()), default=0)
        self._space = Space()
        held: dict[int, set[int]] = {number: set() for number in recovered.segments}
        for record in self._records.values():
            held[record.place.segment].add(record.place.slot)
        for number, segment in recovered.segments.items():
            self._space.add(number, segment.num_slots, held[number])
        self._health = Health()
        self._dropped = Counter(recovered.dropped)
        self._retired = 0
        for reason, count in self._dropped.items():
            metrics.SSD_DROPPED.labels(reason).inc(count)
        self._arriving: dict[BlockKey, asyncio.Future[None]] = {}
        """Each with the end of the `put` that writes it."""
        self._growing = asyncio.Lock()
        self._operations: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._show()

    @classmethod
    async def open(
        cls,
        directory: Path,
        capacity_bytes: int,
        bytes_per_slot: int,
        fingerprint: str,
        disk: Disk | None = None,
        clock: Clock | None = None,
    ) -> SsdTier:
        """Opens the tier with the blocks that are in `directory` (made if need be) from earlier, as far as they are of the same
        `fingerprint` and `bytes_per_slot`; other segments are deleted. Raises SsdUnavailable."""
        layout, clock = Layout(bytes_per_slot, fingerprint), clock or MonotonicClock()
        files = await asyncio.to_thread(SegmentFiles, directory, layout, capacity_bytes, disk or Disk(), clock)
        tier = cls(files, layout, clock)
        how = "directly" if tier.direct else "through the page cache"
        logger.info("SSD tier in %s, %s: %s", directory, how, tier.counts())
        return tier

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache: `bytes_per_slot` is a multiple of a page, and the file system can."""
        return self._files.direct

    def blocks(self) -> list[tuple[BlockKey, BlockKey | None]]:
        """Every block with its parent, parents before their children, otherwise those put earlier before those put later."""
        return [(record.entry.key, record.entry.parent) for record in parents_first(self._records)]

    def counts(self) -> TierCounts:
        now = self._clock.now()
        growable = self._files.growable_slots
        free = self._space.num_free + (growable if self._health.may_grow(now) else 0)
        return TierCounts(
            state=self._health.state,
            held=len(self._records),
            free=free if self._health.may_write(now) else 0,
            capacity=self._files.num_slots + growable - self._retired,
            retired=self._retired,
            dropped=dict(self._dropped),
        )

    def estimated_read_s(self, num_blocks: int) -> float:
        """How long a `get` of so many would take, from what the last ones took and what is queued."""
        return self._files.read_speed.estimate_s(num_blocks * self._layout.bytes_per_slot)

    def hanging_s(self) -> float:
        """How long the oldest read in flight has not come back: a system call, which moves one block or 2 MiB."""
        return self._files.read_speed.hanging_s()

    async def put(self, blocks: Sequence[PutBlock]) -> list[bool]:
        """Puts `blocks`, parents before their children, and says which the tier holds afterwards: those it held before, and those that it
        has written. Refused are blocks without room, without their parent, or that another `put` is writing now; and all, while the disk
        fails. What continues a block that another `put` is writing is written beside it, and held once that one is."""
        self._check([block.memory for block in blocks])
        await self._to_the_end(self._put(blocks))
        return [block.key in self._records for block in blocks]

    async def get(self, keys: Sequence[BlockKey], memories: Sequence[memoryview]) -> list[SpringtideError | None]:
        """Fills `memories` with the blocks. For each what went wrong, if anything: BlockNotHeld; CorruptBlock or DiskError, the tier having
        dropped the block. Its memory is undefined then. The caller removes the descendants of what was dropped."""
        self._check(memories)
        if len(keys) != len(memories):
            raise ValueError(f"{len(keys)} keys for {len(memories)} memories")
        return await self._to_the_end(self._get(keys, memories))

    async def remove(self, keys: Iterable[BlockKey]) -> None:
        """Removes blocks, children with or before their parents. They are not held from the call on; their room is free when it returns."""
        removed = [record for key in keys if (record := self._records.pop(key, None)) is not None]
        await self._to_the_end(self._free([record.place for record in removed]))

    async def close(self) -> None:
        """Closes it when what is in flight has ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        while self._operations:
            await asyncio.wait(self._operations)
        await self._files.close()

    async def _put(self, blocks: Sequence[PutBlock]) -> None:
        wanted = self._wanted(blocks)
        earlier = {self._arriving[block.parent] for block in wanted.values() if block.parent in self._arriving}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arriving |= dict.fromkeys(wanted, done)
        try:
            places = await self._room(len(wanted))
            placed = list(zip(places, wanted.values()))  # noqa: B905 - what finds no room stays out
            entries = await self._write(placed)
            failed = await self._commit(entries)
            if placed and len(entries) == len(placed) and not failed:
                self._health.wrote()
            if earlier:
                await asyncio.wait(earlier)
            for place, block in placed:
                if place in entries and place not in failed and self._has(block.parent):
                    self._records[block.key] = Record(place, entries[place])
            metrics.SSD_REFUSED.inc(sum(key not in self._records for key in wanted))
            await self._free([place for place, block in placed if block.key not in self._records])
        finally:
            for key in wanted:
                del self._arriving[key]
            done.set_result(None)

    def _wanted(self, blocks: Sequence[PutBlock]) -> dict[BlockKey, PutBlock]:
        wanted: dict[BlockKey, PutBlock] = {}
        for block in blocks:
            if block.key not in self._records and block.key not in self._arriving and self._may_follow(block.parent, wanted):
                wanted.setdefault(block.key, block)
        return wanted

    def _may_follow(self, parent: BlockKey | None, wanted: Collection[BlockKey]) -> bool:
        return self._has(parent) or parent in wanted or parent in self._arriving

    def _has(self, parent: BlockKey | None) -> bool:
        return parent is None or parent in self._records

    async def _room(self, count: int) -> list[SegmentSlot]:
        """Free slots, as many as there are of `count`."""
        if not self._health.may_write(self._clock.now()):
            return []
        async with self._growing:
            while self._space.num_free < count and self._files.growable_slots and self._health.may_grow(self._clock.now()):
                try:
                    self._space.add(*await self._files.grow())
                    self._health.grew()
                except DiskError as error:
                    self._health.growth_failed(error, self._clock.now())
        return self._space.take(count)

    async def _write(self, placed: Sequence[tuple[SegmentSlot, PutBlock]]) -> dict[SegmentSlot, Entry]:
        """The entries of those that could be written."""
        results = await self._files.write([(place, block.memory) for place, block in placed])
        entries: dict[SegmentSlot, Entry] = {}
        for (place, block), result in zip(placed, results, strict=True):
            if isinstance(result, DiskError):
                self._health.write_failed(result, self._clock.now())
                continue
            self._sequence += 1
            entries[place] = Entry(block.key, block.parent, self._sequence, result)
        metrics.SSD_WRITTEN_BYTES.inc(len(entries) * self._layout.bytes_per_slot)
        return entries

    async def _commit(self, entries: Mapping[SegmentSlot, Entry | None]) -> Mapping[SegmentSlot, DiskError]:
        failed = await self._files.commit(entries)
        if failed:
            self._health.write_failed(next(iter(failed.values())), self._clock.now())
        return failed

    async def _free(self, places: Sequence[SegmentSlot]) -> None:
        """Frees the slots. Where that cannot be written, a restart may find a removed block again: whole, or overwritten, which its
        checksum shows."""
        await self._commit(dict.fromkeys(places))
        for place in places:
            self._space.give_back(place)
        self._show()

    async def _get(self, keys: Sequence[BlockKey], memories: Sequence[memoryview]) -> list[SpringtideError | None]:
        errors: list[SpringtideError | None] = [None if key in self._records else BlockNotHeld(f"not held: {key.hex()}") for key in keys]
        wanted = [(i, self._records[key]) for i, key in enumerate(keys) if errors[i] is None]
        for _, record in wanted:
            self._space.begin_read(record.place)
        began = self._clock.now()
        results = await self._files.read([(record.place, memories[i]) for i, record in wanted])
        metrics.SSD_READ_SECONDS.observe(self._clock.now() - began)
        for _, record in wanted:
            self._space.end_read(record.place)
        lost: dict[Record, str] = {}
        for (i, record), result in zip(wanted, results, strict=True):
            if isinstance(result, DiskError):
                errors[i], lost[record] = result, "disk_error"
            elif result != record.entry.checksum:
                errors[i] = CorruptBlock(f"the bytes of {record.entry.key.hex()} at {record.place} are not those that were put")
                lost[record] = "corrupt"
        metrics.SSD_READ_BYTES.inc(sum(error is None for error in errors) * self._layout.bytes_per_slot)
        if lost:
            logger.warning(
                "%d blocks could not be read from the SSD, the first: %s",
                len(lost),
                next(errors[i] for i, record in wanted if record in lost),
            )
            await self._drop(lost)
        return errors

    async def _drop(self, lost: Mapping[Record, str]) -> None:
        """Their slots are not given back: what failed once is not trusted with another block."""
        held = {record: reason for record, reason in lost.items() if self._records.get(record.entry.key) is record}
        for record, reason in held.items():
            del self._records[record.entry.key]
            self._dropped[reason] += 1
            metrics.SSD_DROPPED.labels(reason).inc()
        self._retired += len(held)
        await self._commit({record.place: None for record in held})
        self._show()

    async def _to_the_end(self, operation: Coroutine[Any, Any, T]) -> T:
        """Runs to its end also what a caller that is cancelled has begun: threads are using its memory."""
        if self._closed:
            operation.close()
            raise SsdUnavailable("the SSD tier has been closed")
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        return await uninterrupted(task)

    def _check(self, memories: Sequence[memoryview]) -> None:
        for memory in memories:
            if memory.nbytes != self._layout.bytes_per_slot:
                raise ValueError(f"a block has {self._layout.bytes_per_slot} bytes, its memory {memory.nbytes}")
            address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
            if self.direct and address % ALIGNMENT:
                raise ValueError(f"the memory of a block at {address:#x} is not aligned to {ALIGNMENT} bytes, as direct I/O needs")

    def _show(self) -> None:
        counts = self.counts()
        metrics.SLOTS.labels("ssd", "free").set(counts.free)
        metrics.SLOTS.labels("ssd", "cached").set(counts.held)
        metrics.SLOTS.labels("ssd", "retired").set(counts.retired)
        for state in TierState:
            metrics.SSD_STATE.labels(state.value).set(state is counts.state)
