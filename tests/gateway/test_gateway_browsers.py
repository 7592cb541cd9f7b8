"""What browsers and proxies ask of an HTTP API: other origins' pages by option, compressed answers, streams untouched."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import pytest
from gateway_cluster import MODEL, Cluster
from hypothesis import given
from hypothesis import strategies as st

from gateway.app import GatewayServer
from gateway.compression import MIN_BYTES, accepts_gzip
from springtide.process import ProcessArguments

LONG = {"model": MODEL, "prompt": "Say it.", "max_tokens": 60, "logprobs": 5, "n": 8}
ORIGIN = "https://app.example"


@pytest.fixture
async def browsed(arguments: ProcessArguments, cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    cluster.script = lambda start: list(range(100, 200))
    server = arguments.config.server.model_copy(update={"cors_origins": (ORIGIN,)})
    gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"server": server})), cluster.conductor.address)
    await gateway.start()
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as http:
        yield http
    await gateway.close()


async def test_a_page_of_a_named_origin_may_call_and_read_what_it_needs(browsed: httpx.AsyncClient) -> None:
    asks = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = await browsed.options("/v1/completions", headers=asks)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    answer = await browsed.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = await browsed.post("/v1/completions", json={"model": "no", "prompt": "Hi"}, headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (404, ORIGIN)


async def test_a_page_of_another_origin_may_not(browsed: httpx.AsyncClient, http: httpx.AsyncClient) -> None:
    other = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in (await browsed.options("/v1/completions", headers=other)).headers
    assert "access-control-allow-origin" not in (await http.get("/v1/models", headers={"origin": ORIGIN})).headers


async def test_a_long_answer_is_compressed_for_who_accepts_it(browsed: httpx.AsyncClient) -> None:
    async with browsed.stream("POST", "/v1/completions", json=LONG, headers={"accept-encoding": "gzip"}) as response:
        raw = b"".join([piece async for piece in response.aiter_raw()])
    assert response.headers["content-encoding"] == "gzip" and "accept-encoding" in response.headers["vary"].lower()
    assert int(response.headers["content-length"]) == len(raw) < MIN_BYTES * 2
    assert len(json.loads(gzip.decompress(raw))["choices"][0]["logprobs"]["tokens"]) == 60
    plain = await browsed.post("/v1/completions", json=LONG, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.json()["choices"][0]["text"]


async def test_streams_and_short_answers_go_out_as_they_are(browsed: httpx.AsyncClient) -> None:
    async with browsed.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers={"accept-encoding": "gzip"}) as stream:
        pieces = [piece async for piece in stream.aiter_raw()]
    assert "content-encoding" not in stream.headers and pieces[-1].endswith(b"data: [DONE]\n\n")
    assert "content-encoding" not in (await browsed.get("/v1/models")).headers


@pytest.mark.parametrize(
    ("accepted", "gzipped"),
    [("gzip", True), ("deflate, GZIP;q=0.5, br", True), ("br", False), ("", False), ("gzip;q=0", False), ("gzip; q=0.0", False)],
)
def test_what_a_client_accepts_is_read(accepted: str, gzipped: bool) -> None:
    assert accepts_gzip(accepted) is gzipped


@given(st.text())
def test_whatever_a_client_says_it_accepts_is_read(accepted: str) -> None:
    is_gzip: Callable[[str], bool] = accepts_gzip
    assert is_gzip(accepted) in (True, False)
