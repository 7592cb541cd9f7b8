"""A real cluster for tests: `springtide up` in a process of its own, with free ports, and the means to hurt it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import httpx
import psutil
import redis
import yaml

from deploy.local import rundir
from deploy.local.logs import last_lines
from deploy.local.rundir import ClusterRecord
from springtide.config import TlsConfig
from springtide.credentials import Credentials
from springtide.membership import Member, read_record
from springtide.protocol import wire
from springtide.protocol.status import ClusterStatus
from springtide.rpc import conductor_pb2 as pb
from springtide.rpc import conductor_pb2_grpc, store_pb2, store_pb2_grpc
from springtide.rpc.authentication import TOKEN_KEY
from tests.support.installation import Installation, this_installation
from tests.support.ports import ReservedPorts
from tests.support.waiting import wait_until

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
OBSERVERS = frozenset({"alertmanager", "prometheus"})
"""Of `observe`: in no membership."""
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Cluster:
    """`with Cluster(prefill=2, kv={"block_tokens": 32}) as cluster:` – the arguments are those of the configuration file. Without
    `instances` there is a node of each role at least, unless it is said to be none.

    Ready when entered; gone, with everything it made, when left.
    """

    def __init__(self, **settings: Any) -> None:
        self._ports = ReservedPorts(2)
        port, grpc_port = self._ports.numbers
        server = {"port": port, "grpc_port": grpc_port, **settings.get("server", {})}
        self._scratch = tempfile.TemporaryDirectory(prefix="springtide-test-")
        split = {} if "instances" in settings else {"prefill": 1, "decode": 1}
        self._settings = {**split, **settings, "server": server}
        self.profile: str | None = settings.get("profile")
        """For machines that join: it is each one's own."""
        self._process: subprocess.Popen[bytes] | None = None
        self._names: frozenset[str] = frozenset()
        self._before: dict[str, int] = {}
        """Incarnations by name when something was last killed."""

    def __enter__(self) -> Cluster:
        try:
            self.start(this_installation())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def start(self, installation: Installation, **settings: Any) -> None:
        """`springtide up` of this installation, until it is ready; from here on with these settings, too."""
        self._settings |= settings
        config = Path(self._scratch.name, "config.yaml")
        config.write_text(yaml.safe_dump(self._settings))
        with self._output.open("ab") as output:
            command = [*installation.springtide, "up", "--config", str(config)]
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=installation.environment)
        self._wait(lambda: self._record_if_any() is not None and self.record.ready, "the cluster to become ready", START_TIMEOUT_S)
        self._names = frozenset(self.record.processes) - OBSERVERS

    def kill_all(self) -> None:
        """kill -9 of `springtide up`, with which its processes end. `start` brings it back, where it has a run directory and ports of its
        own."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            print(self.logs(), file=sys.stderr)
        try:
            self.stop()
        finally:
            self._ports.release()
            self._scratch.cleanup()

    def stop(self) -> None:
        """SIGTERM, as an operator would. Raises TimeoutExpired, having killed it, when it does not end in time. Idempotent."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(self.logs(), file=sys.stderr)
            self._process.kill()
            raise

    @property
    def supervisor(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    @property
    def record(self) -> ClusterRecord:
        record = self._record_if_any()
        assert record is not None, f"the cluster is gone:\n{self.logs()}"
        return record

    @property
    def url(self) -> str:
        return self.record.url

    @property
    def grpc_address(self) -> str:
        return self.record.grpc_address

    @property
    def credentials(self) -> Credentials:
        return self.record.credentials

    def channel(self, address: str) -> grpc.Channel:
        """To one of its processes, with certificates where it has any."""
        return _channel(address, self.credentials)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call to one of its processes carries."""
        return _metadata(self.credentials)

    @property
    def model(self) -> str:
        """The name that clients use."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"][0]["id"])

    def pid_of(self, name: str) -> int | None:
        """Of `prefill-0`, `decode-1-store`, `conductor-0`, `gateway-0` or `valkey`; None while it is down."""
        return self.record.processes.get(name)

    def pids_of(self, names: Iterable[str]) -> list[int]:
        """Of those of them that are up."""
        return [pid for name in names if (pid := self.pid_of(name)) is not None]

    def kill(self, name: str) -> int:
        """kill -9; returns the process id that it had."""
        pid = self.pid_of(name)
        assert pid is not None, f"{name} is down already"
        self._before = {**self._incarnations(), "valkey": self.record.processes.get("valkey", 0)}
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_ready(self, restarted: str | None = None, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every process runs and is announced and the Conductor knows them all; `restarted`, which may be a store's or an engine's
        name, in another incarnation than at the last `kill` (an engine takes a new one after losing its store too)."""
        self._wait(lambda: self._whole(restarted), f"the cluster to be whole again ({restarted} restarted)", timeout_s)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it holds of the running cluster; an AssertionError of its own counts as no."""

        def holds() -> bool:
            try:
                return condition()
            except (grpc.RpcError, AssertionError):
                return False

        self._wait(holds, what, timeout_s)

    def members(self) -> list[Member]:
        """Everybody whose lease holds; nobody while Valkey is down."""
        return members_of(self.record.redis_url, self.record.cluster, self.credentials)

    def status(self) -> ClusterStatus:
        """The Conductor's view. Raises grpc.RpcError or AssertionError while it has none."""
        return status_of(self.members(), self.credentials)

    def ready_instances(self) -> set[str]:
        """The engines that take requests. Raises as `status` does."""
        return {each.instance.instance_id for each in self.status().instances if each.ready}

    def metric(self, name: str, metric: str, labels: dict[str, str] | None = None) -> float:
        """The sum of a metric's samples that carry `labels`, as process `name` reports it now; 0 when it has none yet."""
        return metric_at(self._metrics_address(name), metric, labels, TlsConfig.model_validate(self.record.tls))

    def metrics_page(self, name: str, accept: str = "text/plain") -> str:
        """All metrics of process `name`, as it shows them now to who accepts that."""
        return metrics_page(self._metrics_address(name), TlsConfig.model_validate(self.record.tls), accept)

    def wait_metric(
        self, name: str, metric: str, condition: Callable[[float], bool], labels: dict[str, str] | None = None, timeout_s: float = 30.0
    ) -> None:
        self._wait(lambda: condition(self.metric(name, metric, labels)), f"{metric} {labels or ''} of {name}", timeout_s)

    def log(self, name: str, lines: int = 40) -> str:
        """The end of a process's log."""
        return last_lines(Path(self.record.run_dir, "logs", f"{name}.log"), lines)

    def logs(self) -> str:
        """What `springtide up` printed and the end of every log, for a failure's report."""
        parts = ["--- springtide up", last_lines(self._output, 100)]
        record = self._record_if_any()
        if record is not None:
            for path in sorted(Path(record.run_dir, "logs").glob("*.log")):
                parts += [f"--- {path.name}", last_lines(path, 30)]
        return "\n".join(parts)

    @property
    def _output(self) -> Path:
        return Path(self._scratch.name, "up.log")

    def _record_if_any(self) -> ClusterRecord | None:
        assert self._process is not None
        return next((record for record in rundir.running_clusters() if record.pid == self._process.pid), None)

    def _metrics_address(self, name: str) -> str:
        pid = self.pid_of(name)
        address = next((member.metrics_address for member in self.members() if member.pid == pid and member.metrics_address), "")
        assert address, f"{name} announces no metrics address"
        return address

    def _incarnations(self) -> dict[str, int]:
        """Of everybody who is announced by the process that runs under the name now."""
        named = {f"{member.member_id}-store" if member.role == "store" else member.member_id: member for member in self.members()}
        running = self.record.processes
        # An engine of both roles has another name as a prefill instance.
        return {name: member.incarnation for name, member in named.items() if member.pid == running.get(name.removesuffix(".prefill"))}

    def _whole(self, restarted: str | None) -> bool:
        now = {**self._incarnations(), "valkey": self.record.processes.get("valkey", 0)}
        if not self._names <= now.keys():
            return False
        affected = {restarted, restarted.removesuffix("-store")} if restarted else set()
        if any(now.get(name) == self._before.get(name) for name in affected & self._names):
            return False
        try:
            status = self.status()
            known = {instance.instance.instance_id: instance.incarnation for instance in status.instances if instance.ready}
            engines = {
                name: incarnation
                for name, incarnation in now.items()
                if name.startswith(("prefill", "decode", "instance")) and "store" not in name
            }
            return known == engines and httpx.get(f"{self.url}/ready", timeout=5, verify=False).status_code == httpx.codes.OK
        except (grpc.RpcError, httpx.HTTPError, AssertionError):
            return False

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        def holds() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"springtide up ended while waiting for {what}:\n{self.logs()}"
            return condition()

        wait_until(holds, what, timeout_s, self.logs, POLL_S)


def status_of(members: Sequence[Member], credentials: Credentials) -> ClusterStatus:
    """The view of a Conductor among these. Raises grpc.RpcError or AssertionError while it has none."""
    conductors = [member for member in members if member.role == "conductor"]
    assert conductors, "no Conductor is announced"
    with _channel(conductors[0].address, credentials) as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        return wire.CLUSTER_STATUS.decode(stub.GetCluster(pb.GetClusterRequest(), timeout=5, metadata=_metadata(credentials)))


@contextlib.contextmanager
def hanging(pids: Sequence[int]) -> Iterator[None]:
    """SIGSTOP; afterwards they go on."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)


def pins_of(store_socket: Path) -> set[str]:
    """The ids of what the store keeps."""
    with grpc.insecure_channel(f"unix:{store_socket}") as channel:
        return {pin.pin_id for pin in store_pb2_grpc.StoreStub(channel).ListPins(store_pb2.ListPinsRequest(), timeout=10).pins}


def evict_all(store_socket: Path) -> None:
    """By order of an operator on the store's machine: all that nobody uses."""
    with grpc.insecure_channel(f"unix:{store_socket}") as channel:
        store_pb2_grpc.StoreStub(channel).Evict(store_pb2.EvictRequest(all=True), timeout=10)


def cached_blocks(status: ClusterStatus, instance_id: str) -> int:
    """What the Conductor knows the instance's store to hold."""
    return next(one.cached_blocks for one in status.instances if one.instance.instance_id == instance_id)


def _channel(address: str, credentials: Credentials) -> grpc.Channel:
    # It is reached at its own address, whatever the environment says of proxies.
    options, tls = (("grpc.enable_http_proxy", 0),), credentials.tls
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.channel_credentials(), options=options)


