"""What the dashboards' panels and variables ask for, asked of a Prometheus that scrapes a cluster under load, with all sorts of trouble:
each shows something, and no label has a value that it is not to have."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from springtide.config import LOOPBACK
from tests.support.cluster import Cluster, hanging
from tests.support.dashboards import DASHBOARDS, expressions, substituted
from tests.support.environment import own_environment
from tests.support.label_bounds import unbounded
from tests.support.ports import ReservedPorts
from tests.support.prometheus import Server, serving
from tests.support.waiting import wait_until
from tests.support.watched import SMALL, Load, Watched, scraped, watched

pytestmark = pytest.mark.timeout(600)

RATE_INTERVAL = "20s"
NAMESPACE = "models"
ROLES = {"conductor", "gateway", "prefill", "decode", "store"}
LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
"""How Grafana is told what to offer; of a metric, and by what has been chosen before."""
NODE_EXPORTER = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
CARDS = {"springtide-hosts: Cards: busy", "springtide-hosts: Cards: memory", "springtide-hosts: Cards: last error"}
"""Panels that show nothing here."""
SHOWN_S = 1800.0
"""How far back a panel looks."""
STEP = "5s"
WITHIN_S = 60.0
DOCUMENTS = 40
"""More than arenas have room for: by the time one is asked for again it is on an SSD."""
MOST_TIMES = 6
OBJECTIVE_S = 1.0
LOST_S = 4.0
"""Longer than what may be silent before it is taken for lost."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Where its node_exporter is; nowhere where there is none."""
    if NODE_EXPORTER is None:
        yield []
        return
    ports = ReservedPorts(1)
    address = f"{LOOPBACK}:{ports.numbers[0]}"
    ports.release()
    log = tmp_path_factory.mktemp("machine") / "node_exporter.log"
    with serving([NODE_EXPORTER, f"--web.listen-address={address}"], f"http://{address}", log, "/metrics"):
        yield [address]


@pytest.fixture(scope="module")
def troubled(model: Path, machine: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """With certificates, SSDs, arenas that are too small for what is asked, and instances that are moved."""
    directory = tmp_path_factory.mktemp("watched")
    identity = Identity(directory / "tls")
    issue_to(identity, Authority.create(directory / "ca", "a company"), "a machine", [LOOPBACK, "localhost"])
    settings: dict[str, Any] = {
        **SMALL,
        "model": str(model),
        "prefill": 3,
        "decode": 2,
        "tls": {"certificate": str(identity.certificate), "key": str(identity.key), "ca": str(identity.authorities)},
        "kv": {"block_tokens": 16, "arena_size": "3MiB", "ssd_dir": str(directory / "ssd"), "ssd_size": "64MiB", "transports": ["tcp"]},
        "slo": {"ttft_ms": 1000 * OBJECTIVE_S},
        "conductor": {
            "replication_gain_ms": 0,
            "pool_balance": True,
            "pool_balance_load": 0.001,
            "pool_balance_ratio": 1.01,
            "pool_balance_after_s": 0,
            "pool_balance_pause_s": 1e6,
            "pool_balance_drain_s": 0,
        },
    }
    with (
        watched(directory, others=machine, namespace=NAMESPACE, **settings) as watching,
        Load(watching.cluster, clients=4, documents=DOCUMENTS, document_tokens=320, output_tokens=48, pause_s=0.05),
    ):
        make_trouble(watching)
        yield watching


def make_trouble(watching: Watched) -> None:
    """What is counted once it has happened."""
    cluster = watching.cluster
    url, body = f"{cluster.url}/v1/completions", {"model": cluster.model, "prompt": "One two three", "max_tokens": 400, "ignore_eos": True}
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60, trust_env=False) as left:
        next(left.iter_lines())
    httpx.post(url, json={**body, "deadline_ms": 1}, timeout=60, trust_env=False)
    limit = [sys.executable, "-m", "deploy.cli", "tenants", "set", "limited", "--requests-per-minute", "1", "--url", cluster.url]
    subprocess.run(limit, check=True, capture_output=True, env=own_environment())
    limited: dict[str, Any] = {"json": {**body, "max_tokens": 1}, "headers": {"x-springtide-tenant": "limited"}}
    wait_until(lambda: httpx.post(url, **limited, timeout=60, trust_env=False).status_code == 429, "a tenant to be over its limit")

    def engines(role: str) -> list[str]:
        return [f"{role}-{number}" for number in range(3) if cluster.pid_of(f"{role}-{number}") is not None]

    def stores(role: str) -> list[str]:
        return [f"{engine}-store" for engine in engines(role)]

    prompts, outputs = engines("prefill"), engines("decode")
    with Load(cluster, clients=6, output_tokens=400):
        for count, break_once in (
            (
                'springtide_gateway_slo_generations_total{result="missed"}',
                lambda: hang(cluster, prompts + outputs, OBJECTIVE_S),
            ),
            ("springtide_conductor_rejections_total", lambda: hurry(url, body)),
            ("springtide_store_sources_given_up_total", lambda: hang(cluster, stores("prefill")[1:], LOST_S)),
            ("springtide_messenger_failures_total", lambda: hang(cluster, stores("decode"), LOST_S)),
            ("springtide_gateway_failed_attempts_total", lambda: hang(cluster, outputs[1:], LOST_S)),
            ("springtide_decode_failures_total", lambda: restart(cluster, stores("decode"))),
            ("springtide_prefill_failures_total", lambda: restart(cluster, stores("prefill"))),
        ):
            # What it befalls is a matter of chance.
            for _ in range(MOST_TIMES):
                if watching.prometheus.query(count):
                    break
                break_once()


