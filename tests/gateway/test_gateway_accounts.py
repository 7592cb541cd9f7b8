"""Keys, limits and usage at the gateways: all of them together let in what a limit allows, and write down what was served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
import httpx
import openai
import pytest
import redis.asyncio as redis
from gateway_cluster import MODEL, Cluster
from openai.types import Batch
from prometheus_client import REGISTRY

from gateway.accounts.allowance import Allowance, ApiKey, digest_of, new_key, new_key_id
from gateway.accounts.limiter import Claim, Limiter
from gateway.accounts.register import Register
from gateway.accounts.usage import Counts, DayUsage, UsageBook, today
from gateway.app import GatewayServer
from springtide.ids import new_id
from springtide.process import ProcessArguments
from springtide.rpc import caches_pb2, caches_pb2_grpc, inference_pb2, inference_pb2_grpc
from springtide.rpc.channels import connect
from tests.support.waiting import until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say it."}]}
PLAIN = {"model": MODEL, "prompt": "Say it."}
WAIT_S = 10.0


class Office:
    """Two gateways of one cluster, and the registers behind them."""

    def __init__(self, gateways: list[GatewayServer], client: redis.Redis, name: str) -> None:
        self.gateways, self.client, self.name = gateways, client, name
        self.register = Register(client, name)
        self.book = UsageBook(client, name)

    async def key(self, tenant: str, **allowance: Any) -> str:
        """A new one that every gateway knows."""
        key = new_key()
        await self.register.add_key(digest_of(key), ApiKey(new_key_id(), tenant, allowance=Allowance(**allowance)))
        for number in range(len(self.gateways)):
            # Before it knows of a key a gateway lets everybody in.
            await self.until_status(number, "none", 401)
            await self.until_status(number, key, 200)
        return key

    async def key_id(self, key: str) -> str:
        return (await self.register.keys())[digest_of(key)].key_id

    def http(self, number: int, key: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=f"http://{self.gateways[number].http_address}", headers=headers, timeout=20)

    async def until_status(self, number: int, key: str, status: int) -> None:
        async with self.http(number, key) as http:

            async def answered() -> bool:
                return (await http.get("/v1/models")).status_code == status

            await until(answered)

    def api(self, number: int, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://{self.gateways[number].http_address}/v1", api_key=key, max_retries=0, timeout=20)

    async def until_left(self, key_id: str, limit: int, left: int, kind: str = "tokens") -> None:
        """Returns when so many tokens of a key's limit are left: an answer is settled beside it."""
        limiter = Limiter(self.client, self.name)

        async def settled() -> bool:
            return (await limiter.take([Claim(f"{kind}:key/{key_id}", limit, 0)])).standings[0].remaining == left

        await until(settled)

    async def used(self, tenant: str, requests: int) -> list[DayUsage]:
        """What is written down of a tenant's use, once so many requests are."""

        async def found() -> list[DayUsage] | None:
            rows = [usage async for usage in self.book.read(today(), today()) if usage.row.tenant == tenant]
            return rows if sum(usage.counts.requests for usage in rows) >= requests else None

        return await until(found) or []

    async def used_counts(self, tenant: str, counts: Counts) -> None:
        """Returns when so much is written down."""
        total = Counts()
        try:
            async with asyncio.timeout(WAIT_S):
                while total != counts:
                    await asyncio.sleep(0.05)
                    total = Counts()
                    for usage in await self.used(tenant, 0):
                        total.add(usage.counts)
        except TimeoutError:
            raise AssertionError(f"{total} is written down, not {counts}") from None


