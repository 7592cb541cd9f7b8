"""API keys and tenants in Valkey: what is made is usable and what is revoked is refused at every gateway within a second, and only digests
are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from deploy.local.plan import free_port
from gateway.accounts.accounts import Accounts
from gateway.accounts.allowance import Allowance, ApiKey, digest_of, new_key, new_key_id
from gateway.accounts.register import Register, RegisterCopy, UnknownKey
from springtide.config import LOOPBACK
from springtide.errors import Unauthenticated, Unavailable
from springtide.ids import new_id
from springtide.valkey import ValkeyClient
from tests.support.valkey import new_valkey, resettable
from tests.support.waiting import until


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[redis.Redis]:
    client = ValkeyClient.from_url(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def cluster_name() -> str:
    return new_id("cluster")


@pytest.fixture
def register(client: redis.Redis, cluster_name: str) -> Register:
    return Register(client, cluster_name)


async def made(register: Register, tenant: str = "acme", **fields: object) -> tuple[str, ApiKey]:
    key = new_key()
    record = ApiKey(new_key_id(), tenant, **fields)  # type: ignore[arg-type]
    await register.add_key(digest_of(key), record)
    return key, record


async def test_a_copy_learns_of_keys_tenants_and_revocations(register: Register) -> None:
    copy = RegisterCopy(register)
    assert not copy.read
    await copy.start()
    assert copy.read and not copy.has_keys
    key, record = await made(register, allowance=Allowance(requests_per_minute=5, models=("demo",)))
    await until(lambda: copy.key(digest_of(key)) == record)
    await register.set_tenant("acme", Allowance(tokens_per_minute=100))
    await until(lambda: copy.tenant("acme") == Allowance(tokens_per_minute=100))
    revoked = await register.revoke(record.key_id, 123.0)
    assert revoked.revoked_at == 123.0
    await until(lambda: copy.key(digest_of(key)) == revoked)
    assert copy.has_keys, "with its last key revoked a cluster is not open to everybody"
    assert await register.revoke(record.key_id, 456.0) == revoked
    await copy.close()


async def test_a_register_with_many_entries_is_read_whole(register: Register) -> None:
    keys = [await made(register, f"tenant-{number}") for number in range(1100)]
    copy = RegisterCopy(register)
    await copy.start()
    assert all(copy.key(digest_of(key)) == record for key, record in keys)
    assert len(await register.keys()) == 1100
    await copy.close()


async def test_only_digests_are_kept(register: Register, client: redis.Redis, cluster_name: str) -> None:
    key, _ = await made(register)
    values = [await client.dump(name) async for name in client.scan_iter(match=f"{cluster_name}:*")]
    assert values and not any(key.encode() in (value or b"") for value in values)


async def test_a_key_that_is_not_there_is_not_revoked(register: Register) -> None:
    with pytest.raises(UnknownKey, match="key_0"):
        await register.revoke("key_0", 1.0)


async def test_changes_at_once_are_all_kept(register: Register) -> None:
    await asyncio.gather(*(register.set_tenant("acme", Allowance(requests_per_minute=number)) for number in range(1, 6)))
    assert (await register.tenants())["acme"].requests_per_minute in range(1, 6)


async def test_an_expired_key_is_refused(client: redis.Redis, register: Register, cluster_name: str) -> None:
    (past, _), (future, record) = await made(register, expires_at=time.time() - 1), await made(register, expires_at=time.time() + 100)
    accounts = Accounts(client, cluster_name, {})
    await accounts.start()
    with pytest.raises(Unauthenticated, match="expired"):
        accounts.caller(f"Bearer {past}")
    assert accounts.caller(f"Bearer {future}").key_id == record.key_id
    await accounts.close()


async def test_while_valkey_is_away_the_last_keys_go_on_and_what_was_revoked_is_refused_when_it_is_back(cluster_name: str) -> None:
    valkey = new_valkey()
    valkey.start()
    client = ValkeyClient.from_url(valkey.connection_url, socket_timeout=1)
    register = Register(client, cluster_name)
    key, record = await made(register)
    accounts = Accounts(client, cluster_name, {})
    await accounts.start()
    valkey.stop()
    with pytest.raises(Unavailable):
        await register.revoke(record.key_id, time.time())
    assert accounts.caller(f"Bearer {key}").key_id == record.key_id
    valkey.start()
    client = ValkeyClient.from_url(valkey.connection_url, socket_timeout=1)
    register = Register(client, cluster_name)
    # It has forgotten everything: another register, in which the old key is not.
    await made(register, "zeta")

    def refused() -> bool:
        try:
            accounts.caller(f"Bearer {key}")
        except Unauthenticated:
            return True
        return False

    await until(refused)
    await accounts.close()
    await client.aclose()


async def test_before_valkey_could_be_asked_nobody_is_let_in(cluster_name: str) -> None:
    client = ValkeyClient.from_url(f"redis://{LOOPBACK}:{free_port('valkey', LOOPBACK, 0)}/0")
    accounts = Accounts(client, cluster_name, {digest_of("configured"): "acme"})
    open_accounts = Accounts(client, cluster_name, {})
    await accounts.start()
    await open_accounts.start()
    assert accounts.caller("Bearer configured").tenant == "acme"
    with pytest.raises(Unavailable):
        accounts.caller("Bearer another")
    with pytest.raises(Unavailable):
        open_accounts.caller("")
    await accounts.close()
    await open_accounts.close()
    await client.aclose()


async def test_a_gateway_whose_first_reading_was_lost_reads_once_more_before_it_serves(cluster_name: str) -> None:
    """As it is lost when the process stands still for longer than Valkey's answer may take."""
    with new_valkey() as valkey:
        async with (
            resettable(valkey, silent=1) as (url, _),
            ValkeyClient.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client,
        ):
            accounts = Accounts(client, cluster_name, {})
            await accounts.start()
            assert accounts.caller("").tenant == ""
            await accounts.close()
