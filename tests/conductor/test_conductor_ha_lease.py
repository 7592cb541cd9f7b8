"""The leader's lease in a real Valkey: what the scripts grant to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio as redis
import uvloop

from springtide.credentials import OPEN, Credentials
from springtide.ids import new_id
from springtide.leader_lease import Answer, Claim, Free, Granted, Held, Leader, LeaderLease
from tests.support.valkey import new_valkey, resettable

LEASE_S = 0.8
LOOK = Claim(floor=1, take=False, leads=False)
TAKE = Claim(floor=1, take=True, leads=False)


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    with new_valkey() as valkey:
        yield valkey.connection_url


class Contest:
    def __init__(self, url: str) -> None:
        self.cluster = new_id("cluster")
        self.valkey = redis.Redis.from_url(url)
        self.a, self.b = (LeaderLease(url, self.cluster, LEASE_S, f"token-{name}", f"conductor-{name}", f"{name}:1") for name in "ab")

    async def forget(self) -> None:
        """As a Valkey that keeps nothing over its restart."""
        await self.valkey.delete(f"{self.cluster}:leader", f"{self.cluster}:leader:epoch")

    async def close(self) -> None:
        for lease in (self.a, self.b):
            await lease.close()
        await self.valkey.aclose()


@pytest.fixture
async def contest(valkey_url: str) -> AsyncIterator[Contest]:
    contest = Contest(valkey_url)
    yield contest
    await contest.close()


async def answer_of(lease: LeaderLease, claim: Claim) -> Answer:
    """On a busy machine an answer may be late, and counts as none."""
    async with asyncio.timeout(10):
        while (answer := await lease.claim(claim)) is None:
            pass
    return answer


async def reader_sees(lease: LeaderLease, leader: Leader) -> bool:
    async with asyncio.timeout(10):
        while (seen := await lease.read()) is None:
            pass
    return seen == leader


async def until_granted(lease: LeaderLease, claim: Claim = TAKE) -> int:
    answer: Answer | None = None
    async with asyncio.timeout(10):
        while not isinstance(answer, Granted):
            answer = await answer_of(lease, claim)
            if isinstance(answer, Held):
                await asyncio.sleep(answer.left_s)
    return answer.epoch


async def test_one_holds_it_and_the_other_learns_who_and_for_how_long(contest: Contest) -> None:
    epoch = await until_granted(contest.a)
    held = await answer_of(contest.b, TAKE)
    assert isinstance(held, Held)
    assert held.leader == Leader("conductor-a", "a:1", epoch)
    assert 0 < held.left_s <= LEASE_S
    assert await reader_sees(contest.b, held.leader)


async def test_renewing_keeps_the_epoch_and_every_other_leadership_has_a_higher_one(contest: Contest) -> None:
    epochs = [await until_granted(contest.a), await until_granted(contest.a)]
    assert epochs[0] == epochs[1]
    epochs.append(await until_granted(contest.b))
    epochs.append(await until_granted(contest.a))
    assert epochs[1] < epochs[2] < epochs[3]


async def test_only_its_holder_can_give_it_up_and_then_anybody_may_take_it_at_once(contest: Contest) -> None:
    epoch = await until_granted(contest.a)
    await contest.b.release()
    assert isinstance(await answer_of(contest.b, LOOK), Held)
    await contest.a.release()
    assert await answer_of(contest.b, LOOK) == Free()
    assert await answer_of(contest.b, TAKE) == Granted(epoch + 1)


async def test_a_floor_above_the_holders_epoch_raises_it(contest: Contest) -> None:
    await until_granted(contest.a)
    assert await answer_of(contest.a, Claim(floor=40, take=True, leads=False)) == Granted(41)
    assert await answer_of(contest.a, Claim(floor=41, take=True, leads=True)) == Granted(41)


async def test_a_valkey_that_forgot_waits_a_lease_for_whoever_led(contest: Contest) -> None:
    epoch = await until_granted(contest.a)
    await contest.forget()
    vacant = await answer_of(contest.b, Claim(floor=epoch, take=True, leads=False))
    assert isinstance(vacant, Held) and vacant.leader is None
    assert await contest.b.read() is None
    assert await answer_of(contest.a, Claim(floor=epoch, take=True, leads=True)) == Granted(epoch + 1)
    await contest.forget()
    assert await until_granted(contest.b, Claim(floor=epoch + 1, take=True, leads=False)) == epoch + 2


async def test_who_only_looks_changes_nothing(contest: Contest, valkey_url: str) -> None:
    gateway = LeaderLease(valkey_url, contest.cluster, LEASE_S)
    assert await gateway.read() is None
    assert await contest.valkey.keys(f"{contest.cluster}:*") == []
    vacant = await answer_of(contest.a, TAKE)
    assert isinstance(vacant, Held) and vacant.leader is None
    assert await gateway.read() is None
    epoch = await until_granted(contest.a)
    assert await reader_sees(gateway, Leader("conductor-a", "a:1", epoch))
    await gateway.close()


async def test_a_valkey_that_is_away_gives_no_answer() -> None:
    nowhere = LeaderLease("redis://127.0.0.1:1/0", "springtide", LEASE_S, "token", "conductor-0", "a:1")
    assert await nowhere.claim(TAKE) is None
    assert await nowhere.read() is None
    await nowhere.release()
    await nowhere.close()


async def test_a_leader_who_has_not_signed_the_lease_is_not_believed(valkey_url: str) -> None:
    cluster = new_id("cluster")
    ours, theirs = (Credentials(secret, cluster) for secret in (b"the secret of this cluster", b"the secret of another one"))
    gateway = LeaderLease(valkey_url, cluster, LEASE_S, credentials=ours)
    for name, credentials, believed in (("ours", ours, True), ("theirs", theirs, False), ("unsigned", OPEN, False)):
        holder = LeaderLease(valkey_url, cluster, LEASE_S, f"token-{name}", f"conductor-{name}", f"{name}:1", credentials)
        epoch = await until_granted(holder)
        seen = await answer_of(gateway, Claim(floor=0, take=False, leads=False))
        assert isinstance(seen, Held), name
        assert seen.leader == (Leader(f"conductor-{name}", f"{name}:1", epoch) if believed else None), name
        await holder.release()
        await holder.close()
    await gateway.close()


@pytest.mark.parametrize("field", [{"epoch": "many"}, {"address": b"\xff"}])
async def test_a_lease_that_makes_no_sense_ends_no_reader(contest: Contest, valkey_url: str, field: dict[str, str]) -> None:
    lease = {"token": "t", "epoch": "1", "member_id": "m", "address": "a:1", **field}
    await contest.valkey.hset(f"{contest.cluster}:leader", mapping=lease)
    gateway = LeaderLease(valkey_url, contest.cluster, LEASE_S)
    assert await gateway.read() is None
    await gateway.close()


def test_a_lease_can_be_asked_for_again_after_a_reset_connection() -> None:
    """In uvloop, in which every process runs and which has an error of its own for it."""

    async def reset_while_idle() -> None:
        with new_valkey() as valkey:
            async with resettable(valkey) as (url, reset):
                lease = LeaderLease(url, new_id("cluster"), LEASE_S, "token-a", "conductor-a", "a:1")
                try:
                    for _ in range(3):
                        await answer_of(lease, TAKE)
                        assert reset() > 0
                        for _ in range(20):  # turns of the loop, which is to see the reset before the connection is used again
                            await asyncio.sleep(0)
                finally:
                    await lease.close()

    uvloop.run(reset_while_idle())
