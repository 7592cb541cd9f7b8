"""Ports for servers under test."""

from __future__ import annotations

import socket

from springtide.config import LOOPBACK


class ReservedPorts:
    """Free ports, which the kernel gives to nobody else until they are released, however often the servers there are started afresh: they
    stay bound, and nobody listens. Servers bind with SO_REUSEADDR, and may."""

    def __init__(self, count: int, host: str = LOOPBACK) -> None:
        self._sockets = [_bound(host) for _ in range(count)]
        self.numbers = [int(each.getsockname()[1]) for each in self._sockets]

    def release(self) -> None:
        for each in self._sockets:
            each.close()


def _bound(host: str) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, 0))
    return bound