async def submit(client: openai.AsyncOpenAI, num_lines: int) -> Batch:
    line = {"method": "POST", "url": "/v1/completions", "body": PLAIN}
    lines = "\n".join(json.dumps({**line, "custom_id": str(number)}) for number in range(num_lines))
    file = await client.files.create(file=("lines.jsonl", lines.encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


async def batch_over(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    while batch.status not in ("failed", "completed", "cancelled"):
        await asyncio.sleep(0.05)
        batch = await client.batches.retrieve(batch.id)
    return batch


@pytest.fixture
async def office(arguments: ProcessArguments, cluster: Cluster, valkey_url: str) -> AsyncIterator[Office]:
    config = arguments.config.model_copy(update={"cluster": new_id("cluster")})
    gateways = [
        GatewayServer(replace(arguments, config=config, instance_id=f"gateway-{number}"), cluster.conductor.address) for number in range(2)
    ]
    for gateway in gateways:
        await gateway.start()
    client = redis.Redis.from_url(valkey_url)
    yield Office(gateways, client, config.cluster)
    for gateway in gateways:
        await gateway.close()
    await client.aclose()


async def test_without_any_key_clients_say_who_they_are_and_with_one_they_show_it(office: Office) -> None:
    async with office.http(0, "none") as http:
        assert (await http.post("/v1/chat/completions", json=CHAT, headers={"x-springtide-tenant": "acme"})).status_code == 200
    key = await office.key("acme")
    for number in range(2):
        await office.until_status(number, "none", 401)
        async with office.http(number, key) as http:
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    await office.register.revoke(await office.key_id(key), 1.0)
    for number in range(2):
        await office.until_status(number, key, 401)
        async with office.http(number, key) as http:
            refused = await http.post("/v1/chat/completions", json=CHAT)
    assert refused.json()["error"]["message"] == "this API key has been revoked"


async def test_two_gateways_hold_a_limit_of_requests_together_and_say_how_it_stands(office: Office) -> None:
    key = await office.key("acme", requests_per_minute=4)
    answers = []
    for number in (0, 1, 0, 1, 0, 1):
        async with office.http(number, key) as http:
            answers.append(await http.post("/v1/completions", json=PLAIN))
    assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["3", "2", "1", "0", "0", "0"]
    refused = answers[-1]
    assert refused.headers["x-ratelimit-limit-requests"] == "4"
    assert 0 < float(refused.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 61
    assert 0 < int(refused.headers["retry-after"]) <= 61
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "this API key may have 4 requests a minute, of which 0 are left" in refused.json()["error"]["message"]
    assert refused.json()["error"]["message"].endswith(f"try again in {refused.headers['retry-after']} s")
    assert refused.headers["x-request-id"]


async def test_openais_client_knows_a_limit_when_it_sees_one(office: Office) -> None:
    key = await office.key("acme", requests_per_minute=1)
    url = f"http://{office.gateways[0].http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20) as client:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=[{"role": "user", "content": "Say it."}])
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as raised:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Say it."}], stream=True)
        assert raised.value.code == "rate_limit_exceeded"


async def test_tokens_count_when_they_are_known_and_settle_at_the_end(office: Office, cluster: Cluster) -> None:
    limited = await office.key("acme", tokens_per_minute=1000)
    prompt = {"model": MODEL, "prompt": [5] * 300, "max_tokens": 3, "ignore_eos": True}
    async with office.http(0, limited) as http:
        first = await http.post("/v1/completions", json=prompt)
        assert (first.status_code, first.headers["x-ratelimit-remaining-tokens"]) == (200, "700")
        served = first.json()["usage"]["total_tokens"]
        assert served == 303
        await office.until_left(await office.key_id(limited), limit=1000, left=1000 - 303)
        over = await http.post("/v1/completions", json={**prompt, "prompt": [5] * 900})
        assert over.status_code == 429 and "tokens a minute" in over.json()["error"]["message"]
        never = await http.post("/v1/completions", json={**prompt, "prompt": [5] * 1001})
        assert never.status_code == 400 and never.json()["error"]["code"] == "rate_limit_exceeded"
        before = len(cluster.conductor.requests)
        assert (await http.post("/v1/completions", json={**prompt, "prompt": [5] * 900})).status_code == 429
        assert len(cluster.conductor.requests) == before, "nothing is computed for what is over the limit"


async def test_a_tenants_limit_is_that_of_all_its_keys_together(office: Office) -> None:
    first, second = await office.key("acme", requests_per_minute=100), await office.key("acme")
    await office.register.set_tenant("acme", Allowance(requests_per_minute=2))
    async with office.http(0, first) as one, office.http(0, second) as two, asyncio.timeout(WAIT_S):
        while "x-ratelimit-limit-requests" not in (await two.post("/v1/completions", json=PLAIN)).headers:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        answers = [await http.post("/v1/completions", json=PLAIN) for http in (one, two, one)]
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert "tenant 'acme'" in answers[1].json()["error"]["message"]
    assert answers[2].headers["x-ratelimit-limit-requests"] == "2", "the one of which less is left is told of"


async def test_a_tenants_context_caches_have_its_budget(office: Office) -> None:
    key = await office.key("acme")
    await office.register.set_tenant("acme", Allowance(cache_tokens=5))
    context = {"model": MODEL, "messages": [{"role": "system", "content": "You know a lot about lighthouses. " * 30}], "ttl": 60}
    async with office.http(0, key) as http, asyncio.timeout(WAIT_S):
        while (answer := await http.post("/v1/caching", json=context)).status_code == 200:  # noqa: ASYNC110 - only an answer tells
            await asyncio.sleep(0.02)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cache_budget_exceeded")
        assert ": 5 (server.cache_budget_tokens, or what is set for the tenant)" in answer.json()["error"]["message"]


async def test_a_keys_context_caches_have_a_budget_of_their_own(office: Office) -> None:
    small, large = await office.key("acme", cache_tokens=5), await office.key("acme")
    said = {"role": "system", "content": "You know a lot about lighthouses. " * 30}
    context = {"model": MODEL, "messages": [said], "ttl": 60}
    async with office.http(0, small) as http:
        answer = await http.post("/v1/caching", json=context)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cache_budget_exceeded")
        assert answer.json()["error"]["message"].endswith("5 (what is set for the API key)")
    async with office.http(0, large) as http:
        assert (await http.post("/v1/caching", json=context)).status_code == 200


async def test_a_batch_keeps_to_its_keys_budget_and_is_written_down_as_one(office: Office) -> None:
    key = await office.key("acme", batch_lines=1)
    async with office.api(0, key) as client, asyncio.timeout(WAIT_S):
        ended = {number: await batch_over(client, await submit(client, number)) for number in (2, 1)}
        assert (ended[2].status, ended[1].status) == ("failed", "completed")
        assert ended[2].errors.data[0].code == "batch_lines_exceeded"
    [usage] = await office.used("acme", 1)
    assert (usage.row.batch, usage.row.endpoint, usage.row.key_id) == (True, "/v1/completions", await office.key_id(key))


async def test_lines_of_a_batch_wait_while_their_tokens_of_the_minute_are_used_up(office: Office, cluster: Cluster) -> None:
    async with office.http(0, "none") as http:
        usage = (await http.post("/v1/completions", json=PLAIN)).json()["usage"]
    key = await office.key("acme", batch_tokens_per_minute=3 * usage["prompt_tokens"] - 1)
    refused = partial(REGISTRY.get_sample_value, "springtide_gateway_rate_limited_total", {"kind": "batch_tokens"})
    before = refused() or 0
    for node in cluster.nodes.values():
        node.pause_at = 0
    async with office.api(0, key) as client, asyncio.timeout(WAIT_S):
        batch = await submit(client, 3)
        await until(lambda: (refused() or 0) > before)
        for node in cluster.nodes.values():
            node.pause_at = None
            node.patience.set()
        while (counts := (await client.batches.retrieve(batch.id)).request_counts) is None or counts.completed < 2:  # noqa: ASYNC110 - only an answer tells
            await asyncio.sleep(0.05)
        await client.batches.cancel(batch.id)
        ended = await batch_over(client, batch)
        assert ended.status == "cancelled" and ended.request_counts is not None and ended.request_counts.completed == 2
    await office.until_left(await office.key_id(key), 1 << 20, (1 << 20) - 2 * usage["total_tokens"], "batch_tokens")


async def test_a_line_that_never_fits_into_a_minute_is_an_error(office: Office) -> None:
    key = await office.key("acme", batch_tokens_per_minute=1)
    async with office.api(0, key) as client, asyncio.timeout(WAIT_S):
        ended = await batch_over(client, await submit(client, 1))
        assert ended.status == "completed" and ended.error_file_id is not None
        row = json.loads((await client.files.content(ended.error_file_id)).text)
    assert row["response"]["status_code"] == 400
    assert row["response"]["body"]["error"]["code"] == "rate_limit_exceeded"
    assert "at most 1 batch tokens a minute" in row["response"]["body"]["error"]["message"]


LISTS = {"accept": "data", "anthropic-version": "data", "x-goog-api-client": "models"}
"""What a list of models is called by whoever has this header."""


async def test_a_key_opens_and_lists_the_models_it_is_for(office: Office) -> None:
    other, this = await office.key("acme", models=("another",)), await office.key("acme", models=("another", MODEL))
    async with office.http(0, other) as http:
        refused = await http.post("/v1/completions", json=PLAIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await http.get(f"/v1/models/{MODEL}")).json()["error"]["code"] == "model_not_found"
        listed = {header: (await http.get("/v1/models", headers={header: "x"})).json() for header in LISTS}
        assert all(listed[header][name] == [] for header, name in LISTS.items())
    async with office.http(0, this) as http:
        assert (await http.post("/v1/completions", json=PLAIN)).status_code == 200
        assert (await http.get(f"/v1/models/{MODEL}")).status_code == 200
        for header, name in LISTS.items():
            assert len((await http.get("/v1/models", headers={header: "x"})).json()[name]) == 1
    async with connect(office.gateways[0].grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for key, listed_there in ((other, []), (this, [MODEL])):
            answer = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {key}"),))
            assert [model.id for model in answer.models] == listed_there


async def test_a_key_counts_with_the_models_it_is_for(office: Office) -> None:
    other, this = await office.key("acme", models=("another",)), await office.key("acme", models=(MODEL,))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "high water"}]}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", chat),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/messages/count_tokens", chat),
        (f"/v1beta/models/{MODEL}:countTokens", {"contents": [{"parts": [{"text": "high water"}]}]}),
        ("/v1/tokenizers/estimate-token-count", chat),
        ("/v1/responses/input_tokens", {"model": MODEL, "input": "high water"}),
    ]
    for key, status in ((other, 404), (this, 200)):
        async with office.http(0, key) as http:
            assert [(await http.post(path, json=body)).status_code for path, body in asked] == [status] * len(asked)


