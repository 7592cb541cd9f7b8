"""The ports that serve: found, named by configuration, paired with a peer's."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from messenger.rdma.verbs import RdmaUnavailable, Verbs, kernel_devices, load

logger = logging.getLogger(__name__)


class LinkLayer(IntEnum):
    """What a port is connected to. A queue pair joins two ports of the same kind. The numbers travel to peers."""

    INFINIBAND = 1
    ETHERNET = 2


@dataclass(frozen=True, slots=True)
class PortAddress:
    """The place where a port is reached."""

    link: LinkLayer
    gid: str
    """The address in IPv6 notation, all eight groups."""
    lid: int
    """Local identifier, of InfiniBand only; 0 with RoCE."""
    mtu: int
    """The active port's MTU, as the enum ibv_mtu."""


@dataclass(frozen=True, slots=True)
class Port:
    device: str
    number: int
    gid_index: int
    address: PortAddress

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


@dataclass(frozen=True, slots=True)
class GidEntry:
    """A row of a port's GID table."""

    index: int
    is_roce_v2: bool
    gid: str


def rdma_problem(devices: Sequence[str] = ()) -> str | None:
    """The reason why this machine cannot serve by RDMA, or None when it can. Cheap where there is no device."""
    try:
        find_ports(devices)
    except RdmaUnavailable as error:
        return error.message
    return None


def find_ports(wanted: Sequence[str] = ()) -> list[Port]:
    """The active ports, in the order of `wanted` (`mlx5_0`, or `mlx5_0:1` for one port), or all of them by name.

    Raises RdmaUnavailable when there is none, or when one of `wanted` is missing or not active.
    """
    devices = kernel_devices()
    if not devices:
        raise RdmaUnavailable("this machine has no RDMA device (nothing in /sys/class/infiniband)")
    verbs = load()
    found = {str(port): port for device in devices for port in _ports_of(verbs, device)}
    if not wanted:
        if not found:
            raise RdmaUnavailable(f"no port of {', '.join(devices)} is active with a usable address")
        return list(found.values())
    chosen: dict[str, Port] = {}
    for name in wanted:
        matching = {key: port for key, port in found.items() if name in (key, port.device)}
        if not matching:
            raise RdmaUnavailable(f"kv.rdma_devices names {name!r}, which is not among the active ports {', '.join(found) or '(none)'}")
        chosen.update(matching)
    return list(chosen.values())


def choose_gid(entries: Iterable[GidEntry], link: LinkLayer) -> GidEntry | None:
    """The row of a GID table to be reached at. InfiniBand: the first. RoCE: version 2, since version 1 is not routed, and rather an IPv4
    address than a global IPv6 one than a link-local one, which holds only within one segment. None when no row will do."""
    if link is LinkLayer.INFINIBAND:
        return min(entries, key=lambda entry: entry.index, default=None)
    usable = [entry for entry in entries if entry.is_roce_v2]
    return min(usable, key=lambda entry: (_distance(ipaddress.IPv6Address(entry.gid)), entry.index), default=None)


def pair_ports(here: Sequence[PortAddress], there: Sequence[PortAddress]) -> list[tuple[int, int]]:
    """The pairs of ports that are joined, as indices: both lists in order, the shorter one repeated, per kind of link. Sides whose devices
    are named alike meet rail by rail."""
    pairs = []
    for link in LinkLayer:
        mine = [index for index, address in enumerate(here) if address.link is link]
        theirs = [index for index, address in enumerate(there) if address.link is link]
        if mine and theirs:
            pairs += [(mine[i % len(mine)], theirs[i % len(theirs)]) for i in range(max(len(mine), len(theirs)))]
    return pairs


def _distance(gid: ipaddress.IPv6Address) -> int:
    if gid.ipv4_mapped is not None:
        return 0
    return 2 if gid.is_link_local else 1


def _ports_of(verbs: Verbs, device: str) -> list[Port]:
    try:
        context = verbs.device.Context(name=device)
    except verbs.error as error:
        logger.warning("cannot open the RDMA device %s: %s", device, error)
        return []
    try:
        count = context.query_device().phys_port_cnt
        return [port for number in range(1, count + 1) if (port := _port(verbs, context, device, number)) is not None]
    finally:
        context.close()


def _port(verbs: Verbs, context: Any, device: str, number: int) -> Port | None:
    attributes = context.query_port(number)
    if attributes.state != verbs.enums.IBV_PORT_ACTIVE:
        return None
    link = LinkLayer.ETHERNET if attributes.link_layer == verbs.enums.IBV_LINK_LAYER_ETHERNET else LinkLayer.INFINIBAND
    rows = [
        GidEntry(row.gid_index, row.gid_type == verbs.enums.IBV_GID_TYPE_ROCE_V2, row.gid_str())
        for row in context.query_gid_table(attributes.gid_tbl_len)
        if row.port_num == number
    ]
    row = choose_gid(rows, link)
    if row is None:
        logger.warning("%s:%d has no RoCE v2 address and is not used", device, number)
        return None
    return Port(device, number, row.index, PortAddress(link, row.gid, int(attributes.lid), int(attributes.active_mtu)))
