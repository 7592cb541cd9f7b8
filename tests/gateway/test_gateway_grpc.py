"""The gRPC API: the same path, the errors of gRPC."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_cluster import MODEL, Cluster
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from engine.tokenizer.tokenizer import Tokenizer
from gateway import grpc_service
from gateway.app import GatewayServer
from gateway.bodies import Bodies
from gateway.grpc_messages import AT_ONCE, has_more_fields, parse_request, shape_of
from gateway.grpc_service import InferenceService
from gateway.prepare import Origin
from springtide.blocks import KEY_BYTES
from springtide.protocol import wire
from springtide.protocol.sampling import LogitBias
from springtide.rpc import common_pb2 as pb
from springtide.rpc import conductor_pb2, inference_pb2, inference_pb2_grpc
from springtide.rpc.channels import connect
from tests.support.waiting import until

SHAPE = shape_of(inference_pb2.GenerateRequest.DESCRIPTOR)
TEXT = "Hello, wörld! One two three four."


@pytest.fixture
async def channel(gateway: GatewayServer) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(gateway.grpc_address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(channel)


def chat(**fields: object) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="Say it.")])
    return inference_pb2.GenerateRequest(model=MODEL, chat=prompt, **fields)


async def test_a_chat_is_streamed_with_reason_and_usage_at_its_end(
    stub: inference_pb2_grpc.InferenceStub, cluster: Cluster, tokenizer: Tokenizer
) -> None:
    cluster.cached_tokens = 5
    chunks = [chunk async for chunk in stub.Generate(chat(sampling=pb.SamplingParams(logprobs=1)))]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    tokens = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert tokens == tokenizer.encode(TEXT) and sum(len(chunk.logprobs) for chunk in chunks) == len(tokens)
    last = chunks[-1]
    assert last.finish_reason == pb.FINISH_REASON_STOP
    assert (last.usage.completion_tokens, last.usage.cached_tokens) == (len(tokens), 5)
    assert last.usage.prompt_tokens == len(tokenizer.apply_chat_template([{"role": "user", "content": "Say it."}]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chat": inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * 2001)}, "2000 tokens, but messages has 2001"),
        ({"tokens": inference_pb2.TokenPrompt(token_ids=[1] * 2001)}, "2000 tokens, but tokens has 2001"),
        ({"text": "=" * 200_000}, "at least 2470"),
        ({"text": "x", "sampling": pb.SamplingParams(stop_token_ids=[1] * 300)}, "stop_token_ids may hold at most"),
        ({"text": "x", "sampling": pb.SamplingParams(logit_bias=pb.LogitBias(token_ids=b"1234"))}, "sampling.logit_bias"),
        ({"text": "x", "logit_bias": {1 << 31: 1.0}}, "logit_bias: keys must be token ids"),
        ({"text": "x", "logit_bias": {5: float("nan")}}, "logit_bias values must be between -100 and 100"),
    ],
)
async def test_what_can_never_fit_or_is_out_of_range_is_refused_by_name(
    stub: inference_pb2_grpc.InferenceStub, cluster: Cluster, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, **fields))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not cluster.conductor.requests


async def test_a_refused_message_does_not_stay(stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[inference_pb2.GenerateRequest] = []
    prepare = InferenceService._prepare

    def remembering(service: InferenceService, request: inference_pb2.GenerateRequest, origin: Origin) -> Any:
        seen.append(request)
        return prepare(service, request, origin)

    monkeypatch.setattr(InferenceService, "_prepare", remembering)
    gc.disable()
    try:
        for number in (2001, 50_000):
            chat_prompt = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * number)
            with pytest.raises(grpc.aio.AioRpcError):
                [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, chat=chat_prompt))]
        # By the list alone, and for this look.
        await until(lambda: [sys.getrefcount(seen[number]) for number in range(2)] == [2, 2])
    finally:
        gc.enable()


async def test_a_message_larger_than_the_context_could_hold_is_not_read(stub: inference_pb2_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="x" * (8 << 20)))]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# ---- messages ----


def fields_of(message: Message) -> int:
    """As many as any serialisation of it has."""
    count = 0
    for field, value in message.ListFields():
        values = (
            [value]
            if not field.is_repeated
            else list(value.items() if field.message_type and field.message_type.GetOptions().map_entry else value)
        )
        packed = field.is_repeated and field.cpp_type != FieldDescriptor.CPPTYPE_STRING and not field.message_type
        count += len(values) + packed
        count += sum(2 if isinstance(each, tuple) else fields_of(each) for each in values if field.message_type)
    return count


REQUESTS = st.builds(
    inference_pb2.GenerateRequest,
    model=st.text(max_size=3),
    chat=st.none()
    | st.builds(
        inference_pb2.ChatPrompt,
        messages=st.lists(st.builds(inference_pb2.ChatMessage, role=st.text(max_size=200), content=st.text(max_size=3)), max_size=4),
    ),
    sampling=st.none()
    | st.builds(pb.SamplingParams, stop_token_ids=st.lists(st.integers(0, 1 << 31), max_size=5), temperature=st.floats(0, 1, width=32)),
    stop=st.lists(st.text(max_size=3), max_size=3),
    terms=st.none() | st.builds(pb.Terms, priority=st.integers(-(1 << 31), 1 << 31 - 1), deadline_ms=st.floats(0, 9)),
    logit_bias=st.dictionaries(st.integers(0, 1 << 31), st.floats(1, 2, width=32), max_size=3),
)


@given(REQUESTS)
def test_fields_are_counted_as_they_are_whatever_texts_contain(request_: inference_pb2.GenerateRequest) -> None:
    raw, count = request_.SerializeToString(), fields_of(request_)
    assert not has_more_fields(raw, SHAPE, count)
    assert count == 0 or has_more_fields(raw, SHAPE, count - 1)


@given(st.binary(max_size=40) | st.text(alphabet="\x00\x01\x08\x0a\x1a\x22\x2a\x52\x7f", max_size=40).map(str.encode))
def test_what_is_refused_uncounted_could_not_be_parsed_either(raw: bytes) -> None:
    try:
        has_more_fields(raw, SHAPE, 0)
    except DecodeError:
        with pytest.raises(DecodeError):
            inference_pb2.GenerateRequest.FromString(raw)


async def test_a_message_of_nothing_but_entries_is_not_parsed(
    stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_on: list[str] = []

    def parse(raw: bytes, kind: type[inference_pb2.GenerateRequest], max_fields: int) -> inference_pb2.GenerateRequest:
        parsed_on.append(threading.current_thread().name)
        return parse_request(raw, kind, max_fields)

    monkeypatch.setattr(grpc_service, "parse_request", parse)
    prompt = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * 400_000)
    with pytest.raises(grpc.aio.AioRpcError, match=r"more than \d+ fields") as caught:
        [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, chat=prompt))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "gateway-prepare" in parsed_on[0]


async def test_whatever_goes_wrong_is_our_fault_and_no_disconnect(
    stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(raw: bytes, kind: type[inference_pb2.GenerateRequest], max_fields: int) -> inference_pb2.GenerateRequest:
        raise RuntimeError("nobody has thought of this")

    def counted(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"springtide_gateway_{name}_total", {"route": "grpc/Generate", **labels}) or 0.0

    before = counted("requests", status="INTERNAL"), counted("client_disconnects")
    monkeypatch.setattr(grpc_service, "parse_request", fails)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in stub.Generate(chat())]
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "the server's log has more" in (details := caught.value.details() or "") and "nobody" not in details
    assert (counted("requests", status="INTERNAL"), counted("client_disconnects")) == (before[0] + 1, before[1])


async def test_large_messages_on_one_connection_wait_for_one_another(
    stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = spy_on_held_bytes(monkeypatch)
    large = inference_pb2.GenerateRequest(model=MODEL, text="=" * 900_000)

    async def call() -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in stub.Generate(large)]
        return caught.value.code()

    assert set(await asyncio.gather(*(call() for _ in range(40)))) == {grpc.StatusCode.INVALID_ARGUMENT}
    assert large.ByteSize() <= max(held) < (AT_ONCE + 1) * (1 << 20)


async def test_hundreds_of_small_calls_over_one_connection_are_all_answered(stub: inference_pb2_grpc.InferenceStub) -> None:
    async def call() -> str:
        return "".join([chunk.text async for chunk in stub.Generate(chat())])

    assert set(await asyncio.gather(*(call() for _ in range(200)))) == {TEXT}


def spy_on_held_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were held whenever they became more."""
    held: list[int] = []
    grow = Bodies._grow

    def growing(bodies: Bodies, receiving: Any, num_bytes: int) -> None:
        grow(bodies, receiving, num_bytes)
        held.append(bodies.held_bytes)

    monkeypatch.setattr(Bodies, "_grow", growing)
    return held


