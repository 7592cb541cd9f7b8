"""Whose turn it is: what has to be done for context caches, in a real Valkey."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from gateway.caching.agenda import Agenda, Claim, Errand
from gateway.caching.context import CacheId
from tests.support.valkey import new_valkey

NOW = 1_000_000.0


class Diary:
    """An agenda, and what its entries are made with."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.agenda = Agenda(client, "agenda")

    async def wake(self, tenant: str, *names: str, at: float = NOW) -> None:
        for name in names:
            for command in self.agenda.waking(tenant, name, at):
                await self.client.execute_command(*command)

    async def claim(self, most: int, most_each: int = 100, now: float = NOW, errand: Errand = Errand.LOOK, **held: int) -> list[Claim]:
        return await self.agenda.claim(errand, now, now + 15, most, most_each, held)

    async def names(self, most: int, **more: float) -> list[tuple[str, str]]:
        return [(claim.tenant, claim.cache_id) for claim in await self.claim(most, now=more.get("now", NOW))]


@pytest.fixture
async def diary() -> AsyncIterator[Diary]:
    with new_valkey() as valkey:
        async with redis.Redis.from_url(valkey.connection_url) as client:
            yield Diary(client)


async def test_tenants_take_turns_however_much_one_has(diary: Diary) -> None:
    await diary.wake("hog", *(f"h{number:03}" for number in range(500)), at=NOW - 1000)
    await diary.wake("ann", "a0", "a1")
    await diary.wake("bob", "b0", at=NOW + 1)
    assert Counter(tenant for tenant, _ in await diary.names(4)) == {"hog": 2, "ann": 2}
    await diary.wake("ann", "a2")
    served = [
        tenant for tenant, _ in [*await diary.names(1, now=NOW + 2), *await diary.names(1, now=NOW + 3), *await diary.names(1, now=NOW + 4)]
    ]
    assert sorted(served) == ["ann", "bob", "hog"], "one at a time, each has its turn"


async def test_a_tenant_has_so_many_at_once(diary: Diary) -> None:
    await diary.wake("hog", *(f"h{number:03}" for number in range(50)))
    assert len(await diary.claim(8, 4)) == 4
    assert len(await diary.claim(4, 4, hog=3)) == 1
    assert await diary.claim(4, 4, hog=4) == []


async def test_what_is_claimed_is_due_again_only_when_the_claim_is_over_or_somebody_wants_it(diary: Diary) -> None:
    await diary.wake("ann", "a")
    (claim,) = await diary.claim(9)
    assert claim == Claim(Errand.LOOK, "ann", CacheId("a"), NOW + 15) and await diary.claim(9, now=NOW + 14) == []
    renewed = await diary.agenda.renew(claim, NOW + 20)
    assert renewed is not None and await diary.claim(9, now=NOW + 16) == []
    assert await diary.agenda.renew(claim, NOW + 30) is None, "it is another claim now"
    await diary.wake("ann", "a", at=NOW + 17)
    await diary.agenda.put_back(renewed, NOW + 60)
    assert len(await diary.claim(9, now=NOW + 17)) == 1, "whoever wanted it meanwhile has it looked at"


async def test_a_claim_by_who_is_an_hour_ahead_is_over_an_hour_late_and_who_is_behind_finds_due_what_was_due_then(diary: Diary) -> None:
    hour_s = 3600.0
    await diary.wake("ann", "a")
    assert len(await diary.claim(9, now=NOW + hour_s)) == 1
    assert await diary.claim(9, now=NOW + hour_s + 14) == [] and len(await diary.claim(9, now=NOW + hour_s + 15)) == 1
    await diary.wake("bob", "b")
    assert await diary.names(9, now=NOW - hour_s) == []
    await diary.wake("bob", "b", at=NOW - hour_s)
    assert await diary.names(9, now=NOW - hour_s) == [("bob", "b")], "what is wanted at once is due at once"


async def test_work_waits_by_itself_and_what_is_looked_at_meanwhile_does_not_hold_it_up(diary: Diary) -> None:
    await diary.wake("ann", "pending", "held")
    for claim in await diary.claim(9):
        await diary.agenda.put_back(claim, NOW + 20 if claim.cache_id == "held" else None, NOW)
    assert await diary.names(9, now=NOW + 1) == [] and await diary.names(9, now=NOW + 20) == [("ann", "held")]
    works = await diary.claim(9, errand=Errand.WORK)
    assert [claim.cache_id for claim in works] == ["held", "pending"]
    (look,) = await diary.claim(9, now=NOW + 40)
    await diary.agenda.put_back(look, NOW + 60, NOW + 40)
    assert await diary.agenda.renew(works[0], NOW + 90) is not None, "who works at it goes on"
    await diary.agenda.put_back(works[1], NOW + 50)
    assert await diary.names(9, now=NOW + 50) == [("ann", "pending")]


async def test_when_the_stores_are_others_all_is_looked_at(diary: Diary) -> None:
    await diary.wake("ann", "a", at=NOW + 20)
    await diary.wake("bob", "b", at=NOW + 30)
    assert await diary.agenda.stores_changed("node-0", NOW) == 2
    assert await diary.agenda.stores_changed("node-0", NOW) == 0
    assert sorted(await diary.names(9)) == [("ann", "a"), ("bob", "b")]


async def test_nothing_is_left_of_a_tenant_for_whom_nothing_is_to_be_done(diary: Diary) -> None:
    await diary.wake("ann", "a", "b")
    (claim, _) = await diary.claim(9)
    await diary.agenda.put_back(claim, None)
    for command in diary.agenda.dropping("ann", "b", *Errand):
        await diary.client.execute_command(*command)
    assert await diary.claim(9, now=NOW + 20) == []
    assert await diary.client.keys("*") == []
