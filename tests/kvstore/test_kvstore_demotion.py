"""What is copied to the SSD ahead of need, while the disk takes its time."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ssd_support import BLOCK_BYTES, ManualDisk, key, open_tier

from kvstore.core.pool import Pool
from kvstore.server.shared.ssd import Ssd, SsdOptions
from kvstore.server.shared.stripe_ssd import OwnSsd
from kvstore.server.transfer import demotion
from kvstore.server.transfer.demotion import BATCHES_IN_FLIGHT, Demotion
from kvstore.ssd.disk import Disk, aligned_memory
from springtide.clock import ManualClock
from springtide.ids import AttemptId
from tests.support.waiting import until

NUM_SLOTS = 16


def cache(pool: Pool, numbers: Sequence[int]) -> None:
    keys, attempt_id = [key(number) for number in numbers], AttemptId(str(numbers))
    pool.acquire(attempt_id, keys, len(keys), 0)
    pool.commit(attempt_id, 0, keys)
    pool.release(attempt_id)


async def test_a_stop_in_the_middle_of_writing_flushes_the_rest(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(demotion, "STAGED_BYTES", 2 * BLOCK_BYTES)
    disk, pool = ManualDisk(ManualClock()), Pool([0] * NUM_SLOTS, 1, ssd_capacity=100)
    assert pool.ssd is not None
    tier = await open_tier(tmp_path, disk=disk, clock=disk.clock)
    arena = np.frombuffer(aligned_memory(NUM_SLOTS * BLOCK_BYTES), np.uint8)
    shared = SimpleNamespace(options=SimpleNamespace(spec=SimpleNamespace(bytes_per_slot=BLOCK_BYTES)), pool=pool, changed=lambda: None)
    options = SsdOptions(tmp_path, 1 << 20, "f", demote_below=1.0, demote_until=1.0, flush_s=30.0)
    copying = Demotion(shared, Ssd(OwnSsd(tier, arena, BLOCK_BYTES), pool.ssd), options)  # type: ignore[arg-type]
    cache(pool, range(NUM_SLOTS))
    running = asyncio.create_task(copying.run())
    for _ in range(1000):
        await asyncio.sleep(0)
        if len(copying._in_flight) == BATCHES_IN_FLIGHT:
            break
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(copying._in_flight) == BATCHES_IN_FLIGHT, "it was stopped while it waited for the first of them"
    await copying.flush()
    assert len(pool.ssd) == NUM_SLOTS
    await tier.close()


async def test_what_was_not_foreseen_costs_a_batch_and_not_the_copying(tmp_path: Path, monkeypatch: Any) -> None:
    """There is no memory or no thread for a moment."""
    monkeypatch.setattr(demotion, "AGAIN_AFTER_S", 0.0)
    clock = ManualClock()
    pool, disk = Pool([0] * NUM_SLOTS, 1, ssd_capacity=100), Disk()
    assert pool.ssd is not None
    tier = await open_tier(tmp_path, disk=disk, clock=clock)
    ssd = Ssd(OwnSsd(tier, np.frombuffer(aligned_memory(NUM_SLOTS * BLOCK_BYTES), np.uint8), BLOCK_BYTES), pool.ssd)
    copy_out, failures = ssd.copy_out, [OSError(errno.ENOMEM, "no memory"), RuntimeError("can't start new thread")]

    def fails(blocks: Any) -> Any:
        if failures:
            raise failures.pop()
        return copy_out(blocks)

    monkeypatch.setattr(ssd, "copy_out", fails)
    shared = SimpleNamespace(options=SimpleNamespace(spec=SimpleNamespace(bytes_per_slot=BLOCK_BYTES)), pool=pool, changed=lambda: None)
    options = SsdOptions(tmp_path, 1 << 20, "f", demote_below=1.0, demote_until=1.0, flush_s=30.0)
    cache(pool, range(NUM_SLOTS))
    running = asyncio.create_task(Demotion(shared, ssd, options).run())  # type: ignore[arg-type]
    await until(lambda: len(pool.ssd or ()) == NUM_SLOTS)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await tier.close()
