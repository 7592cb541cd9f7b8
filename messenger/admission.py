"""Whom a transport may speak with when there is no secret: this machine only, unless somebody has decided otherwise."""

from __future__ import annotations

import ipaddress

from springtide.errors import ConfigError


def check_host(transport: str, host: str, secret: bytes | None, open_to_strangers: bool) -> None:
    """Raises ConfigError where other hosts could come in, or be spoken with, without a secret."""
    if secret is None and not open_to_strangers and not _is_loopback(host):
        raise ConfigError(
            f"{transport} at {host} without cluster_secret: whoever reaches the port could read and write the pool's memory. Set "
            "cluster_secret to the same 16 characters or more on every node, or kv.open_to_strangers to true on a network of your own"
        )


def _is_loopback(host: str) -> bool:
    """Of an address, or of a name as it stands in every hosts file."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
