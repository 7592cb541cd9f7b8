"""The wall clock jumps by an hour: what docs/chaos.md says of that, and nothing worse."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.accounts.allowance import ApiKey, Caller
from gateway.accounts.limiter import Claim, Limiter
from gateway.accounts.usage import Meter, UsageBook, UsageRow, UsageTally, UsageWriter
from gateway.accounts.windows import WINDOW_S
from gateway.batches.batch import Batch, BatchStatus
from gateway.batches.desk import BatchDesk, Lease, OpenBatch
from gateway.batches.files import Files
from gateway.batches.results import LineResult
from gateway.batches.worker import BatchWorker
from gateway.bodies import SideThread
from springtide.clock import ManualClock, MonotonicClock
from springtide.errors import Unavailable
from springtide.ids import new_id
from springtide.protocol.usage import Usage
from springtide.valkey import ValkeyClient
from tests.support.valkey import new_valkey

HOUR_S = 3600.0
STEPS = pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the wall clock of this process forward, or with a negative number of seconds back."""
    real = time.time

    def jumped(step_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + step_s)

    return jumped


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[ValkeyClient]:
    client = ValkeyClient.from_url(valkey_url)
    yield client
    await client.aclose()


@STEPS
async def test_rates_that_a_gateway_holds_alone_are_those_of_before(step_s: float, jump: Callable[[float], None]) -> None:
    with new_valkey() as valkey:
        client = ValkeyClient.from_url(valkey.connection_url)
        limiter = Limiter(client, new_id("cluster"))
        before = [await limiter.take([Claim("requests:key/a", 3, 1)]) for _ in range(2)]
    jump(step_s)
    after = [await limiter.take([Claim("requests:key/a", 3, 1)]) for _ in range(2)]
    assert [verdict.granted for verdict in (*before, *after)] == [True, True, True, False]
    assert 0 < after[-1].standings[0].wait_s <= WINDOW_S + 1
    await limiter.settle(["requests:key/a"], 5, after[0].second)
    assert (await limiter.take([Claim("requests:key/a", 8, 1)])).standings[0].wait_s <= WINDOW_S + 1
    await client.aclose()


@STEPS
async def test_what_was_taken_before_valkeys_clock_was_set_counts_no_more(step_s: float, valkey: ValkeyClient) -> None:
    cluster = new_id("cluster")
    await valkey.hset(f"{cluster}:rate:requests:key/a", mapping={str(int(time.time() - step_s)): 10})
    verdict = await Limiter(valkey, cluster).take([Claim("requests:key/a", 10, 1)])
    assert (verdict.granted, verdict.standings[0].remaining) == (True, 9)


async def test_after_a_small_step_of_valkeys_clock_the_limit_is_held(valkey: ValkeyClient) -> None:
    cluster = new_id("cluster")
    await valkey.hset(f"{cluster}:rate:requests:key/a", mapping={str(int(time.time() + 20)): 10})
    verdict = await Limiter(valkey, cluster).take([Claim("requests:key/a", 10, 1)])
    assert not verdict.granted and verdict.standings[0].wait_s <= 2 * WINDOW_S + 1


@STEPS
def test_a_key_ends_an_hour_early_or_late(step_s: float, jump: Callable[[float], None]) -> None:
    now = time.time()
    key = ApiKey("key_1", "acme", "", now, expires_at=now + 600)
    jump(step_s)
    assert key.usable(time.time()) == (step_s < 0)
    assert not ApiKey("key_1", "acme", "", now, expires_at=now + 600 - HOUR_S).usable(time.time() + HOUR_S)


async def test_what_an_answer_uses_is_counted_once_on_the_days_of_the_clock(valkey: ValkeyClient) -> None:
    clock, output_tokens = datetime.datetime(2026, 11, 24, 23, 30), 0
    book, tally = UsageBook(valkey, new_id("cluster")), UsageTally()
    writer = UsageWriter(tally, book, lambda: clock.date())
    meter = Meter(UsageRow("acme", "key_1", "demo", "/v1/completions"), lambda: Usage(100, output_tokens, 0))
    tally.open(meter)
    for step_s, more_tokens in ((0, 1), (HOUR_S, 10), (-HOUR_S, 100)):
        clock += datetime.timedelta(seconds=step_s)
        output_tokens += more_tokens
        await writer.flush()
    tally.close(meter, clock.date())
    await writer.flush()
    before, after = clock.date(), clock.date() + datetime.timedelta(days=1)
    found = {usage.day: (usage.counts.requests, usage.counts.output_tokens) async for usage in book.read(before, after)}
    assert found == {before: (1, 101), after: (0, 10)}


