from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import redis
from prometheus_client import REGISTRY

from springtide.credentials import OPEN, Credentials
from springtide.membership import MAX_RECORD_BYTES, Member, Membership, read_record, write_record
from tests.support.valkey import new_valkey, resettable
from tests.support.waiting import until

OURS = Credentials(b"the secret of this cluster", "springtide")
THEIRS = Credentials(b"the secret of another one", "springtide")
STORE = Member("store", "prefill-0", 1, "127.0.0.1:1")
FAKE = Member("prefill", "fake", 1, "127.0.0.1:1", "fake", details={"store_address": "127.0.0.1:1"})


def _changed(**fields: Any) -> bytes:
    said = json.dumps({**asdict(FAKE), **fields}).encode()
    return OURS.signature(said).encode() + b"\n" + said


ILL: dict[str, tuple[bytes, str]] = {
    "unsigned": (write_record(FAKE, OPEN), "not signed"),
    "signed with another secret": (write_record(FAKE, THEIRS), "not signed"),
    "signed, then changed": (write_record(FAKE, OURS).replace(b"127.0.0.1:1", b"127.0.0.1:2"), "not signed"),
    "another's signature": (write_record(STORE, OURS).partition(b"\n")[0] + write_record(FAKE, OPEN), "not signed"),
    "of another member": (write_record(replace(FAKE, member_id="other"), OURS), "it is of prefill other"),
    "details null": (_changed(details=None), "details"),
    "details not of texts": (_changed(details={"store_address": 5}), "details"),
    "a number for an id": (_changed(member_id=5), "member_id"),
    "no id": (_changed(member_id=""), "member_id"),
    "a text for an incarnation": (_changed(incarnation="1"), "incarnation"),
    "an address without a port": (_changed(address="somewhere"), "address"),
    "an unknown role": (_changed(role="king"), "role"),
    "an unknown field": (_changed(colour="red"), "colour"),
    "no JSON": (OURS.signature(b"{").encode() + b"\n{", "JSON"),
    "no text": (b"\xff\xfe", "not signed"),
    "nested without end": (OURS.signature(b"[" * 50_000).encode() + b"\n" + b"[" * 50_000, "recursion"),
    "huge": (b"x" * (MAX_RECORD_BYTES + 1), str(MAX_RECORD_BYTES)),
}


@pytest.fixture
async def valkey_url() -> AsyncIterator[str]:
    with new_valkey() as valkey:
        yield valkey.connection_url


async def listed(membership: Membership) -> list[str]:
    return [member.member_id for member in await membership.members() or []]


