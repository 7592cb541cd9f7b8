"""uvicorn, run inside a process that minds its own signals."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from springtide.errors import ConfigError

KEEP_ALIVE_S = 75
STOP_TIMEOUT_S = 1


class HttpServer(uvicorn.Server):
    def __init__(self, app: FastAPI) -> None:
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        super().__init__(settings)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals alone, where uvicorn would take them over."""
        yield


def bind(host: str, port: int, name: str) -> socket.socket:
    """A socket for the server to listen on. Raises ConfigError, calling the port by the setting's `name`."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"{name}: cannot listen on {host}:{port}: {error.strerror}", param=name) from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        # So that clients are queued, not refused, from here on.
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ConfigError(f"{name}: cannot listen on {host}:{port}: {error.strerror}", param=name) from None
    return bound
