"""A file system that is really full. Needs root, for a small tmpfs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from ssd_support import MIB, block, key, open_tier, read, small_segments

from kvstore.ssd.disk import Disk
from kvstore.ssd.errors import DiskError, SsdUnavailable
from kvstore.ssd.health import RETRY_S, TierState
from springtide.clock import ManualClock
from tests.support.tmpfs import tmpfs


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for 4 MiB."""
    with tmpfs(tmp_path / "disk", "4m") as path:
        yield path


def remount(path: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", path], check=True)


def state_metric(state: TierState) -> float | None:
    return REGISTRY.get_sample_value("springtide_store_ssd_state", {"state": state.value})


async def test_a_full_disk_is_said_and_served_and_used_again_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_segments(monkeypatch, MIB)
    clock = ManualClock()
    tier = await open_tier(small_disk, 16 * MIB, clock=clock)
    stored = [(await tier.put([block(number)]))[0] for number in range(600)]
    num_stored = sum(stored)
    assert stored == [True] * num_stored + [False] * (600 - num_stored)
    assert 250 < num_stored < 512, "three segments of 1 MiB, and not a fourth"
    assert (tier.counts().state, tier.counts().free) == (TierState.DISK_FULL, 0)
    assert state_metric(TierState.DISK_FULL) == 1
    assert state_metric(TierState.TAKING) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"

    assert set(await read(tier, range(num_stored))) == {"right"}
    await tier.remove([key(0), key(1)])
    assert await tier.put([block(1000), block(1001), block(1002)]) == [True, True, False], "what it has, it uses"
    assert await read(tier, [1000, 1001]) == ["right", "right"]

    remount(small_disk, "size=32m")
    assert await tier.put([block(2000)]) == [False], "it is not asked at every put"
    clock.advance(RETRY_S)
    assert tier.counts().free > 0
    assert await tier.put([block(2000)]) == [True]
    assert tier.counts().state is TierState.TAKING
    assert state_metric(TierState.TAKING) == 1
    await tier.close()


async def test_on_a_disk_without_any_room_nothing_is_taken(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, MIB)
    (small_disk / "hog").write_bytes(bytes(4 * MIB - 16384))
    tier = await open_tier(small_disk, 16 * MIB)
    assert await tier.put([block(1)]) == [False]
    assert tier.counts().state is TierState.DISK_FULL
    assert sorted(os.listdir(small_disk)) == ["hog", "lock"]
    await tier.close()


async def test_on_a_full_disk_a_tier_opens_again_and_serves_what_it_has(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, MIB)
    tier = await open_tier(small_disk, 16 * MIB)
    direct = tier.direct
    await tier.put([block(number) for number in range(300)])
    await tier.close()
    with pytest.raises(OSError, match="No space"), (small_disk / "hog").open("wb", buffering=0) as hog:
        while True:
            hog.write(bytes(4096))
    tier = await open_tier(small_disk, 16 * MIB)
    assert set(await read(tier, range(300))) == {"right"}
    assert tier.direct is direct
    await tier.remove([key(0)])
    assert await tier.put([block(1000)]) == [True]
    await tier.close()


def test_what_is_left_of_a_disk_is_not_taken_for_a_reservation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("tried"))
    with (tmp_path / "file").open("wb") as file, pytest.raises(DiskError, match="No space") as raised:
        Disk().allocate(file.fileno(), 1 << 60)
    assert raised.value.no_room


async def test_a_disk_that_is_read_only_cannot_be_opened(small_disk: Path) -> None:
    remount(small_disk, "ro")
    with pytest.raises(SsdUnavailable, match="Read-only"):
        await open_tier(small_disk)
