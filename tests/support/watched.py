"""A real cluster that is watched: by Prometheus with the project's rules, whose alerts Alertmanager tells to who writes them down.

The rules' clock runs faster: every range in an expression is FASTER times shorter, and whatever waits (`for`, Alertmanager's groups)
FASTER / PATIENCE times, for what is waited for in between (a scrape, a stall of this machine) is as long as ever.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.local.rundir import ClusterRecord
from springtide.config import LOOPBACK
from tests.support.cluster import OBSERVERS, Cluster
from tests.support.prometheus import ALERTMANAGER, Server, alertmanager, alerts, faster, program, prometheus, rules, seconds, shorter
from tests.support.reference import random_prompt
from tests.support.waiting import wait_until

FASTER = 30.0
PATIENCE = 5.0
SMALL: Mapping[str, Any] = {
    "served_model_name": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "prefill_node": {"threads": 1, "chunk_tokens": 256},
    "decode_node": {"threads": 1},
    "server": {"separate_gateway": True},
}
"""Settings of a cluster that many of fit on a machine."""
TOLERATED = "SpringtidePredictionsOff"
"""A model this small takes less time than what goes on around it: of its first tokens, what is predicted is off by itself."""
SLACK_S = 60.0
"""What a slow machine may add to the time in which an alert is to arrive."""
CALM_S = 180.0
"""For everything to be well again and every range to have passed."""


def scraped(record: ClusterRecord) -> set[str]:
    """The names of a cluster's processes that have metrics of the project's."""
    return set(record.processes) - OBSERVERS - {"valkey"}


@dataclass(frozen=True, slots=True)
class Notice:
    """What a receiver of Alertmanager's was told of one alert."""

    at: float
    """Monotonic seconds."""
    receiver: str
    """page or ticket."""
    firing: bool
    labels: Mapping[str, str]

    @property
    def alert(self) -> str:
        return self.labels["alertname"]


