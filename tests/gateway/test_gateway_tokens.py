"""What is beside answers: tokens of texts and chats, who serves what, and what nobody here serves."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateway_cluster import MODEL, Cluster

from engine.tokenizer.tokenizer import Tokenizer
from gateway.api_request import ApiRequest, Texts
from gateway.prepare import Origin, Preparer
from springtide import __version__

MESSAGES = [{"role": "user", "content": "Say it."}]
TOOL = {"type": "function", "function": {"name": "weather"}}
SERVED = ("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models", "/v1/files", "/v1/batches")
_ENDPOINT = re.compile(r'self\._(get|post|put|patch|delete|get_api_list)\(\s*(?:path_template\(\s*)?f?"(/[^"]*)"')
_ID = re.compile(r"\{[^}]*\}")


async def test_a_text_is_told_in_tokens_and_back(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "prompt": "Hello, wörld!", "return_token_strs": True}
    told = (await http.post("/tokenize", json=body)).json()
    assert told["tokens"] == tokenizer.encode("Hello, wörld!") and told["count"] == len(told["tokens"]) and told["max_model_len"] == 2000
    assert told["token_strs"][0] == "Hello"
    back = await http.post("/detokenize", json={"model": MODEL, "tokens": told["tokens"]})
    assert back.json() == {"prompt": "Hello, wörld!"}


async def test_a_chat_is_told_in_the_tokens_that_it_is_answered_by(http: httpx.AsyncClient, cluster: Cluster) -> None:
    for extra in ({}, {"tools": [TOOL]}):
        told = (await http.post("/tokenize", json={"messages": MESSAGES, **extra})).json()
        await http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, **extra})
        request = cluster.started[-1][1].request
        assert told["tokens"] == list(request.token_ids[: request.num_prompt_tokens]) and told["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}], "model": MODEL}, "messages[0]"),
        ("/tokenize", {"prompt": "x", "surprise": 1}, "surprise"),
        ("/tokenize", {"prompt": "x" * 500_000}, "prompt"),
        ("/detokenize", {"tokens": [1, 49152]}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/v1/audio/speech", "audio"),
        ("POST", "/v1/images/generations", "images"),
        ("POST", "/v1/moderations", "moderations"),
        ("GET", "/v1/assistants/asst_1", "assistants"),
        ("POST", "/v1/responses/compact", "compaction"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "chat completions that it keeps"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(http: httpx.AsyncClient, method: str, path: str, what: str) -> None:
    response = await http.request(method, path, json={})
    error = response.json()["error"]
    assert response.status_code == 404 and error["code"] == "not_served" and f"does not serve {what}" in error["message"]


def endpoints(package: ModuleType, prefix: str) -> set[tuple[str, str]]:
    """Those that a vendor's client asks for, as its source has them, with some id where one is wanted."""
    asked = set()
    for source in Path(str(package.__file__)).parent.glob("resources/**/*.py"):
        for method, path in _ENDPOINT.findall(source.read_text()):
            asked.add((method.removesuffix("_api_list").upper(), prefix + _ID.sub("x", path.split("?")[0])))
    return asked


async def test_what_the_vendors_clients_ask_of_a_served_part_is_served_or_refused_by_name(http: httpx.AsyncClient) -> None:
    of_openai, of_anthropic = endpoints(openai, "/v1"), endpoints(anthropic, "")
    assert ("POST", "/v1/responses/x/cancel") in of_openai and ("POST", "/v1/messages/count_tokens") in of_anthropic
    for asked, headers in ((of_openai, {}), (of_anthropic, {"anthropic-version": "2023-06-01"})):
        for method, path in sorted(asked - {("DELETE", "/v1/models/x")}):
            if path.startswith(SERVED):
                answer = await http.request(method, path, headers=headers, json={} if method != "GET" else None)
                error = {} if answer.is_success else answer.json()["error"]
                code = error.get("code") or error.get("details", {}).get("error_code")
                assert code not in ("not_found", "method_not_allowed"), (method, path)


async def test_who_is_asked_says_what_it_is(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": __version__}
    assert (await http.get("/ping")).status_code == (await http.post("/ping")).status_code == 200
    card = (await http.get("/v1/models")).json()["data"][0]
    assert (card["root"], card["parent"], card["max_model_len"]) == (MODEL, None, 2000)


def test_words_of_tokens_that_only_the_tokenizer_has_are_never_drawn_and_go_to_no_node(tokenizer: Tokenizer) -> None:
    words, ids = ("the", "Hello"), [tokenizer.encode(text)[0] for text in ("the", "Hello", " the", " Hello")]
    whole, small = (Preparer("m", 4000, vocab_size, tokenizer, block_tokens=32) for vocab_size in (49152, max(ids)))
    request = ApiRequest("m", Texts(((1, 2, 3),)), bad_words=words)

    def kept(preparer: Preparer) -> set[int]:
        return {token for word in preparer.prepared(request, Origin("r", 0.0)).sampling.bad_words for token in word.column().tolist()}

    assert kept(whole) >= set(ids) and kept(small) == kept(whole) - {max(ids)}
