"""Connections between processes with certificates: who has none, or another's, is told nothing; a renewed one is taken up while calls go
on."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from conductor.server.streaming import follow
from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from springtide import telemetry
from springtide import tls as springtide_tls
from springtide.config import TlsConfig
from springtide.credentials import OPEN, Credentials
from springtide.errors import ConfigError
from springtide.rpc.channels import connect, listen, new_server
from springtide.rpc.health import add_health
from springtide.supervision import first_of
from springtide.telemetry import serve_metrics
from springtide.tls import Tls, TlsFiles, accept, cluster_tls
from tests.support.ports import ReservedPorts
from tests.support.waiting import until

SECRET, CLUSTER = b"a secret of sixteen", "springtide"
SETTINGS = ("tls.certificate", "tls.key", "tls.ca")
WATCH = "/grpc.health.v1.Health/Watch"
ASK = health_pb2.HealthCheckRequest()


class Came(list[bytes]):
    """What a followed stream has said."""

    def __call__(self, messages: list[bytes]) -> None:
        self.extend(messages)


class Machine:
    """One with a certificate, of this cluster's authority or of another's."""

    def __init__(self, authority: Authority, directory: Path, address: str = "127.0.0.1") -> None:
        self.authority, self.identity, self._address = authority, Identity(directory), address
        self.renew()
        self.tls = Tls(TlsFiles(self.identity.certificate, self.identity.key, self.identity.authorities, SETTINGS))
        self.credentials = Credentials(SECRET, CLUSTER, self.tls)

    def renew(self) -> int:
        """Returns the new certificate's serial number."""
        issue_to(self.identity, self.authority, "a-machine", (self._address,))
        return x509.load_pem_x509_certificate(self.identity.certificate.read_bytes()).serial_number

    async def renewed(self) -> int:
        """The same, once the process has read it."""
        before, serial = self.tls.number, self.renew()
        async with asyncio.timeout(10):
            while self.tls.number == before:  # noqa: ASYNC110 - looks when it is asked
                await asyncio.sleep(0.02)
        return serial

    @property
    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.identity.authorities)
        context.load_cert_chain(self.identity.certificate, self.identity.key)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", CLUSTER)


@pytest.fixture
def machine(authority: Authority, tmp_path: Path) -> Machine:
    return Machine(authority, tmp_path / "machine")


@asynccontextmanager
async def serving(machine: Machine) -> AsyncIterator[str]:
    server = new_server(machine.credentials)
    add_health(server)
    address = listen(server, "127.0.0.1:0", machine.credentials)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def test_the_metrics_tell_when_the_certificate_in_use_ends(authority: Authority, machine: Machine) -> None:
    def told() -> float | None:
        return REGISTRY.get_sample_value("springtide_certificate_expiry_timestamp_seconds", {"certificate": "told"})

    def end() -> float:
        return x509.load_pem_x509_certificate(machine.identity.certificate.read_bytes()).not_valid_after_utc.timestamp()

    Tls(machine.tls.files, "told")
    assert told() == end()


async def test_an_address_of_ipv6_is_announced_as_it_is_dialled() -> None:
    """By gRPC and by who reads metrics."""
    server = new_server(OPEN)
    add_health(server)
    for host in ("::1", "[::1]"):
        assert listen(server, f"{host}:0", OPEN).startswith("[::1]:")
    address = listen(server, "::1:0", OPEN)
    await server.start()
    try:
        async with connect(address) as channel:
            await check(channel)
    finally:
        await server.stop(None)
    assert serve_metrics(OPEN, "::1").startswith("[::1]:")


async def check(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as answered:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="none"), timeout=5)
    if answered.value.code() is not grpc.StatusCode.NOT_FOUND:
        raise answered.value


async def served_serial(address: str, machine: Machine) -> int | None:
    """Of the certificate that a new connection gets; None where it is not believed."""
    host, port = address.split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port), ssl=machine.context)
    except ssl.SSLError:
        return None
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(certificate).serial_number


async def test_processes_of_the_cluster_speak_with_each_other(machine: Machine, authority: Authority, tmp_path: Path) -> None:
    other = Machine(authority, tmp_path / "other", "192.0.2.1")
    async with serving(machine) as address, connect(address, other.credentials) as channel:
        await check(channel)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-8-sig"])
async def test_authorities_may_have_comments_in_any_encoding(machine: Machine, encoding: str) -> None:
    plain = machine.identity.authorities.read_bytes()
    machine.identity.authorities.write_bytes("# die größte Behörde\n".encode(encoding) + plain)
    commented = Credentials(SECRET, CLUSTER, Tls(machine.tls.files))
    server = new_server(commented)
    add_health(server)
    address = listen(server, "127.0.0.1:0", commented)
    await server.start()
    try:
        async with connect(address, commented) as channel:
            await check(channel)
        following = asyncio.ensure_future(follow(address, WATCH, ASK.SerializeToString(), (), came := Came(), tls=commented.tls))
        await until(lambda: came or following.done())
        assert came
        following.cancel()
    finally:
        await server.stop(None)


