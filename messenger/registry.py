"""The transports that a configuration can name: how each is made, and whether this machine has it (docs/add-a-transport.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from messenger.arena_memory import SharedMemory
from messenger.base import Transport
from messenger.options import RdmaOptions, ShmOptions, TcpOptions
from messenger.rdma.ports import rdma_problem
from messenger.rdma.transport import RdmaTransport
from messenger.shm import ShmTransport
from messenger.tcp.transport import TcpTransport
from springtide.config import ClusterConfig
from springtide.credentials import credentials_of, secret_of
from springtide.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportSite:
    """What a transport serves, and where."""

    memory: SharedMemory
    host: str
    """The address at which other hosts reach it."""
    socket: Path
    """The Unix socket at which this host reaches it."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What is chosen about every transport."""

    shm: ShmOptions = field(default_factory=ShmOptions)
    tcp: TcpOptions = field(default_factory=TcpOptions)
    rdma: RdmaOptions = field(default_factory=RdmaOptions)


@dataclass(frozen=True, slots=True)
class RegisteredTransport:
    make: Callable[[TransportSite, TransportOptions], Transport]
    problem: Callable[[TransportOptions], str | None] | None = None
    """The reason why this machine cannot serve by it, or None when it can. Only transports that not every machine has are asked."""
    is_wanted: Callable[[TransportOptions], bool] = lambda options: False
    """Whether the options speak of it, so that a machine without it is wrong about something."""


TRANSPORTS: Mapping[str, RegisteredTransport] = {
    "shm": RegisteredTransport(lambda site, options: ShmTransport(site.memory, site.socket, options.shm)),
    "rdma": RegisteredTransport(
        lambda site, options: RdmaTransport(site.host, options.rdma),
        problem=lambda options: rdma_problem(options.rdma.devices),
        is_wanted=lambda options: bool(options.rdma.devices),
    ),
    "tcp": RegisteredTransport(lambda site, options: TcpTransport(site.host, options=options.tcp)),
}
"""Transports by name, the best first: TransportName in springtide/choices.py has the same ones in the same order (a test compares them)."""


def make_transport(name: str, site: TransportSite, options: TransportOptions) -> Transport:
    """The transport of that name. Raises ValueError when there is none, SpringtideError when this machine does not have it."""
    if name not in TRANSPORTS:
        raise ValueError(f"there is no transport {name!r}; there are {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name].make(site, options)


def choose_transports(named: Sequence[str] | None, options: TransportOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the transports to serve by, best first, and of those among them that may fail to start: what the configuration has
    `named`, or else all that this machine has. Raises ConfigError when it does not have one that is named or wanted."""
    chosen, optional = [], []
    for name in TRANSPORTS if named is None else named:
        problem_of = TRANSPORTS[name].problem
        problem = None if problem_of is None else problem_of(options)
        if problem is None:
            chosen.append(name)
            if named is None and problem_of is not None:
                optional.append(name)
        elif named is not None or TRANSPORTS[name].is_wanted(options):
            raise ConfigError(f"kv.transports: {problem}")
        else:
            logger.info("without %s: %s", name, problem)
    return tuple(chosen), tuple(optional)


def transport_options_of(config: ClusterConfig) -> TransportOptions:
    """What the configuration chooses. Raises ConfigError without a secret, where one is needed."""
    kv, secret = config.kv, secret_of(config)
    return TransportOptions(
        tcp=TcpOptions(checksums=kv.checksums, secret=secret, open_to_strangers=kv.open_to_strangers),
        rdma=RdmaOptions(
            devices=kv.rdma_devices,
            traffic_class=kv.rdma_traffic_class,
            secret=secret,
            credentials=credentials_of(config),
            open_to_strangers=kv.open_to_strangers,
        ),
    )
