"""The HTTP API beyond what the OpenAI client shows: the shape of every error, disconnects, failures of nodes, operation."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from gateway_cluster import MODEL, Cluster
from prometheus_client import REGISTRY

from engine.tokenizer.tokenizer import Tokenizer
from gateway.app import GatewayServer
from gateway.grammar_checks import GrammarChecker
from gateway.http_app import TENANT_HEADER
from gateway.prepare import Preparer
from gateway.state import Limits
from springtide import supervision
from springtide.config import ServerConfig
from springtide.errors import ConfigError
from springtide.membership import Member
from springtide.process import ProcessArguments
from springtide.protocol.sampling import Grammar
from springtide.rpc import common_pb2 as pb
from springtide.rpc import conductor_pb2
from tests.support.waiting import until

LIMITS = Limits()
TEXT = "Hello, wörld! One two three four."
CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say it."}]


def plain(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Say it.", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **fields}


NEUTRAL = {
    "user": "me",
    "store": False,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "modalities": ["text"],
    "metadata": {"run": "7"},
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "chat_template_kwargs": {},
    "include_reasoning": True,
    "reasoning_effort": "low",
    "cache_salt": None,
    "bad_words": [],
    "echo": False,
    "best_of": None,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "truncate_prompt_tokens": None,
    "structured_outputs": None,
    "guided_json": None,
    "prompt_cache_key": "mine",
    "documents": None,
    "stop": None,
    "n": None,
    "temperature": None,
    "logprobs": False,
    "stream": False,
    "stream_options": None,
    "top_k": -1,
    "max_tokens": None,
}


async def test_known_fields_at_values_that_ask_for_nothing_are_fine(http: httpx.AsyncClient) -> None:
    answered = {"role": "assistant", "content": "No.", "refusal": None, "tool_calls": None, "annotations": [], "reasoning_content": None}
    turns = [{"role": "user", "content": "Say it.", "name": "Bob"}, answered, *MESSAGES]
    assert (await http.post(CHAT, json=chat(**{**NEUTRAL, "messages": turns}))).status_code == 200
    assert (await http.post(PLAIN, json=plain(echo=False, suffix=None, best_of=1, logprobs=None))).status_code == 200


async def test_too_long_a_request_is_told_both_numbers(http: httpx.AsyncClient) -> None:
    for body in (plain(prompt=[5] * 1900, max_tokens=200), plain(prompt=[5] * 2000)):
        error = (await http.post(PLAIN, json=body)).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        assert "2000" in error["message"] and str(len(body["prompt"]) + body.get("max_tokens", 0)) in error["message"]


async def test_with_max_tokens_0_the_prompt_alone_is_computed(http: httpx.AsyncClient, cluster: Cluster) -> None:
    """Also one that fills the context."""
    for path, body in ((CHAT, chat(max_tokens=0)), (PLAIN, plain(max_tokens=0)), (PLAIN, plain(prompt=[5] * 2000, max_tokens=0))):
        answer = (await http.post(path, json=body)).json()
        (choice,) = answer["choices"]
        assert (choice.get("text", "") or choice.get("message", {}).get("content", "")) == ""
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] > 0
        streamed = (await http.post(path, json={**body, "stream": True})).text
        assert '"finish_reason":"length"' in streamed and streamed.endswith("data: [DONE]\n\n")
    await until(lambda: cluster.idle)


async def text_of(http: httpx.AsyncClient) -> str:
    return (await http.post(PLAIN, json=plain())).json()["choices"][0]["text"]


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_what_runs_at_an_instance_that_hangs_goes_on_elsewhere(http: httpx.AsyncClient, cluster: Cluster, name: str) -> None:
    node = cluster.nodes[name]
    node.pause_at = 3 if name == "decode-0" else 0
    request = asyncio.create_task(text_of(http))
    await until(lambda: node.running)
    cluster.conductor.says_hung(name)
    assert await request == TEXT


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_node_that_accepts_and_says_nothing_does_not_hold_a_request(http: httpx.AsyncClient, cluster: Cluster, name: str) -> None:
    node = cluster.nodes[name]
    node.silent = True
    began = asyncio.get_running_loop().time()
    assert await text_of(http) == TEXT
    assert asyncio.get_running_loop().time() - began < 5, "the promise for whoever hangs"


async def test_a_node_that_only_takes_long_is_waited_for(http: httpx.AsyncClient, cluster: Cluster) -> None:
    node = cluster.nodes["prefill-0"]
    node.pause_at = 0
    asyncio.get_running_loop().call_later(LIMITS.silence_s + 1, node.patience.set)
    assert await text_of(http) == TEXT
    assert not cluster.attempts_on("prefill-1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_frees_both_sides(http: httpx.AsyncClient, cluster: Cluster, stream: bool) -> None:
    cluster.nodes["decode-0"].pause_at = 3
    request = asyncio.create_task(http.post(PLAIN, json=plain(stream=stream, n=2)))
    await until(lambda: len(cluster.nodes["decode-0"].running) == 2)
    request.cancel()
    await until(lambda: cluster.idle)
    attempts = cluster.attempts_on("decode-0")
    assert sorted(attempt_id for name, attempt_id in cluster.aborted if name == "decode-0") == sorted(attempts)
    await until(lambda: all(conductor_pb2.PHASE_FINISHED in cluster.conductor.phases(a) for a in attempts))


async def test_a_client_that_goes_before_the_first_token_frees_the_prefill(http: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.nodes["prefill-0"].pause_at = 0
    request = asyncio.create_task(http.post(PLAIN, json=plain(stream=True)))
    await until(lambda: cluster.nodes["prefill-0"].running and cluster.nodes["decode-0"].running)
    request.cancel()
    await until(lambda: cluster.idle)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_a_node_that_dies_mid_stream_is_replaced_without_the_client_noticing(
    http: httpx.AsyncClient, cluster: Cluster, tokenizer: Tokenizer, victim: str
) -> None:
    expected = 4 if victim == "decode-0" else 1
    cluster.nodes["decode-0"].pause_at = expected
    before_the_pause = tokenizer.decode(tokenizer.encode(TEXT)[:expected])
    body = plain(stream=True, seed=11)
    async with http.stream("POST", PLAIN, json=body) as response:
        lines = response.aiter_lines()
        text = ""
        while len(text) < len(before_the_pause):
            line = await anext(lines)
            text += json.loads(line[6:])["choices"][0]["text"] if line.startswith("data: ") else ""
        await cluster.nodes[victim].stop()
        await until(lambda: len(cluster.conductor.requests) == 2)
        cluster.nodes["decode-0"].patience.set()
        rest = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
    assert text + "".join(event["choices"][0]["text"] for event in rest) == TEXT
    first, second = cluster.conductor.requests
    received = second.num_tokens - first.num_tokens
    assert second.accepted and list(second.avoid) == [victim] and received == expected
    starts = [start for name, start in cluster.started if name.startswith("prefill")]
    assert list(starts[1].request.token_ids) == [*starts[0].request.token_ids, *tokenizer.encode(TEXT)[:received]]
    assert (
        starts[0].request.params == starts[1].request.params and starts[1].request.num_prompt_tokens == starts[0].request.num_prompt_tokens
    )
    await until(lambda: conductor_pb2.PHASE_FAILED in cluster.conductor.phases(first.attempt_id))


async def test_a_node_that_comes_back_at_another_address_is_found_there(http: httpx.AsyncClient, cluster: Cluster) -> None:
    assert (await http.post(PLAIN, json=plain())).status_code == 200
    for name in ("decode-0", "prefill-0"):
        await cluster.nodes[name].stop()
        await cluster.nodes[name].start()
    answer = await http.post(PLAIN, json=plain())
    assert answer.json()["choices"][0]["text"] == TEXT


async def test_every_answer_says_under_which_id_the_log_has_the_request(
    http: httpx.AsyncClient, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole, stream = await http.post(PLAIN, json=plain()), await http.post(PLAIN, json=plain(stream=True))
    assert whole.headers["x-request-id"] == whole.json()["id"] and stream.headers["x-request-id"] in stream.text
    too_busy = conductor_pb2.Rejection(reason=conductor_pb2.REASON_TTFT, message="too busy", retry_after_s=2.0)
    cluster.conductor.rejections.append(too_busy)
    for refused in (await http.post(PLAIN, json=plain()), await http.post(PLAIN, json=plain(max_tokens=-1))):
        assert refused.status_code in (429, 400)
        request_id = refused.headers["x-request-id"]
        said = [record.getMessage() for record in caplog.records if getattr(record, "request_id", "") == request_id]
        assert any(f"answered {refused.status_code}" in line for line in said)


async def test_every_other_answer_has_an_id_too_and_so_has_the_log_where_it_is_a_refusal(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    asked: list[tuple[str, str, Any]] = [
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/none", None),
        ("GET", "/v1/files", None),
        ("GET", "/v1/batches/none", None),
        ("GET", "/v1/caching", None),
        ("GET", "/v1/nowhere", None),
        ("POST", "/v1/embeddings", {}),
        ("POST", "/tokenize", {"prompt": 5}),
        ("POST", "/v1/messages/count_tokens", {}),
        ("POST", "/v1/messages/batches", {}),
    ]
    for method, path, body in asked:
        ours, theirs = [await http.request(method, path, json=body, headers=headers) for headers in ({}, {"x-request-id": "mine-9"})]
        assert theirs.headers["x-request-id"] == "mine-9"
        request_id = ours.headers["x-request-id"]
        said = [record.getMessage() for record in caplog.records if getattr(record, "request_id", "") == request_id]
        assert ours.is_success or any(f"answered {ours.status_code}" in line for line in said), (path, said)
        if path.startswith("/v1/messages"):
            assert ours.headers["request-id"] == ours.json()["request_id"] == request_id


async def test_a_fault_of_ours_has_an_id_for_the_client_and_the_log(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(preparer: Preparer, model: str) -> None:
        raise RuntimeError("nobody has thought of this")

    monkeypatch.setattr(Preparer, "check_model", fails)
    broken = await http.get("/v1/models/x", headers={"x-request-id": "mine-10"})
    assert broken.status_code == 500 and broken.headers["x-request-id"] == "mine-10"
    request_id = (await http.get("/v1/models/x")).headers["x-request-id"]
    assert any(getattr(record, "request_id", "") == request_id for record in caplog.records)


async def test_the_decode_nodes_late_refusal_is_a_429_or_the_event_of_a_stream_that_has_begun(
    http: httpx.AsyncClient, cluster: Cluster
) -> None:
    for name in ("decode-0", "decode-1"):
        cluster.nodes[name].failure = pb.Failure(code=pb.FAILURE_CODE_OVERLOADED, message="the batch is full")
    for name in ("prefill-0", "prefill-1"):
        cluster.nodes[name].pause_at = 0
    whole, stream = await http.post(PLAIN, json=plain()), await http.post(PLAIN, json=plain(stream=True))
    assert whole.status_code == 429 and int(whole.headers["retry-after"]) >= 1
    assert stream.status_code == 200
    for error in (whole.json()["error"], json.loads(stream.text.removeprefix("data: "))["error"]):
        assert error["code"] == "refused_at_admission" and "the batch is full" in error["message"]
    assert [request.accepted for request in cluster.conductor.requests] == [False] * 4
    await until(lambda: cluster.idle)


async def test_a_streams_headers_do_not_wait_for_its_first_token_and_it_says_that_it_lives(
    arguments: ProcessArguments, cluster: Cluster
) -> None:
    server = arguments.config.server.model_copy(update={"stream_ping_s": 0.05})
    gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"server": server})), cluster.conductor.address)
    await gateway.start()
    prefill = cluster.nodes["prefill-0"]
    prefill.pause_at = 0
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as http,
            http.stream("POST", CHAT, json=chat(stream=True)) as response,
        ):
            lines = response.aiter_lines()
            assert response.status_code == 200 and await anext(lines) == ": ping"
            prefill.patience.set()
            said = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in said) == TEXT
    finally:
        await gateway.close()


async def test_a_stream_that_waits_to_be_placed_says_that_it_lives_and_how_that_ends(arguments: ProcessArguments, cluster: Cluster) -> None:
    """As of who wants idle capacity only: there may be none for long."""
    server = arguments.config.server.model_copy(update={"stream_ping_s": 0.05})
    gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"server": server})), cluster.conductor.address)
    await gateway.start()
    busy = conductor_pb2.Rejection(reason=conductor_pb2.REASON_NOT_IDLE, message="no decode node has idle capacity", retry_after_s=0.3)
    try:
        async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as http:
            cluster.conductor.rejections += [busy, busy]
            async with http.stream("POST", CHAT, json=chat(stream=True, service_tier="flex")) as response:
                lines = response.aiter_lines()
                assert response.status_code == 200 and await anext(lines) == ": ping"
                said = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
            assert "".join(event["choices"][0]["delta"].get("content", "") for event in said) == TEXT
            cluster.conductor.rejections += [busy]
            async with http.stream("POST", CHAT, json=chat(stream=True, service_tier="flex", deadline_ms=200)) as response:
                said = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
            assert response.status_code == 200 and "deadline" in said[-1]["error"]["message"]
            nobody = conductor_pb2.Rejection(reason=conductor_pb2.REASON_NO_PREFILL, message="no prefill instance is ready")
            cluster.conductor.rejections += 50 * [nobody]
            refused = await http.post(CHAT, json=chat(stream=True, deadline_ms=200))
            assert refused.status_code == 504, "who does not wait for idle capacity is refused before a stream begins"
    finally:
        await gateway.close()


async def test_a_client_may_name_its_request_and_has_the_name_back(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for stream in (False, True):
        answer = await http.post(PLAIN, json=plain(stream=stream), headers={"x-request-id": "mine-7"})
        assert answer.headers["x-request-id"] == "mine-7"
    ours = {getattr(record, "request_id", "") for record in caplog.records if "mine-7" in record.getMessage()}
    assert len(ours) == 2 and any(request_id in answer.text for request_id in ours)
    refused = await http.post(PLAIN, json=plain(max_tokens=-1), headers={"x-request-id": "mine-8"})
    assert refused.status_code == 400 and refused.headers["x-request-id"] == "mine-8"
    odd = await http.post(PLAIN, json=plain(), headers={"x-request-id": "not mine" * 40})
    assert odd.headers["x-request-id"] == odd.json()["id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_nodes_that_keep_failing_are_a_503_or_the_streams_last_event_and_only_the_log_says_where_they_are(
    http: httpx.AsyncClient, cluster: Cluster, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("decode-0", "decode-1"):
        cluster.nodes[name].failure = pb.Failure(code=pb.FAILURE_CODE_INTERNAL, message="lost the store at 10.0.0.7:4711")
    if not stream:
        for name in ("prefill-0", "prefill-1"):
            cluster.nodes[name].pause_at = 0
    response = await http.post(PLAIN, json=plain(stream=stream))
    if stream and response.status_code == 200:
        last = [line for line in response.text.splitlines() if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 503
        error = response.json()["error"]
    assert error["code"] == "node_lost" and error["type"] == "service_unavailable"
    assert "10.0.0.7" not in error["message"] and "decode-" not in error["message"]
    (logged,) = [record for record in caplog.records if record.getMessage().startswith("request failed")]
    assert "10.0.0.7:4711" in logged.getMessage()
    assert str(vars(logged)["request_id"]) in error["message"]
    assert len(cluster.conductor.requests) == 3


async def test_running_streams_outlive_the_conductor_and_new_requests_wait_for_it(http: httpx.AsyncClient, cluster: Cluster) -> None:
    decode = cluster.nodes["decode-0"]
    decode.pause_at = 3
    running = asyncio.create_task(http.post(PLAIN, json=plain(stream=True)))
    await until(lambda: decode.running)
    await cluster.conductor.stop()
    waiting = asyncio.create_task(http.post(PLAIN, json=plain()))
    decode.patience.set()
    assert "data: [DONE]" in (await running).text
    assert not waiting.done()
    await cluster.conductor.start(cluster.conductor.address)
    assert (await waiting).json()["choices"][0]["text"] == TEXT


async def test_the_conductor_is_told_how_attempts_get_on(http: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.cached_tokens = 2
    decode = cluster.nodes["decode-0"]
    decode.pause_at = 3
    answer = asyncio.create_task(http.post(PLAIN, json=plain()))
    await until(lambda: cluster.conductor.renewals and cluster.conductor.renewals[-1].attempts)
    (live,) = cluster.conductor.renewals[-1].attempts
    assert (live.prefill_id, live.decode_id, live.cached_tokens) == ("prefill-0", "decode-0", 2)
    assert live.phase == conductor_pb2.PHASE_DECODE
    decode.patience.set()
    await answer
    await until(lambda: len(cluster.conductor.advances) == 2)
    first, last = cluster.conductor.advances
    assert (first.phase, first.cached_tokens, first.attempt_id) == (conductor_pb2.PHASE_DECODE, 2, live.attempt_id)
    assert first.ttft_ms > 0
    assert (last.phase, last.output_tokens) == (conductor_pb2.PHASE_FINISHED, answer.result().json()["usage"]["completion_tokens"])


async def test_a_body_beyond_all_measure_is_refused_before_it_is_held(http: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(80):
            yield b"a" * (1 << 20)

    reply = await http.post(PLAIN, content=endless(), headers={"content-type": "application/json"})
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "body_too_large"
    assert (await http.post(PLAIN, json=plain())).status_code == 200


async def test_ready_is_what_the_conductor_says(http: httpx.AsyncClient, cluster: Cluster) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/ready")).status_code == 200
    cluster.conductor.ready = False
    response = await http.get("/ready")
    assert response.status_code == 503 and response.json()["error"]["code"] == "not_ready"


async def test_metrics_count_requests_tokens_and_latencies(http: httpx.AsyncClient, cluster: Cluster) -> None:
    await http.post(PLAIN, json=plain())
    await http.post(PLAIN, json=plain(suffix="."))
    text = (await http.get("/metrics")).text
    for sample in (
        f'springtide_gateway_requests_total{{route="{PLAIN}",status="200"}}',
        f'springtide_gateway_requests_total{{route="{PLAIN}",status="400"}}',
        "springtide_gateway_ttft_seconds_bucket",
        "springtide_gateway_tbt_seconds_count",
        "springtide_gateway_output_tokens_total",
    ):
        assert sample in text
    assert f'springtide_gateway_requests_in_flight{{route="{PLAIN}"}} 0.0' in text


async def test_a_gateway_that_stops_answers_what_still_runs(arguments: ProcessArguments, cluster: Cluster) -> None:
    gateway = GatewayServer(arguments, cluster.conductor.address)
    await gateway.start()
    stop = asyncio.Event()
    running = asyncio.create_task(gateway.run(stop))
    cluster.nodes["decode-0"].pause_at = 3
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as client:
        stream = asyncio.create_task(client.post(PLAIN, json=plain(stream=True)))
        whole = asyncio.create_task(client.post(PLAIN, json=plain()))
        await until(lambda: len(cluster.nodes["decode-0"].running) == 2)
        stop.set()
        assert '"code":"shutting_down"' in (await stream).text
        assert (await whole).status_code == 503
    await running
    await gateway.close()
    await until(lambda: cluster.idle)


async def test_grammars_can_be_checked_without_waiting_when_a_gateway_has_been_there_for_a_moment(
    arguments: ProcessArguments, cluster: Cluster
) -> None:
    gateway, stop = GatewayServer(arguments, cluster.conductor.address), asyncio.Event()
    await gateway.start()
    running = asyncio.create_task(gateway.run(stop))
    await until(lambda: gateway._grammars._process)
    process = gateway._grammars._process
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as client:
        assert (await client.post(PLAIN, json=plain(guided_regex="[a-z]+"))).status_code == 200
    assert gateway._grammars._process is process
    stop.set()
    await running
    await gateway.close()
    assert process is not None and process.ended_within(0.0) is not None


async def test_a_taken_port_is_an_error_that_names_the_setting(arguments: ProcessArguments, gateway: GatewayServer) -> None:
    taken = int(gateway.http_address.rpartition(":")[2])
    config = arguments.config.model_copy(update={"server": ServerConfig(port=taken, grpc_port=0)})
    another = GatewayServer(ProcessArguments(config, arguments.model_info, arguments.run_dir, "", "gateway-1", "127.0.0.1"))
    with pytest.raises(ConfigError, match=rf"server.port: cannot listen on 127.0.0.1:{taken}"):
        await another.start()
    await another.close()


async def test_a_gateway_whose_conductor_is_gone_does_not_say_where_it_was(http: httpx.AsyncClient, cluster: Cluster) -> None:
    await cluster.conductor.stop()
    response = await http.get("/ready")
    assert response.status_code == 503 and response.json()["error"]["code"] == "no_conductor"
    assert cluster.conductor.address not in response.text


async def test_a_gateway_finds_the_conductor_also_after_something_unexpected_in_its_membership(
    arguments: ProcessArguments, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a bug: whatever is in Valkey, members() returns."""
    monkeypatch.setattr(supervision, "AGAIN_AFTER_S", 0.0)
    gateway = GatewayServer(arguments)
    asked = 0

    async def members() -> list[Member]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise TypeError("what nobody thought of")
        return [Member("conductor", "conductor-0", 1, cluster.conductor.address)]

    monkeypatch.setattr(gateway._membership, "members", members)
    await gateway.start()
    try:
        await until(lambda: cluster.conductor.renewals)
    finally:
        await gateway.close()