async def test_files_that_come_to_fit_no_more_end_nothing(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    certificate = machine.identity.certificate.read_bytes()
    async with serving(machine) as address, connect(address, machine.credentials) as channel:
        machine.identity.certificate.write_bytes(certificate.replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE"))
        await until(lambda: machine.tls.client_context() and "there is no -----BEGIN CERTIFICATE-----" in caplog.text)
        await check(channel)
        await machine.renewed()
        await check(channel)


async def test_strangers_are_told_nothing(machine: Machine, tmp_path: Path) -> None:
    """In the clear, without a certificate, with another authority's, and with one of that which names ours."""
    stranger = Machine(Authority.create(tmp_path / "other-ca", CLUSTER), tmp_path / "stranger")
    ours = machine.identity.authorities.read_bytes()
    theirs = stranger.identity.key.read_bytes(), stranger.identity.certificate.read_bytes()
    async with serving(machine) as address:
        for channel in (
            connect(address, Credentials(SECRET, CLUSTER)),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ours)),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ours, *theirs)),
            connect(address, stranger.credentials),
        ):
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await check(channel)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_nothing_is_told_to_a_server_of_another_name_or_authority(machine: Machine, authority: Authority, tmp_path: Path) -> None:
    misplaced = Machine(authority, tmp_path / "misplaced", "192.0.2.1")
    stranger = Machine(Authority.create(tmp_path / "other-ca", CLUSTER), tmp_path / "stranger")
    for server in (misplaced, stranger):
        async with serving(server) as address:
            async with connect(address, machine.credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await check(channel)
            with pytest.raises(OSError):
                await follow(address, WATCH, ASK.SerializeToString(), (), lambda messages: None, tls=machine.tls)


async def test_a_followed_stream_has_certificates_too(machine: Machine) -> None:
    async with serving(machine) as address:
        following = asyncio.ensure_future(follow(address, WATCH, ASK.SerializeToString(), (), came := Came(), tls=machine.tls))
        await until(lambda: came)
        assert health_pb2.HealthCheckResponse.FromString(came[0]).status
        following.cancel()
        with pytest.raises(OSError):
            await follow(address, WATCH, ASK.SerializeToString(), (), lambda messages: None)


async def test_a_renewed_certificate_is_taken_up_while_calls_go_on(machine: Machine, authority: Authority, tmp_path: Path) -> None:
    """By the server and by the client, over a rotation of the authority and its end."""
    client = Machine(authority, tmp_path / "client")
    async with serving(machine) as address, connect(address, client.credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        under_way = stub.Watch(ASK)
        await under_way.read()
        reading = asyncio.ensure_future(under_way.read())
        following = authority.rotate()
        # One after the other, and calls go on in between.
        for each in (client, machine):
            each.authority = following
            await check(channel)
            await each.renewed()
            await check(channel)
        alone = following.retire()
        for each in (machine, client):
            each.authority = alone
        await client.renewed()
        serial = await machine.renewed()
        async with asyncio.timeout(10):
            while await served_serial(address, client) != serial:  # noqa: ASYNC110 - only a handshake tells
                await asyncio.sleep(0.02)
        await check(channel)
        async with connect(address, client.credentials) as anew:
            await check(anew)
        assert not reading.done(), "the stream that was under way goes on"
        reading.cancel()


async def test_the_connections_of_an_older_certificate_end_with_the_calls_that_are_on_them(
    machine: Machine, authority: Authority, tmp_path: Path
) -> None:
    client, connected = Machine(authority, tmp_path / "client"), 0

    def are_connected() -> int:
        gc.collect()  # a call of gRPC's that has ended keeps its connection as long as it is there, and refers to itself
        return connected

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        host, port = address.split(":")
        there = await asyncio.open_connection(host, int(port))
        await first_of(pump(reader, there[1]), pump(there[0], writer))
        for each in (writer, there[1]):
            each.close()
        connected -= 1

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(1 << 16):
            writer.write(some)

    async with serving(machine) as address, await asyncio.start_server(relay, "127.0.0.1") as relaying:
        host, port = relaying.sockets[0].getsockname()
        async with connect(f"{host}:{port}", client.credentials) as channel:
            under_way = health_pb2_grpc.HealthStub(channel).Watch(ASK)
            await under_way.read()
            for _ in range(3):
                await client.renewed()
                await check(channel)
            await until(lambda: are_connected() == 2)
            under_way.cancel()
            del under_way
            await until(lambda: are_connected() == 1)
            await check(channel)


async def test_metrics_are_for_those_with_a_certificate(machine: Machine, authority: Authority, tmp_path: Path) -> None:
    stranger = Machine(Authority.create(tmp_path / "other-ca", CLUSTER), tmp_path / "stranger")
    address = serve_metrics(machine.credentials)
    async with httpx.AsyncClient(verify=machine.context) as http:
        assert "python_info" in (await http.get(f"https://{address}/metrics")).text
    nameless = ssl.create_default_context(cafile=machine.identity.authorities)
    others = ssl.create_default_context(cafile=machine.identity.authorities)
    others.load_cert_chain(stranger.identity.certificate, stranger.identity.key)
    for url, context in ((f"https://{address}", nameless), (f"https://{address}", others), (f"http://{address}", nameless)):
        async with httpx.AsyncClient(verify=context) as http:
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await http.get(f"{url}/metrics")


def shake_hands(address: str, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
    """The session of a connection that was answered, for another one to resume. Raises OSError where it is refused."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(plain, server_hostname=host, session=session) as tls:
        tls.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        if not tls.recv(1):
            raise ConnectionError("refused")
        return tls.session


@asynccontextmanager
async def listening_at(machine: Machine, most_handshakes: int) -> AsyncIterator[str]:
    """The address of a server that says the same to everybody."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"welcome")
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        taking = accept(listening, machine.tls, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), answer), most_handshakes)
        task = asyncio.create_task(taking)
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_of_before_lets_nobody_in_whose_authority_was_retired(
    machine: Machine, authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """OpenSSL's servers ask who resumes one for no certificate."""
    client = Machine(authority, tmp_path / "client")
    context = client.context
    context.minimum_version = context.maximum_version = version
    # The client is not to be who refuses.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with listening_at(machine, 8) as streams:
        addresses = (serve_metrics(machine.credentials), streams)
        sessions = [await asyncio.to_thread(shake_hands, address, context) for address in addresses]
        machine.authority = authority.rotate().retire()
        await machine.renewed()
        for address, session in zip(addresses, sessions, strict=True):
            for shown in (session, None):
                with pytest.raises(OSError):
                    await asyncio.to_thread(shake_hands, address, context, shown)


async def test_handshakes_that_do_not_end_keep_nobody_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening_at(machine, 3) as address:
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        await asyncio.to_thread(shake_hands, address, machine.context)
        for reader, _ in silent[:5]:
            assert await asyncio.wait_for(reader.read(), 10) == b"", "the oldest make room"
        monkeypatch.setattr(springtide_tls, "HANDSHAKE_S", 0.1)
        reader, _ = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(), 10) == b"", "and none is waited for without end"
        for _, writer in silent:
            writer.close()


async def test_who_keeps_many_connections_to_the_metrics_costs_few_threads_and_keeps_nobody_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_METRICS_CONNECTIONS", 3)
    address, before = serve_metrics(machine.credentials), set(threading.enumerate())
    host, port = address.split(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    async with httpx.AsyncClient(verify=machine.context) as http:
        assert "python_info" in (await http.get(f"https://{address}/metrics")).text
    serving_them = [thread for thread in threading.enumerate() if thread not in before and "process_request" in thread.name]
    assert len(serving_them) <= 3 + 1, "one of which may have closed its connection and not ended yet"
    for _, writer in silent:
        writer.close()


async def test_metrics_have_the_port_that_was_chosen_for_them_or_a_free_one(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    reserved = ReservedPorts(1)
    (port,) = reserved.numbers
    assert serve_metrics(machine.credentials, port=port) == f"127.0.0.1:{port}"
    reserved.release()
    other = serve_metrics(machine.credentials, port=port)
    assert other != f"127.0.0.1:{port}" and f"127.0.0.1:{port} is in use" in caplog.text
    async with httpx.AsyncClient(verify=machine.context) as http:
        assert "python_info" in (await http.get(f"https://{other}/metrics")).text
    with pytest.raises(ConfigError, match=r"--metrics-port: cannot listen on 192\.0\.2\.1:9400"):
        serve_metrics(machine.credentials, "192.0.2.1", 9400)


async def test_nothing_listens_in_the_clear_where_other_machines_come_in(machine: Machine) -> None:
    clear, allowed = Credentials(SECRET, CLUSTER), Credentials(SECRET, CLUSTER, plaintext_allowed=True)
    for host in ("0.0.0.0", "[::]", "192.0.2.1", "a-host"):
        with pytest.raises(ConfigError, match=r"tls\.certificate"):
            listen(new_server(clear), f"{host}:0", clear)
        with pytest.raises(ConfigError, match=r"tls\.certificate"):
            serve_metrics(clear, host)
        for credentials in (allowed, machine.credentials):
            credentials.check_host(host)
    for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost"):
        clear.check_host(host)


def test_settings_of_certificates_come_together() -> None:
    assert cluster_tls(TlsConfig()) is None
    with pytest.raises(ValueError, match="but not key and ca"):
        TlsConfig(certificate=Path("tls.crt"))
