"""OpenTelemetry's metrics of generative AI, from requests to a collector."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from gateway_cluster import MODEL, Cluster

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")

from gateway import events as ev
from gateway import genai_metrics
from gateway.app import GatewayServer
from gateway.collector import destination
from gateway.genai_metrics import GenAiMetrics
from gateway.objectives import Latencies
from springtide.config import MetricsConfig
from springtide.errors import ConfigError, Overloaded
from springtide.process import ProcessArguments
from springtide.protocol.outputs import Finish
from tests.support.otlp import Collector

NAMES = {
    "gen_ai.server.time_to_first_token": genai_metrics.TTFT_BOUNDS_S,
    "gen_ai.server.time_per_output_token": genai_metrics.TIME_PER_TOKEN_BOUNDS_S,
    "gen_ai.server.request.duration": genai_metrics.DURATION_BOUNDS_S,
}
COMMON = {"gen_ai.provider.name": "springtide", "gen_ai.request.model": MODEL, "gen_ai.response.model": MODEL}


async def test_generations_come_to_the_collector_with_the_bounds_that_the_conventions_want(
    arguments: ProcessArguments, cluster: Cluster
) -> None:
    with Collector() as collector:
        config = arguments.config.model_copy(update={"metrics": MetricsConfig(otlp_endpoint=collector.url)})
        gateway = GatewayServer(replace(arguments, config=config), cluster.conductor.address)
        await gateway.start()
        try:
            async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as client:
                messages = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
                assert (await client.post("/v1/chat/completions", json={**messages, "n": 2})).status_code == 200
                assert (await client.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 8})).status_code == 200
        finally:
            await gateway.close()
        for name, bounds in NAMES.items():
            for operation, count in (("chat", 2), ("text_completion", 1)):
                point = collector.histogram(name, {**COMMON, "gen_ai.operation.name": operation})
                assert point is not None and point.count == count and tuple(point.explicit_bounds) == pytest.approx(bounds)


def test_a_failure_has_its_error_and_no_latency_but_its_duration() -> None:
    with Collector() as collector:
        told = GenAiMetrics(f"{collector.url}/v1/metrics", MODEL, "gateway-0")
        told.ended("text_completion", Latencies(1.0), 5.0, 9, ev.Finished(Finish.STOP, 0))
        told.ended("text_completion", Latencies(), 0.5, 0, ev.Failed(Overloaded("full", retry_after_s=1, reason="ttft")))
        told.ended("text_completion", Latencies(1.0), 7.0, 9, ev.Cancelled())
        told.close()
        failed = collector.histogram("gen_ai.server.request.duration", {"error.type": "ttft"})
        per_token = collector.histogram("gen_ai.server.time_per_output_token", COMMON)
        first = collector.histogram("gen_ai.server.time_to_first_token", COMMON)
    assert failed is not None and (failed.count, failed.sum) == (1, 0.5)
    assert per_token is not None and (per_token.count, per_token.sum) == (1, 0.5)
    assert first is not None and (first.count, first.sum) == (1, 1.0)


def test_a_collector_that_is_away_is_in_nobodys_way() -> None:
    told = GenAiMetrics("http://127.0.0.1:1/v1/metrics", MODEL, "gateway-0")
    told.ended("text_completion", Latencies(1.0), 5.0, 9, ev.Finished(Finish.STOP, 0))
    told.close()


def test_metrics_are_of_whom_opentelemetrys_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=other")
    with Collector() as collector:
        told = GenAiMetrics(f"{collector.url}/v1/metrics", MODEL, "gateway-0")
        told.ended("text_completion", Latencies(1.0), 5.0, 9, ev.Finished(Finish.STOP, 0))
        told.close()
        (resource,) = collector.resources
    expected = {"service.name": "llm", "deployment.environment.name": "test", "service.instance.id": "gateway-0"}
    assert expected.items() <= resource.items() and resource["telemetry.sdk.language"] == "python"


@pytest.mark.parametrize(
    ("endpoint", "environ", "url"),
    [
        (None, {}, None),
        ("http://collector:4318", {}, "http://collector:4318/v1/metrics"),
        ("http://collector:4318/v1/metrics", {"OTEL_METRICS_EXPORTER": "none"}, "http://collector:4318/v1/metrics"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}, "http://collector:4318/v1/metrics"),
        (None, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4318/m"}, "http://collector:4318/m"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_METRICS_EXPORTER": "none"}, None),
        ("http://collector:4318", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_metrics_go_where_the_setting_says_or_else_opentelemetrys_variables(
    endpoint: str | None, environ: dict[str, str], url: str | None
) -> None:
    assert destination("metrics", "metrics.otlp_endpoint", endpoint, environ) == url


def test_a_setting_that_is_no_url_is_refused_by_name_and_a_variable_costs_the_metrics_alone() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.otlp_endpoint must be a URL"):
        GenAiMetrics.of(MetricsConfig(otlp_endpoint="collector"), {}, MODEL, "gateway-0")
    assert GenAiMetrics.of(MetricsConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector"}, MODEL, "gateway-0") is None
    assert GenAiMetrics.of(MetricsConfig(), {}, MODEL, "gateway-0") is None
