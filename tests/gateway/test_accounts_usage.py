"""What was used is counted once, whatever becomes of the answer to the gateway that writes it down."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounts import usage
from gateway.accounts.usage import OTHERS, Counts, DayUsage, Meter, UsageBook, UsageRow, UsageTally, UsageWriter
from springtide.errors import Unavailable
from springtide.ids import new_id
from springtide.protocol.usage import Usage
from springtide.valkey import ValkeyClient

DAY = datetime.date(2026, 11, 24)
ROW = UsageRow("acme", "key_1", "demo", "/v1/chat/completions")
BATCH = UsageRow("acme", "key_1", "demo", "/v1/chat/completions", batch=True)


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[redis.Redis]:
    client = ValkeyClient.from_url(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def book(client: redis.Redis) -> UsageBook:
    return UsageBook(client, new_id("cluster"))


async def written(book: UsageBook, last: datetime.date = DAY) -> list[DayUsage]:
    return [found async for found in book.read(DAY, last)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=40))
def test_however_often_it_is_taken_what_was_served_is_counted_once(steps: list[tuple[int, int]]) -> None:
    tally, served = UsageTally(), [Usage(0, 0, 0)] * 3
    meters = [Meter(ROW, lambda number=number: served[number]) for number in range(3)]
    for meter in meters:
        tally.open(meter)
    total = Counts()
    for which, tokens in [*steps, (3, 0)]:
        if which < 3:
            before = served[which]
            served[which] = Usage(100 * (which + 1), before.completion_tokens + tokens, 10)
            continue
        for counts in tally.take(DAY).get(DAY, {}).values():
            total.add(counts)
    for meter in meters * 2:
        tally.close(meter, DAY)
    for counts in tally.take(DAY).get(DAY, {}).values():
        total.add(counts)
    begun = [one for one in served if one.prompt_tokens]
    assert total == Counts(
        len(begun), sum(one.prompt_tokens for one in begun), 10 * len(begun), sum(one.completion_tokens for one in begun)
    )
    assert not tally.take(DAY)


async def test_what_is_sent_twice_counts_once(book: UsageBook) -> None:
    for number in (1, 2, 2, 1):
        await book.add("gateway-0", number, DAY, {ROW: Counts(1, 10, 5, 3)})
    await book.add("gateway-1", 1, DAY, {ROW: Counts(1, 10, 5, 3), BATCH: Counts(1, 1, 0, 1)})
    assert await written(book) == [DayUsage(DAY, ROW, Counts(3, 30, 15, 9)), DayUsage(DAY, BATCH, Counts(1, 1, 0, 1))]


async def test_days_are_apart_and_in_order(book: UsageBook) -> None:
    after = DAY + datetime.timedelta(days=2)
    await book.add("gateway-0", 1, after, {ROW: Counts(1, 2, 0, 1)})
    await book.add("gateway-0", 2, DAY, {ROW: Counts(1, 1, 0, 1)})
    assert [found.day for found in await written(book, after)] == [DAY, after]
    assert [found.day for found in await written(book)] == [DAY]


async def test_what_valkey_did_not_take_is_written_later(book: UsageBook, monkeypatch: pytest.MonkeyPatch) -> None:
    tally, served = UsageTally(), Usage(7, 3, 2)
    writer = UsageWriter(tally, book, lambda: DAY)
    add, lost = UsageBook.add, [True, True]

    async def unanswered(*arguments: object) -> None:
        await add(*arguments)  # type: ignore[arg-type]
        if lost:
            lost.pop()
            raise Unavailable("the answer is lost")

    monkeypatch.setattr(UsageBook, "add", unanswered)
    meter = Meter(ROW, lambda: served)
    tally.open(meter)
    for _ in range(4):
        await writer.flush()
    tally.close(meter, DAY)
    await writer.flush()
    assert await written(book) == [DayUsage(DAY, ROW, Counts(1, 7, 2, 3))]


async def test_whoever_is_closed_writes_what_was_left_and_what_came_since(book: UsageBook, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = UsageTally()
    writer = UsageWriter(tally, book, lambda: DAY)
    writer.start()

    async def away(*_: object) -> None:
        raise Unavailable("Valkey is away")

    meters = [Meter(ROW, lambda: Usage(7, 3, 2)) for _ in range(2)]
    with monkeypatch.context() as valkey:
        valkey.setattr(UsageBook, "add", away)
        tally.open(meters[0])
        tally.close(meters[0], DAY)
        await writer.flush()
    tally.open(meters[1])
    tally.close(meters[1], DAY)
    await writer.close()
    assert await written(book) == [DayUsage(DAY, ROW, Counts(2, 14, 4, 6))]


async def test_of_more_tenants_than_there_is_room_for_the_last_are_counted_together(
    book: UsageBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MAX_ROWS", 2)
    for number, tenant in enumerate(("a", "b", "c", "d", "a")):
        row = UsageRow(tenant, "", "demo", "grpc/Generate")
        await book.add("gateway-0", number + 1, DAY, {row: Counts(1, 1, 0, 1)})
    assert {found.row.tenant: found.counts.requests for found in await written(book)} == {"a": 2, "b": 1, OTHERS: 2}