async def test_a_context_that_no_node_can_hold_is_refused_before_anything_runs(arguments: ProcessArguments, cluster: Cluster) -> None:
    spec = arguments.model_info.kv_spec(arguments.config.dtype, arguments.config.kv.block_tokens)
    kv = arguments.config.kv.model_copy(update={"arena_size": 8 * spec.bytes_per_slot})
    holds = 8 * spec.block_tokens
    gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"kv": kv})), cluster.conductor.address)
    await gateway.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as http:
            assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == holds
            refused = await http.post(PLAIN, json=plain(prompt=[5] * 100, max_tokens=holds - 99, stream=True))
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
            assert not cluster.conductor.requests
            assert (await http.post(PLAIN, json=plain(prompt=[5] * 100, max_tokens=holds - 100))).status_code == 200
    finally:
        await gateway.close()


async def test_what_a_tenants_quota_never_holds_is_refused_before_anything_runs(arguments: ProcessArguments, cluster: Cluster) -> None:
    spec = arguments.model_info.kv_spec(arguments.config.dtype, arguments.config.kv.block_tokens)
    kv = arguments.config.kv.model_copy(update={"tenant_quotas": {"small": 4 * spec.bytes_per_slot}})
    holds = 4 * spec.block_tokens
    gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"kv": kv})), cluster.conductor.address)
    await gateway.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as http:
            for tenant, status in (("small", 400), ("other", 200)):
                asked = await http.post(PLAIN, json=plain(prompt=[5] * 10, max_tokens=holds - 9), headers={TENANT_HEADER: tenant})
                assert asked.status_code == status
                if status == 400:
                    error = asked.json()["error"]
                    assert error["code"] == "quota_exceeded" and f"'small' holds {holds} tokens" in error["message"]
            fits = plain(prompt=[5] * 10, max_tokens=holds - 10)
            assert (await http.post(PLAIN, json=fits, headers={TENANT_HEADER: "small"})).status_code == 200
    finally:
        await gateway.close()


