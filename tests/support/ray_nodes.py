"""A Ray cluster of several nodes on this machine, by `ray start` as an operator would, each node to be lost by force.

`ray stop` ends every Ray of the machine, so what was started here is ended by its process ids.
"""

from __future__ import annotations

import asyncio
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
from deploy.ray.placement import Phase
from deploy.ray.record import PlacementBook, PlacementRecord
from springtide.errors import Unavailable
from springtide.valkey import ValkeyClient
from tests.support.cluster import Cluster
from tests.support.installation import Installation, this_installation
from tests.support.waiting import wait_until

START_TIMEOUT_S = 300.0
STOP_S = 16.0
"""How long `ray stop` waits for processes to end."""
GROUP_NICE = -8
"""Of a Ray node's session: one share of the processors is too little for the six processes that begin in it, for which Ray waits 15 s."""
RECONNECT_S = 4
"""How long a Ray node, and whoever is connected to it, lives without the head: a minute unless it is told otherwise."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
    "RAY_health_check_period_ms": "1000",
    # Half a minute, unless it is told otherwise, is less than what a busy machine may take.
    "RAY_agent_register_timeout_ms": str(int(1000 * START_TIMEOUT_S)),
    # A worker for each processor, of which nobody makes use.
    "RAY_prestart_worker_first_driver": "0",
}


class RayNode:
    """`ray start --block`: one node, with all its processes."""

    def __init__(
        self, output: Path, arguments: Sequence[str], code: Path | str | None = None, installation: Installation | None = None
    ) -> None:
        """`code`: where Python looks first for what is placed there; None: where it does here. `installation`: from which it is started;
        None: that of whoever runs the tests."""
        self._output = output
        installation = installation or this_installation()
        self._command = [*installation.ray, "start", "--block", "--disable-usage-stats", *arguments]
        own = {name: value for name, value in installation.environment.items() if not name.startswith("RAY_")}
        self._environment = own | ENVIRONMENT | ({} if code is None else {"PYTHONPATH": str(code)})
        self._begin()

    def _begin(self) -> None:
        with self._output.open("wb") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True)
        with contextlib.suppress(OSError):  # which root alone may, where the kernel shares by session
            Path(f"/proc/{self.process.pid}/autogroup").write_text(f"{GROUP_NICE}\n")
        self._gone = False
        """Whether all its processes have ended, and their ids may be those of others."""

    @property
    def started(self) -> bool:
        return "Ray runtime started" in self._output.read_text()

    def wait_started(self) -> None:
        def started() -> bool:
            if self.process.poll() is not None and "timed out during startup" in self._output.read_text():
                self.kill()
                self._begin()  # half a minute is all that Ray gives a node, and a busy machine may take longer
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

    def _session(self) -> Iterator[int]:
        """The same, and what a `ray start` that has failed has left."""
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self.process.pid:
                    yield pid

    @property
    def agents(self) -> int:
        """Nodes of the cluster that were placed here."""
        return sum("NodeAgent" in title_of(pid) for pid in self.pids)

    def records(self) -> list[ClusterRecord]:
        """Of the nodes whose processes were started here, by an agent that was here then."""
        return [record for record in rundir.running_clusters() if raylet_of(record.pid) in {str(pid) for pid in self.pids}]

    def kill(self, and_nodes: bool = False) -> None:
        """All of its processes at once; with `and_nodes`, those of the cluster that were placed here too: the machine is gone."""
        if self._gone:
            return
        pids = {*self.pids, *self._session()}
        if and_nodes:
            for record in self.records():
                pids |= {record.pid, *(each.pid for each in psutil.Process(record.pid).children(recursive=True))}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._gone = True

    def stop(self) -> None:
        """As `ray stop` does, which would end those of other tests, too: SIGTERM to all, and SIGKILL to whom is there then."""
        processes = [psutil.Process(pid) for pid in self.pids]
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
        _, left = psutil.wait_procs(processes, STOP_S)
        for each in left:
            each.kill()
        self.process.wait()
        self._gone = True

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
        return self._start(*own, "--no-monitor", *more)

    def add(self, cpus: int, *more: str, code: Path | str | None = None, installation: Installation | None = None) -> RayNode:
        """`code` and `installation`: as of RayNode."""
        return self._start("--address", self.address, f"--num-cpus={cpus}", *more, code=code, installation=installation)

    def _start(self, *arguments: str, code: Path | str | None = None, installation: Installation | None = None) -> RayNode:
        output = self._scratch / f"start-{len(self.nodes)}.log"
        output.touch()
        node = RayNode(output, [*arguments, "--include-log-monitor=false", "--object-store-memory=80000000"], code, installation)
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


def placement_of(cluster: Cluster) -> PlacementRecord:
    """What the placer says of its nodes. Raises AssertionError while that cannot be read."""

    async def read() -> PlacementRecord | None:
        async with ValkeyClient.from_url(cluster.record.redis_url) as valkey:
            return await PlacementBook(valkey, cluster.record.cluster, cluster.credentials).read()

    try:
        record = asyncio.run(read())
    except Unavailable as error:
        raise AssertionError(error.message) from None
    assert record is not None, "the placer has said nothing yet"
    return record


def all_serve(record: PlacementRecord) -> bool:
    return all(node.phase is Phase.SERVING for node in record.nodes.values())


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
    """A cluster whose nodes Ray places on `machines`, and which refuses nothing for load; it may take `patience_s` to start, and as long to
    end. `ray` are further settings of that section."""
    everywhere: dict[str, Any] = {"device": "cpu", "join_port": 0, "valkey_port": 0, "conductor": {"admission": "baseline"}}
    started_with, limits = mock.patch.dict(os.environ, ENVIRONMENT), ("START_TIMEOUT_S", "STOP_TIMEOUT_S")
    patience = mock.patch.multiple("tests.support.cluster", **dict.fromkeys(limits, patience_s))
    with started_with, patience, Cluster(**everywhere | settings, ray={"address": machines.address, **(ray or {})}) as cluster:
        yield cluster
