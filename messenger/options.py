"""What can be chosen about each transport, and whom one that reaches other hosts may speak with."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from springtide.config import is_loopback
from springtide.credentials import OPEN, Credentials
from springtide.errors import ConfigError

DEFAULT_LANES = 4
"""Data lanes to one peer, where there are cores for them."""
MAX_LANES = 32
"""Most data lanes of one connection. The C part has room for twice as many: those that end are still there while others take their
place."""


@dataclass(frozen=True, slots=True)
class ShmOptions:
    helpers: int = field(default_factory=lambda: max(0, min(3, len(os.sched_getaffinity(0)) // 2 - 1)))
    """Threads that help the event loop's to copy large batches; the second hyperthread of a core brings nothing."""
    connect_timeout_s: float = 2.0
    populate: bool = False
    """Get all pages of a peer's memory when it is mapped: copies are faster from the first on, but a large arena that was not touched yet
    takes a second or two, in which this process does nothing else (Python holds its lock in madvise)."""


@dataclass(frozen=True, slots=True)
class TcpOptions:
    lanes: int = field(default_factory=lambda: min(DEFAULT_LANES, max(2, len(os.sched_getaffinity(0)))))
    """Data lanes to one peer that large batches are striped over. More of them than cores cost a tenth of the rate."""
    connect_timeout_s: float = 2.0
    peer_timeout_s: float = 1.2
    """A peer that is silent on all lanes for so long in the middle of an exchange is lost, for longer where round trips are slow. Pauses of
    this process do not count."""
    checksums: bool = False
    """Send a checksum with every slice, both ways, on connections that are opened from here."""
    secret: bytes | None = field(default=None, repr=False)
    """The cluster's secret: only who knows it is served, and believed. Without one, only this machine is spoken with."""
    open_to_strangers: bool = False
    """Do without a secret on other addresses than loopback too: whoever reaches the port can read and write the region."""

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= MAX_LANES:
            raise ValueError(f"TcpOptions.lanes must be from 1 to {MAX_LANES}, not {self.lanes}")


@dataclass(frozen=True, slots=True)
class RdmaOptions:
    devices: tuple[str, ...] = ()
    """Devices to use, in this order: `mlx5_0`, or `mlx5_0:1` for one of its ports; none named: every active port."""
    traffic_class: int = 0
    """The traffic class of RoCE packets: the DSCP that the fabric's lossless class goes by, times 4."""
    connect_timeout_s: float = 3.0
    silence_s: float = 0.8
    """A path on which nothing comes back for so long is given up. NICs report a lost peer themselves, sooner than this as a rule."""
    secret: bytes | None = field(default=None, repr=False)
    """The cluster's secret: only who knows it gets a queue pair. Without one, the control RPC speaks with this machine only."""
    credentials: Credentials = OPEN
    """Of the control RPC's connections."""
    open_to_strangers: bool = False
    """Do without a secret on other addresses than loopback too: whoever reaches the port can read and write the region."""

    def __post_init__(self) -> None:
        if self.silence_s <= 0:
            raise ValueError(f"RdmaOptions.silence_s must be above 0, not {self.silence_s}")
        if not 0 <= self.traffic_class <= 255:
            raise ValueError(f"RdmaOptions.traffic_class must be between 0 and 255, not {self.traffic_class}")


def check_host(transport: str, host: str, options: TcpOptions | RdmaOptions) -> None:
    """Raises ConfigError where other hosts could come in, or be spoken with, without a secret."""
    if options.secret is None and not options.open_to_strangers and not is_loopback(host):
        raise ConfigError(
            f"{transport} at {host} without cluster_secret: whoever reaches the port could read and write the pool's memory. Set "
            "cluster_secret to the same 16 characters or more on every node, or kv.open_to_strangers to true on a network of your own"
        )
