"""The Helm chart's commands, executed with instances in the place of prefill and decode pods, and then with all three."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_deploy_chart_runs import OUTPUT_TOKENS, PROMPTS, as_keda_reads, as_prometheus, is_whole, model_of, scraped, stream
from tests.support.chart import RELEASE, of_kind, rendered
from tests.support.chart_pods import PROFILE, Cluster, cluster_of
from tests.support.clients import WORKERS, Load, Questions
from tests.support.prometheus import prometheus
from tests.support.waiting import wait_until

POOL = {"threads": 1, "drainSeconds": 1}
VALUES = {
    "config": {"kv": {"arena_size": "64MiB"}, "dtype": "float32", "profile": PROFILE},
    "monitoring": {"podMonitor": {"enabled": True}},
    "gateway": {"replicas": 1, "preStopSeconds": 1, "drainSeconds": 110},
    "instance": {"replicas": 2, **POOL},
}
WITH_OTHERS = {**VALUES, "prefill": {"replicas": 1, **POOL}, "decode": {"replicas": 1, **POOL}}
ENDED = {"instance": 0, "store": 0}
pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="wants root"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(rendered(VALUES), tmp_path_factory.mktemp("pods")) as cluster:
        cluster.start("valkey-0")
        cluster.start("conductor-0", "instance-0", "instance-1", "gateway-0")
        yield cluster


def test_instances_serve_and_show_life(cluster: Cluster) -> None:
    assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))
    for pod in ("instance-0", "instance-1"):
        assert cluster.pods[pod].ready and all(cluster.pods[pod].lives(name) for name in ("store", "instance"))


def test_prometheus_reads_what_instances_do_in_both_roles(cluster: Cluster, tmp_path: Path) -> None:
    trusted = as_prometheus(cluster, tmp_path)
    address = cluster.pods["instance-0"].address
    for port, several in (
        (9400, ("springtide_prefill_queue_seconds", "springtide_decode_step_seconds_bucket")),
        (9401, ("springtide_store_slots",)),
    ):
        page = httpx.get(f"https://{address}:{port}/metrics", verify=trusted, trust_env=False).text
        assert all(series in page for series in several)


def test_instances_are_scaled_by_what_prometheus_knows_of_the_pods(cluster: Cluster, tmp_path: Path) -> None:
    scaling = {"enabled": True, "latencySeconds": 2.5, "queuedTokens": 1000}
    objects = rendered({**VALUES, "instance": {"autoscaling": scaling}})
    (found,) = of_kind(objects, "ScaledObject")
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in found["spec"]["triggers"]}
    assert queries.keys() == {"load", "queue", "kv", "latency"}
    as_prometheus(cluster, tmp_path)
    (monitor,) = of_kind(objects, "PodMonitor")
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": list(scraped(monitor, cluster, objects, tmp_path))}
    with prometheus(tmp_path, config) as asked:

        def read() -> dict[str, float | None]:
            return {name: as_keda_reads(asked.query(query)) for name, query in queries.items()}

        wait_until(lambda: None not in read().values(), "each to be a number", more=lambda: str(read()), poll_s=0.5)
        assert is_whole(list(stream(cluster.pods["gateway-0"], 50)))
        wait_until(lambda: (read()["latency"] or 0.0) > 0, "what was asked to be known", more=lambda: str(read()), poll_s=0.5)


def test_instances_are_replaced_under_load_and_make_way_for_pods_of_one_role(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Each answer is compared with what it is in calm."""
    url = f"http://{cluster.address(f'{RELEASE}-springtide')}:8000/v1"
    calm = Questions(model_of(cluster.pods["gateway-0"]), PROMPTS.__getitem__)
    calm.learn_in_calm(url, [(number, OUTPUT_TOKENS) for number in range(len(PROMPTS))])
    with Load(calm, [url], logs=cluster.logs) as load, ThreadPoolExecutor() as kubelets:
        load.wait_under_way()
        cluster.start("instance-2")
        assert kubelets.submit(cluster.stop, "instance-0").result() == {"instance-0": ENDED}
        load.wait_answered(WORKERS)
        cluster.upgrade(rendered(WITH_OTHERS))
        cluster.start("prefill-0", "decode-0")
        load.wait_answered(WORKERS)
        load.wait_under_way()
        assert cluster.stop("instance-1", "instance-2") == {"instance-1": ENDED, "instance-2": ENDED}
        load.wait_answered(WORKERS)
    with capsys.disabled():
        print(f"\n{load.summary()}")
    load.check()
