"""Looks at the cluster from outside: who is ready, what is held, what processes take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import grpc
import httpx
import psutil
import redis
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from springtide.membership import Member
from springtide.rpc import conductor_pb2 as pb
from springtide.rpc import conductor_pb2_grpc
from tests.chaos.cluster import ClusterUnderTest
from tests.chaos.history import CalmPoint, ProcessState, Sample, Topology
from tests.support.intervals import Interval

EVERY_S = 0.5
ANSWER_S = 1.0
"""Who takes longer is not ready."""
WHOLE_S = 60.0
"""For everything that was broken to be whole again."""
GIVEN_BACK_S = 45.0
"""For everything that was held to be given back; leases run for 30 s."""
POLL_S = 0.5
OWN_STALL_S = 0.2
"""What the clients' event loop is late by at least when it is said to have stood still."""
VERIFY_S = 120.0
_HELD: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "store": (
        ("springtide_store_slots", {"state": "in_use"}),
        ("springtide_store_slots", {"state": "quarantined"}),
        ("springtide_store_leases", {}),
        ("springtide_store_ingests", {}),
    ),
    "prefill": (("springtide_prefill_attempts_running", {}), ("springtide_prefill_attempts_waiting", {})),
    "decode": (("springtide_decode_attempts_running", {}), ("springtide_decode_attempts_waiting", {})),
    "conductor": (("springtide_conductor_attempts", {}),),
    "gateway": (("springtide_gateway_requests_in_flight", {}),),
}
"""By role: what is 0 while nothing runs."""