async def test_a_key_makes_and_finds_context_caches_of_the_models_it_is_for(office: Office) -> None:
    other, this = await office.key("acme", models=("another",)), await office.key("acme", models=(MODEL,))
    long = "The sea is wide, and the tide comes in. " * 20
    kimi = {"model": MODEL, "messages": [{"role": "system", "content": long}]}
    gemini = {"model": MODEL, "systemInstruction": {"parts": [{"text": long}]}}
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="system", content=long)])
    async with office.http(0, this) as http:
        made = (await http.post("/v1/caching", json=kimi)).json()["id"]
        assert (await http.post("/v1/caching/refs/tags", json={"tag": "tide", "cache_id": made})).status_code == 200
    async with office.http(0, other) as http:
        asked = [
            ("POST", "/v1/caching", kimi),
            ("POST", "/v1beta/cachedContents", gemini),
            ("GET", f"/v1/caching/{made}", None),
            ("PUT", f"/v1/caching/{made}", {"ttl": 60}),
            ("DELETE", f"/v1/caching/{made}", None),
            ("GET", "/v1/caching/refs/tags/tide/content", None),
            ("GET", f"/v1beta/cachedContents/{made}", None),
            ("PATCH", f"/v1beta/cachedContents/{made}", {"ttl": "60s"}),
            ("DELETE", f"/v1beta/cachedContents/{made}", None),
        ]
        assert [(await http.request(method, path, json=body)).status_code for method, path, body in asked] == [404] * len(asked)
        assert (await http.get("/v1/caching")).json()["data"] == [] == (await http.get("/v1beta/cachedContents")).json()["cachedContents"]
    async with connect(office.gateways[0].grpc_address) as channel:
        stub = caches_pb2_grpc.ContextCachesStub(channel)
        metadata = (("authorization", f"Bearer {other}"),)
        for call in (
            stub.CreateCache(caches_pb2.CreateCacheRequest(model=MODEL, chat=chat), metadata=metadata),
            stub.GetCache(caches_pb2.CacheName(cache_id=made), metadata=metadata),
            stub.ExtendCache(caches_pb2.ExtendCacheRequest(cache_id=made, ttl_s=60), metadata=metadata),
            stub.DeleteCache(caches_pb2.CacheName(cache_id=made), metadata=metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert not (await stub.ListCaches(caches_pb2.ListCachesRequest(), metadata=metadata)).caches
    async with office.http(0, this) as http:
        assert (await http.get(f"/v1/caching/{made}")).status_code == 200


async def test_over_grpc_the_same_limits_hold(office: Office) -> None:
    key = await office.key("acme", requests_per_minute=2)
    request = inference_pb2.GenerateRequest(model=MODEL, text="Say it.")
    async with connect(office.gateways[1].grpc_address) as channel, office.http(0, key) as http:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))
        assert [chunk async for chunk in call]
        assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "1"
        assert (await http.post("/v1/completions", json=PLAIN)).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(request, metadata=(("x-api-key", key),)).read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < int(dict(raised.value.trailing_metadata())["retry-after"]) <= 61


