"""`springtide node`: has this machine join a running cluster, and keeps what it lends to it running until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import SecretStr

from deploy.ca.authority import new_request
from deploy.ca.identity import Identity
from deploy.join import client
from deploy.join.settings import joined_config
from deploy.join.tokens import Token
from deploy.join.words import JoinReply, JoinRequest, RenewRequest, checked_name
from deploy.local.certificates import addresses_of
from deploy.local.display import Display
from deploy.local.plan import ClusterPaths, check_redis_is_private, free_port, metrics_ports, node_processes, with_threads
from deploy.local.rundir import ClusterRecord, RunDir
from deploy.local.session import Machine, Session, Work, own_run_dir
from engine.formats.files import describe
from springtide.capacity import check_memory, memory_bytes
from springtide.choices import NodeRole
from springtide.config import ClusterConfig, in_url
from springtide.errors import ConfigError, InvalidRequest, SpringtideError, Unauthenticated, Unavailable
from springtide.modelinfo import ModelInfo
from springtide.process import stage_id
from springtide.valkey import with_certificates

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""How often a machine asks whom the cluster believes."""
NAME_TAKEN_S = 10.0
"""For so long a node of the same name may still be listed that has just ended."""
Beside: TypeAlias = Callable[[ClusterConfig], Mapping[str, Work]]
"""Work by its names, of a configuration with which this machine has joined."""
WhileWanted: TypeAlias = Callable[[ClusterConfig], Coroutine[Any, Any, None]]
"""Goes on for as long as the node of such a configuration is wanted."""
_LAST_PORT = 65535
_LONGEST_SUFFIX = ".stage-1023.ring.sock"


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Which stage of a prefill group is here: `number` of `stages`, counted from 0."""

    group: str
    number: int
    stages: int


def stage_place(role: NodeRole, name: str | None, group: str | None, stage: str | None) -> StagePlace | None:
    """What `--group` and `--stage` say. Raises ConfigError."""
    if group is None and stage is None:
        return None
    if group is None or stage is None:
        raise ConfigError("--group, --stage: a stage has both: the group's name, and which one it is of how many")
    if role != "prefill":
        raise ConfigError(f"--group: stages are of prefill groups, not of a {role} node")
    if name is not None:
        raise ConfigError(f"--name: {name!r} is not needed: a stage's name comes of its group's")
    number, _, stages = stage.partition("/")
    if not (number.isdecimal() and stages.isdecimal() and int(number) < int(stages) and int(stages) > 1):
        raise ConfigError(f"--stage: it must be I/X with I from 0 to X - 1 and X at least 2, not {stage!r}")
    return StagePlace(group, int(number), int(stages))


@dataclass(frozen=True, slots=True)
class NodeOptions:
    role: NodeRole
    join: tuple[str, ...]
    """host:port of the head's join service, and of others; the first that answers is asked."""
    token: str | None
    """None: of a machine that has joined before, whose run directory has been kept."""
    name: str | None
    config_file: Path | None
    settings: Mapping[str, Any]
    """By dotted names, of the command line."""
    stage: StagePlace | None = None
    """Of a prefill group over several machines; None: the node is whole."""


def run_node(
    options: NodeOptions, display: Display, *, verbose: bool, beside: Beside = lambda _: {}, while_wanted: WhileWanted | None = None
) -> int:
    """Runs a node in the foreground until SIGTERM or SIGINT; returns the exit code. `beside`: what this process does besides, once it has
    been let in. `while_wanted` returns once the node is to leave without a signal. Raises ConfigError, Unauthenticated, Unavailable,
    UnsupportedModel before anything is started."""
    token = None if options.token is None else Token.parse(options.token)
    wanted = _wanted_run_dir(options)
    if token is None and (wanted is None or not Identity(wanted / "tls").certificate.is_file()):
        raise ConfigError(
            "--token: this machine has not joined before, or not with this --run-dir, which would have its certificate; "
            "`springtide token create` at the head makes a token"
        )
    name = _name(options)
    address = str(options.settings.get("address") or _address_towards(options.join))
    with own_run_dir(f"springtide node {name}", wanted, f"{name}{_LONGEST_SUFFIX}") as run_dir, display:
        identity = Identity(run_dir.path / "tls")
        reply = asyncio.run(_join(options, token, name, address, identity))
        display.step("join", f"{' or '.join(options.join)} has let {name} in, at {address}", done=True)
        machine = _machine(options, name, address, reply, identity, run_dir)
        machine = replace(
            machine,
            beside={**machine.beside, **beside(machine.config)},
            while_wanted=while_wanted and partial(while_wanted, machine.config),
        )
        return asyncio.run(_run(machine, options.role, name, display, verbose))


