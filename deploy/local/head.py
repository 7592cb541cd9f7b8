"""What the head of a cluster of several machines has beside its processes: the join service, and the relay to its Valkey. The join
service of another machine, which has a copy of its authority."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from deploy.ca.authority import Authority, revoked
from deploy.join.service import Head, JoinService, check_copy, what_is_told
from deploy.join.tokens import TokenBook
from deploy.join.words import JoinReply
from deploy.local.certificates import OwnCertificates
from deploy.local.plan import VALKEY_SOCKET, embedded_password, free_port
from deploy.local.session import Work
from deploy.valkey_relay import ValkeyRelay
from gateway.http_server import bind
from springtide.config import ClusterConfig, in_url
from springtide.credentials import credentials_of
from springtide.errors import ConfigError
from springtide.membership import Membership
from springtide.modelinfo import ModelInfo
from springtide.tls import cluster_tls
from springtide.valkey import ValkeyClient


@dataclass(frozen=True, slots=True)
class HeadServices:
    """Of a placed configuration that lets other machines in, with its certificates. In the supervisor's own process: nothing that serves
    requests asks them for anything."""

    config: ClusterConfig
    info: ModelInfo
    certificates: OwnCertificates | None
    embedded_valkey: bool

    @property
    def join_address(self) -> str:
        return f"{in_url(self.config.address)}:{self.config.join_port}"

    async def run(self) -> None:
        """Serves until it is cancelled. Raises ConfigError where a port is taken."""
        config = self.config
        tls = cluster_tls(config.tls)
        assert tls is not None and config.redis_url is not None and config.run_dir is not None
        relayed = f"rediss://:{embedded_password(config)}@{in_url(config.address)}:{config.valkey_port}/0"
        directory = None if self.certificates is None else self.certificates.authority_directory
        told = what_is_told(config, self.info, relayed if self.embedded_valkey else config.redis_url, self.embedded_valkey)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_joins(config, Head(told, directory, tls)))
            if self.embedded_valkey:
                relay = ValkeyRelay(Path(config.run_dir, VALKEY_SOCKET), tls, lambda: {} if directory is None else revoked(directory))
                tasks.create_task(relay.serve(bind(config.address, config.valkey_port, "valkey_port")))


def further_joins(ca_dir: Path, config: ClusterConfig, reply: JoinReply) -> Work:
    """The join service of a machine that has been let in by `reply`: others join there while the head is away. Raises
    ConfigError, Unavailable."""
    if not reply.certificate:
        raise ConfigError("tls.ca_dir: this cluster is given its certificates, and has no authority that could be copied")
    if config.address not in reply.settings["join_hosts"]:
        raise ConfigError(f"tls.ca_dir: machines are to join at {config.address}, too: set join_hosts at the head to [{config.address}]")
    check_copy(Authority.open(ca_dir), reply.authorities.encode())
    assert config.join_port is not None, "a cluster that can be joined has a port for it"
    free_port("join_port", config.address, config.join_port)
    tls = cluster_tls(config.tls)
    assert tls is not None, "who is let in by a certificate has it"
    head = Head(reply.model_copy(update={"certificate": "", "authorities": ""}), ca_dir, tls, copied=True)
    return lambda: serve_joins(config, head)


async def serve_joins(config: ClusterConfig, head: Head) -> None:
    """The join service of a placed configuration, until it is cancelled. Raises ConfigError where its port is taken."""
    assert config.join_port is not None and config.redis_url is not None
    credentials = credentials_of(config)
    valkey = ValkeyClient.from_url(config.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0)
    membership = Membership.of(config, credentials)
    try:
        service = JoinService(head, TokenBook(valkey, config.cluster, credentials), membership)
        await service.serve(bind(config.address, config.join_port, "join_port"))
    finally:
        await membership.close()
        await valkey.aclose()
