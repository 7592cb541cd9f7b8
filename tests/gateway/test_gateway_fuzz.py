"""Whatever a client sends, made from the API's own description and from its opposite: an answer or a refusal, never a failure of ours, and
nothing of it stays."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from gateway_cluster import MODEL, Cluster, until
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from gateway.app import GatewayServer

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, GENERATE = "/v1/messages", "/v1beta/models/{model}:generateContent"
OPENAI_ERROR = ("message", "type", "param", "code")
ANTHROPIC_ERROR = ("message", "type")
GOOGLE_ERROR = ("message", "code", "status")
LEAST_ANSWERS = 5
BUDGET_S = 6.0
"""For each kind of request; what is drawn after it is not sent."""
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**30), 10**30)
RANGES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2) | st.sampled_from([1e-45, 1e-38, 1e-300]) | NUMBERS,
    "top_p": st.floats(0, 1) | NUMBERS,
    "min_p": st.floats(0, 1) | NUMBERS,
    "top_k": st.integers(-2, 1 << 33),
    "repetition_penalty": st.floats(0.01, 100) | NUMBERS,
    "presence_penalty": st.floats(-2, 2) | NUMBERS,
    "frequency_penalty": st.floats(-2, 2) | NUMBERS,
    "seed": st.integers(-(1 << 65), 1 << 65),
    "n": st.integers(-1, 4),
    "max_tokens": st.integers(0, 8) | st.integers(),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "stream": st.booleans(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 1 << 33), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 1 << 33).map(str), NUMBERS, max_size=3),
    "deadline_ms": NUMBERS,
    "priority": st.integers(-(1 << 32), 1 << 32),
}


class Fuzz:
    """Sends cases from a thread, and judges the answers."""

    def __init__(self, url: str, *error_fields: str) -> None:
        """`error_fields` are those of the API's errors."""
        self.url = url
        self._error_fields = set(error_fields)
        self.statuses: Counter[int] = Counter()
        self._http = httpx.Client(base_url=url, timeout=20)
        self._until = time.monotonic() + BUDGET_S

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until

    def judge(self, status: int, content: bytes) -> None:
        """503 and 504 are the cluster's: it is refused here, or its deadline was too short."""
        self.statuses[status] += 1
        assert status < 500 or status == 504, (status, content[:500])
        if status in (400, 404, 413, 422, 504):
            error = json.loads(content)["error"]
            assert {*error, "details"} == {*self._error_fields, "details"} and error["message"]
        elif status == 200 and not content.startswith((b"data:", b"event:")):
            json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    def post(self, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        reply = self._http.post(path, content=content, headers={"content-type": "application/json"})
        self.judge(reply.status_code, reply.content)


def settings_for(examples: int) -> settings:
    """No shrinking: what fails is printed as it is."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def fuzz_described(fuzz: Fuzz, path: str, mode: GenerationMode, modest: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzz.url}/openapi.json")
    operation = schema[path]["POST"]

    @settings_for(150)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        if not fuzz.over:
            case.path_parameters = {"model": MODEL}
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                case.body = {**case.body, **modest}
            reply = case.call(timeout=20)
            fuzz.judge(reply.status_code, reply.content)

    send()


def _fields(names: set[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: RANGES[name] for name in sorted(names)})


def fuzz_parameters(fuzz: Fuzz, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "Say it."}]} if path == CHAT else {"prompt": "Say it."}

    @settings_for(400)
    @given(fields=st.sets(st.sampled_from(sorted(RANGES)), max_size=3).flatmap(_fields))
    def send(fields: dict[str, Any]) -> None:
        if not fuzz.over:
            fuzz.post(path, {"model": MODEL, **prompt, **fields})

    send()


async def assert_nothing_stays(gateway: GatewayServer, cluster: Cluster) -> None:
    await until(lambda: cluster.idle)
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as client:
        assert (await client.post(PLAIN, json={"model": MODEL, "prompt": "Say it."})).status_code == 200
        for line in (await client.get("/metrics")).text.splitlines():
            if line.startswith("springtide_gateway_requests_in_flight{"):
                assert line.endswith(" 0.0"), line


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_bodies_as_described_and_as_not(gateway: GatewayServer, cluster: Cluster, path: str, mode: GenerationMode) -> None:
    fuzz = Fuzz(f"http://{gateway.http_address}", *OPENAI_ERROR)
    await asyncio.to_thread(fuzz_described, fuzz, path, mode, {"model": MODEL, "n": 1, "max_tokens": 4})
    print(fuzz.statuses)
    assert fuzz.statuses[400] + fuzz.statuses[200] >= LEAST_ANSWERS
    await assert_nothing_stays(gateway, cluster)


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_parameters_within_their_ranges_and_beyond(gateway: GatewayServer, cluster: Cluster, path: str) -> None:
    fuzz = Fuzz(f"http://{gateway.http_address}", *OPENAI_ERROR)
    await asyncio.to_thread(fuzz_parameters, fuzz, path)
    print(fuzz.statuses)
    assert fuzz.statuses[400] >= LEAST_ANSWERS and fuzz.statuses[200] >= LEAST_ANSWERS
    await assert_nothing_stays(gateway, cluster)


MODEST_MESSAGE = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Say it."}]}
MODEST_RESPONSE = {"model": MODEL, "input": "Say it.", "max_output_tokens": 4, "previous_response_id": None}
MODEST_CONTENT = {"model": MODEL, "contents": [{"parts": [{"text": "Say it."}]}], "generationConfig": {"maxOutputTokens": 4}}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(
    ("path", "modest", "error_fields"),
    [
        (RESPONSES, MODEST_RESPONSE, OPENAI_ERROR),
        (MESSAGES, MODEST_MESSAGE, ANTHROPIC_ERROR),
        (GENERATE, MODEST_CONTENT, GOOGLE_ERROR),
    ],
)
async def test_bodies_of_other_apis_as_described_and_as_not(
    gateway: GatewayServer, cluster: Cluster, path: str, modest: dict[str, Any], error_fields: tuple[str, ...], mode: GenerationMode
) -> None:
    fuzz = Fuzz(f"http://{gateway.http_address}", *error_fields)
    await asyncio.to_thread(fuzz_described, fuzz, path, mode, modest)
    print(fuzz.statuses)
    assert fuzz.statuses[400] + fuzz.statuses[200] >= LEAST_ANSWERS
    await assert_nothing_stays(gateway, cluster)