async def test_what_was_served_is_written_down_whole_cut_and_by_whatever_api(office: Office, cluster: Cluster) -> None:
    key = await office.key("acme")
    cluster.cached_tokens = 1
    async with office.http(0, key) as http:
        whole = (await http.post("/v1/chat/completions", json={**CHAT, "n": 2})).json()["usage"]
        for node in cluster.nodes.values():
            node.pause_at = 3
        async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            lines = response.aiter_lines()
            assert "data: " in await anext(lines)
            # Three tokens are out, and while it goes on they are written down.
            cut = whole["prompt_tokens"]
            expected = Counts(2, whole["prompt_tokens"] + cut, 2, whole["completion_tokens"] + 3)
            await office.used_counts("acme", expected)
        await until(lambda: cluster.idle)
        await office.used_counts("acme", expected)
        for node in cluster.nodes.values():
            node.pause_at = None
    async with connect(office.gateways[1].grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        chunks = [
            chunk
            async for chunk in stub.Generate(
                inference_pb2.GenerateRequest(model=MODEL, text="Say it."), metadata=(("authorization", f"Bearer {key}"),)
            )
        ]
    last = Counts(1, chunks[-1].usage.prompt_tokens, 1, chunks[-1].usage.completion_tokens)
    await office.used_counts("acme", Counts(3, expected.prompt_tokens + last.prompt_tokens, 3, expected.output_tokens + last.output_tokens))
    found = {usage.row.endpoint: usage for usage in await office.used("acme", 3)}
    over_grpc = found["grpc/Generate"]
    assert over_grpc.counts == last
    assert found["/v1/chat/completions"].counts.requests == 2
    row = over_grpc.row
    assert (row.key_id, row.model, row.batch) == (await office.key_id(key), MODEL, False)


async def test_what_is_refused_is_no_use(office: Office) -> None:
    key = await office.key("acme")
    async with office.http(0, key) as http:
        assert (await http.post("/v1/completions", json={**PLAIN, "n": 0})).status_code == 400
        assert (await http.post("/v1/completions", json=PLAIN)).status_code == 200
    assert [usage.counts.requests for usage in await office.used("acme", 1)] == [1]


async def test_a_gateway_that_is_stopped_has_written_everything_down(office: Office) -> None:
    key = await office.key("acme")
    async with office.http(1, key) as http:
        usage = (await http.post("/v1/completions", json=PLAIN)).json()["usage"]
    await office.gateways[1].close()
    [found] = [found async for found in office.book.read(today(), today())]
    assert found.counts == Counts(1, usage["prompt_tokens"], 0, usage["completion_tokens"])


async def gateway_of_one_stream(arguments: ProcessArguments, cluster: Cluster) -> GatewayServer:
    """A further one, with as many for each tenant; nodes pause after the first token."""
    server = arguments.config.server.model_copy(update={"max_streams_per_tenant": 1})
    gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"server": server})), cluster.conductor.address)
    await gateway.start()
    for node in cluster.nodes.values():
        node.pause_at = 1
    return gateway