async def test_while_a_large_request_is_read_and_tokenised_others_are_served(
    http: httpx.AsyncClient, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, free = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def slow(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 5000:
            begun.set()
            assert free.wait(10)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    large = [asyncio.create_task(http.post(CHAT, json=chat(messages=[{"role": "user", "content": "word " * 1200}]))) for _ in range(3)]
    await until(begun.is_set)
    assert (await http.post(CHAT, json=chat())).status_code == 200
    assert (await http.post(PLAIN, json=plain(stream=True))).status_code == 200
    free.set()
    assert [(await task).status_code for task in large] == [200] * 3


async def test_a_client_that_goes_while_its_body_comes_leaves_nothing(http: httpx.AsyncClient, gateway: GatewayServer) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        await asyncio.sleep(30)

    request = asyncio.create_task(http.post(PLAIN, content=body(), headers={"content-type": "application/json"}))
    in_flight = functools.partial(REGISTRY.get_sample_value, "springtide_gateway_requests_in_flight", {"route": PLAIN})
    await until(lambda: in_flight() == 1)
    request.cancel()
    await until(lambda: in_flight() == 0)


async def test_whatever_goes_wrong_when_a_grammar_is_checked_ends_the_request(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(checker: GrammarChecker, grammar: Grammar, field: str) -> None:
        raise RuntimeError("nobody has thought of this")

    monkeypatch.setattr(GrammarChecker, "check", fails)
    async with asyncio.timeout(30):
        for stream in (False, True):
            reply = await http.post(PLAIN, json=plain(guided_regex="[0-9]{7}", stream=stream))
            assert reply.status_code == 500 and "internal_error" in reply.text and "nobody" not in reply.text


async def test_a_slash_behind_a_path_changes_nothing(http: httpx.AsyncClient) -> None:
    models = await http.get("/v1/models/")
    assert models.status_code == 200 and models.json()["data"][0]["id"] == MODEL
    assert (await http.post(f"{PLAIN}/", json=plain())).json()["object"] == "text_completion"
    assert (await http.get("/health/?deep=1")).status_code == 200
    assert [(await http.get(path)).status_code for path in ("/", "/v1/models//", "/v1/nothing/")] == [404] * 3


async def test_health_is_told_without_a_body_too(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ping", "/ready"):
        whole, head = await http.get(path), await http.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.content))