def http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def half_a_call(stream: int, path: bytes) -> bytes:
    """Headers, and the beginning of a message of 1,000,000 bytes."""
    names = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    headers = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in names.items())
    return http2_frame(1, 4, stream, headers) + http2_frame(0, 0, stream, b"\0" + (1_000_000).to_bytes(4) + b"x" * 5000)


@pytest.mark.parametrize(
    "path", [b"/springtide.v1.Inference/Generate", b"/springtide.v1.Inference/ListModels", b"/grpc.health.v1.Health/Check"]
)
async def test_messages_that_stop_in_the_middle_keep_no_other_connection_out(
    gateway: GatewayServer, stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    held = spy_on_held_bytes(monkeypatch)
    writers = []
    for _ in range(12):
        _, writer = await asyncio.open_connection(*gateway.grpc_address.split(":"))
        calls = b"".join(half_a_call(2 * number + 1, path) for number in range(30))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(4, 0, 0) + calls)
        writers.append(writer)
    await until(lambda: len(held) >= 12 * AT_ONCE)
    # As large as they may become, and no larger than all that may be held.
    assert max(held) > 12 * (1 << 20)
    assert "".join([chunk.text async for chunk in stub.Generate(chat())]) == TEXT
    with pytest.raises(grpc.aio.AioRpcError, match="at least") as caught:
        [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="=" * 900_000))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for writer in writers:
        writer.close()