async def test_a_tenant_has_a_bound_on_its_streams(arguments: ProcessArguments, cluster: Cluster) -> None:
    gateway = await gateway_of_one_stream(arguments, cluster)
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as http:
        acme, zeta = {"x-springtide-tenant": "acme"}, {"x-springtide-tenant": "zeta"}
        async with http.stream("POST", "/v1/completions", json={**PLAIN, "stream": True}, headers=acme) as response:
            await anext(response.aiter_lines())
            refused = await http.post("/v1/completions", json=PLAIN, headers=acme)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
            for node in cluster.nodes.values():
                node.patience.set()
            assert (await http.post("/v1/completions", json=PLAIN, headers=zeta)).status_code == 200
        await until(lambda: cluster.idle)
        assert (await http.post("/v1/completions", json=PLAIN, headers=acme)).status_code == 200
    await gateway.close()


@pytest.mark.parametrize("again", [True, False], ids=["taken-up-again", "with-its-post"])
async def test_streams_of_background_responses_count_among_them(arguments: ProcessArguments, cluster: Cluster, again: bool) -> None:
    gateway = await gateway_of_one_stream(arguments, cluster)
    acme = {"x-springtide-tenant": "acme"}
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20, headers=acme) as http:
        body = {"model": MODEL, "input": "Say it.", "background": True}
        made = (await http.post("/v1/responses", json=body)).json()
        events = f"/v1/responses/{made['id']}?stream=true"
        first = http.stream("GET", events) if again else http.stream("POST", "/v1/responses", json={**body, "stream": True})
        async with first as response:
            lines = response.aiter_lines()
            await anext(lines)
            async with http.stream("GET", events) as refused:
                assert refused.status_code == 429 and b"too_many_streams" in await refused.aread()
            for node in cluster.nodes.values():
                node.patience.set()
        async with asyncio.timeout(20):
            while (last := await http.get(events)).status_code == 429:
                pass
        assert last.status_code == 200 and "response.completed" in last.text
    await gateway.close()
