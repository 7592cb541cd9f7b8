from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from gateway_cluster import Cluster, new_arguments

from engine.formats.files import describe
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gateway.app import GatewayServer
from springtide.modelinfo import ModelInfo
from springtide.process import ProcessArguments
from tests.support.valkey import new_valkey


@pytest.fixture(scope="session", autouse=True)
def loaded() -> Iterator[Callable[[ModelInfo], Tokenizer]]:
    """What reads a model's tokenizer, as gateways do, but each only once: it takes longer than most tests."""
    made: dict[str, Tokenizer] = {}

    def load_once(info: ModelInfo) -> Tokenizer:
        if info.path not in made:
            made[info.path] = load_tokenizer(info)
        return made[info.path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.app.load_tokenizer", load_once)
        yield load_once


@pytest.fixture(scope="session")
def model_info() -> ModelInfo:
    return describe("demo")


@pytest.fixture(scope="session")
def tokenizer(model_info: ModelInfo, loaded: Callable[[ModelInfo], Tokenizer]) -> Tokenizer:
    return loaded(model_info)


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with new_valkey() as valkey:
        yield valkey.connection_url


@pytest.fixture
def arguments(model_info: ModelInfo, valkey_url: str, tmp_path: Path) -> ProcessArguments:
    return new_arguments(model_info, valkey_url, tmp_path)


@pytest.fixture
async def cluster(tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    cluster = Cluster()
    reply = tokenizer.encode("Hello, wörld! One two three four.")
    cluster.script = lambda start: reply
    await cluster.start()
    yield cluster
    await cluster.close()


@pytest.fixture
async def gateway(arguments: ProcessArguments, cluster: Cluster) -> AsyncIterator[GatewayServer]:
    gateway = GatewayServer(arguments, cluster.conductor.address)
    await gateway.start()
    yield gateway
    await gateway.close()


@pytest.fixture
async def http(gateway: GatewayServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as client:
        yield client


@pytest.fixture
async def client(gateway: GatewayServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.http_address}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
