"""Brings the blocks of a prefix from the node's SSD and from other stores into an attempt's slots, and tells the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstore import metrics
from kvstore.core.results import UnknownAttempt
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.failures import failure_of
from kvstore.server.shared.ssd import Ssd
from kvstore.server.transfer.prefix_read import PrefixRead
from messenger.base import TransferTimeout
from springtide.clock import ObservedTime
from springtide.ids import AttemptId, BlockKey, Slot
from springtide.protocol.outputs import AttemptFailed
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.storage import Acquired, FetchProgress, FetchTruncated, Notice

logger = logging.getLogger(__name__)

LATE_S = 1.0
"""The time after which a read from the SSD is late, when one system call of it does not come back for so long, or all of it takes
LATE_FACTOR times what was estimated, and so long at least: the engine's model waits for it, whoever else would have a turn."""
LATE_FACTOR = 4.0
LOOK_EVERY_S, _MOST_BETWEEN_LOOKS_S = 0.1, 0.2
Notify = Callable[[Notice], None]


class PrefixFetch:
    """The fetch of one attempt. `acquired` are its slots; blocks [acquired.local_blocks, len(keys)) are wanted: those before `ssd_blocks`
    from the SSD, which is read first and block by block; the others, and what it fails to give, from the stores at `sources`, layer by
    layer."""

    def __init__(
        self,
        shared: StoreContext,
        notify: Notify,
        attempt_id: AttemptId,
        tenant: str,
        acquired: Acquired,
        keys: Sequence[BlockKey],
        sources: Sequence[PrefixSource],
        ssd_blocks: int,
    ) -> None:
        self._shared = shared
        self._notify = notify
        self._attempt_id = attempt_id
        self._tenant = tenant
        self._acquired = acquired
        self._keys = keys
        self._sources = sources
        self._ssd_blocks = ssd_blocks
        self._cancelled = asyncio.Event()
        self._late = False
        """The engine has been told that the attempt failed, as the SSD did not give its blocks in time."""
        self._read = PrefixRead(shared, keys, sources, tenant)

    def cancel(self) -> None:
        """Ends it, as the engine does not want it any more. Reading stops after what is in flight; the slots are held until then."""
        self._cancelled.set()
        self._read.cancel()

    async def run(self) -> None:
        """Answers the Acquire, with as many remote blocks as are on the SSD or a source could lease, then reads them."""
        local = self._acquired.local_blocks
        try:
            remote = max(await self._read.open(self._ssd_blocks), self._ssd_blocks) - local
            if remote == 0:
                logger.info("no prefix from elsewhere: %s", self._read.failure or "none is there", extra={"attempt_id": self._attempt_id})
                self._answer(0)
                return
            try:
                slots = self._shared.pool.begin_fetch(self._attempt_id, range(local, local + remote))
            except UnknownAttempt:  # released meanwhile
                return
            self._answer(remote)
            await self._fetch(slots)
        finally:
            await self._read.close()

    async def _fetch(self, slots: Sequence[Slot]) -> None:
        """Ends the fetch in the pool before it says so, for the engine goes on from there."""
        start, local, valid = time.perf_counter(), self._acquired.local_blocks, 0
        try:
            valid = await self._fill(local, slots)
            if self._late:  # until it lets go, the engine may commit what it computed without these blocks: held here, that is refused
                await self._cancelled.wait()
        finally:
            self._shared.pool.end_fetch(self._attempt_id, max(valid, local))
            self._shared.changed()
        if self._late:
            metrics.FETCH_SECONDS.labels("late").observe(time.perf_counter() - start)
            return
        complete = valid == local + len(slots)
        metrics.FETCH_SECONDS.labels("complete" if complete else "truncated").observe(time.perf_counter() - start)
        if complete:
            self._progress(self._shared.options.spec.layers)
        else:
            logger.warning("a fetch broke off after %d of %d blocks", valid - local, len(slots), extra={"attempt_id": self._attempt_id})
            self._notify(FetchTruncated(self._attempt_id, valid))

    async def _fill(self, first: int, slots: Sequence[Slot]) -> int:
        """Blocks from `first` on into `slots`. Returns how many of the prompt's are valid then."""
        valid, end = first, first + len(slots)
        if self._shared.ssd is not None and self._ssd_blocks > first:
            valid = await self._read_ssd(self._shared.ssd, first, slots[: self._ssd_blocks - first])
            if valid < self._ssd_blocks and not self._cancelled.is_set() and not self._late:
                end = min(await self._open_anew(valid), end)
        from_ssd = valid
        if valid < end and not self._late:
            valid = await self._read.run(valid, slots[valid - first : end - first], self._arrived)
            metrics.FETCHED_BLOCKS.inc(valid - from_ssd)
        if not self._late:
            block_tokens = self._shared.options.spec.block_tokens
            metrics.REUSED_TOKENS.labels("ssd").inc((from_ssd - first) * block_tokens)
            metrics.REUSED_TOKENS.labels("remote").inc((valid - from_ssd) * block_tokens)
        return valid

    async def _read_ssd(self, ssd: Ssd, first: int, slots: Sequence[Slot]) -> int:
        """Reads as `Ssd.read`: returns when nothing is written to the slots any more, however late that is."""
        limit_s = LATE_FACTOR * ssd.estimated_read_s(len(slots))
        watching = asyncio.create_task(self._fail_when_late(ssd, limit_s), name="watch a read from the SSD")
        try:
            return await ssd.read(self._keys[: self._ssd_blocks], first, slots)
        finally:
            watching.cancel()
            self._shared.changed()

    async def _fail_when_late(self, ssd: Ssd, limit_s: float) -> None:
        """Truncating the fetch would not do: the engine would compute into slots that the read may yet write. Pauses of this process are
        not the disk's."""
        loop, taken = asyncio.get_running_loop(), ObservedTime(_MOST_BETWEEN_LOOKS_S)
        taken.look(loop.time())
        while taken.now < LATE_S or (taken.now < limit_s and ssd.hanging_s() - taken.stood_still_s < LATE_S):
            await asyncio.sleep(LOOK_EVERY_S)
            taken.look(loop.time())
        self._late = True
        error = TransferTimeout(f"blocks are late from the SSD, after {taken.now:.1f} s")
        logger.warning("%s", error, extra={"attempt_id": self._attempt_id})
        self._notify(AttemptFailed(self._attempt_id, failure_of(error)))

    async def _open_anew(self, more_than: int) -> int:
        """The SSD gave less than it had promised: sources may have the rest, which were passed over for that promise."""
        await self._read.close()
        self._read = PrefixRead(self._shared, self._keys, self._sources, self._tenant)
        if self._cancelled.is_set():  # while the other one was being closed
            self._read.cancel()
        return await self._read.open(more_than)

    def _arrived(self, layers: int) -> None:
        if layers < self._shared.options.spec.layers:
            self._progress(layers)

    def _progress(self, layers_ready: int) -> None:
        self._notify(FetchProgress(self._attempt_id, layers_ready))

    def _answer(self, remote_blocks: int) -> None:
        self._notify(replace(self._acquired, remote_blocks=remote_blocks))
