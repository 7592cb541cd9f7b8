"""The gRPC API: the same path, the errors of gRPC."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from gateway_cluster import MODEL, Cluster, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from conductor.gateway.app import GatewayServer
from conductor.gateway.grpc_service import InferenceService
from conductor.gateway.prepare import Origin
from conductor.gateway.reply import Work
from engine.tokenizer import Tokenizer
from springtide.blocks import KEY_BYTES
from springtide.rpc import common_pb2 as pb
from springtide.rpc import conductor_pb2, inference_pb2, inference_pb2_grpc
from springtide.rpc.channels import connect
from springtide.sampling import LogitBias, SamplingParams

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

    def remembering(service: InferenceService, request: inference_pb2.GenerateRequest, origin: Origin) -> Work:
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


async def test_biases_reach_the_nodes(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    tokens = inference_pb2.TokenPrompt(token_ids=[500, 501])
    [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, tokens=tokens, logit_bias={7: -3.5}))]
    assert SamplingParams.from_proto(cluster.started[0][1].sampling).logit_bias == LogitBias.of({7: -3.5})


async def test_fields_at_zero_take_the_apis_defaults(stub: inference_pb2_grpc.InferenceStub, cluster: Cluster) -> None:
    tokens = inference_pb2.TokenPrompt(token_ids=[500, 501])
    [_ async for _ in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, tokens=tokens, stop=["three"], tenant="acme", priority=2))]
    start = cluster.started[0][1]
    assert (start.sampling.temperature, start.sampling.top_p, start.sampling.repetition_penalty) == (0, 1, 1)
    assert start.sampling.max_tokens == 16 and list(start.token_ids) == [500, 501]
    assert (start.context.tenant, start.context.priority) == ("acme", 2)


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
    rejection = conductor_pb2.Rejection(reason=conductor_pb2.REJECTION_REASON_TBT, message="too busy", retry_after_s=4)
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
