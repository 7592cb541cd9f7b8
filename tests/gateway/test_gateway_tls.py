"""TLS for HTTP and gRPC from certificate files: new ones are served as they come, connections that are there go on, and files that do not
fit change nothing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import httpx
import openai
import pytest
from cryptography import x509
from gateway_cluster import MODEL, Cluster

from gateway.app import GatewayServer
from springtide.client import AsyncClient
from springtide.config import load_config
from springtide.errors import ConfigError, Unavailable
from springtide.process import ProcessArguments
from springtide.rpc import inference_pb2, inference_pb2_grpc
from springtide.tls import Tls, TlsFiles
from tests.support.certificates import Authority
from tests.support.waiting import until

SETTINGS = ("server.tls_certificate", "server.tls_key", "server.tls_client_ca")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say it."}]}
REQUEST = inference_pb2.GenerateRequest(model=MODEL, text="Say it.")


@dataclass(frozen=True)
class Pki:
    """An authority, and the files that a gateway serves with."""

    authority: Authority
    files: TlsFiles

    def renew(self) -> int:
        """Another certificate in the place of the one that is there; returns its serial number."""
        return self.authority.sign(self.files.certificate, self.files.key)

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority.path)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    pki = Pki(Authority(tmp_path), TlsFiles(tmp_path / "server.pem", tmp_path / "server.key", None, SETTINGS))
    pki.renew()
    return pki


def with_tls(arguments: ProcessArguments, files: TlsFiles) -> ProcessArguments:
    tls = {"tls_certificate": files.certificate, "tls_key": files.key, "tls_client_ca": files.authorities}
    return replace(arguments, config=arguments.config.model_copy(update={"server": arguments.config.server.model_copy(update=tls)}))


@pytest.fixture
async def secured(arguments: ProcessArguments, cluster: Cluster, pki: Pki) -> AsyncIterator[GatewayServer]:
    gateway = GatewayServer(with_tls(arguments, pki.files), cluster.conductor.address)
    await gateway.start()
    yield gateway
    await gateway.close()


def secure_channel(address: str, pki: Pki, client: TlsFiles | None = None) -> grpc.aio.Channel:
    key, certificate = (None, None) if client is None else (client.key.read_bytes(), client.certificate.read_bytes())
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pki.authority.path.read_bytes(), key, certificate))


async def served_serial(address: str, pki: Pki) -> int:
    """Of the certificate that a new connection gets."""
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=pki.context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(certificate).serial_number


async def until_served(address: str, pki: Pki, serial: int) -> None:
    async def served() -> bool:
        return await served_serial(address, pki) == serial

    await until(served)


async def test_http_and_grpc_are_served_to_who_trusts_the_authority(secured: GatewayServer, pki: Pki) -> None:
    url = f"https://{secured.http_address}"
    async with httpx.AsyncClient(base_url=url, verify=pki.context) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    async with (
        httpx.AsyncClient(verify=pki.context) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Say it."}], stream=True)
        assert [chunk async for chunk in stream]
    async with AsyncClient(url, ca=pki.authority.path) as ours:
        assert [chunk async for chunk in ours.complete("Say it.")]
    async with secure_channel(secured.grpc_address, pki) as channel:
        assert [chunk async for chunk in inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST)]


async def test_who_does_not_trust_it_or_speaks_without_tls_gets_nothing(secured: GatewayServer, cluster: Cluster) -> None:
    for url in (f"https://{secured.http_address}", f"http://{secured.http_address}"):
        async with AsyncClient(url) as client:
            with pytest.raises(Unavailable):
                await client.models()
    async with grpc.aio.insecure_channel(secured.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST, timeout=5).read()
    assert cluster.conductor.requests == []


async def test_a_new_certificate_is_served_while_connections_go_on(secured: GatewayServer, cluster: Cluster, pki: Pki) -> None:
    for node in cluster.nodes.values():
        node.pause_at = 2
    async with (
        httpx.AsyncClient(base_url=f"https://{secured.http_address}", verify=pki.context, timeout=20) as http,
        secure_channel(secured.grpc_address, pki) as channel,
    ):
        async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            lines = response.aiter_lines()
            assert "data: " in await anext(lines)
            call = inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST)
            chunks = aiter(call)
            assert (await anext(chunks)).text
            await until_served(secured.http_address, pki, pki.renew())
            serial = pki.renew()
            await until_served(secured.http_address, pki, serial)
            await until_served(secured.grpc_address, pki, serial)
            for node in cluster.nodes.values():
                node.patience.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
            assert [chunk async for chunk in chunks][-1].finish_reason
        async with secure_channel(secured.grpc_address, pki) as newer:
            assert [chunk async for chunk in inference_pb2_grpc.InferenceStub(newer).Generate(REQUEST)]


async def test_files_that_do_not_fit_change_nothing_and_are_logged(
    secured: GatewayServer, pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    before = await served_serial(secured.http_address, pki)
    key = pki.files.key.read_bytes()
    pki.renew()
    pki.files.key.write_bytes(key)
    while "is still used" not in caplog.text:
        assert await served_serial(secured.http_address, pki) == await served_serial(secured.grpc_address, pki) == before
    await until_served(secured.http_address, pki, pki.renew())


async def test_with_client_authorities_only_certified_clients_are_served(
    arguments: ProcessArguments, cluster: Cluster, pki: Pki, tmp_path: Path
) -> None:
    clients = Authority(tmp_path, "clients")
    client = TlsFiles(tmp_path / "client.pem", tmp_path / "client.key", None, SETTINGS)
    clients.sign(client.certificate, client.key, "a client")
    gateway = GatewayServer(with_tls(arguments, replace(pki.files, authorities=clients.path)), cluster.conductor.address)
    await gateway.start()
    try:
        url, certified = f"https://{gateway.http_address}", pki.context
        certified.load_cert_chain(client.certificate, client.key)
        async with httpx.AsyncClient(base_url=url, verify=certified) as http:
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        async with httpx.AsyncClient(base_url=url, verify=pki.context) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get("/health")
        async with secure_channel(gateway.grpc_address, pki, client) as channel:
            assert [chunk async for chunk in inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST)]
        async with secure_channel(gateway.grpc_address, pki) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST, timeout=5).read()
    finally:
        await gateway.close()


def test_wrong_files_are_named_at_the_start(pki: Pki, tmp_path: Path) -> None:
    nothing, rubbish = tmp_path / "nothing.pem", tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    other = TlsFiles(tmp_path / "other.pem", tmp_path / "other.key", None, SETTINGS)
    pki.authority.sign(other.certificate, other.key)
    trusted = TlsFiles(tmp_path / "trusted.pem", other.key, tmp_path / "trusted-ca.pem", SETTINGS)
    trusted.certificate.write_bytes(other.certificate.read_bytes().replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE"))
    assert trusted.authorities is not None
    trusted.authorities.write_bytes(pki.authority.path.read_bytes().replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE"))
    for files, said in (
        (replace(pki.files, certificate=nothing), r"server\.tls_certificate: cannot read .*nothing\.pem"),
        (replace(pki.files, key=nothing), r"server\.tls_key: cannot read .*nothing\.pem"),
        (replace(pki.files, certificate=rubbish), r"server\.tls_certificate: .*rubbish\.pem"),
        (replace(pki.files, key=other.key), r"server\.tls_certificate: .*other\.key"),
        (replace(pki.files, authorities=rubbish), r"server\.tls_client_ca: .*rubbish\.pem"),
        (replace(trusted, authorities=None), r"server\.tls_certificate: .*trusted\.pem.*there is no -----BEGIN CERTIFICATE-----"),
        (replace(pki.files, authorities=trusted.authorities), r"server\.tls_client_ca: .*trusted-ca\.pem"),
    ):
        with pytest.raises(ConfigError, match=said):
            Tls(files)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"server.tls_certificate": "a.pem"}, "not tls_key"),
        ({"server.tls_key": "a.key"}, "not tls_certificate"),
        ({"server.tls_client_ca": "ca.pem"}, "no tls_certificate"),
    ],
)
def test_half_a_tls_is_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(overrides=settings, environ={})
