"""The certificates of the machine on which a cluster's authority is: made at the start, renewed while it runs."""

from __future__ import annotations

import asyncio
import datetime
import logging
import socket
from dataclasses import dataclass
from pathlib import Path

from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from springtide.config import ClusterConfig, plain_host
from springtide.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
_OWN_NAME = "head"


@dataclass(frozen=True, slots=True)
class OwnCertificates:
    """What this machine's authority issues to this machine's processes."""

    identity: Identity
    authority_directory: Path
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, config: ClusterConfig) -> OwnCertificates | None:
        """Of a placed configuration; None where the processes speak in the clear, or have been given certificates."""
        if config.join_port is None or config.tls.certificate is not None:
            return None
        assert config.run_dir is not None and config.tls.ca_dir is not None, "the configuration must be placed"
        addresses = addresses_of(config.address, *config.tls.names, socket.gethostname())
        return cls(Identity(config.run_dir / "tls"), config.tls.ca_dir, addresses)

    def prepare(self, config: ClusterConfig) -> ClusterConfig:
        """The configuration with certificates, which are there when this returns, and the authority too. Raises ConfigError."""
        if not self.authority_directory.exists():
            Authority.create(self.authority_directory, config.cluster)
        self.renew()
        return config.model_copy(update={"tls": self.identity.settings.model_copy(update={"ca_dir": self.authority_directory})})

    def renew(self) -> None:
        """Makes new ones if it is time, or the authority is another now. Raises ConfigError."""
        authority = Authority.open(self.authority_directory)
        if not self.identity.is_there(self.addresses, authority.bundle, datetime.datetime.now(datetime.UTC)):
            issue_to(self.identity, authority, _OWN_NAME, self.addresses)

    async def keep_renewed(self) -> None:
        """Goes on for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await asyncio.to_thread(self.renew)
            except (ConfigError, OSError) as error:
                logger.error("the certificates of this machine cannot be renewed: %s", error)


def addresses_of(address: str, *names: str) -> tuple[str, ...]:
    """What a machine at this address is called in its certificate, which has no zone of an IPv6 address (`%eth0`). That it is reached by
    `names`, too, is for the head alone to say."""
    called = (address, *names, "localhost", "127.0.0.1", "::1")
    return tuple(dict.fromkeys(plain_host(each).partition("%")[0] for each in called))
