from __future__ import annotations

import asyncio

import pytest
import redis
import uvloop

from springtide.membership import Member, Membership
from tests.support.valkey import new_valkey, resettable


async def test_records_that_are_no_members_are_left_out_and_end_no_reader() -> None:
    with new_valkey() as valkey:
        ours = Membership(valkey.connection_url, "springtide", 5.0)
        try:
            await ours.announce(Member("store", "prefill-0", 1, "127.0.0.1:1"))
            with redis.Redis.from_url(valkey.connection_url) as other:
                for name, value in (("a", "{"), ("b", "[1]"), ("c", '{"role": "store"}'), ("d", '{"colour": "red"}')):
                    other.set(f"springtide:member:store:{name}", value)
            assert [member.member_id for member in await ours.members() or []] == ["prefill-0"]
        finally:
            await ours.close()


async def test_a_valkey_that_is_away_is_no_empty_cluster() -> None:
    nowhere = Membership("redis://127.0.0.1:1/0", "springtide", 5.0)
    try:
        assert await nowhere.members() is None
    finally:
        await nowhere.close()


async def test_who_lists_the_members_ends_at_the_first_cancellation_whenever_it_comes() -> None:
    async def list_for_ever(membership: Membership) -> None:
        while True:
            await membership.members()

    with new_valkey() as valkey:
        for turns in range(200):
            membership = Membership(valkey.connection_url, "springtide", 5.0)
            listing = asyncio.create_task(list_for_ever(membership))
            for _ in range(turns % 50):
                await asyncio.sleep(0)
            listing.cancel()
            ended, _ = await asyncio.wait([listing], timeout=5)
            assert ended and listing.cancelled(), f"cancelled after {turns % 50} turns of the loop, it went on"
            await membership.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_member_whose_connection_is_reset_goes_on_renewing(run) -> None:
    """uvloop, in which every process runs, has an error of its own for it."""

    async def reset_again_and_again() -> None:
        with new_valkey() as valkey:
            async with resettable(valkey) as (url, reset):
                ours, others = Membership(url, "springtide", 0.3), Membership(valkey.connection_url, "springtide", 5.0)
                try:
                    await ours.announce(Member("store", "prefill-0", 1, "127.0.0.1:1"))
                    for _ in range(3):
                        assert reset() > 0
                        with redis.Redis.from_url(valkey.connection_url) as forgetful:
                            forgetful.flushall()
                        async with asyncio.timeout(10):
                            while not await others.members():  # noqa: ASYNC110 (nothing signals it)
                                await asyncio.sleep(0.01)
                finally:
                    await ours.close()
                    await others.close()

    run(reset_again_and_again())