class Lines:
    """Answers none."""

    max_line_bytes = 1 << 20

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def check(self, endpoint: str, raw: bytes) -> str:
        return "q-1"

    async def answer(self, batch: Batch, line: int, raw: bytes, tries: int) -> LineResult:
        self.begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    def unanswered(self, batch: Batch, line: int, raw: bytes) -> LineResult:
        return LineResult(line, ok=False, text="{}")


class Desk(BatchDesk):
    """Tells of what was looked at and left, and of what is over."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.left, self.over = asyncio.Queue[OpenBatch](), asyncio.Event()

    async def release(self, lease: Lease) -> None:
        await super().release(lease)
        self.left.put_nowait(lease.batch)
        self.changed.set()

    async def closed(self, batch: OpenBatch) -> None:
        await super().closed(batch)
        self.over.set()


class Batches:
    def __init__(self, valkey: ValkeyClient, directory: Path) -> None:
        cluster = new_id("cluster")
        self.files = Files(valkey, cluster, directory / "files", 1 << 20, 1 << 20)
        self.files.prepare()
        self.desk = Desk(valkey, cluster, directory / "batches", self.files, "gateway-1", MonotonicClock())
        self.lines, self.clock = Lines(), ManualClock()
        self.worker = BatchWorker(self.desk, self.files, self.lines, SideThread(), self.clock)

    async def make(self, window_s: int = 600, *, lost: bool = False) -> Batch | None:
        """A batch of one line; None when its making came to nothing."""
        upload = await self.files.upload("acme")
        await upload.write(b"{}\n")
        await upload.end()
        stored = await self.files.keep("acme", upload, "lines.jsonl", "batch", time.time())
        if lost:
            self.files.path(stored.file_id).unlink()
        try:
            return await self.desk.create(Caller("acme"), "/v1/completions", stored.file_id, "10m", window_s, None, time.time())
        except Unavailable:
            return None

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.desk.changed.set()


@pytest.fixture
async def batches(valkey: ValkeyClient, tmp_path: Path) -> AsyncIterator[Batches]:
    batches = Batches(valkey, tmp_path)
    yield batches
    await batches.worker.close()


@STEPS
async def test_a_batch_in_the_making_is_given_its_time(step_s: float, batches: Batches, jump: Callable[[float], None]) -> None:
    assert await batches.make(lost=True) is None
    jump(step_s)
    batches.worker.start()
    for _ in range(2):
        await batches.desk.left.get()
    assert not batches.desk.over.is_set()
    batches.advance(601)
    await batches.desk.over.wait()
    assert await batches.desk.open() == []


@STEPS
async def test_a_batch_that_runs_expires_when_its_window_is_over(step_s: float, batches: Batches, jump: Callable[[float], None]) -> None:
    batch = await batches.make()
    assert batch is not None
    batches.worker.start()
    await batches.lines.begun.wait()
    jump(step_s)
    batches.advance(500)
    assert (await batches.desk.get("acme", batch.batch_id)).status is BatchStatus.IN_PROGRESS
    batches.advance(101)
    await batches.desk.over.wait()
    assert (await batches.desk.get("acme", batch.batch_id)).status is BatchStatus.EXPIRED


@STEPS
async def test_a_batch_that_is_taken_over_expires_an_hour_early_or_late(
    step_s: float, batches: Batches, jump: Callable[[float], None]
) -> None:
    batch = await batches.make()
    assert batch is not None
    jump(step_s)
    batches.worker.start()
    if step_s < 0:
        await batches.lines.begun.wait()
        batches.advance(HOUR_S + 601)
    await batches.desk.over.wait()
    assert (await batches.desk.get("acme", batch.batch_id)).status is BatchStatus.EXPIRED
