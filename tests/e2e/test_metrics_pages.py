"""The metrics pages of a real cluster: what is on them is in the registry, and what Prometheus and those who know vLLM read."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from deploy.commands.metrics_reference import CONDUCTOR, DECODE, GATEWAY, PREFILL, STORE, all_metrics, described_name
from tests.support.cluster import Cluster
from tests.support.label_bounds import unbounded
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.prometheus import program

ROLES = {
    "gateway-0": GATEWAY,
    "conductor-0": CONDUCTOR,
    "prefill-0": PREFILL,
    "decode-0": DECODE,
    "prefill-0-store": STORE,
    "decode-0-store": STORE,
}
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    tiny = {"model": str(make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")), "dtype": "float32", "profile": TINY_PROFILE}
    kv = {"ssd_dir": str(tmp_path_factory.mktemp("ssd")), "ssd_size": 64 << 20}
    with Cluster(**tiny, kv=kv, server={"separate_gateway": True}, conductor={"admission": "baseline"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def answer(cluster: Cluster) -> httpx.Response:
    """To a request of which all processes have told."""
    body = {"model": cluster.model, "prompt": "One two three " * 40, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    cluster.wait_metric("decode-0", "vllm:request_success_total", lambda ended: ended == 1)
    cluster.wait_metric("conductor-0", "springtide_conductor_instances", lambda instances: instances == 2)
    return answer


@pytest.fixture(scope="module")
def usage(answer: httpx.Response) -> dict[str, int]:
    usage: dict[str, int] = answer.json()["usage"]
    return usage


@pytest.mark.parametrize("process", ROLES)
def test_a_page_has_nothing_that_is_not_in_the_registry(cluster: Cluster, usage: dict[str, int], process: str) -> None:
    known, page = all_metrics(), cluster.metrics_page(process)
    families = list(text_string_to_metric_families(page))
    assert [name for name in map(described_name, families) if name not in known] == []
    for family in families:
        described = known[described_name(family)]
        assert ROLES[process] in described.processes, described.name
        assert (described.type, described.help) == (family.type, family.documentation.rstrip("."))
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(described.labels), sample
            assert unbounded(sample.name, sample.labels) == [], sample
    missing = {name for name, metric in known.items() if ROLES[process] in metric.processes} - set(map(described_name, families))
    assert missing == set()


@pytest.mark.parametrize("process", ROLES)
def test_a_page_passes_promtool(cluster: Cluster, usage: dict[str, int], process: str) -> None:
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=cluster.metrics_page(process), capture_output=True, text=True)
    complaints = checked.stderr.splitlines()
    assert [line for line in complaints if not line.startswith(("vllm:", "python_", "process_"))] == []


@pytest.mark.parametrize("process", ROLES)
def test_a_page_is_openmetrics_to_who_asks_for_it(cluster: Cluster, usage: dict[str, int], process: str) -> None:
    assert list(openmetrics.text_string_to_metric_families(cluster.metrics_page(process, OPENMETRICS)))


@pytest.mark.parametrize("metric", ["ttft", "tbt", "e2e"])
def test_latencies_lead_to_a_request_and_its_trace(cluster: Cluster, usage: dict[str, int], metric: str) -> None:
    page = cluster.metrics_page("gateway-0", OPENMETRICS)
    found = {
        exemplar.labels["trace_id"]
        for family in openmetrics.text_string_to_metric_families(page)
        for sample in family.samples
        if family.name == f"springtide_gateway_{metric}_seconds" and (exemplar := sample.exemplar) is not None
    }
    assert found == {TRACE}


def test_tenants_are_named_to_those_alone_who_reach_the_metrics_port(cluster: Cluster, usage: dict[str, int]) -> None:
    assert "springtide_gateway_slo_generations_total{" in cluster.metrics_page("gateway-0")
    public = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    assert "springtide_gateway_ttft_seconds_bucket" in public and "tenant=" not in public


def test_a_generation_within_its_objectives_is_goodput(cluster: Cluster, usage: dict[str, int]) -> None:
    for objective in ("ttft", "tbt", "goodput"):
        labels = {"objective": objective, "result": "met"}
        assert cluster.metric("gateway-0", "springtide_gateway_slo_generations_total", labels) == 1
    assert cluster.metric("gateway-0", "springtide_gateway_tenant_tokens_total", {"kind": "output"}) == usage["completion_tokens"]


def test_what_keeps_pools_from_zero_is_told(cluster: Cluster, usage: dict[str, int]) -> None:
    assert cluster.metric("gateway-0", "vllm:num_incoming_requests_total", {"model": cluster.model}) == 1


def test_engines_tell_by_vllms_names_what_was_computed(cluster: Cluster, answer: httpx.Response, usage: dict[str, int]) -> None:
    engines, client_s = ("prefill-0", "decode-0"), answer.elapsed.total_seconds()

    def summed(metric: str, labels: dict[str, str] | None = None) -> float:
        wanted = {"model_name": cluster.model, "engine": "0", **(labels or {})}
        return sum(cluster.metric(engine, f"vllm:{metric}", wanted) for engine in engines)

    assert summed("prompt_tokens_total") == usage["prompt_tokens"]
    assert summed("generation_tokens_total") == usage["completion_tokens"] == 8
    assert summed("request_success_total", {"finished_reason": "length"}) == 1
    assert summed("time_to_first_token_seconds_count") == 1
    # Not compared with one another: each engine hears of the request after a time of its own.
    assert 0 < summed("time_to_first_token_seconds_sum") < client_s
    assert 0 < summed("e2e_request_latency_seconds_sum") < client_s
    assert summed("num_requests_running") == summed("num_requests_waiting") == 0
    for engine in engines:
        assert cluster.metric(engine, "vllm:cache_config_info", {"block_size": "64"}) == 1
        assert 0 <= cluster.metric(engine, "vllm:kv_cache_usage_perc") < 1