class _Receivers:
    """Where Alertmanager tells of alerts: a path for each receiver."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        receivers = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["content-length"])))
                for alert in told["alerts"]:
                    receivers.notices.append(Notice(time.monotonic(), self.path[1:], alert["status"] == "firing", alert["labels"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> _Receivers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def url(self, receiver: str) -> str:
        return f"http://{LOOPBACK}:{self._server.server_port}/{receiver}"


class Watched:
    """Made by `watched`."""

    def __init__(self, cluster: Cluster, prometheus: Server, alertmanager: Server, told: list[Notice], waits: Waits) -> None:
        self.cluster = cluster
        self.prometheus = prometheus
        self.waits = waits
        self._alertmanager = alertmanager
        self._told = told

    def longest_s(self, alert: str) -> float:
        """The most seconds that it is to take from its cause to its notice."""
        return self.waits.longest_s(alert)

    def held_back_by(self, alert: str, **labels: str) -> set[str]:
        """The alerts for whose sake Alertmanager tells nobody of this one, which has these labels among its own; nothing where it tells, or
        does not know of it."""
        known = self._alertmanager.get("/api/v2/alerts")
        names = {each["fingerprint"]: each["labels"]["alertname"] for each in known}
        wanted = {"alertname": alert, **labels}
        return {
            names.get(fingerprint, fingerprint)
            for each in known
            if wanted.items() <= each["labels"].items() and each["status"]["state"] == "suppressed"
            for fingerprint in each["status"]["inhibitedBy"]
        }

    def active(self) -> list[str]:
        """The alerts that fire now, or are to wake somebody soon, as Prometheus has them, or as Alertmanager still does."""
        pending = [(alert["labels"], alert["state"]) for alert in self.prometheus.get("/api/v1/alerts")["data"]["alerts"]]
        told = [(alert["labels"], "told of") for alert in self._alertmanager.get("/api/v2/alerts")]
        return sorted(
            f"{labels['alertname']} {state}"
            for labels, state in pending + told
            if labels["alertname"] != TOLERATED and (state != "pending" or labels["severity"] == "critical")
        )

    def wait_calm(self) -> None:
        """Until every process is scraped, and there is no alert."""
        names = scraped(self.cluster.record)

        def calm() -> bool:
            up = {series["metric"]["instance"] for series in self.prometheus.query("up == 1")}
            return names <= up and not self.active()

        wait_until(calm, "the cluster to be calm", CALM_S, lambda: "\n".join([*self.active(), self.cluster.logs()]), 0.5)

    @contextlib.contextmanager
    def fault(self, *pages: str, outlast: Sequence[str] = ()) -> Iterator[Fault]:
        """Something is broken within, and mended; it is calm before and afterwards. Asserts that all of `pages` woke somebody, and nothing
        else did. Symptoms that `outlast` their cause may, when that is mended."""
        self.wait_calm()
        fault = Fault(self, len(self._told))
        yield fault
        self.wait_calm()
        assert {notice.alert for notice in fault.pages} - set(outlast) == set(pages), fault.pages


@dataclass
class Fault:
    """What is told of since it began."""

    watched: Watched
    _first: int
    began: float = field(default_factory=time.monotonic)

    @property
    def notices(self) -> list[Notice]:
        return self.watched._told[self._first :]

    @property
    def pages(self) -> list[Notice]:
        """Those that woke somebody."""
        return [notice for notice in self.notices if notice.firing and notice.receiver == "page"]

    def notice(self, alert: str, **labels: str) -> Notice | None:
        """That the alert fires with these labels; None as long as nobody was told."""
        fires = (notice for notice in self.notices if notice.alert == alert and notice.firing and labels.items() <= notice.labels.items())
        return next(fires, None)

    def told(self, alert: str, receiver: str, **labels: str) -> None:
        """Waits until the receiver has been told of it, which has to be in the alert's time."""
        within_s = self.watched.longest_s(alert)
        left_s = self.began + within_s - time.monotonic()
        more = lambda: f"{self.watched.active()}\n{self.notices}"  # noqa: E731
        notice = wait_until(lambda: self.notice(alert, **labels), f"{alert} to be told of", max(left_s, 0.0), more, 0.1)
        assert notice.receiver == receiver
        print(f"{alert} {dict(notice.labels)}: after {notice.at - self.began:.1f} s, which may be {within_s:.0f} s")

    def held_back(self, alert: str, by: str, **labels: str) -> None:
        """Waits until it fires as well, and Alertmanager has told nobody of it, for the other one's sake, for twice as long as it waits
        before it tells of anything."""

        def held() -> bool:
            return by in self.watched.held_back_by(alert, **labels)

        more = lambda: f"{self.watched.active()}\n{self.notices}"  # noqa: E731
        wait_until(held, f"{alert} to be held back by {by}", self.watched.longest_s(alert), more, 0.1)
        since, long_s = time.monotonic(), 2 * self.watched.waits.group_s
        wait_until(lambda: not held() or time.monotonic() - since > long_s, "it to be told of all the same", long_s + SLACK_S, more, 0.5)
        assert held() and self.notice(alert, **labels) is None, more()
        print(f"{alert} {labels}: held back by {by} for {time.monotonic() - since:.0f} s")


