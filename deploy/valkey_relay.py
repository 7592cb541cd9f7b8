"""A relay in front of the embedded Valkey, which speaks no TLS: machines of the cluster show their certificates, and what they then say
goes to its Unix socket: its password first, for others may have such certificates, too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path

from springtide.telemetry import FewWarnings
from springtide.tls import Tls, accept

logger = logging.getLogger(__name__)

_MAX_HANDSHAKES = 1024
"""At a time: all processes of a cluster come at once when its head has been started again."""
_PIECE_BYTES = 64 << 10
_ASK_AFTER_S, _ASK_EVERY_S, _ASK_TIMES = 15, 5, 3
"""The kernel asks a machine that is silent whether it is there. One that has lost its power, or its cable, says no goodbye."""


class ValkeyRelay:
    """Each connection has one of its own to Valkey, and ends with it."""

    def __init__(self, unix_socket: Path, tls: Tls) -> None:
        self._unix_socket = unix_socket
        self._tls = tls
        self._warnings = FewWarnings(logger)

    async def serve(self, listening: socket.socket) -> None:
        """Serves there until it is cancelled."""
        with listening:
            await accept(listening, self._tls, self._new_connection, _MAX_HANDSHAKES)

    def _new_connection(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_PIECE_BYTES), self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            _ask_when_silent(writer.get_extra_info("socket"))
            try:
                there, back = await asyncio.open_unix_connection(str(self._unix_socket), limit=_PIECE_BYTES)
            except OSError as error:
                self._warnings.warn("Valkey does not answer: %s", error)
                return
            with contextlib.closing(back):
                pumps = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)


def _ask_when_silent(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _ASK_AFTER_S), ("TCP_KEEPINTVL", _ASK_EVERY_S), ("TCP_KEEPCNT", _ASK_TIMES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