def _name(options: NodeOptions) -> str:
    """What the node is called in the cluster. Raises ConfigError."""
    option, name = "--name", options.name or f"{options.role}-{socket.gethostname().partition('.')[0]}"
    if options.stage is not None:
        option, name = "--group", stage_id(options.stage.group, options.stage.number)
    try:
        return checked_name(name)
    except ValueError as error:
        raise ConfigError(f"{option}: {name!r} is no name of a node: {error}") from None


async def _run(machine: Machine, role: NodeRole, name: str, display: Display, verbose: bool) -> int:
    def greeting(record: ClusterRecord, took_s: float) -> str:
        what = {"prefill": "a store and a prefill engine", "decode": "a store and a decode engine", "gateway": f"a gateway on {record.url}"}
        what["instance"] = "a store and an engine that prefills and decodes"
        if machine.config.prefill_node.spread_stages:
            what["prefill"] = f"a store and a stage, of {machine.config.prefill_node.stages}, of a prefill group"
        return (
            f"\n{name} is in the cluster {machine.config.cluster!r} as {what.get(role, f'a {role}')}, at {machine.config.address} "
            f"(ready after {took_s:.1f} s; logs in {machine.paths.run_dir / 'logs'}). Ctrl-C or SIGTERM has it leave."
            f"{f' Machines join at {record.join_address}, too.' if record.join_address else ''}"
        )

    return await Session(machine, display, verbose, greeting).run()


async def _join(options: NodeOptions, token: Token | None, name: str, address: str, identity: Identity) -> JoinReply:
    """Lets the cluster know of this machine; its certificate is in place when this returns."""
    if identity.certificate.is_file():
        try:
            return await _come_back(options, name, address, identity)
        except (Unauthenticated, Unavailable, OSError, ValueError) as error:
            if token is None:
                kind = type(error) if isinstance(error, SpringtideError) else ConfigError
                raise kind(f"{error}. If its certificate from before is not believed any more, this machine needs a --token") from None
            logger.info("the certificate from before is not used: %s", error)
    assert token is not None, "who has neither was told so"
    known = token
    key, request = new_request(addresses_of(address))
    asked = JoinRequest(token=str(token), role=options.role, name=name, request=request.decode())

    async def ask(service: str) -> JoinReply:
        return await client.join(service, await client.discover(service, known), asked)

    return await _let_in(options.join, ask, key, identity)


async def _come_back(options: NodeOptions, name: str, address: str, identity: Identity) -> JoinReply:
    """The same, with the certificate that is there in the place of a token."""
    key, request = new_request(addresses_of(address))
    certificate, signature = identity.certificate.read_text(), identity.sign(request).hex()
    asked = JoinRequest(role=options.role, name=name, request=request.decode(), certificate=certificate, signature=signature)
    authorities = identity.authorities.read_bytes()
    return await _let_in(options.join, lambda service: client.join(service, authorities, asked), key, identity)


async def _let_in(services: Sequence[str], ask: Callable[[str], Awaitable[JoinReply]], key: bytes, identity: Identity) -> JoinReply:
    deadline = asyncio.get_running_loop().time() + NAME_TAKEN_S
    while True:
        try:
            reply = await client.first_that_answers(services, ask)
            break
        except InvalidRequest as error:
            if error.code != "name_taken" or asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(1.0)
    if reply.certificate:
        identity.install(key, reply.certificate.encode(), reply.authorities.encode())
    return reply


def _machine(options: NodeOptions, name: str, address: str, reply: JoinReply, identity: Identity, run_dir: RunDir) -> Machine:
    role = options.role
    counts = {"instances": int(role == "instance"), "prefill": int(role == "prefill"), "decode": int(role == "decode")}
    given = {**options.settings, "address": address, "run_dir": str(run_dir.path)}
    if options.stage is not None:
        given |= {"prefill_node.stages": options.stage.stages, "prefill_node.spread_stages": True}
    config = joined_config({**reply.settings, **counts}, options.config_file, given)
    if options.stage is None and config.prefill_node.spread_stages:
        raise ConfigError("prefill_node.spread_stages: it is for `--group` and `--stage` to set")
    ca_dir, config = config.tls.ca_dir, _resolved(config, role, reply, identity)
    paths = ClusterPaths(run_dir.path)
    beside: dict[str, Work] = {}
    if reply.certificate:
        beside["renew certificates"] = lambda: _keep_renewed(options.join, identity, addresses_of(config.address))
    join_address = ""
    if ca_dir is not None:
        # Imported here alone: it takes an HTTP server, which other machines do without.
        from deploy.local.head import further_joins

        beside["let machines in"] = further_joins(ca_dir, config, reply)
        join_address = f"{in_url(config.address)}:{config.join_port}"
    processes = node_processes(role, name, config, paths, metrics_ports(config), 0 if options.stage is None else options.stage.number)
    return Machine(
        config,
        _checked_info(config, reply, role),
        paths,
        processes,
        run_dir.temporary,
        beside,
        serves_requests=False,
        join_address=join_address,
    )


