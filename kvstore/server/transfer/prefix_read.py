"""Reads a prefix from whichever stores have it: the best one first, another at once when it fails, another beside it when it is slow.

Every part of the prefix has one reader at a time. Hedging therefore gives no part to two sources at once, whose bytes would mix in one
slot: another source takes the parts that *follow* the late one. When that alone is left, or it is late for as long again, the late read is
cancelled, and its part is given to the other source once the read has ended, for then own memory is at rest (messenger.base.Connection).
So hedging needs no scratch memory, moves hardly a byte twice, and cannot overload a network that is slow because it is full. The price: a
source that has stopped altogether holds its last parts for the second that a cancelled read may take.

A source of which nothing comes through is asked whether it lives, again and again; one that does not answer is given up, whoever else there
is to read from. So who hangs is told from who is slow, which no deadline could without knowing the network.

Replicas of a block are copies of each other or were computed from the same tokens, so a block's layers may come from different sources.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore import metrics
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.peers import LONGEST_BATCH_S
from kvstore.server.transfer.pacing import RateLimit, block_slice, layer_groups
from kvstore.server.transfer.source import Source
from messenger.base import Completion
from springtide.errors import SpringtideError
from springtide.ids import BlockKey, Slot
from springtide.protocol.scheduling import PrefixSource

logger = logging.getLogger(__name__)

MAX_PART_BYTES = 8 << 20
READS_PER_SOURCE = 4
OPEN_PATIENCE_S = 0.2
"""A store that has not answered after so long is not waited for alone."""


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The part that one read brings: the slabs of a layer group of some blocks, ascending, numbered from the prompt's first."""

    group: int
    blocks: Sequence[int]


@dataclass(slots=True, eq=False)
class _Read:
    source: Source
    part: ReadPart
    num_bytes: int
    begins_at: float
    """A time in the past, or when its turn comes under a `RateLimit`."""
    late: bool = False
    recalled: bool = False