class Observer:
    def __init__(self, cluster: ClusterUnderTest, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._conductors: dict[str, str] = {}
        """Addresses by name, as last announced."""
        self._engines: frozenset[str] = frozenset()
        """Ready, as last heard."""
        self._http = httpx.Client(timeout=ANSWER_S, trust_env=False)
        self.samples: list[Sample] = []
        self.own_stalls: list[Interval] = []

    async def watch(self) -> None:
        """For ever."""
        while True:
            self._cluster.revive()
            self.samples.append(await asyncio.to_thread(self._sample))
            await asyncio.sleep(EVERY_S)

    async def watch_own_stalls(self) -> None:
        """For ever: when this process's event loop stood still."""
        while True:
            due_s = self._clock() + OWN_STALL_S / 2
            await asyncio.sleep(OWN_STALL_S / 2)
            if self._clock() - due_s >= OWN_STALL_S:
                self.own_stalls.append((due_s, self._clock()))

    async def calm_point(self, ssd: bool) -> CalmPoint:
        """Waits, for as long as is allowed, until the cluster is whole and nothing is held."""
        return await asyncio.to_thread(self._calm_point, ssd)

    def close(self) -> None:
        self._http.close()

    # ---- samples ----

    def _sample(self) -> Sample:
        at_s = self._clock()
        statuses = self._statuses()
        leading = {name: status for name, status in statuses.items() if status.leads}
        for status in leading.values():
            self._engines = frozenset(one.instance.instance_id for one in status.instances if one.ready)
        healthy = {name for name in self._cluster.shape.topology.gateways if self._healthy(name)}
        if self._valkey_answers():
            healthy.add("valkey")
        with contextlib.suppress(AssertionError, psutil.Error):
            self._cluster.note_processes()
            if len(statuses) < len(self._cluster.shape.topology.conductors):
                members = self._cluster.up.members()
                self._conductors |= {member.member_id: member.address for member in members if member.role == "conductor"}
        return Sample(at_s, frozenset({*leading, *self._engines, *healthy}))

    def _statuses(self) -> dict[str, pb.ClusterStatus]:
        channels = {name: grpc.insecure_channel(address) for name, address in self._conductors.items()}
        try:
            calls = {
                name: conductor_pb2_grpc.ConductorStub(channel).GetCluster.future(
                    pb.GetClusterRequest(), timeout=ANSWER_S, metadata=self._cluster.up.metadata
                )
                for name, channel in channels.items()
            }
            found = {}
            for name, call in calls.items():
                with contextlib.suppress(grpc.RpcError):
                    found[name] = call.result()
            return found
        finally:
            for channel in channels.values():
                channel.close()

    def _valkey_answers(self) -> bool:
        try:
            url = self._cluster.up.record.redis_url
            with redis.Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S) as valkey:
                return bool(valkey.ping())
        except (redis.RedisError, AssertionError):
            return False

    def _healthy(self, gateway: str) -> bool:
        try:
            return self._http.get(f"{self._cluster.urls[gateway]}/health").status_code == httpx.codes.OK
        except (httpx.HTTPError, AssertionError):
            return False

    # ---- calm points ----

    def _calm_point(self, ssd: bool) -> CalmPoint:
        not_whole: str | None = None
        try:
            self._cluster.up.wait_ready(timeout_s=WHOLE_S)
            self._wait(lambda: all(map(self._healthy, self._cluster.urls)), WHOLE_S)
        except AssertionError as error:
            not_whole = str(error).splitlines()[0]
        self._wait(lambda: not self._held(), GIVEN_BACK_S)
        return CalmPoint(self._clock(), self._held(), tuple(self._process_states()), self._verdicts(ssd), not_whole)

    def _held(self) -> dict[str, float]:
        try:
            members = self._cluster.up.members()
        except AssertionError:
            return {"springtide up": 1.0}
        pages = {(member.role, member.member_id): self._page(member) for member in members if member.metrics_address}
        return held(self._cluster.shape.topology, pages)

    def _page(self, member: Member) -> str | None:
        try:
            response = self._http.get(f"http://{member.metrics_address}/metrics")
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == httpx.codes.OK else None

    def _process_states(self) -> Iterator[ProcessState]:
        with contextlib.suppress(AssertionError):
            for name, process in self._cluster.everything().items():
                with contextlib.suppress(psutil.Error):
                    memory = process.memory_info()
                    yield ProcessState(name, process.pid, process.num_fds(), process.num_threads(), memory.rss - memory.shared)

    def _verdicts(self, ssd: bool) -> dict[str, str]:
        command = [sys.executable, "-m", "deploy.cli", "store", "verify", "--json", *(["--ssd"] if ssd else [])]
        try:
            command += ["--url", self._cluster.up.url]
            result = subprocess.run(command, capture_output=True, text=True, timeout=VERIFY_S, check=False)
            return {row["store"]: row["verdict"] for row in json.loads(result.stdout)}
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return {"springtide store verify": str(error).splitlines()[0]}
        except json.JSONDecodeError:
            return {"springtide store verify": f"exit code {result.returncode}: {result.stderr.strip()[-300:]}"}

    @staticmethod
    def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
        """At most so long."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(POLL_S)


def held(topology: Topology, pages: Mapping[tuple[str, str], str | None]) -> dict[str, float]:
    """What is not 0, by `process metric`, from the metrics pages of processes by their roles and names. What cannot be seen counts as held:
    a page (None) or a metric that should be there and is not."""
    found: dict[str, float] = {}
    for role, name in {*_expected(topology), *pages}:
        process = f"{name}-store" if role == "store" else name
        page = pages.get((role, name))
        if page is None:
            found[f"{process} metrics"] = 1.0
            continue
        families = {family.name: family for family in text_string_to_metric_families(page)}
        for metric, labels in (*_HELD[role], *_held_beside(topology, role, name)):
            shown = f"{metric}{{{','.join(labels.values())}}}" if labels else metric
            value = _gauge(families.get(metric), labels)
            if value is None:
                found[f"{process} {shown} is not told"] = 1.0
            elif value:
                found[f"{process} {shown}"] = value
    return found


def _held_beside(topology: Topology, role: str, name: str) -> tuple[tuple[str, dict[str, str]], ...]:
    """Of another role that the same process has."""
    if role == "conductor" and topology.gateway_in_conductor:
        return _HELD["gateway"]
    return _HELD["prefill"] if role == "decode" and name in topology.prefill else ()


def _expected(topology: Topology) -> Iterator[tuple[str, str]]:
    """Who has a metrics page, by role and name: a gateway beside the Conductor has that one's, and what prefills and decodes one page."""
    yield from (("decode", name) for name in topology.decode)
    yield from (("prefill", name) for name in topology.prefill if name not in topology.decode)
    yield from (("store", name) for name in topology.engines)
    yield from (("conductor", name) for name in topology.conductors)
    yield from (("gateway", name) for name in topology.gateways if not topology.gateway_in_conductor)


def _gauge(family: Metric | None, labels: dict[str, str]) -> float | None:
    """The sum of its samples that carry the labels. None: there is no such gauge, or none of its labels. One of any labels may have no
    samples yet."""
    if family is None:
        return None
    values = [sample.value for sample in family.samples if labels.items() <= sample.labels.items()]
    return sum(values) if values or not labels else None