def hurry(url: str, body: Mapping[str, Any]) -> None:
    """Of a deadline that is too early, and has not passed yet, the Conductor says so."""
    for deadline_ms in (10, 20, 40, 80, 160):
        httpx.post(url, json={**body, "deadline_ms": deadline_ms}, timeout=60, trust_env=False)


def restart(cluster: Cluster, stores: Sequence[str]) -> None:
    for store in stores:
        cluster.kill(store)
        cluster.wait_ready(store)


def hang(cluster: Cluster, names: Sequence[str], for_s: float) -> None:
    """Then it is whole again."""
    with hanging(cluster.pids_of(names)):
        time.sleep(for_s)
    cluster.wait_ready()


def asked() -> Iterator[tuple[str, str]]:
    """Every expression, with where it stands."""
    for path in DASHBOARDS:
        for title, expr in expressions(json.loads(path.read_text())):
            yield f"{path.stem}: {title}", substituted(expr, RATE_INTERVAL)


def since(prometheus: Server, expr: str, seconds: float) -> list[dict[str, Any]]:
    """The series that an expression has had for so long, each with `metric` and `values`."""
    now = time.time()
    within = {"start": str(now - seconds), "end": str(now), "step": STEP}
    return list(prometheus.get("/api/v1/query_range", query=expr, **within)["data"]["result"])


@pytest.mark.parametrize(("where", "expr"), [pytest.param(*question, id=question[0]) for question in asked()])
def test_a_panel_shows_something(troubled: Watched, where: str, expr: str) -> None:
    if where in CARDS:
        pytest.skip("of dcgm-exporter, which wants a card of NVIDIA's and its driver")
    if "node_" in expr and NODE_EXPORTER is None:
        pytest.skip("there is no node_exporter (Debian's prometheus-node-exporter)")

    def shown() -> bool:
        """Quantiles, and quotients, of what is not counted are no numbers: no point is drawn of these."""
        return any(not math.isnan(float(value)) for series in since(troubled.prometheus, expr, SHOWN_S) for _, value in series["values"])

    wait_until(shown, where, WITHIN_S, poll_s=0.5)


def offered(prometheus: Server, query: str, chosen: Mapping[str, Sequence[str]]) -> list[str]:
    """The values of a variable with this query, when of those before it these are chosen."""
    asked = LABEL_VALUES.fullmatch(query)
    assert asked is not None, query
    selector = re.sub(r"\$(\w+)", lambda name: "|".join(chosen[name[1]]), asked["selector"])
    now = time.time()
    within = {"match[]": selector, "start": str(now - SHOWN_S), "end": str(now)}
    return list(prometheus.get(f"/api/v1/label/{asked['label']}/values", **within)["data"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_each_variable_offers_what_there_is(troubled: Watched, path: Path) -> None:
    """Each in its turn, with all of what those before it offer."""
    cluster = troubled.cluster.record
    every = {"cluster": {cluster.cluster}, "namespace": {NAMESPACE}, **({"role": ROLES} if path.stem == "springtide-hosts" else {})}
    some = {"role": ROLES, "instance": scraped(cluster)}
    chosen: dict[str, Sequence[str]] = {}
    for variable in json.loads(path.read_text())["templating"]["list"]:
        name = variable["name"]
        if variable["type"] != "query" or (name == "host" and NODE_EXPORTER is None):
            continue

        def now(name: str = name, query: str = variable["query"]) -> list[str]:
            found = offered(troubled.prometheus, query, chosen)
            return found if every.get(name, set()) <= set(found) else []

        chosen[name] = wait_until(now, f"${name} of {path.stem}", WITHIN_S, lambda: str(chosen), 0.5)
        if name != "host":
            assert set(chosen[name]) <= every.get(name, some.get(name, set())), name
    assert {"cluster", "namespace", "role", "instance"} <= chosen.keys()


def test_whatever_happens_labels_stay_within_their_bounds(troubled: Watched) -> None:
    now = time.time()
    within = {
        "match[]": '{__name__=~"(springtide|python|process)_.+|vllm:.+",springtide_role!=""}',
        "start": str(now - SHOWN_S),
        "end": str(now),
    }
    series = troubled.prometheus.get("/api/v1/series", **within)["data"]
    print("series of each process", Counter(labels["instance"] for labels in series).most_common())
    assert {labels["springtide_role"] for labels in series} == ROLES
    assert [labels for labels in series if unbounded(labels["__name__"], labels)] == []