async def test_records_that_are_no_members_are_left_out_end_no_reader_and_are_told_of_once(
    valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Membership(valkey_url, "springtide", 5.0, OURS)
    try:
        await ours.announce(STORE)
        for name, (record, complaint) in ILL.items():
            caplog.clear()
            reader = Membership(valkey_url, "springtide", 5.0, OURS)
            with redis.Redis.from_url(valkey_url) as other:
                other.set("springtide:member:prefill:fake", record)
                for number in range(3):
                    other.set("springtide:member:store:z", write_record(Member("store", "z", number, "127.0.0.1:1"), OURS))
                    assert await listed(reader) == ["prefill-0", "z"], name
            (warning,) = caplog.records
            assert "springtide:member:prefill:fake" in warning.getMessage() and complaint in warning.getMessage(), name
            await reader.close()
    finally:
        await ours.close()


async def test_keys_that_are_no_text_and_no_record_end_no_reader(valkey_url: str) -> None:
    ours = Membership(valkey_url, "springtide", 5.0, OURS)
    try:
        await ours.announce(STORE)
        with redis.Redis.from_url(valkey_url) as other:
            other.rpush("springtide:member:store:list", "x")
            other.set(b"springtide:member:store:\xff", "x")
        assert await listed(ours) == ["prefill-0"]
    finally:
        await ours.close()


async def test_clusters_with_different_secrets_in_one_valkey_do_not_see_each_other(valkey_url: str) -> None:
    ours, theirs = Membership(valkey_url, "springtide", 5.0, OURS), Membership(valkey_url, "springtide", 5.0, THEIRS)
    try:
        await ours.announce(STORE)
        await theirs.announce(replace(STORE, member_id="prefill-1"))
        assert (await listed(ours), await listed(theirs)) == (["prefill-0"], ["prefill-1"])
    finally:
        await ours.close()
        await theirs.close()


async def test_who_is_announced_is_there_until_its_lease_or_it_itself_ends(valkey_url: str) -> None:
    ours, asking = Membership(valkey_url, "springtide", 5.0, OURS), Membership(valkey_url, "springtide", 5.0)
    nowhere = Membership("redis://127.0.0.1:1/0", "springtide", 5.0)
    try:
        assert await asking.has("store", STORE.member_id) is False
        await ours.announce(STORE)
        assert await asking.has("store", STORE.member_id) is True
        assert await asking.has("prefill", STORE.member_id) is False
        assert await nowhere.has("store", STORE.member_id) is None
        await ours.close()
        assert await asking.has("store", STORE.member_id) is False
    finally:
        await asking.close()
        await nowhere.close()


async def test_who_lists_the_members_may_know_for_how_long_their_leases_hold(valkey_url: str) -> None:
    ours, nowhere = Membership(valkey_url, "springtide", 5.0, OURS), Membership("redis://127.0.0.1:1/0", "springtide", 5.0)
    try:
        await ours.announce(STORE)
        ((member, left_s),) = await ours.leases() or []
        assert member == STORE and 0 < left_s <= 5.0
        await ours.withdraw()
        assert await ours.leases() == [] and await nowhere.leases() is None
    finally:
        await ours.close()
        await nowhere.close()


async def test_who_is_cancelled_while_it_withdraws_ends_as_cancelled(valkey_url: str) -> None:
    ours = Membership(valkey_url, "springtide", 5.0, OURS)
    try:
        await ours.announce(STORE)
        withdrawing = asyncio.create_task(ours.withdraw())
        await asyncio.sleep(0)
        withdrawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await withdrawing
    finally:
        await ours.close()


async def test_the_metrics_tell_whether_valkey_answers(valkey_url: str) -> None:
    def up() -> float | None:
        return REGISTRY.get_sample_value("springtide_valkey_up", {"client": "membership"})

    ours, nowhere = Membership(valkey_url, "springtide", 5.0), Membership("redis://127.0.0.1:1/0", "springtide", 5.0)
    try:
        await ours.announce(STORE)
        assert up() == 1
        await nowhere.announce(STORE)
        assert up() == 0
    finally:
        await ours.close()
        await nowhere.close()


async def test_without_a_secret_everybody_is_believed(valkey_url: str) -> None:
    ours, trusting = Membership(valkey_url, "springtide", 5.0, OURS), Membership(valkey_url, "springtide", 5.0)
    try:
        await ours.announce(STORE)
        assert await trusting.members() == [STORE]
    finally:
        await ours.close()
        await trusting.close()


@pytest.mark.parametrize("credentials", [OURS, OPEN], ids=["signed", "unsigned"])
def test_a_record_is_read_as_it_was_written(credentials: Credentials) -> None:
    member = Member("decode", "decode-0", (1 << 64) - 1, "[::1]:1", "decode-0", "[::1]:2", 7, {"store_address": "[::1]:3"})
    assert read_record(write_record(member, credentials), credentials) == member


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


@pytest.mark.asyncio(loop_factories=("asyncio", "uvloop"))
async def test_a_member_whose_connection_is_reset_goes_on_renewing() -> None:
    """uvloop, in which every process runs, has an error of its own for it."""
    with new_valkey() as valkey:
        async with resettable(valkey) as (url, reset):
            ours, others = Membership(url, "springtide", 0.3), Membership(valkey.connection_url, "springtide", 5.0)
            try:
                await ours.announce(Member("store", "prefill-0", 1, "127.0.0.1:1"))
                for _ in range(3):
                    assert reset() > 0
                    with redis.Redis.from_url(valkey.connection_url) as forgetful:
                        forgetful.flushall()
                    await until(others.members)
            finally:
                await ours.close()
                await others.close()
