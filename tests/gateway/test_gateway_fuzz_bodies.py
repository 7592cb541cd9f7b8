"""Bodies that are almost right, something else standing in one of their places: each is answered, or refused in words that name the field,
alone and as a line of a batch. Never a failure of ours, and nothing of it stays."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from gateway_cluster import MODEL, Cluster
from gateway_fuzzing import TIMEOUT_S, Judge, assert_nothing_stays, sampled

from gateway.app import GatewayServer

TALK = [{"role": "user", "content": "Say it."}]
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL = {"name": "tide", "description": "Its height.", "parameters": PARAMETERS}
CALL = {"id": "call-1", "type": "function", "function": {"name": "tide", "arguments": '{"at": "noon"}'}}
SCHEMA = {"type": "object", "properties": {"high": {"type": "boolean"}}, "required": ["high"], "additionalProperties": False}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 7, "presence_penalty": 0.1, "frequency_penalty": 0.1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief.", "name": "keeper"},
            {"role": "user", "content": [{"type": "text", "text": "How high?", "prompt_cache_breakpoint": {"ttl": "5m"}}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call-1", "content": "Two metres."},
            *TALK,
        ],
        "tools": [{"type": "function", "function": {**TOOL, "strict": False}}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tokens": 8,
        "n": 1,
        "stop": ["zz"],
        "stop_token_ids": [5],
        "logit_bias": {"7": 1.5},
        "logprobs": True,
        "top_logprobs": 2,
        "user": "ann",
        "metadata": {"a": "b"},
        "prompt_cache_key": "ann",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "chat_template_kwargs": {"enable_thinking": False},
        "bad_words": ["zz"],
        "min_tokens": 1,
        "priority": 1,
        "deadline_ms": 600_000,
        **SAMPLING,
    },
    "/v1/completions": {
        "model": MODEL,
        "prompt": ["Say it.", "Say it again."],
        "max_tokens": 8,
        "n": 1,
        "best_of": 1,
        "logprobs": 2,
        "echo": False,
        "stop": "zz",
        "suffix": None,
        "structured_outputs": {"choice": ["yes", "no"]},
        "allowed_token_ids": [300, 301, 302],
        **SAMPLING,
    },
    "/v1/messages": {
        "model": MODEL,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "How high?", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "tide", "input": {"at": "noon"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "Two metres."}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "Say it."},
                ],
            },
        ],
        "tools": [{"name": "tide", "description": "Its height.", "input_schema": PARAMETERS, "strict": False}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "disabled"},
        "stop_sequences": ["zz"],
        "metadata": {"user_id": "ann"},
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
    },
    "/v1/messages/count_tokens": {
        "model": MODEL,
        "messages": TALK,
        "system": "Be brief.",
        "tools": [{"name": "tide", "input_schema": PARAMETERS}],
    },
    "/v1/responses": {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How high?"}]},
            {"type": "function_call", "call_id": "call-1", "name": "tide", "arguments": '{"at": "noon"}'},
            {"type": "function_call_output", "call_id": "call-1", "output": "Two metres."},
            {"role": "user", "content": "Say it."},
        ],
        "tools": [{"type": "function", "name": "tide", "parameters": PARAMETERS, "strict": False}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 16,
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "reasoning": {"effort": "none"},
        "store": False,
        "truncation": "auto",
        **{name: SAMPLING[name] for name in ("temperature", "top_p", "seed")},
    },
    f"/v1beta/models/{MODEL}:generateContent": {
        "contents": [
            {"role": "user", "parts": [{"text": "How high?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "tide", "args": {"at": "noon"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "tide", "response": {"high": True}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "tide", "description": "Its height.", "parametersJsonSchema": PARAMETERS}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"maxOutputTokens": 8, "temperature": 0.5, "topP": 0.9, "topK": 20, "stopSequences": ["zz"], "seed": 7},
    },
    "/v1/caching": {
        "model": MODEL,
        "messages": [{"role": "system", "content": "The tide comes in, and the tide goes out. " * 20}],
        "tools": [{"type": "function", "function": TOOL}],
        "name": "tide",
        "description": "The sea's.",
        "metadata": {"a": "b"},
        "ttl": 600,
        "pin": "soft",
        "replicas": 1,
    },
    "/tokenize": {"model": MODEL, "messages": TALK, "add_generation_prompt": True, "return_token_strs": True},
}
"""Of each API one that is answered, with most of its fields."""
DELETED, NO_TEXT = object(), "\ud800"
"""The latter is half a surrogate pair."""
VALUES: list[Any] = [
    *(DELETED, None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, 5e-324, 10**40, 1 << 31, 1 << 63),
    *("", "x", " ", "0", "\x00\x01\u2028\ufeff\u202e", NO_TEXT, "é" * 300, "{}", "null", "../../x", "1e999"),
    *([], [None], [[]], [{}], {}, {"": ""}, {"x": None}, {"$ref": "#"}, [1] * 500, [["x"] * 3] * 3),
]
"""What stands in the place of a part of a body."""


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Those of all its parts."""
    if path:
        yield path
    parts: Sequence[Any] = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for part in parts:
        yield from paths_of(value[part], (*path, part))