def _resolved(config: ClusterConfig, role: NodeRole, reply: JoinReply, identity: Identity) -> ClusterConfig:
    """Raises ConfigError where a certificate is to have been given, or a port is taken."""
    if role not in ("gateway", "conductor"):
        check_memory(config.kv, 1, memory_bytes())
    tls = identity.settings if reply.certificate else config.tls
    if tls.certificate is None or tls.key is None or tls.ca is None:
        raise ConfigError(
            "tls.certificate: this cluster is given its certificates: set tls.certificate, tls.key and tls.ca of this machine"
        )
    redis_url = config.redis_url or reply.redis_url
    check_redis_is_private(redis_url, config.tls)
    if reply.certified_valkey:
        redis_url = with_certificates(redis_url, str(tls.certificate), str(tls.key), str(tls.ca))
    server = config.server
    if role == "gateway":
        ports = {"port": free_port("server.port", server.host, server.port)}
        ports["grpc_port"] = free_port("server.grpc_port", server.host, server.grpc_port)
        server = server.model_copy(update=ports)
    secret = SecretStr(reply.cluster_secret) if reply.cluster_secret else None
    changes = {"tls": tls, "redis_url": redis_url, "cluster_secret": secret, "server": server}
    return with_threads(config.model_copy(update=changes))


def _checked_info(config: ClusterConfig, reply: JoinReply, role: NodeRole) -> ModelInfo:
    """What is known of the model, with its place here. Raises ConfigError where its files are not the cluster's."""
    fields = {**reply.model_info, "eos_token_ids": tuple(reply.model_info["eos_token_ids"])}
    cluster = ModelInfo(**fields)
    if role in ("store", "conductor"):
        return cluster
    here = describe(config.model, config.max_context)
    if here.fingerprint != cluster.fingerprint:
        raise ConfigError(
            f"model: {config.model} on this machine is not what the cluster serves, {cluster.name}: its fingerprint is {here.fingerprint}, "
            f"not {cluster.fingerprint}; give the same files with --model"
        )
    return here


async def _keep_renewed(services: Sequence[str], identity: Identity, addresses: tuple[str, ...]) -> None:
    """Goes on for ever: follows the cluster's authorities, and has the certificate replaced in time."""
    said = ""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            authorities = identity.authorities.read_bytes()
            believed = await client.first_that_answers(services, partial(client.believed, authorities=authorities))
            said = ""
            if identity.is_there(addresses, believed, datetime.datetime.now(datetime.UTC)):
                continue
            key, request = new_request(addresses)
            certificate, signature = identity.certificate.read_text(), identity.sign(request).hex()
            asked = RenewRequest(certificate=certificate, request=request.decode(), signature=signature)
            reply = await client.first_that_answers(services, partial(client.renew, authorities=authorities, asked=asked))
            identity.install(key, reply.certificate.encode(), reply.authorities.encode())
        except (SpringtideError, OSError, ValueError) as error:
            if str(error) != said:  # once: the head may be away for long
                said = str(error)
                logger.warning("the certificate of this machine cannot be renewed now: %s", said)


def _wanted_run_dir(options: NodeOptions) -> Path | None:
    wanted = options.settings.get("run_dir")
    return None if wanted is None else Path(str(wanted))


def join_services(text: str) -> tuple[str, ...]:
    """The addresses that `--join` names. Raises ConfigError."""
    services = tuple(each.strip() for each in text.split(","))
    for host, _, port in (each.rpartition(":") for each in services):
        if not host or not port.isdecimal() or int(port) > _LAST_PORT:
            raise ConfigError(f"--join: {text!r} is no HOST:PORT, nor several with commas between them")
    return services


def _address_towards(services: Sequence[str]) -> str:
    """The address of this machine from which it reaches the first of them that can be reached. Raises ConfigError."""
    *others, last = services
    for service in others:
        with contextlib.suppress(ConfigError):
            return _own_address(service)
    return _own_address(last)


def _own_address(service: str) -> str:
    """Raises ConfigError where this machine has none from which it reaches that."""
    host, _, port = service.rpartition(":")
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"--join: {service!r} is no HOST:PORT that this machine can reach: {error}") from None
