"""What the gateway refuses, and how it says so: a table. One gateway serves all of it."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from gateway_cluster import MODEL, Cluster, new_arguments

from gateway.app import GatewayServer
from gateway.bodies import MAX_DEPTH, check_depth
from springtide.errors import InvalidRequest
from springtide.modelinfo import ModelInfo

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
CACHES = "/v1/caching"
RESPONSES = "/v1/responses"


TOOL = {"type": "function", "function": {"name": "weather"}}


def plain(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Say it.", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Say it."}], **fields}


def answered(annotation: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [annotation]}]}


def asked_with_logprobs(logprob: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": [logprob]}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(
    model_info: ModelInfo, valkey_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[httpx.AsyncClient, Cluster]]:
    cluster = Cluster()
    await cluster.start()
    gateway = GatewayServer(new_arguments(model_info, valkey_url, tmp_path_factory.mktemp("run")), cluster.conductor.address)
    await gateway.start()
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as client:
        yield client, cluster
    await gateway.close()
    await cluster.close()


INVALID: list[tuple[str, dict[str, Any], str | None, str]] = [
    # path, body, param, part of the message
    (PLAIN, {"prompt": "x"}, "model", "model is required"),
    (PLAIN, {"model": MODEL}, "prompt", "prompt is required"),
    (CHAT, {"model": MODEL}, "messages", "messages is required"),
    (CHAT, chat(messages=[]), "messages", "at least 1 item"),
    (CHAT, chat(surprise=1), "surprise", "surprise is not a field"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function", "is required"),
    (CHAT, chat(tools=[{"type": "custom", "custom": {"name": "x"}}]), "tools[0].type", "'function'"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "when there are tools"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "time"}}), "tool_choice", "'time'"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format", "json_schema"),
    (
        CHAT,
        chat(response_format={"type": "json_object"}, guided_regex="x"),
        "guided_regex",
        "not to guided_regex, response_format together",
    ),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}), "response_format", "not"),
    (CHAT, chat(guided_json="{"), "guided_json", "guided_json must be a JSON schema as JSON"),
    (PLAIN, plain(guided_grammar="root ::= ?"), "guided_grammar", "guided_grammar is no grammar in GBNF"),
    (PLAIN, plain(guided_regex="("), "guided_regex", "guided_regex cannot be"),
    (CHAT, chat(structured_outputs={"regex": "("}), "structured_outputs.regex", "structured_outputs.regex cannot be"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "messages"),
    (CHAT, chat(continue_final_message=True), "continue_final_message", "assistant"),
    (CHAT, chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message", "cannot both"),
    (CHAT, chat(store=True), "store", "not supported"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role", "'wizard'"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content", "image_url"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), "messages[0]", "content is required"),
    (CHAT, chat(top_logprobs=3), "top_logprobs", "logprobs is true"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "20"),
    (CHAT, chat(max_tokens=3, max_completion_tokens=4), "max_tokens", "contradict"),
    (CHAT, chat(max_tokens=-1), "max_tokens", "greater than or equal to 0"),
    (PLAIN, plain(max_tokens="5"), "max_tokens", "not '5'"),
    (PLAIN, plain(temperature=2.5), "temperature", "between 0 and 2, not 2.5"),
    (PLAIN, plain(top_p=-0.1), "top_p", "between 0 and 1, not -0.1"),
    (PLAIN, plain(top_p=1.5), "top_p", "between 0 and 1, not 1.5"),
    (PLAIN, plain(repetition_penalty=0), "repetition_penalty", "between 0.01 and 100, not 0"),
    (PLAIN, plain(presence_penalty=-3), "presence_penalty", "-2"),
    (PLAIN, plain(n=0), "n", "greater than or equal to 1"),
    (PLAIN, plain(best_of=2, n=3), "best_of", "at least n (3)"),
    (PLAIN, plain(best_of=2, stream=True), "best_of", "must equal n (1)"),
    (PLAIN, plain(prompt_logprobs=21), "prompt_logprobs", "less than or equal to 20"),
    (PLAIN, plain(prompt_logprobs=1, stream=True), "prompt_logprobs", "stream is false"),
    (CHAT, chat(prompt_logprobs=-1), "prompt_logprobs", "greater than or equal to 0"),
    (CHAT, chat(echo=True), "echo", "not supported"),
    (PLAIN, plain(suffix="end"), "suffix", "not supported"),
    (PLAIN, plain(stop=["a"] * 17), "stop", "at most 16"),
    (PLAIN, plain(stop=""), "stop", "1 to"),
    (PLAIN, plain(stop=5), "stop", "string or a list of strings"),
    (PLAIN, plain(stream_options={"include_usage": True}), "stream_options", "stream is true"),
    (PLAIN, plain(logit_bias={"hello": 1}), "logit_bias", "token ids, not 'hello'"),
    (PLAIN, plain(logit_bias={"5": 101}), "logit_bias", "between -100 and 100"),
    (PLAIN, plain(logit_bias={"99999999": 1}), "logit_bias", "99999999"),
    (PLAIN, plain(stop_token_ids=[-1]), "stop_token_ids", "not -1"),
    (PLAIN, plain(stop_token_ids=[1] * 257), "stop_token_ids", "at most 256"),
    (PLAIN, plain(repetition_penalty=1e-40), "repetition_penalty", "between 0.01 and 100"),
    (PLAIN, plain(prompt="=" * 200_000), "prompt", "at least 2470"),
    (PLAIN, plain(prompt=["1" * 1900] * 100), "prompt", "tokens together"),
    (CHAT, chat(messages=[{"role": "user", "content": ""}] * 2001), "messages", "2001 entries"),
    (PLAIN, plain(seed=2**70), "seed", "64-bit"),
    (PLAIN, plain(prompt=[]), "prompt", "not empty"),
    (PLAIN, plain(prompt=""), "prompt", "at least one token"),
    (PLAIN, plain(prompt=[1, 49152]), "prompt", "49152"),
    (PLAIN, plain(prompt=[[1], "x"]), "prompt", "must be a string"),
    (PLAIN, plain(guided_json=5), "guided_json", "must be a JSON schema"),
    (PLAIN, plain(max_tokens=2001), "max_tokens", "2000 tokens, but max_tokens alone is 2001"),
    (CHAT, chat(max_completion_tokens=10**30), "max_completion_tokens", "but max_completion_tokens alone is 1000"),
    (CHAT, chat(tool_choice="any"), "tool_choice", "tool_choice: input should be 'none', 'auto' or 'required', not 'any'"),
    (CHAT, chat(tool_choice={"type": "custom"}), "tool_choice.type", "not 'custom'"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "x" * 5000}]}]),
        "messages[0].content",
        "xxx; this model reads only 'text'",
    ),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x", "lang": 1}]}]), "messages[0].content", "has 'lang'"),
    (CACHES, chat(ttl=10**400), "ttl", "less than or equal to 2592000"),
    (CACHES, chat(expired_at=10**400), "expired_at", "in the future, within 2592000 seconds"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), INVALID)
async def test_what_cannot_be_honoured_is_a_400_that_names_it(
    refusing: tuple[httpx.AsyncClient, Cluster], path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    http, cluster = refusing
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert words in error["message"]
    assert cluster.conductor.requests == []


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/v2/nothing", None, 404, "not_found"),
        ("GET", "/v1/completions", None, 405, "method_not_allowed"),
        ("POST", CHAT, b'{"model": ', 400, "invalid_json"),
        ("POST", CHAT, b"[1]", 400, "invalid_body"),
        ("POST", CHAT, b'{"x": [' + b"[]," * 100_000 + b"1]}", 400, "too_many_values"),
        ("POST", CHAT, b" " * (3 << 20), 413, "body_too_large"),
        ("POST", CHAT, b"", 400, "invalid_body"),
        ("POST", CHAT, json.dumps(chat(model="gpt-x")).encode(), 404, "model_not_found"),
        ("GET", "/v1/models/gpt-x", None, 404, "model_not_found"),
    ],
)
async def test_every_error_has_openais_shape(
    refusing: tuple[httpx.AsyncClient, Cluster], method: str, path: str, content: bytes | None, status: int, code: str
) -> None:
    response = await refusing[0].request(method, path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        rb'{"model": "demo-model", "prompt": "\ud800"}',
        rb'{"model": "demo-model", "prompt": "x", "stop": "\ud800"}',
        rb'{"model": "demo-model", "prompt": "x", "\ud800": 1}',
        rb'{"model": "demo-model", "prompt": "x", "temperature": NaN}',
        b'{"model": "demo-model", "prompt": "\xff"}',
        b"[" * 100_000,
    ],
)
async def test_malformed_text_and_numbers_are_the_clients_fault(refusing: tuple[httpx.AsyncClient, Cluster], content: bytes) -> None:
    response = await refusing[0].post(PLAIN, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error", response.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PLAIN, plain(logit_bias={"5": "HALF"}), "logit_bias"),
        (CACHES, chat(tools=["DEEP"]), "tools"),
        (CACHES, chat(name="HALF"), "name"),
        (CACHES, chat(description="HALF"), "description"),
        (CACHES, chat(metadata={"a": "HALF"}), "metadata.a"),
        (CACHES, chat(metadata={"HALF": "a"}), "metadata.\ufffd\ufffd\ufffd"),
        (RESPONSES, {"model": MODEL, "input": "x", "metadata": {"a": "HALF"}}, "metadata.a"),
        (RESPONSES, {"model": MODEL, "input": "x", "metadata": {"HALF": "a"}}, "metadata.\ufffd\ufffd\ufffd"),
        (RESPONSES, {"model": MODEL, "input": [answered("HALF")]}, "input[0].content.annotations"),
        (RESPONSES, {"model": MODEL, "input": [answered(math.nan)]}, "input[0].content.annotations"),
        (RESPONSES, {"model": MODEL, "input": [answered("DEEP")]}, "input"),
        (RESPONSES, {"model": MODEL, "input": [asked_with_logprobs("HALF")]}, "input[0].content.logprobs"),
    ],
)
async def test_what_could_not_be_written_again_is_refused_by_name(
    refusing: tuple[httpx.AsyncClient, Cluster], path: str, body: dict[str, Any], param: str
) -> None:
    content = json.dumps(body).replace("HALF", r"\ud800").replace('"DEEP"', "[" * 128 + "]" * 128)
    response = await refusing[0].post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize("leaf", ["1", ""])
async def test_a_field_is_nested_so_deep_and_no_deeper(leaf: str) -> None:
    check_depth(json.loads("[" * MAX_DEPTH + leaf + "]" * MAX_DEPTH), "field")
    with pytest.raises(InvalidRequest, match="field is nested more than 128 deep"):
        check_depth(json.loads("[" * (MAX_DEPTH + 1) + leaf + "]" * (MAX_DEPTH + 1)), "field")


async def test_google_s_paths_have_google_s_words_for_another_method_and_a_compressed_body(
    refusing: tuple[httpx.AsyncClient, Cluster],
) -> None:
    path = "/v1beta/models/demo-model:generateContent"
    told = [await refusing[0].delete(path), await refusing[0].post(path, content=b"x", headers={"content-encoding": "gzip"})]
    assert [(one.status_code, one.json()["error"]["status"]) for one in told] == [(405, "UNIMPLEMENTED"), (415, "INVALID_ARGUMENT")]


async def test_a_byte_order_mark_before_the_body_is_ignored(refusing: tuple[httpx.AsyncClient, Cluster]) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(plain(model="gpt-x")).encode()
    response = await refusing[0].post(PLAIN, content=body, headers={"content-type": "application/json"})
    assert response.json()["error"]["code"] == "model_not_found", "it was read"


async def test_a_compressed_body_is_refused_as_such(refusing: tuple[httpx.AsyncClient, Cluster]) -> None:
    body, kind = json.dumps(plain()).encode(), {"content-type": "application/json"}
    response = await refusing[0].post(PLAIN, content=gzip.compress(body), headers={**kind, "content-encoding": "gzip"})
    assert response.status_code == 415 and response.json()["error"]["code"] == "unsupported_encoding", response.text
    assert "gzip" in response.json()["error"]["message"]
    invalid = await refusing[0].post(PLAIN, content=b"[1]", headers={**kind, "content-encoding": "identity"})
    assert invalid.json()["error"]["code"] == "invalid_body", "it was read"