def mutated(body: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    found: Any = (whole := copy.deepcopy(body))
    for part in path[:-1]:
        found = found[part]
    if value is DELETED:
        del found[path[-1]]
    else:
        found[path[-1]] = value
    return whole


def fuzz_bodies(url: str, path: str, judge: Judge) -> None:
    body = BODIES[path]
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:

        def send(what: Any, changed: dict[str, Any], names: str = "") -> None:
            reply = client.post(path, content=json.dumps(changed), headers={"content-type": "application/json"})
            judge.take(f"{what}", reply.status_code, reply.content, names=names)

        send("as it is", body)
        assert judge.statuses == {200: 1}, judge.failures
        for place, value in sampled([(place, value) for place in paths_of(body) for value in VALUES], path):
            shown = "deleted" if value is DELETED else repr(value)[:60]
            send(f"{'.'.join(map(str, place))}: {shown}", mutated(body, place, value), str(place[0]))


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_with_something_else_in_one_place_is_answered_or_that_field_is_named(
    gateway: GatewayServer, cluster: Cluster, path: str
) -> None:
    judge = Judge()
    await asyncio.to_thread(fuzz_bodies, f"http://{gateway.http_address}", path, judge)
    judge.done()
    await assert_nothing_stays(gateway, cluster)


def batch_line(number: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


LINE = batch_line(0, {"model": MODEL, "messages": TALK, "max_tokens": 4})
FILES = [
    *(b"", b"\n", b"\n\n\n", b"\xff\xfe", b"\xef\xbb\xbf{}", b"[]", b"null", b"{", b"{}" * 10, b"\x00" * 100, b"1\n2\n3"),
    *(b"[" * 5000, b"{}\r\n{}\r"),
    *(json.dumps(line).encode() for line in (LINE, [LINE], {**LINE, "x": 1}, {**LINE, "custom_id": "a" * 9000})),
    *(json.dumps(mutated(LINE, place, value)).encode() for place in paths_of(LINE) for value in VALUES if len(place) == 1),
    b"\n".join([json.dumps(LINE).encode()] * 2),
]
"""Each of which is refused as a whole, or answered."""


async def over(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            batch: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.02)


async def submitted(client: httpx.AsyncClient, content: bytes, judge: Judge) -> dict[str, Any] | None:
    """How the batch of these lines has ended; None: it was refused."""
    made = await client.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
    judge.take(f"file {content[:200]!r}", made.status_code, made.content)
    if made.status_code != 200:
        return None
    said = {"input_file_id": made.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    begun = await client.post("/v1/batches", json=said)
    judge.take(f"batch of {content[:200]!r}", begun.status_code, begun.content)
    return await over(client, begun.json()["id"]) if begun.status_code == 200 else None


async def test_any_file_of_lines_is_a_batch_that_ends(gateway: GatewayServer, cluster: Cluster) -> None:
    judge, ends = Judge(), list[str]()
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=TIMEOUT_S) as client:
        for content in sampled(FILES, "lines"):
            batch = await submitted(client, content, judge)
            if batch is not None:
                ends.append(batch["status"])
                counts = batch["request_counts"]
                if batch["status"] == "completed" and counts["completed"] + counts["failed"] != counts["total"]:
                    judge.failures.append(f"{content[:200]!r}: {counts}")
    judge.done()
    assert {"completed", "failed"} <= set(ends)
    await assert_nothing_stays(gateway, cluster)


async def test_each_line_is_answered_whatever_is_in_its_body(gateway: GatewayServer, cluster: Cluster) -> None:
    judge, body = Judge(), BODIES["/v1/chat/completions"]
    changed = sampled([mutated(body, place, value) for place in paths_of(body) for value in VALUES if value != NO_TEXT], "lines' bodies")
    lines = [batch_line(number, each) for number, each in enumerate(changed)]
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=TIMEOUT_S) as client:
        batch = await submitted(client, b"\n".join(json.dumps(line).encode() for line in lines), judge)
        assert batch is not None and batch["status"] == "completed", batch
        files = [(await client.get(f"/v1/files/{batch[name]}/content")).text for name in ("output_file_id", "error_file_id")]
    rows = [json.loads(row) for file in files for row in file.splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(line["custom_id"] for line in lines)
    for row in rows:
        reply = row["response"]
        judge.take(json.dumps(lines[int(row["custom_id"][5:])])[:300], reply["status_code"], json.dumps(reply["body"]).encode())
    judge.done()
    await assert_nothing_stays(gateway, cluster)