def _metadata(credentials: Credentials) -> tuple[tuple[str, str], ...]:
    return ((TOKEN_KEY, str(credentials.token)),)


def members_of(redis_url: str, cluster: str, credentials: Credentials) -> list[Member]:
    """Everybody whose lease holds; nobody while Valkey is down."""
    try:
        with redis.Redis.from_url(redis_url, socket_timeout=2) as valkey:
            keys = list(valkey.scan_iter(match=f"{cluster}:member:*"))
            values = valkey.mget(keys) if keys else []
    except redis.RedisError:
        return []
    members = []
    for value in values:
        with contextlib.suppress(ValueError):  # a stranger's
            members += [read_record(value, credentials)] if value else []
    return members


def metric_at(address: str, metric: str, labels: dict[str, str] | None = None, tls: TlsConfig | None = None) -> float:
    """The sum of a metric's samples that carry `labels`, as the process whose metrics are there reports it now; 0 when it has none."""
    total = 0.0
    for line in metrics_page(address, tls).splitlines():
        sample = _SAMPLE.match(line)
        if sample and sample["name"] == metric and (labels or {}).items() <= dict(_LABEL.findall(sample["labels"] or "")).items():
            total += float(sample["value"])
    return total


def metrics_page(address: str, tls: TlsConfig | None = None, accept: str = "text/plain") -> str:
    """What the process whose metrics are there shows of them, to who accepts that."""
    scheme, verify = "http", ssl.create_default_context()
    if tls is not None and tls.certificate is not None and tls.key is not None:
        scheme, verify = "https", ssl.create_default_context(cafile=tls.ca)
        verify.load_cert_chain(tls.certificate, tls.key)
    return httpx.get(f"{scheme}://{address}/metrics", headers={"accept": accept}, timeout=10, trust_env=False, verify=verify).text
