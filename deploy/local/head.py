"""What the head of a cluster of several machines has beside its processes: the join service, and the relay to its Valkey."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from deploy.ca.authority import revoked
from deploy.join.service import Head, JoinService, what_is_told
from deploy.join.tokens import TokenBook
from deploy.local.certificates import OwnCertificates
from deploy.local.plan import VALKEY_SOCKET, embedded_password
from deploy.valkey_relay import ValkeyRelay
from gateway.http_server import bind
from springtide.config import ClusterConfig, in_url
from springtide.credentials import credentials_of
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