@contextlib.contextmanager
def watched(
    directory: Path,
    *,
    times: float = FASTER,
    patience: float = PATIENCE,
    others: Sequence[str] = (),
    namespace: str = "",
    **settings: Any,
) -> Iterator[Watched]:
    """Of a cluster with these settings, and what else there is to scrape; Alertmanager is always. `namespace`: what its processes are
    labelled with, as on Kubernetes; empty: nothing. Skips the test where Prometheus or Alertmanager cannot be had."""
    for name in ("prometheus", "prometheus-alertmanager"):
        program(name)
    given = faster(rules(), times, patience)
    observe = {"enabled": True, "prometheus_port": 0, "alertmanager_port": 0}
    with _Receivers() as receivers, Cluster(**settings, observe=observe) as cluster:
        (directory / "rules.yaml").write_text(yaml.safe_dump(given))
        routes = _faster_routes(yaml.safe_load(ALERTMANAGER.read_text()), times / patience, receivers.url)
        with alertmanager(directory, routes) as told:
            config = yaml.safe_load(Path(cluster.record.run_dir, "observe/prometheus.yaml").read_text())
            config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
            config["rule_files"] = [str(directory / "rules.yaml")]
            if namespace:
                config["scrape_configs"][0]["relabel_configs"] = [{"target_label": "namespace", "replacement": namespace}]
            address = told.url.removeprefix("http://")
            config["scrape_configs"] += [{"job_name": "others", "static_configs": [{"targets": [address, *others]}]}]
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [address]}]}]}
            with prometheus(directory, config) as asked:
                yield Watched(cluster, asked, told, receivers.notices, Waits.of(given, routes))


def _faster_routes(config: Mapping[str, Any], times: float, url: Callable[[str], str]) -> dict[str, Any]:
    """An Alertmanager's configuration with all its waits so many times shorter, whose receivers are ours."""

    def route(one: Mapping[str, Any]) -> dict[str, Any]:
        waits = {name: shorter(one[name], times) for name in ("group_wait", "group_interval", "repeat_interval") if name in one}
        return {**one, **waits, **({"routes": [route(inner) for inner in one["routes"]]} if "routes" in one else {})}

    receivers = [{"name": one["name"], "webhook_configs": [{"url": url(one["name"])}]} for one in config["receivers"]]
    return {**config, "route": route(config["route"]), "receivers": receivers}


@dataclass(frozen=True)
class Waits:
    """How long rules and routes let alerts wait."""

    rules: Mapping[str, Mapping[str, Any]]
    """By their alerts."""
    group_s: float
    """The longest that Alertmanager does before it tells of a group of them for the first time."""

    @classmethod
    def of(cls, given: Mapping[str, Any], routes: Mapping[str, Any]) -> Waits:
        waits = [seconds(route["group_wait"]) for route in (routes["route"], *routes["route"]["routes"]) if "group_wait" in route]
        return cls({rule["alert"]: rule for rule in alerts(given)}, max(waits))

    def longest_s(self, alert: str) -> float:
        """What it may take: the longest range that it looks at, for how long it is to be so, its group's wait, and slack."""
        rule = self.rules[alert]
        ranges = [seconds(found) for found in re.findall(r"\[(\w+)\]", rule["expr"])]
        return max(ranges, default=0.0) + seconds(rule.get("for", "0s")) + self.group_s + SLACK_S


class Load:
    """Clients that ask one request after another while it is entered, whatever becomes of them. Each prompt begins with one of some
    documents, and is asked twice."""

    def __init__(
        self,
        cluster: Cluster,
        clients: int = 2,
        documents: int = 1,
        document_tokens: int = 64,
        own_tokens: int = 64,
        output_tokens: int = 24,
        pause_s: float = 0.2,
    ) -> None:
        self._url, self._model = cluster.url, cluster.model
        self._documents = [random_prompt(number, document_tokens, 10, 250) for number in range(documents)]
        self._own_tokens, self._output_tokens, self._pause_s = own_tokens, output_tokens, pause_s
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(1000 * (1 + number),)) for number in range(clients)]
        self.answers: Counter[str] = Counter()
        """By status, or by what kept one from coming."""

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        turn = 0
        with httpx.Client(timeout=60, trust_env=False) as http:
            while not self._over.wait(self._pause_s):
                own = random_prompt(seed + turn // 2, self._own_tokens, 10, 250)
                prompt = [*self._documents[turn // 2 % len(self._documents)], *own]
                turn += 1
                body = {"model": self._model, "prompt": prompt, "max_tokens": self._output_tokens, "ignore_eos": True, "temperature": 0}
                try:
                    self.answers[str(http.post(f"{self._url}/v1/completions", json=body).status_code)] += 1
                except httpx.TransportError as error:
                    self.answers[type(error).__name__] += 1