async def test_other_methods_take_small_messages_only(channel: grpc.aio.Channel) -> None:
    question = health_pb2.HealthCheckRequest(service="x" * 900_000)
    for answer in (health_pb2_grpc.HealthStub(channel).Check(question), health_pb2_grpc.HealthStub(channel).Watch(question).read()):
        with pytest.raises(grpc.aio.AioRpcError, match="may have 4096 bytes") as caught:
            await answer
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# ---- what reaches the cluster ----


async def test_biases_reach_the_nodes(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    tokens = inference_pb2.TokenPrompt(token_ids=[500, 501])
    [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, tokens=tokens, logit_bias={7: -3.5}))]
    assert wire.SAMPLING_PARAMS.decode(cluster.started[0][1].request.params).logit_bias == LogitBias.of({7: -3.5})


async def test_fields_at_zero_take_the_apis_defaults(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    tokens = inference_pb2.TokenPrompt(token_ids=[500, 501])
    terms = pb.Terms(priority=2)
    [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, tokens=tokens, stop=["three"], tenant="acme", terms=terms))]
    start = cluster.started[0][1]
    assert (start.request.params.temperature, start.request.params.top_p, start.request.params.repetition_penalty) == (0, 1, 1)
    assert start.request.params.max_tokens == 16 and list(start.request.token_ids) == [500, 501]
    assert (start.request.tenant, cluster.conductor.requests[0].terms.priority) == ("acme", 2)


async def test_tenants_do_not_share_blocks(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    for tenant in ("a", "b", "a"):
        tokens = inference_pb2.TokenPrompt(token_ids=range(500, 600))
        [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, tokens=tokens, tenant=tenant))]
    first, second, third = (request.block_keys for request in cluster.conductor.requests)
    assert first == third and first != second and len(first) == KEY_BYTES


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (inference_pb2.GenerateRequest(model="gpt-x", text="x"), grpc.StatusCode.NOT_FOUND, "gpt-x"),
        (inference_pb2.GenerateRequest(model=MODEL), grpc.StatusCode.INVALID_ARGUMENT, "prompt is required"),
        (chat(sampling=pb.SamplingParams(temperature=3)), grpc.StatusCode.INVALID_ARGUMENT, "temperature must be between"),
        (chat(sampling=pb.SamplingParams(max_tokens=5000)), grpc.StatusCode.INVALID_ARGUMENT, "2000"),
        (chat(stop=[""]), grpc.StatusCode.INVALID_ARGUMENT, "stop"),
    ],
)
async def test_errors_are_grpcs_own(
    stub: inference_pb2_grpc.InferenceStub, request_: inference_pb2.GenerateRequest, code: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in stub.Generate(request_)]
    assert caught.value.code() is code and words in (caught.value.details() or "")


async def test_an_overload_says_when_to_come_back(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    rejection = conductor_pb2.Rejection(reason=conductor_pb2.REASON_TBT, message="too busy", retry_after_s=4)
    cluster.conductor.rejections.append(rejection)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in stub.Generate(chat())]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata() or ()).get("retry-after") == "4"


async def test_a_cancelled_call_frees_both_sides(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    cluster.nodes["decode-0"].pause_at = 3
    call = stub.Generate(chat())
    assert (await call.read()).text
    call.cancel()
    await until(lambda: cluster.idle and cluster.aborted)


async def test_health_models_and_reflection_are_served(channel: grpc.aio.Channel, stub: inference_pb2_grpc.InferenceStub) -> None:
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="springtide.v1.Inference"))
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.id, model.context_length) == (MODEL, 2000)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([question])):
        assert "springtide.v1.Inference" in [service.name for service in answer.list_services_response.service]
