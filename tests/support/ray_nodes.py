"""A Ray cluster of several nodes on this machine, by `ray start` as an operator would, each node to be lost by force.

`ray stop` ends every Ray of the machine, so what was started here is ended by its process ids.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import psutil

from deploy.local import rundir
from deploy.local.logs import last_lines
from deploy.local.plan import free_port
from deploy.local.rundir import ClusterRecord
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

START_TIMEOUT_S = 120.0
RECONNECT_S = 4
"""How long a Ray node, and whoever is connected to it, lives without the head: a minute unless it is told otherwise."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
    "RAY_health_check_period_ms": "1000",
}


class RayNode:
    """`ray start --block`: one node, with all its processes."""

    def __init__(self, output: Path, arguments: Sequence[str], code: Path | str | None = None) -> None:
        """`code`: where Python looks first for what is placed there; None: where it does here."""
        self._output = output
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPRINGTIDE_", "RAY_"))}
        if code is not None:
            environment["PYTHONPATH"] = str(code)
        with output.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**environment, **ENVIRONMENT}, start_new_session=True)

    @property
    def started(self) -> bool:
        return "Ray runtime started" in self._output.read_text()

    def wait_started(self) -> None:
        def started() -> bool:
            assert self.process.poll() is None, f"Ray did not start:\n{last_lines(self._output, 60)}"
            return self.started

        wait_until(started, "Ray to start", START_TIMEOUT_S, lambda: last_lines(self._output, 60))

    @property
    def pids(self) -> set[int]:
        """Of all that is this Ray node: what Ray's actors have started besides is not."""
        try:
            own = psutil.Process(self.process.pid)
            return {own.pid, *(each.pid for each in own.children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()

    @property
    def agents(self) -> int:
        """Nodes of the cluster that were placed here."""
        return sum("NodeAgent" in title_of(pid) for pid in self.pids)

    def records(self) -> list[ClusterRecord]:
        """Of the nodes whose processes were started here, by an agent that was here then."""
        return [record for record in rundir.running_clusters() if raylet_of(record.pid) in {str(pid) for pid in self.pids}]

    def kill(self, and_nodes: bool = False) -> None:
        """All of its processes at once; with `and_nodes`, those of the cluster that were placed here too: the machine is gone."""
        pids = set(self.pids)
        if and_nodes:
            for record in self.records():
                pids |= {record.pid, *(each.pid for each in psutil.Process(record.pid).children(recursive=True))}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def ended(self) -> bool:
        """By itself, and all that it had."""
        return self.process.poll() is not None


class RayMachines:
    """`with RayMachines(head=…) as ray`: a head, and nodes that are added."""

    def __init__(self) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets have long names
        import ray

        self.host = str(ray.util.get_node_ip_address())
        self._port = free_port("ray", self.host, 0)
        self.nodes: list[RayNode] = []

    @property
    def address(self) -> str:
        return f"{self.host}:{self._port}"

    def start_head(self, *more: str) -> RayNode:
        """It places nothing on itself. `more`: options of `ray start`."""
        own = ("--head", "--port", str(self._port), "--include-dashboard=false", f"--temp-dir={self._scratch}", "--num-cpus=0")
        return self._start(*own, *more)

    def add(self, cpus: int, *more: str, code: Path | str | None = None) -> RayNode:
        """`code`: where Python looks first for what is placed there; None: where it does here."""
        return self._start("--address", self.address, f"--num-cpus={cpus}", *more, code=code)

    def _start(self, *arguments: str, code: Path | str | None = None) -> RayNode:
        output = self._scratch / f"start-{len(self.nodes)}.log"
        output.touch()
        node = RayNode(output, [*arguments, "--object-store-memory=80000000"], code)
        self.nodes.append(node)
        return node

    def __enter__(self) -> RayMachines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            for log in sorted(self._scratch.glob("start-*.log")):
                print(f"--- {log.name}\n{last_lines(log, 30)}", file=sys.stderr)
        for node in reversed(self.nodes):
            node.kill(and_nodes=True)
        shutil.rmtree(self._scratch, ignore_errors=True)


def title_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def raylet_of(pid: int) -> str | None:
    """The id of the raylet among whose workers the process was started."""
    return _environment_of(pid).get("RAY_RAYLET_PID")


def placed_nodes() -> dict[str, int]:
    """The process ids of the engines that Ray has placed for these tests, by their nodes' names: other clusters may run here, too."""
    return {
        name: pid
        for record in rundir.running_clusters()
        if _environment_of(record.pid).get("RAY_AUTH_TOKEN") == ENVIRONMENT["RAY_AUTH_TOKEN"]
        for name, pid in record.processes.items()
        if name.startswith(("prefill-", "decode-")) and not name.endswith("-store")
    }


def cards_of_nodes() -> dict[str, str]:
    """The cards that the engines' processes see, by their nodes' names."""
    return {name: _environment_of(pid).get("CUDA_VISIBLE_DEVICES", "") for name, pid in placed_nodes().items()}


def _environment_of(pid: int) -> dict[str, str]:
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


@contextlib.contextmanager
def cluster_on(machines: RayMachines, patience_s: float, ray: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[Cluster]:
    """A cluster whose nodes Ray places on `machines`, and which refuses nothing for load; it may take `patience_s` to start. `ray` are
    further settings of that section."""
    everywhere: dict[str, Any] = {"device": "cpu", "join_port": 0, "valkey_port": 0, "conductor": {"admission": "baseline"}}
    started_with, patience = mock.patch.dict(os.environ, ENVIRONMENT), mock.patch("tests.support.cluster.START_TIMEOUT_S", patience_s)
    with started_with, patience, Cluster(**everywhere, **settings, ray={"address": machines.address, **(ray or {})}) as cluster:
        yield cluster
