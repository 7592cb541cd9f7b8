"""Traces on their way out of a gateway: over HTTP and gRPC in, by OTLP out, and never in the way."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import httpx
import pytest
from gateway_cluster import MODEL, Cluster

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")

from gateway import metrics
from gateway.answer import AnswerStream, ApiBackend
from gateway.app import GatewayServer
from gateway.batches import core
from gateway.objectives import Objectives
from gateway.prepare import PreparedRequest
from gateway.tracing import otlp
from gateway.tracing.otlp import DEFAULT_RATIO, Destination, TraceExporter
from gateway.tracing.tracer import Sampling, Tracer
from springtide.config import ClusterConfig, TracingConfig
from springtide.errors import ConfigError
from springtide.process import ProcessArguments
from springtide.rpc import inference_pb2, inference_pb2_grpc
from springtide.telemetry import JsonFormatter
from springtide.trace_context import TraceContext, parsed
from tests.support.otlp import Collector
from tests.support.traces import children, named
from tests.support.waiting import until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a secret of the client"}], "max_tokens": 8}
CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def traced(arguments: ProcessArguments, endpoint: str, ratio: float = 1.0) -> ProcessArguments:
    return replace(arguments, config=arguments.config.model_copy(update={"tracing": TracingConfig(endpoint=endpoint, ratio=ratio)}))


@pytest.fixture
async def traced_gateway(arguments: ProcessArguments, cluster: Cluster, collector: Collector) -> AsyncIterator[GatewayServer]:
    gateway = GatewayServer(traced(arguments, collector.url), cluster.conductor.address)
    await gateway.start()
    yield gateway
    await gateway.close()


async def asked(gateway: GatewayServer, headers: dict[str, str] | None = None, **changes: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as client:
        return await client.post("/v1/chat/completions", json={**CHAT, **changes}, headers=headers)


async def received(collector: Collector, answer: httpx.Response) -> list:  # type: ignore[type-arg]
    context = parsed(answer.headers["traceparent"])
    assert context is not None
    return await asyncio.to_thread(collector.trace, context.trace_id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_trace_goes_on_in_the_gateway_and_comes_to_the_collector(
    traced_gateway: GatewayServer, collector: Collector, stream: bool
) -> None:
    answer = await asked(traced_gateway, {"traceparent": CLIENT.header}, stream=stream)
    spans = await received(collector, answer)
    root = spans[0]
    assert (root.trace_id, root.parent_id, root.name) == (CLIENT.trace_id, CLIENT.span_id, f"chat {MODEL}")
    assert answer.headers["traceparent"] == f"00-{root.trace_id}-{root.span_id}-01"
    assert [span.name for span in children(spans, root)] == ["prepare", "attempt"]
    assert [span.name for span in children(spans, named(spans, "attempt")[0])] == ["schedule", "prefill", "decode"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 8 and root.attributes["http.response.status_code"] == 200
    assert root.resource["service.name"] == "springtide" and root.resource["service.instance.id"] == "gateway-0"
    assert "secret" not in repr(spans)


async def test_a_request_over_grpc_is_traced_too(traced_gateway: GatewayServer, collector: Collector) -> None:
    async with grpc.aio.insecure_channel(traced_gateway.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(model=MODEL, text="Hello", sampling={"max_tokens": 4}), metadata=(("traceparent", CLIENT.header),)
        )
        async for _ in call:
            pass
        header = dict(await call.initial_metadata())["traceparent"]
    spans = await asyncio.to_thread(collector.trace, CLIENT.trace_id)
    assert header == f"00-{CLIENT.trace_id}-{spans[0].span_id}-01"
    assert spans[0].parent_id == CLIENT.span_id and spans[0].attributes["rpc.response.status_code"] == "OK"


async def test_choices_are_attempts_of_one_trace(traced_gateway: GatewayServer, collector: Collector) -> None:
    spans = await received(collector, await asked(traced_gateway, n=3))
    assert sorted(span.attributes["springtide.choice"] for span in named(spans, "attempt")) == [0, 1, 2]
    assert spans[0].attributes["gen_ai.request.choice.count"] == 3


@pytest.fixture
async def batching_gateway(
    arguments: ProcessArguments, cluster: Cluster, collector: Collector, tmp_path: Path
) -> AsyncIterator[GatewayServer]:
    """Whose batches no other gateway takes."""
    own = replace(arguments, config=arguments.config.model_copy(update={"cluster": f"traces-{tmp_path.name}"}))
    gateway = GatewayServer(traced(own, collector.url), cluster.conductor.address)
    await gateway.start()
    yield gateway
    await gateway.close()


async def test_a_batchs_line_is_traced_as_the_same_request_by_itself(batching_gateway: GatewayServer, collector: Collector) -> None:
    (alone, *_) = await received(collector, await asked(batching_gateway))
    await batched(batching_gateway)
    await until(lambda: len(collector.trace_ids) == 2, within_s=60)
    (root, *_) = collector.trace(collector.trace_ids[1])
    its_own = ("gen_ai.response.id", "gen_ai.response.time_to_first_chunk", "springtide.request.id", "springtide.kept")
    said, expected = ({name: value for name, value in span.attributes.items() if name not in its_own} for span in (root, alone))
    assert root.name == alone.name == f"chat {MODEL}" and said == expected


async def test_a_line_that_fails_by_a_fault_of_the_gateways_is_a_trace_with_an_error(
    batching_gateway: GatewayServer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "FIRST_PAUSE_S", 0.01)
    start, failed = ApiBackend.start, list[PreparedRequest]()

    def fails_once(backend: ApiBackend, prepared: PreparedRequest) -> AnswerStream:
        if not failed:
            failed.append(prepared)
            raise RuntimeError("nobody has thought of this")
        return start(backend, prepared)

    monkeypatch.setattr(ApiBackend, "start", fails_once)
    await batched(batching_gateway)
    await until(lambda: len(collector.trace_ids) == 2, within_s=60)
    assert [collector.trace(trace_id)[0].attributes["http.response.status_code"] for trace_id in collector.trace_ids] == [500, 200]


async def batched(gateway: GatewayServer) -> None:
    """Submits a batch of one line."""
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}/v1", timeout=20) as client:
        line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT})
        file = (await client.post("files", files={"file": line.encode()}, data={"purpose": "batch"})).json()
        batch = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        assert (await client.post("batches", json=batch)).status_code == 200


async def test_nodes_are_told_of_the_requests_span_and_where_nothing_is_traced_of_the_clients(
    traced_gateway: GatewayServer, gateway: GatewayServer, cluster: Cluster
) -> None:
    answer = await asked(traced_gateway)
    assert {(start.request.traceparent, start.request.traced) for _, start in cluster.started} == {(answer.headers["traceparent"], True)}
    for sent, told in ((CLIENT.header, CLIENT.header), ("nonsense", "")):
        cluster.started.clear()
        answer = await asked(gateway, {"traceparent": sent})
        assert {(start.request.traceparent, start.request.traced) for _, start in cluster.started} == {(told, False)}
        assert "traceparent" not in answer.headers


async def test_the_log_of_a_request_has_the_trace_of_its_client_even_where_nothing_is_traced(
    gateway: GatewayServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answer = await asked(gateway, {"traceparent": CLIENT.header})
    (record,) = [record for record in caplog.records if "request finished" in record.getMessage()]
    line = json.loads(JsonFormatter("gateway").format(record))
    assert (line["request_id"], line["trace_id"]) == (answer.headers["x-request-id"], CLIENT.trace_id)


async def test_a_refusal_is_an_end_as_any_other(traced_gateway: GatewayServer, collector: Collector) -> None:
    answer = await asked(traced_gateway, model="nobody")
    (root, prepare) = await received(collector, answer)
    assert root.attributes["http.response.status_code"] == 404 and not root.error and prepare.name == "prepare"


async def test_what_has_not_been_sent_is_sent_when_the_gateway_ends(
    arguments: ProcessArguments, cluster: Cluster, collector: Collector
) -> None:
    gateway = GatewayServer(traced(arguments, collector.url), cluster.conductor.address)
    await gateway.start()
    try:
        answer = await asked(gateway)
    finally:
        await gateway.close()
    assert (await received(collector, answer))[0].name == f"chat {MODEL}"


async def test_a_collector_that_is_away_is_in_nobodys_way_and_what_is_dropped_is_counted(
    arguments: ProcessArguments, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "MOST_WAITING", 2)
    monkeypatch.setattr(otlp, "MOST_AT_ONCE", 1)
    dropped = metrics.DROPPED_TRACES._value.get()  # type: ignore[attr-defined]
    with socket.socket() as silent:
        # It takes connections, and says nothing: whoever waited for an answer would wait for its whole time limit.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        gateway = GatewayServer(traced(arguments, f"http://127.0.0.1:{silent.getsockname()[1]}"), cluster.conductor.address)
        await gateway.start()
        try:
            answers = await asyncio.gather(*(asked(gateway) for _ in range(8)))
            assert [answer.status_code for answer in answers] == [200] * 8
            # One is being sent, two wait.
            await until(lambda: metrics.DROPPED_TRACES._value.get() - dropped >= 8 - 3)  # type: ignore[attr-defined]
            assert (await asked(gateway)).status_code == 200
        finally:
            await gateway.close()


def test_a_collector_that_refuses_costs_the_trace_and_holds_up_no_end() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1/traces"
    dropped = metrics.DROPPED_TRACES._value.get()  # type: ignore[attr-defined]
    exporter = TraceExporter(url, "gateway-0")
    tracer = Tracer(Sampling(1.0, Objectives(1.0, 1.0)), exporter.put, lambda: None)
    tracer.end(tracer.begin("r", "", "/v1/completions", "text_completion", 0.0, 0), "200", 0.1)
    tracer.look(0.1, linger_s=0.0)
    exporter.close()
    assert not any(thread.name == "traces" for thread in threading.enumerate())
    assert metrics.DROPPED_TRACES._value.get() - dropped == 1  # type: ignore[attr-defined]


def test_headers_resource_and_name_are_as_opentelemetrys_variables_say(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=other")
    exporter = TraceExporter(f"{collector.url}/v1/traces", "gateway-0")
    tracer = Tracer(Sampling(1.0, Objectives(1.0, 1.0)), exporter.put, lambda: None)
    trace = tracer.begin("r", "", "/v1/completions", "text_completion", 0.0, 1_700_000_000_000_000_000)
    tracer.end(trace, "200", 0.5)
    tracer.look(0.5, linger_s=0.0)
    exporter.close()
    root = collector.trace(trace.context.trace_id)[0]
    assert (root.begin, root.end) == (1_700_000_000.0, 1_700_000_000.5)
    said = {name: root.resource.get(name) for name in ("service.name", "deployment.environment.name", "service.instance.id")}
    assert said == {"service.name": "llm", "deployment.environment.name": "test", "service.instance.id": "gateway-0"}
    assert collector.headers[0]["api-key"] == "abc" and collector.headers[0]["content-encoding"] == "gzip"


# ---- where traces go ----

BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        ({}, {}, None),
        ({"ratio": 1.0}, {"OTEL_TRACES_SAMPLER_ARG": "0.5"}, None),
        ({"endpoint": "http://a:1"}, {}, Destination("http://a:1/v1/traces", DEFAULT_RATIO)),
        ({"endpoint": "http://a:1/v1/traces"}, {}, Destination("http://a:1/v1/traces", DEFAULT_RATIO)),
        ({}, BASE, Destination("http://collector:4318/v1/traces", DEFAULT_RATIO)),
        ({"endpoint": "http://a:1", "ratio": 0.3}, BASE, Destination("http://a:1/v1/traces", 0.3)),
        ({}, {**BASE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://b/t"}, Destination("https://b/t", DEFAULT_RATIO)),
        ({}, {**BASE, "OTEL_TRACES_SAMPLER_ARG": "0.25"}, Destination("http://collector:4318/v1/traces", 0.25)),
        ({}, {**BASE, "OTEL_TRACES_SAMPLER": "always_on"}, Destination("http://collector:4318/v1/traces", 1.0)),
        ({"ratio": 0.0}, {**BASE, "OTEL_TRACES_SAMPLER_ARG": "0.25"}, Destination("http://collector:4318/v1/traces", 0.0)),
        ({}, {**BASE, "OTEL_SDK_DISABLED": "true"}, None),
        ({}, {**BASE, "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_settings_say_where_traces_go_and_where_they_do_not_opentelemetrys_variables(
    config: dict[str, object], environ: dict[str, str], expected: Destination | None
) -> None:
    assert Destination.of(TracingConfig.model_validate(config), environ) == expected


@pytest.mark.parametrize(
    ("config", "environ", "what"),
    [
        ({"endpoint": "collector:4317"}, {}, "tracing.endpoint"),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({}, {**BASE, "OTEL_TRACES_SAMPLER_ARG": "10"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({}, {**BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
    ],
)
def test_what_cannot_be_is_named(config: dict[str, object], environ: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Destination.of(TracingConfig.model_validate(config), environ)


async def test_a_wrong_setting_ends_the_start_and_a_wrong_variable_costs_the_traces_alone(
    arguments: ProcessArguments, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        GatewayServer(traced(arguments, "collector:4317"), cluster.conductor.address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")
    gateway = GatewayServer(arguments, cluster.conductor.address)
    await gateway.start()
    try:
        answer = await asked(gateway)
    finally:
        await gateway.close()
    assert answer.status_code == 200 and "traceparent" not in answer.headers


def test_nothing_is_traced_unless_somebody_says_where_to() -> None:
    assert ClusterConfig().tracing == TracingConfig()
    assert Destination.of(TracingConfig(), {}) is None
