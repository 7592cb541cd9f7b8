"""Files and batches as they are remembered, in a real Valkey and on the disk: how many there may be, whoever asks at once or fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from gateway.accounts.allowance import NO_LIMITS, Allowance, Caller
from gateway.batches import desk as desk_module
from gateway.batches import files as files_module
from gateway.batches.batch import Batch
from gateway.batches.desk import KEPT_S, BatchDesk, BatchNotThere
from gateway.batches.files import Files, FileTooLarge, StoredFile, Upload
from springtide.clock import MonotonicClock
from springtide.errors import Overloaded, Unavailable

MOST_BYTES = 250
NOW = 1_700_000_000.0


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def files(valkey: redis.Redis, tmp_path: Path) -> Files:
    files = Files(valkey, f"desk-{tmp_path.name}", tmp_path / "files", MOST_BYTES, MOST_BYTES)
    files.prepare()
    return files


def new_desk(valkey: redis.Redis, files: Files, tmp_path: Path) -> BatchDesk:
    return BatchDesk(valkey, f"desk-{tmp_path.name}", tmp_path / "batches", files, "gateway-1", MonotonicClock())


@pytest.fixture
def desk(valkey: redis.Redis, files: Files, tmp_path: Path) -> BatchDesk:
    return new_desk(valkey, files, tmp_path)


async def received(files: Files, size: int) -> Upload:
    upload = await files.upload("acme")
    await upload.write(bytes(size))
    await upload.end()
    return upload


async def kept(files: Files, size: int = 100) -> StoredFile:
    return await files.keep("acme", await received(files, size), "lines.jsonl", "batch", NOW)


async def created(desk: BatchDesk, stored: StoredFile, allowance: Allowance = NO_LIMITS, now: float = NOW) -> Batch:
    caller = Caller("acme", of_tenant=allowance)
    return await desk.create(caller, "/v1/completions", stored.file_id, "24h", 24 * 3600, None, now)


async def end(desk: BatchDesk, batch: Batch) -> None:
    """As its worker does."""
    taken = await desk.change("acme", batch.batch_id, Batch.taken)
    assert taken is not None
    await desk.change("acme", batch.batch_id, lambda now: now.ended(taken.epoch, "completed", 0, 0, "", "", int(NOW)))
    (listed,) = [one for one in await desk.open() if one.batch_id == batch.batch_id]
    await desk.closed(listed)


def outcomes(results: list[Any], refused: type[Exception]) -> tuple[int, int]:
    """How many were done, and how many refused."""
    return sum(not isinstance(one, BaseException) for one in results), sum(isinstance(one, refused) for one in results)


# ---- files ----


async def test_of_files_that_are_kept_at_once_none_is_beyond_the_tenants_bytes(files: Files) -> None:
    uploads = [await received(files, 100) for _ in range(5)]
    keeping = [files.keep("acme", upload, "lines.jsonl", "batch", NOW) for upload in uploads]
    assert outcomes(await asyncio.gather(*keeping, return_exceptions=True), FileTooLarge) == (2, 3)
    listed, _ = await files.page("acme", order="asc", after="", limit=10, purpose="")
    assert len(listed) == 2 and await files.room("acme") == 50
    assert {path.name for path in files.path("").iterdir()} == {one.file_id for one in listed}


async def test_a_file_that_the_disk_does_not_keep_takes_nothing_of_the_tenants_bytes(files: Files) -> None:
    upload = await received(files, 100)
    upload.path.unlink()
    with pytest.raises(Unavailable):
        await files.keep("acme", upload, "lines.jsonl", "batch", NOW)
    assert await files.room("acme") == MOST_BYTES
    assert await files.page("acme", order="asc", after="", limit=10, purpose="") == ([], False)


async def test_a_file_that_valkey_does_not_take_leaves_nothing_on_the_disk(files: Files, tmp_path: Path) -> None:
    upload = await received(files, 100)
    away = redis.Redis(host="127.0.0.1", port=1)
    with pytest.raises(Unavailable):
        await Files(away, "desk", tmp_path / "files", MOST_BYTES, MOST_BYTES).keep("acme", upload, "lines.jsonl", "batch", NOW)
    assert list((tmp_path / "files").iterdir()) == []
    await away.aclose()


async def test_deleting_what_has_lost_its_content_gives_its_bytes_back(files: Files) -> None:
    stored = await kept(files)
    files.path(stored.file_id).unlink()
    await files.delete("acme", stored.file_id)
    assert await files.room("acme") == MOST_BYTES


async def test_a_tenant_has_so_many_files(valkey: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MOST_FILES", 2)
    files = Files(valkey, f"desk-{tmp_path.name}", tmp_path / "files", MOST_BYTES, MOST_BYTES)
    files.prepare()
    first, _ = await kept(files, 1), await kept(files, 1)
    with pytest.raises(FileTooLarge, match="all the files that it may: 2, or 250 bytes"):
        await files.upload("acme")
    await files.delete("acme", first.file_id)
    await kept(files, 1)


async def test_outputs_are_kept_however_full_it_is_and_then_no_further_batch_is_made(files: Files, desk: BatchDesk) -> None:
    stored = await kept(files)
    for _ in range(2):
        output = await files.make("acme", "file-out", [bytes(200)], "out.jsonl", "batch_output", NOW)
        assert output is not None and await files.get("acme", "file-out") == output
    with pytest.raises(FileTooLarge):
        await created(desk, stored)
    await files.delete("acme", "file-out")
    await created(desk, stored)


# ---- batches ----


async def test_of_batches_that_are_made_at_once_none_is_beyond_as_many_as_may_be_open(
    files: Files, desk: BatchDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "MOST_OPEN", 3)
    stored = await kept(files)
    making = await asyncio.gather(*(created(desk, stored) for _ in range(8)), return_exceptions=True)
    assert outcomes(making, Overloaded) == (3, 5)
    assert len(await desk.open()) == 3 and len((await desk.page("acme", after="", limit=20))[0]) == 3
    await end(desk, next(one for one in making if isinstance(one, Batch)))
    assert outcomes(await asyncio.gather(*(created(desk, stored) for _ in range(3)), return_exceptions=True), Overloaded) == (1, 2)


async def test_of_batches_that_are_looked_over_at_once_none_is_beyond_the_lines_that_may_be_open(files: Files, desk: BatchDesk) -> None:
    stored = await kept(files)
    batches = [await created(desk, stored, Allowance(batch_lines=10)) for _ in range(4)]
    others = await asyncio.gather(*(desk.count_lines(batch, 4) for batch in batches))
    assert others.count(None) == 2 and [other for other in others if other is not None] == [8, 8]
    counted = [batch for batch, other in zip(batches, others, strict=True) if other is None]
    assert await desk.count_lines(counted[0], 4) is None, "who looks it over again counts it once"
    await end(desk, counted[0])
    assert await desk.count_lines(counted[0], 4) is None
    fresh = await created(desk, stored, Allowance(batch_lines=10))
    assert await desk.count_lines(fresh, 4) is None, "what has ended counts no more, even where its holder learns of that late"
    assert await desk.count_lines(await created(desk, stored), 10**6) is None, "there is no limit to that one"


async def test_a_batch_is_known_for_a_month_after_its_end(files: Files, desk: BatchDesk, valkey: redis.Redis) -> None:
    stored = await kept(files)
    over, running = await created(desk, stored), await created(desk, stored)
    await end(desk, over)
    (key,) = [key async for key in valkey.scan_iter(match=f"*:batch:*{over.batch_id}")]
    assert 0 < await valkey.ttl(key) <= KEPT_S
    (key,) = [key async for key in valkey.scan_iter(match=f"*:batch:*{running.batch_id}")]
    assert await valkey.ttl(key) == -1


async def test_beyond_as_many_as_are_known_those_that_ended_first_are_forgotten(
    files: Files, valkey: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "MOST_KNOWN", 3)
    desk, stored = new_desk(valkey, files, tmp_path), await kept(files)
    running, over, other = [await created(desk, stored, now=NOW + number) for number in range(3)]
    await end(desk, over)
    last = await created(desk, stored, now=NOW + 3)
    known, _ = await desk.page("acme", after="", limit=9)
    assert [batch.batch_id for batch in known] == [batch.batch_id for batch in (last, other, running)]
    with pytest.raises(BatchNotThere):
        await desk.get("acme", over.batch_id)


async def test_one_that_came_to_nothing_in_its_making_is_open_no_more_when_it_is_dropped(files: Files, desk: BatchDesk) -> None:
    stored = await kept(files)
    files.path(stored.file_id).unlink()
    with pytest.raises(Unavailable):
        await created(desk, stored)
    (listed,) = await desk.open()
    await desk.closed(listed)
    assert await desk.open() == []
