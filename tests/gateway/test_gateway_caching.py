"""Context caches over HTTP: Kimi's API, and what requests make of them. The model recites; the stores are those of the other tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from gateway_cluster import BLOCK_TOKENS, MODEL, Cluster
from google import genai

from gateway.api_request import Conversation
from gateway.app import GatewayServer
from gateway.openai.requests import ChatCompletionRequest
from gateway.openai.responses_body import ResponseRequest
from springtide.protocol import wire
from tests.support.valkey import new_valkey
from tests.support.waiting import until

LONG = "The sea is wide, and the tide comes in. " * 20
SYSTEM = {"role": "system", "content": LONG}
ASK = {"role": "user", "content": "Why?"}


class Tenant:
    """A client of its own, for Valkey outlives a test."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.headers = {"x-springtide-tenant": f"tenant-{secrets.token_hex(4)}"}

    async def __call__(self, method: str, path: str, body: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> Any:
        answer = await self._http.request(method, path, json=body, headers={**self.headers, **(headers or {})})
        assert answer.status_code == status, answer.text
        return answer.json()

    async def create(self, **more: Any) -> dict[str, Any]:
        return dict(await self("POST", "/v1/caching", {"model": MODEL, "messages": [SYSTEM], **more}))

    async def chat(self, *messages: Any, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": messages, **more}
        return await self._http.post("/v1/chat/completions", json=body, headers={**self.headers, **(headers or {})})


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    """Of this module's own: gateways of other tests must not compute what is left here."""
    with new_valkey() as valkey:
        yield valkey.connection_url


@pytest.fixture
def tenant(http: httpx.AsyncClient) -> Tenant:
    return Tenant(http)


async def test_one_is_created_shown_listed_changed_and_deleted(tenant: Tenant) -> None:
    made = await tenant.create(name="tide", metadata={"a": "1"}, ttl=300)
    assert made["id"].startswith("cache-") and made["object"] == "context-cache" and made["status"] == "pending"
    assert made["expired_at"] - made["created_at"] in (300, 301) and made["tokens"] > BLOCK_TOKENS
    assert made["messages"] == [SYSTEM] and made["tools"] == []
    shown = await tenant("GET", f"/v1/caching/{made['id']}")
    assert (shown["name"], shown["metadata"], shown["pin"], shown["replicas"]) == ("tide", {"a": "1"}, "hard", 1)
    other = await tenant.create(metadata={"a": "2"})
    assert other["expired_at"] - other["created_at"] in (3600, 3601), "an hour, where nothing is said"
    for query, ids in (
        ("", [other["id"], made["id"]]),
        ("?order=asc", [made["id"], other["id"]]),
        ("?limit=1", [other["id"]]),
        (f"?after={other['id']}", [made["id"]]),
        (f"?before={made['id']}", [other["id"]]),
        ("?metadata[a]=1", [made["id"]]),
    ):
        listed = await tenant("GET", f"/v1/caching{query}")
        assert listed["object"] == "list" and [cache["id"] for cache in listed["data"]] == ids, query
    for query in ("after", "before"):
        assert (await tenant("GET", f"/v1/caching?{query}=cache-none", status=400))["error"]["param"] == query
    changed = await tenant("PUT", f"/v1/caching/{made['id']}", {"metadata": {"b": "3"}, "ttl": 7200})
    assert changed["metadata"] == {"b": "3"} and changed["expired_at"] > made["expired_at"] + 6000
    gone = {"deleted": True, "id": made["id"], "object": "context_cache_object.deleted"}
    assert await tenant("DELETE", f"/v1/caching/{made['id']}") == gone
    for method in ("GET", "DELETE"):
        error = (await tenant(method, f"/v1/caching/{made['id']}", status=404))["error"]
        assert error["code"] == "cache_not_found"


async def test_tags_name_caches_and_move(tenant: Tenant) -> None:
    first, second = await tenant.create(), await tenant.create()
    tag = await tenant("POST", "/v1/caching/refs/tags", {"tag": "tide-1.0", "cache_id": first["id"]})
    assert (tag["tag"], tag["cache_id"], tag["object"]) == ("tide-1.0", first["id"], "cache_object.tag")
    await tenant("POST", "/v1/caching/refs/tags", {"tag": "tide-1.0", "cache_id": second["id"]})
    assert (await tenant("GET", "/v1/caching/refs/tags/tide-1.0"))["cache_id"] == second["id"]
    assert (await tenant("GET", "/v1/caching/refs/tags/tide-1.0/content"))["id"] == second["id"]
    assert [tag["tag"] for tag in (await tenant("GET", "/v1/caching/refs/tags"))["data"]] == ["tide-1.0"]
    for _ in range(2):
        gone = {"deleted": True, "object": "cache_object.tag.deleted", "tag": "tide-1.0"}
        assert await tenant("DELETE", "/v1/caching/refs/tags/tide-1.0") == gone
    await tenant("GET", "/v1/caching/refs/tags/tide-1.0", status=404)
    await tenant("POST", "/v1/caching/refs/tags", {"tag": "1st", "cache_id": first["id"]}, status=400)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "cache", "content": "cache_id=x"}, SYSTEM]}, "messages"),
        ({"ttl": 1, "expired_at": 1}, "ttl"),
        ({"expired_at": 1}, "expired_at"),
        ({"ttl": 10**12}, "ttl"),
        ({"name": "n" * 257}, "name"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"replicas": 0}, "replicas"),
        ({"pin": "iron"}, "pin"),
        ({"model": "gpt"}, "model"),
        ({"replicas": 16, "messages": [{"role": "user", "content": LONG * 9}]}, "messages"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(tenant: Tenant, body: dict[str, Any], field: str) -> None:
    asked = {"model": MODEL, "messages": [SYSTEM], **body}
    error = (await tenant("POST", "/v1/caching", asked, status=404 if field == "model" else 400))["error"]
    assert error["param"] == field, error


def prompts(cluster: Cluster) -> list[list[int]]:
    """Of the requests so far, without those that compute contexts."""
    starts = [start for at, start in cluster.started if at.startswith("decode")]
    return [list(start.request.token_ids) for start in starts if not start.request.request_id.startswith("context-cache")]


async def test_a_message_of_the_role_cache_stands_for_the_cached_ones(cluster: Cluster, tenant: Tenant) -> None:
    made = await tenant.create()
    await tenant("POST", "/v1/caching/refs/tags", {"tag": "tide", "cache_id": made["id"]})
    cluster.cached_tokens = made["tokens"]
    plain = await tenant.chat(SYSTEM, ASK)
    assert "msh-context-cache-id" not in plain.headers
    for content in (f"cache_id={made['id']};reset_ttl=7200", "tag=tide;reset_ttl=7200"):
        answer = await tenant.chat({"role": "cache", "content": content}, ASK)
        assert answer.status_code == 200, answer.text
        assert answer.headers["msh-context-cache-id"] == made["id"]
        assert answer.headers["msh-context-cache-token-saved"] == str(made["tokens"])
        assert int(answer.headers["msh-context-cache-token-exp"]) > made["expired_at"] + 3000
    same, *others = prompts(cluster)
    assert others == [same, same], "what is run is what would run without a cache"

    async def counted() -> bool:
        return bool((await tenant("GET", f"/v1/caching/{made['id']}"))["meter"]["calls"] == 2)

    await until(counted)


async def test_headers_name_the_cache_of_messages_that_are_sent_again(cluster: Cluster, tenant: Tenant) -> None:
    made = await tenant.create()
    named = {"x-msh-context-cache": made["id"]}
    answer = await tenant.chat(SYSTEM, ASK, headers=named)
    assert answer.headers["msh-context-cache-id"] == made["id"]
    assert answer.json()["usage"]["prompt_tokens_details"]["cache_miss_reason"] in ("pending", "not_held")
    other = await tenant.chat(ASK, headers=named)
    assert other.status_code == 200 and "msh-context-cache-id" not in other.headers
    assert other.json()["usage"]["prompt_tokens_details"]["cache_miss_reason"] == "messages_changed"
    unknown = await tenant.chat(ASK, headers={"x-msh-context-cache": "cache-0"})
    assert unknown.status_code == 200, "a miss is no error"
    streamed = await tenant.chat(SYSTEM, ASK, headers=named, stream=True)
    assert streamed.headers["msh-context-cache-id"] == made["id"] and streamed.text.endswith("data: [DONE]\n\n")


async def test_a_header_lets_a_cache_end_later(tenant: Tenant) -> None:
    made = await tenant.create(ttl=60)
    named = {"x-msh-context-cache": made["id"], "x-msh-context-cache-reset-ttl": "7200"}

    async def end() -> int:
        return int((await tenant("GET", f"/v1/caching/{made['id']}"))["expired_at"])

    other = await tenant.chat(ASK, headers=named)
    assert other.status_code == 200 and await end() == made["expired_at"], "of messages that are not the cache's it is no use"
    answer = await tenant.chat(SYSTEM, ASK, headers=named)
    assert answer.status_code == 200 and int(answer.headers["msh-context-cache-token-exp"]) == await end() > made["expired_at"] + 7000
    refused = await tenant.chat(SYSTEM, ASK, headers={**named, "x-msh-context-cache-reset-ttl": "soon"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-msh-context-cache-reset-ttl"


async def test_a_dry_run_computes_nothing(cluster: Cluster, tenant: Tenant) -> None:
    made = await tenant.create()
    answer = await tenant.chat({"role": "cache", "content": f"cache_id={made['id']};dry_run=1"}, ASK)
    assert answer.status_code == 200 and answer.json()["choices"] == [] and answer.headers["msh-context-cache-id"] == made["id"]
    headers = {"x-msh-context-cache": made["id"], "x-msh-context-cache-dryrun": "1"}
    assert (await tenant.chat(SYSTEM, ASK, headers=headers)).headers["msh-context-cache-id"] == made["id"]
    assert prompts(cluster) == []


@pytest.mark.parametrize("content", ["", "cache_id=", "x=1", "cache_id=a;tag=b", "cache_id=a;", "tag=b;reset_ttl=soon", "tag=b;dry_run=2"])
async def test_senseless_names_of_caches_are_refused(tenant: Tenant, content: str) -> None:
    answer = await tenant.chat({"role": "cache", "content": content}, ASK)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content"


async def test_caches_of_others_look_like_those_that_there_are_not(http: httpx.AsyncClient, tenant: Tenant) -> None:
    made, other = await tenant.create(), Tenant(http)
    await tenant("POST", "/v1/caching/refs/tags", {"tag": "tide", "cache_id": made["id"]})

    async def told(cache_id: str) -> list[Any]:
        refusals = [
            await other(method, f"/v1/caching/{cache_id}", body, 404) for method, body in (("GET", None), ("PUT", {}), ("DELETE", None))
        ]
        refusals.append(await other("POST", "/v1/caching/refs/tags", {"tag": "t", "cache_id": cache_id}, 404))
        for answer in (
            await other.chat({"role": "cache", "content": f"cache_id={cache_id}"}, ASK),
            await other.chat(SYSTEM, ASK, headers={"x-msh-context-cache": cache_id}),
        ):
            refusals.append([answer.status_code, sorted(set(answer.headers) - {"date", "content-length"}), answer.json().get("error")])
        return [str(refusal).replace(cache_id, "ID") for refusal in refusals]

    assert await told(made["id"]) == await told("cache-0123456789abcdef01234567")
    assert (await other("GET", "/v1/caching"))["data"] == []


async def test_openais_ways_to_keep_a_prompt_are_taken(gateway: GatewayServer, tenant: Tenant) -> None:
    details = "prompt_tokens_details"
    plain = (await tenant.chat(SYSTEM, ASK)).json()["usage"]
    assert plain[details] == {"cached_tokens": 0, "cache_write_tokens": 0}
    kept = plain["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    for more in ({"prompt_cache_options": {"ttl": "1h"}}, {"prompt_cache_retention": "24h", "prompt_cache_key": "k"}):
        written = (await tenant.chat(SYSTEM, ASK, **more)).json()["usage"][details]["cache_write_tokens"]
        assert kept - BLOCK_TOKENS <= written <= kept, more
    part = {"type": "text", "text": LONG, "prompt_cache_breakpoint": {"mode": "explicit"}}
    marked = await tenant.chat({"role": "system", "content": [part]}, ASK, prompt_cache_options={"mode": "explicit"})
    assert 0 < marked.json()["usage"][details]["cache_write_tokens"] <= kept


@pytest.mark.parametrize("ttl", [None, "5m", "1h"])
def test_a_breakpoint_that_says_no_time_lasts_as_the_requests_options_say(ttl: str | None) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt_cache_options": {"mode": "explicit", "ttl": ttl}}

    def kept_s(kind: str, **breakpoint: Any) -> list[float]:
        said = [{"role": "user", "content": [{"type": kind, "text": LONG, "prompt_cache_breakpoint": breakpoint}]}]
        if kind == "text":
            asked = ChatCompletionRequest.model_validate({**options, "messages": said}).api_request()
        else:
            body = ResponseRequest.model_validate({**options, "input": said})
            asked = body.api_request(body.input)
        assert isinstance(asked.prompt, Conversation)
        return [mark.ttl_s for message in asked.prompt.messages for mark in message.cache_marks]

    for kind in ("text", "input_text"):
        assert kept_s(kind) == kept_s(kind, ttl=None) == [{None: 1800.0, "5m": 300.0, "1h": 3600.0}[ttl]]
        assert kept_s(kind, ttl="12h") == [12 * 3600.0]


async def test_anthropics_marks_in_a_chat_are_taken_as_litellm_sends_them(gateway: GatewayServer, tenant: Tenant) -> None:
    control = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tool = {"type": "function", "function": {"name": "tide", "description": LONG, "parameters": {"type": "object"}}}
    part = {"role": "system", "content": [{"type": "text", "text": LONG, **control}]}

    async def written(*messages: Any, **more: Any) -> int:
        usage = (await tenant.chat(*messages, **more)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cache_write_tokens"])

    assert await written(SYSTEM, ASK, tools=[tool]) == 0
    for messages, tools in (((part, ASK), []), (({**SYSTEM, **control}, ASK), []), ((SYSTEM, ASK), [{**tool, **control}])):
        assert await written(*messages, tools=tools) >= BLOCK_TOKENS, messages
    refused = await tenant.chat({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "for ever"}}]})
    assert refused.status_code == 400


async def test_anthropics_marks_are_kept_and_counted_apart(gateway: GatewayServer, cluster: Cluster, tenant: Tenant) -> None:
    client = anthropic.AsyncAnthropic(
        base_url=f"http://{gateway.http_address}", api_key="none", max_retries=0, default_headers=tenant.headers, timeout=20
    )
    async with client:
        system: Any = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        asked: Any = [{"role": "user", "content": [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]}]
        plain = await client.messages.create(model=MODEL, max_tokens=5, system=LONG, messages=[{"role": "user", "content": LONG}])
        assert plain.usage.cache_creation_input_tokens == plain.usage.cache_read_input_tokens == 0
        total = plain.usage.input_tokens
        for cached, hours, minutes in ((0, True, True), (BLOCK_TOKENS * 5, False, True), (total - 1, False, False)):
            cluster.cached_tokens = cached
            usage = (await client.messages.create(model=MODEL, max_tokens=5, system=system, messages=asked)).usage
            assert usage.cache_creation is not None and usage.cache_creation_input_tokens is not None
            kept = usage.cache_creation
            assert (kept.ephemeral_1h_input_tokens > 0, kept.ephemeral_5m_input_tokens > 0) == (hours, minutes), usage
            assert usage.cache_creation_input_tokens == kept.ephemeral_1h_input_tokens + kept.ephemeral_5m_input_tokens
            assert usage.input_tokens + cached + usage.cache_creation_input_tokens == total and usage.cache_read_input_tokens == cached


@pytest.mark.parametrize("api", ["anthropic", "chat", "responses"])
async def test_a_mark_within_a_message_keeps_what_comes_before_it(tenant: Tenant, api: str) -> None:
    """The document that is asked about, and not the question behind it."""

    async def written(question: str) -> tuple[int, int]:
        """Tokens of what is kept, and of the prompt."""
        if api == "anthropic":
            parts = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": question}]
            body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": parts}]}
            usage = (await tenant("POST", "/v1/messages", body))["usage"]
            return usage["cache_creation_input_tokens"], usage["cache_creation_input_tokens"] + usage["input_tokens"]
        kind, breakpoint_ = "text" if api == "chat" else "input_text", {"mode": "explicit"}
        parts = [{"type": kind, "text": LONG, "prompt_cache_breakpoint": breakpoint_}, {"type": kind, "text": question}]
        said, options = [{"role": "user", "content": parts}], {"model": MODEL, "prompt_cache_options": {"mode": "explicit"}}
        if api == "chat":
            usage = (await tenant("POST", "/v1/chat/completions", {**options, "messages": said}))["usage"]
            return usage["prompt_tokens_details"]["cache_write_tokens"], usage["prompt_tokens"]
        usage = (await tenant("POST", "/v1/responses", {**options, "input": said}))["usage"]
        return usage["input_tokens_details"]["cache_write_tokens"], usage["input_tokens"]

    (kept, few), (same, many) = await written("Why? " * 60), await written("How wide is it? " * 60)
    assert kept == same > BLOCK_TOKENS and few != many and kept < min(few, many) - 60


async def test_geminis_tool_config_goes_with_its_cached_content(cluster: Cluster, tenant: Tenant) -> None:
    tools = [{"functionDeclarations": [{"name": "tide"}]}]
    said = {"systemInstruction": {"parts": [{"text": LONG}]}, "tools": tools}
    asked = {"contents": [{"role": "user", "parts": [{"text": "Why?"}]}]}
    path = f"/v1beta/models/{MODEL}:generateContent"
    for mode in ("ANY", "NONE"):
        config = {"toolConfig": {"functionCallingConfig": {"mode": mode}}}
        made = await tenant("POST", "/v1beta/cachedContents", {"model": f"models/{MODEL}", **said, **config})
        before = len(cluster.started)
        await tenant("POST", path, {**asked, **said, **config})
        await tenant("POST", path, {**asked, "cachedContent": made["name"]})
        starts = [start.request for at, start in cluster.started[before:] if at.startswith("decode")]
        whole, begun = [one for one in starts if not one.request_id.startswith("context-cache")]
        assert list(whole.token_ids) == list(begun.token_ids)
        grammars = [wire.SAMPLING_PARAMS.decode(one.params).grammar for one in (whole, begun)]
        assert grammars[0] == grammars[1] and bool(grammars[0]) == (mode == "ANY")


def violated(refusal: Any) -> str:
    """The field that Google's error names."""
    return str(refusal["error"]["details"][0]["fieldViolations"][0]["field"])


async def test_geminis_cached_contents_are_made_listed_extended_used_and_deleted(
    gateway: GatewayServer, cluster: Cluster, tenant: Tenant
) -> None:
    options = genai.types.HttpOptions(base_url=f"http://{gateway.http_address}", headers=tenant.headers)
    client = genai.Client(api_key="none", http_options=options).aio
    config = genai.types.CreateCachedContentConfig(system_instruction=LONG, display_name="tide", ttl="300s")
    made = await client.caches.create(model=MODEL, config=config)
    assert made.name is not None and made.name.startswith("cachedContents/") and made.display_name == "tide"
    assert made.expire_time is not None and made.create_time is not None and made.usage_metadata is not None
    assert round((made.expire_time - made.create_time).total_seconds()) == 300
    assert [cache.name async for cache in await client.caches.list()] == [made.name]
    longer = await client.caches.update(name=made.name, config=genai.types.UpdateCachedContentConfig(ttl="7200s"))
    assert longer.expire_time is not None and (longer.expire_time - made.expire_time).total_seconds() > 6000
    assert (await client.caches.get(name=made.name)).expire_time == longer.expire_time
    cluster.cached_tokens = made.usage_metadata.total_token_count or 0
    named = genai.types.GenerateContentConfig(cached_content=made.name)
    answer = await client.models.generate_content(model=MODEL, contents="Why?", config=named)
    assert answer.usage_metadata is not None and answer.usage_metadata.cached_content_token_count == cluster.cached_tokens
    same = genai.types.GenerateContentConfig(system_instruction=LONG)
    await client.models.generate_content(model=MODEL, contents="Why?", config=same)
    begun, whole = prompts(cluster)
    assert begun == whole
    await client.caches.delete(name=made.name)
    generated = client.models.generate_content(model=MODEL, contents="Why?", config=named)
    counted = {"generateContentRequest": {"contents": [{"parts": [{"text": "Why?"}]}], "cachedContent": made.name}}
    for refused, field in ((client.caches.get(name=made.name), "name"), (generated, "cachedContent")):
        with pytest.raises(genai.errors.ClientError) as raised:
            await refused
        assert raised.value.code == 404 and violated(raised.value.details) == field
    assert violated(await tenant("POST", f"/v1beta/models/{MODEL}:countTokens", counted, 404)) == "cachedContent"
    unnamed = {"contents": [{"parts": [{"text": "Why?"}]}], "cachedContent": "cachedContents/"}
    assert violated(await tenant("POST", f"/v1beta/models/{MODEL}:generateContent", unnamed, 400)) == "cachedContent"
    nothing = {"model": f"models/{MODEL}"}
    assert (await tenant("POST", "/v1beta/cachedContents", nothing, 400))["error"]["status"] == "INVALID_ARGUMENT"
    few = {**nothing, "contents": [{"parts": [{"text": "Hello"}]}]}
    for field, fields in (("contents", few), ("expireTime", {**few, "expireTime": "2999-01-01T00:00:00Z"})):
        assert (await tenant("POST", "/v1beta/cachedContents", fields, 400))["error"]["message"].startswith(field)
    answer = await tenant("GET", "/v1beta/cachedContents?pageToken=none", status=400)
    assert "pageToken: there is no page after 'none'" in answer["error"]["message"]


async def test_gemini_is_told_why_its_cached_content_was_missed(gateway: GatewayServer, cluster: Cluster, tenant: Tenant) -> None:
    said = {"model": f"models/{MODEL}", "systemInstruction": {"parts": [{"text": LONG}]}}
    made = await tenant("POST", "/v1beta/cachedContents", said)
    asked = {"contents": [{"role": "user", "parts": [{"text": "Why?"}]}], "cachedContent": made["name"]}
    path = f"/v1beta/models/{MODEL}"
    missed = (await tenant("POST", f"{path}:generateContent", asked))["usageMetadata"]
    assert missed["cacheMissReason"] in ("pending", "not_held")
    *_, last = await tenant("POST", f"{path}:streamGenerateContent", asked)
    assert last["usageMetadata"]["cacheMissReason"] in ("pending", "not_held")
    options = genai.types.HttpOptions(base_url=f"http://{gateway.http_address}", headers=tenant.headers)
    named = genai.types.GenerateContentConfig(cached_content=made["name"])
    answer = await genai.Client(api_key="none", http_options=options).aio.models.generate_content(
        model=MODEL, contents="Why?", config=named
    )
    assert answer.usage_metadata is not None and answer.text, "a field that Google's client does not know does not trouble it"
    cluster.cached_tokens = made["usageMetadata"]["totalTokenCount"]
    assert "cacheMissReason" not in (await tenant("POST", f"{path}:generateContent", asked))["usageMetadata"]


async def test_tokens_of_a_conversation_are_counted_as_a_request_would(tenant: Tenant) -> None:
    counted = await tenant("POST", "/v1/tokenizers/estimate-token-count", {"model": MODEL, "messages": [SYSTEM, ASK]})
    answer = await tenant.chat(SYSTEM, ASK)
    assert counted == {"data": {"total_tokens": answer.json()["usage"]["prompt_tokens"]}}
    refused = await tenant("POST", "/v1/tokenizers/estimate-token-count", {"model": MODEL, "messages": [{"role": "x"}]}, status=400)
    assert refused["error"]["param"].startswith("messages[0]")
