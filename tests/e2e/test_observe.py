"""`springtide up --observe`: its own Prometheus has the cluster's metrics, its own Alertmanager hears of alerts, and both end with it."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest

from tests.support.cluster import OBSERVERS, Cluster
from tests.support.installation import Installation
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.prometheus import Server, alerts, program, rules
from tests.support.waiting import wait_until
from tests.support.watched import SMALL, scraped

OBSERVED = Installation(("sh", "-c", 'exec "$0" -P -m deploy.cli "$@" --observe', sys.executable), ())
"""Whose `springtide` has that option."""
PLACES = re.compile(r"Prometheus is on (http://[\d.]+:\d+), Alertmanager on (http://[\d.]+:\d+)\.")
TRACE = "0af7651916cd43dd8448eb211c80319c"


@dataclass(frozen=True)
class Observed:
    """A cluster, and what it says of where it is watched from."""

    cluster: Cluster
    prometheus: Server
    alertmanager: Server

    @property
    def names(self) -> set[str]:
        """Of its processes that have metrics."""
        return scraped(self.cluster.record)

    def values(self, expr: str) -> dict[str, float]:
        """By the process that each series is of."""
        return {series["metric"]["instance"]: float(series["value"][1]) for series in self.prometheus.query(expr)}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    programs = [program(name).parent for name in ("prometheus", "prometheus-alertmanager")]
    ports = {"prometheus_port": 0, "alertmanager_port": 0}
    with pytest.MonkeyPatch.context() as environment, contextlib.ExitStack() as ending:
        for directory in programs:
            environment.setenv("PATH", str(directory), prepend=":")
        cluster = Cluster(**SMALL, model=str(model), profile=TINY_PROFILE, kv={"block_tokens": 16, "arena_size": "32MiB"}, observe=ports)
        ending.callback(cluster.__exit__, None, None, None)
        cluster.start(OBSERVED)
        said = wait_until(lambda: PLACES.search(cluster.logs()), "it to say where they are", more=cluster.logs)
        yield Observed(cluster, Server(said[1]), Server(said[2]))


def test_every_process_is_asked_under_its_name_and_role(observed: Observed) -> None:
    wait_until(lambda: observed.values("up == 1").keys() == observed.names, "all to be scraped", more=observed.cluster.logs)
    roles = {series["metric"]["instance"]: series["metric"]["springtide_role"] for series in observed.prometheus.query("up")}
    assert roles == {
        "conductor-0": "conductor",
        "gateway-0": "gateway",
        "prefill-0": "prefill",
        "decode-0": "decode",
        "prefill-0-store": "store",
        "decode-0-store": "store",
    }
    clusters = {series["metric"]["cluster"] for series in observed.prometheus.query("up")}
    assert clusters == {observed.cluster.record.cluster}


def test_it_answers_with_what_the_processes_count(observed: Observed) -> None:
    body = {"model": observed.cluster.model, "prompt": "One two three", "max_tokens": 8, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    for _ in range(3):
        answer = httpx.post(f"{observed.cluster.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
    requests = 'springtide_gateway_requests_total{route="/v1/completions",status="200"}'
    wait_until(lambda: observed.values(requests) == {"gateway-0": 3}, requests, more=observed.cluster.logs)
    tokens = "springtide_decode_tokens_total"
    wait_until(lambda: observed.values(tokens) == {"decode-0": 3 * 7}, tokens, more=observed.cluster.logs)
    assert observed.cluster.metric("decode-0", tokens) == 3 * 7

    def traces() -> set[str]:
        asked = {"query": "springtide_gateway_ttft_seconds_bucket", "start": str(time.time() - 600), "end": str(time.time())}
        found = observed.prometheus.get("/api/v1/query_exemplars", **asked)["data"]
        return {exemplar["labels"].get("trace_id", "") for series in found for exemplar in series["exemplars"]}

    wait_until(lambda: traces() == {TRACE}, "an exemplar")


def test_its_rules_are_the_projects_and_are_evaluated(observed: Observed) -> None:
    def evaluated() -> bool:
        groups = observed.prometheus.get("/api/v1/rules")["data"]["groups"]
        found = {rule["name"]: rule["health"] for group in groups for rule in group["rules"] if rule["type"] == "alerting"}
        return found == {rule["alert"]: "ok" for rule in alerts(rules())}

    wait_until(evaluated, "every rule to be evaluated")
    objective = "springtide:slo_objective:ratio"
    wait_until(lambda: [series["value"][1] for series in observed.prometheus.query(objective)] == ["0.99"], objective)
    known = observed.prometheus.get("/api/v1/alertmanagers")["data"]["activeAlertmanagers"]
    assert [each["url"] for each in known] == [f"{observed.alertmanager.url}/api/v2/alerts"]


def test_who_starts_anew_is_followed_and_alertmanager_hears_of_it(observed: Observed) -> None:
    started = "process_start_time_seconds"
    before = wait_until(lambda: observed.values(started).get("decode-0"), "the engine to have been scraped")
    observed.cluster.kill("decode-0")
    observed.cluster.wait_ready("decode-0")
    wait_until(lambda: observed.values(started).get("decode-0", before) > before, "the new process to be scraped under the name of the old")

    restarted = {"alertname": "SpringtideProcessRestarted", "instance": "decode-0", "springtide_role": "decode"}

    def told() -> bool:
        return any(restarted.items() <= alert["labels"].items() for alert in observed.alertmanager.get("/api/v2/alerts"))

    wait_until(told, "Alertmanager to hear of it", more=lambda: str(observed.alertmanager.get("/api/v2/alerts")))


def test_they_end_with_the_cluster(observed: Observed) -> None:
    watching = [psutil.Process(pid) for name, pid in observed.cluster.record.processes.items() if name in OBSERVERS]
    assert len(watching) == 2
    observed.cluster.stop()
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in watching), "both to end")