class PrefixRead:
    """One reading of a prefix: first `open`, then `run`, then `close`, whatever happened. `keys` are those of all blocks that are wanted,
    from the prompt's first on. `tenant` is whose they have to be; None: whoever's they are, which `tenant` says once it is open."""

    def __init__(
        self,
        shared: StoreContext,
        keys: Sequence[BlockKey],
        sources: Sequence[PrefixSource],
        tenant: str | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        self._shared = shared
        self._keys = keys
        self.tenant = tenant
        self.failure: SpringtideError | None = None
        """The error of the source that failed last."""
        self._rate = rate
        self._unopened = deque(source.store_address for source in sources if source.node_id != shared.options.node_id)
        self._opening: set[asyncio.Task[Source]] = set()
        self._sources: list[Source] = []
        self._reads: dict[asyncio.Task[Completion], _Read] = {}
        self._parts: deque[ReadPart] = deque()
        self._cancelled = False
        self._first = 0
        """The first block that is wanted."""
        self._slots: Sequence[Slot] = ()
        self._groups: list[range] = []
        self._missing: list[int] = []
        """The number of blocks of each layer group that have not arrived."""

    def cancel(self) -> None:
        """Ends it, as nobody wants it any more: `run` starts no more reads, and ends when those in flight have."""
        self._cancelled = True

    # ---- opening ----

    async def open(self, more_than: int) -> int:
        """The number of blocks that can be read: what the first source has that answers and has more than `more_than`; 0 when none has."""
        self._first = more_than
        while not self._cancelled and (self._opening or self._open_next()):
            patience = OPEN_PATIENCE_S if self._unopened else None
            done, _ = await asyncio.wait(self._opening, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._open_next()
            for opening in done:
                self._take_in(opening)
            best = max((source.num_blocks for source in self._sources if not source.given_up), default=0)
            if best:
                return best
        return 0

    def _open_next(self) -> bool:
        if not self._unopened:
            return False
        address = self._unopened.popleft()
        self._opening.add(asyncio.create_task(Source.open(self._shared, address, self._keys, self.tenant), name=f"open {address}"))
        return True

    def _take_in(self, opening: asyncio.Task[Source]) -> None:
        self._opening.discard(opening)
        try:
            source = opening.result()
        except SpringtideError as error:
            self.failure = error
            logger.warning("a source of a prefix is left out: %s", error)
            return
        self._sources.append(source)
        if source.num_blocks <= self._first:
            source.given_up = True
        elif self.tenant is None:
            self.tenant = source.lease.tenant
        elif self.tenant != source.lease.tenant:
            source.given_up = True
            logger.error("%s holds the prefix of tenant %r as that of %r: it is left out", source.address, self.tenant, source.lease.tenant)

    # ---- reading ----

    async def run(self, first: int, slots: Sequence[Slot], on_layers: Callable[[int], None]) -> int:
        """Reads blocks [first, first + len(slots)) into `slots`, all layers of them, and tells `on_layers` up to which layer all are here.
        Returns how many of the prompt's blocks are then valid: those before the first that no source could give. When it ends, however it
        ends, nothing is written to the slots any more."""
        options, end = self._shared.options, first + len(slots)
        self._first, self._slots = first, slots
        self._groups = list(layer_groups(options.spec, len(slots), options.layer_group_bytes))
        self._missing = [len(slots)] * len(self._groups)
        self._parts.extend(ReadPart(group, range(first, end)) for group in range(len(self._groups)))
        ready = 0
        try:
            while self._give_out() or self._find_another():
                await self._step()
                while ready < len(self._groups) and not self._missing[ready]:
                    on_layers(self._groups[ready].stop)
                    ready += 1
        finally:
            await self._rest()
        return min((part.blocks[0] for part in self._parts), default=end)

    async def close(self) -> None:
        """Gives back what was leased; what is still being leased is waited for, lest it stay so until it expires."""
        await self._rest()
        for opened in await asyncio.gather(*self._opening, return_exceptions=True):
            if isinstance(opened, Source):
                self._sources.append(opened)
        await asyncio.gather(*(source.close() for source in self._sources))
        self._opening.clear()
        self._sources.clear()

    async def _rest(self) -> None:
        """Ends what is in flight."""
        for task in self._reads:
            task.cancel()
        interrupted: asyncio.CancelledError | None = None
        while in_flight := [task for task in self._reads if not task.done()]:
            try:
                await asyncio.wait(in_flight)
            except asyncio.CancelledError as error:  # whoever is impatient, the slots are being written
                interrupted = error
        self._parts.extend(read.part for read in self._reads.values())
        self._reads.clear()
        if interrupted is not None:
            raise interrupted

    def _give_out(self) -> bool:
        """Parts to the sources that have time for them. False when nobody reads."""
        for source in self._sources:
            while not self._cancelled and source.in_flight < READS_PER_SOURCE and (part := self._next_for(source)) is not None:
                self._start(source, part)
        return bool(self._reads)

    def _find_another(self) -> bool:
        """True when a source may yet come for what is left."""
        return bool(self._parts) and not self._cancelled and (bool(self._opening) or self._open_next())

    def _next_for(self, source: Source) -> ReadPart | None:
        """The first part of which the source has blocks, as much of it as goes into one read."""
        if source.given_up:
            return None
        for position, part in enumerate(self._parts):
            block_bytes = len(self._groups[part.group]) * self._shared.options.spec.bytes_per_slab
            at_most = max(1, min(source.pace.batch_bytes, MAX_PART_BYTES) // block_bytes)
            there = sum(block < source.num_blocks for block in part.blocks[:at_most])
            if there == 0:
                continue
            del self._parts[position]
            if there < len(part.blocks):
                self._parts.insert(position, ReadPart(part.group, part.blocks[there:]))
            return ReadPart(part.group, part.blocks[:there])
        return None

    def _start(self, source: Source, part: ReadPart) -> None:
        num_bytes = len(part.blocks) * len(self._groups[part.group]) * self._shared.options.spec.bytes_per_slab
        now = _now()
        read = _Read(source, part, num_bytes, now if self._rate is None else self._rate.take(num_bytes, now))
        source.in_flight += 1
        self._reads[asyncio.create_task(self._read(read), name=f"read from {source.address}")] = read

    async def _read(self, read: _Read) -> Completion:
        spec, source, route = self._shared.options.spec, read.source, read.source.route
        assert route is not None, "a source without blocks is asked for none"
        await asyncio.sleep(max(0.0, read.begins_at - _now()))
        layers, theirs, generations = self._groups[read.part.group], source.lease.slots, source.lease.generations
        slices = [
            block_slice(spec, self._slots[block - self._first], theirs[block], generations[block], layers) for block in read.part.blocks
        ]
        reading = self._shared.peers.while_it_lives(
            source.address, route.read(slices, LONGEST_BATCH_S), self._shared.options.batch_timeout_s
        )
        completion = await source.pace.move(reading)
        self._shared.hedging.observe(read.num_bytes, _now() - read.begins_at)
        return completion

    async def _step(self) -> None:
        """Waits until something has happened, or a read is late, and does what that asks for."""
        in_flight: set[asyncio.Task[Any]] = {*self._reads, *self._opening}
        done, _ = await asyncio.wait(in_flight, timeout=self._patience(), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task in self._opening:
                self._take_in(task)
            else:
                self._take(task)
        self._hurry()

    def _take(self, task: asyncio.Task[Completion]) -> None:
        """The read has ended: what it brought is here, what it did not is somebody else's to read."""
        read = self._reads.pop(task)
        read.source.in_flight -= 1
        if task.cancelled():
            self._parts.appendleft(read.part)
            return
        try:
            completion = task.result()
        except SpringtideError as error:
            self._parts.appendleft(read.part)
            self._give_up(read.source, error)
            return
        self._shared.bytes_read += completion.num_bytes
        metrics.FETCHED_BYTES.inc(completion.num_bytes)
        self._missing[read.part.group] -= len(read.part.blocks) - len(completion.failed)
        if completion.failed:
            self._parts.appendleft(ReadPart(read.part.group, [read.part.blocks[i] for i in sorted(completion.failed)]))
            self._give_up(read.source, completion.failed[min(completion.failed)])

    def _give_up(self, source: Source, error: SpringtideError) -> None:
        if source.given_up:
            return
        source.given_up = True
        self.failure = error
        metrics.SOURCES_GIVEN_UP.labels("failed").inc()
        logger.warning("%s failed in the middle of a prefix: %s", source.address, error)
        if not self._helpers(source) and not self._opening:
            self._open_next()

    # ---- hedging ----

    def _helpers(self, source: Source) -> list[Source]:
        return [other for other in self._sources if other is not source and not other.given_up]

    def _patience(self) -> float | None:
        """The time until the next read is late, or late for as long again."""
        now = _now()
        reads = [read for read in self._reads.values() if not read.recalled]
        waiting = [read.begins_at + self._shared.hedging.delay_s(read.num_bytes) * (2 if read.late else 1) - now for read in reads]
        return min((left for left in waiting if left > 0), default=None)

    def _hurry(self) -> None:
        """Beside a source with a late read another one is opened. When that can take over, and nothing else is left for it or the read is
        late for as long again, the read is recalled."""
        now = _now()
        for task, read in self._reads.items():
            if read.recalled:
                continue
            limit, taken = self._shared.hedging.delay_s(read.num_bytes), now - read.begins_at
            if not read.late and taken >= limit:
                read.late = True
                metrics.LATE_READS.inc()
            if not read.late:
                continue
            helpers = self._helpers(read.source)
            if not helpers and not self._opening:
                self._open_next()
            able = any(other.num_blocks > read.part.blocks[-1] and not self._has_late(other) for other in helpers)
            if able and (not self._parts or taken >= 2 * limit):
                self._recall(task, read)

    def _has_late(self, source: Source) -> bool:
        return any(read.source is source and read.late for read in self._reads.values())

    def _recall(self, task: asyncio.Task[Completion], read: _Read) -> None:
        read.recalled = True
        task.cancel()
        if not read.source.given_up:
            read.source.given_up = True
            metrics.SOURCES_GIVEN_UP.labels("slow").inc()
            logger.info("%s is too slow: the rest of the prefix is read elsewhere", read.source.address)


def _now() -> float:
    return asyncio.get_running_loop().time()
