"""The cluster under test: `springtide up` as users run it, with further gateways where the shape has them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import httpx
import psutil
import yaml

from springtide.config import LOOPBACK, SECRET_VARIABLE
from tests.chaos.shapes import Shape
from tests.support.cluster import Cluster
from tests.support.ports import ReservedPorts

SUPERVISOR = "supervisor"


class ClusterUnderTest:
    """`with ClusterUnderTest(shape, model, directory, ssd_dir) as cluster`: ready when entered. Its run directory is `directory`/run."""

    def __init__(self, shape: Shape, model: Path, directory: Path, ssd_dir: Path | None = None) -> None:
        self.shape = shape
        self._directory = directory
        self.up = Cluster(**shape.configuration(model, directory / "run", ssd_dir))
        self._extra: dict[str, ExtraGateway] = {}
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> ClusterUnderTest:
        self.up.__enter__()
        try:
            for name in self.shape.topology.gateways[1:]:
                self._extra[name] = ExtraGateway(name, self.up, self._directory)
            self.note_processes()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for gateway in self._extra.values():
            gateway.stop()
        self.up.__exit__(kind, error, trace)

    def stop(self) -> None:
        """Raises TimeoutExpired when it does not in time."""
        for gateway in self._extra.values():
            gateway.stop()
        self.up.stop()

    @property
    def logs(self) -> Path:
        return self._directory / "run" / "logs"

    @property
    def alive(self) -> bool:
        return self.up.supervisor.is_running() and self.up.supervisor.status() != psutil.STATUS_ZOMBIE

    @property
    def urls(self) -> dict[str, str]:
        """Of the gateways, by name."""
        return {self.shape.topology.gateways[0]: self.up.url, **{name: gateway.url for name, gateway in self._extra.items()}}

    def revive(self) -> None:
        """Starts further gateways again that have ended, as a supervisor would."""
        for gateway in self._extra.values():
            gateway.revive()

    def processes(self, name: str | None = None) -> dict[str, psutil.Process]:
        """Everything that runs, by name, or a node's, with its store and children. Stages and ranks are `prefill-0/1` and so on."""
        found: dict[str, psutil.Process] = {}
        for process_name, pid in self._named().items():
            if name is not None and process_name.removesuffix("-store") != name:
                continue
            with contextlib.suppress(psutil.Error):
                found[process_name] = psutil.Process(pid)
                if not process_name.endswith("-store"):
                    found |= {f"{process_name}/{index}": child for index, child in enumerate(_children(found[process_name]))}
        return found

    def process(self, name: str) -> psutil.Process | None:
        """A process or a child; None while there is none of that name."""
        return self.processes(name.partition("/")[0].removesuffix("-store")).get(name)

    def everything(self) -> dict[str, psutil.Process]:
        return {SUPERVISOR: self.up.supervisor, **self.processes()}

    def note_processes(self) -> None:
        """So that what outlives the cluster is known later."""
        for process in self.everything().values():
            self._seen.setdefault(process.pid, process)

    def left_over(self) -> list[psutil.Process]:
        """After it has stopped."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=5.0)
        return alive

    def _named(self) -> dict[str, int]:
        record = self.up.record.processes
        return {**record, **{name: gateway.pid for name, gateway in self._extra.items() if gateway.pid is not None}}


class ExtraGateway:
    """A gateway beside the one that `springtide up` starts, with its command and environment and other ports."""

    def __init__(self, name: str, up: Cluster, directory: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`changes`: sections of the configuration in the place of those that `springtide up` has."""
        pid = up.pid_of("gateway-0")
        assert pid is not None, "a shape with several gateways has them in processes of their own"
        first = psutil.Process(pid)
        with contextlib.suppress(psutil.Error):
            first = next((child for child in first.children() if "gateway" in child.cmdline()), first)
        run_dir = Path(up.record.run_dir)
        settings = yaml.safe_load((run_dir / "config.yaml").read_text())
        self._ports = ReservedPorts(2)
        port, grpc_port = self._ports.numbers
        settings["server"] |= {"port": port, "grpc_port": grpc_port}
        settings |= changes
        config = directory / f"{name}.yaml"
        config.write_text(yaml.safe_dump(settings))
        self.url = f"http://{LOOPBACK}:{port}"
        self._command = [
            sys.executable, "-P", "-m", "gateway", "--config", str(config), "--model-info", str(run_dir / "model.json"),
            "--run-dir", str(run_dir), "--instance-id", name,
        ]  # fmt: skip
        self._environment = {**first.environ(), SECRET_VARIABLE: up.record.cluster_secret, "SPRINGTIDE_PARENT_PID": str(os.getpid())}
        self._log = run_dir / "logs" / f"{name}.log"
        self._process = self._start()
        up.wait_until(self._healthy, f"{name} to serve")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process.poll() is None else None

    def revive(self) -> None:
        if self._process.poll() is not None:
            self._process = self._start()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ports.release()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True)

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=1, trust_env=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


def _children(process: psutil.Process) -> Iterator[psutil.Process]:
    for child in sorted(process.children(recursive=True), key=lambda child: child.pid):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                yield child
