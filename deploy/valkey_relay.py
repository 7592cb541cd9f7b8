"""A relay in front of the embedded Valkey, which speaks no TLS: machines of the cluster show their certificates, and what they then say
goes to its Unix socket: its password first, for others may have such certificates, too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cryptography import x509

from deploy.ca.authority import is_revoked
from springtide.errors import ConfigError
from springtide.supervision import end
from springtide.telemetry import FewWarnings
from springtide.tls import Tls, accept

logger = logging.getLogger(__name__)

_MAX_HANDSHAKES = 1024
"""At a time: all processes of a cluster come at once when its head has been started again."""
_PIECE_BYTES = 64 << 10
_LOOK_EVERY_S = 1.0
_ASK_AFTER_S, _ASK_EVERY_S, _ASK_TIMES = 15, 5, 3
"""The kernel asks a machine that is silent whether it is there. One that has lost its power, or its cable, says no goodbye."""


class ValkeyRelay:
    """Each connection has one of its own to Valkey, and ends with it."""

    def __init__(self, unix_socket: Path, tls: Tls, revoked: Callable[[], Mapping[str, float]] = dict) -> None:
        """`revoked`: the names, and when, of machines that are spoken with no more. It may raise ConfigError."""
        self._unix_socket = unix_socket
        self._tls = tls
        self._revoked = revoked
        self._connections: dict[asyncio.StreamWriter, x509.Certificate] = {}
        self._warnings = FewWarnings(logger)

    async def serve(self, listening: socket.socket) -> None:
        """Serves there until it is cancelled."""
        with listening:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._shut_out())
                await accept(listening, self._tls, self._new_connection, _MAX_HANDSHAKES)

    def _new_connection(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_PIECE_BYTES), self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            _ask_when_silent(writer.get_extra_info("socket"))
            certificate = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
            if self._refused([certificate]):
                return
            try:
                there, back = await asyncio.open_unix_connection(str(self._unix_socket), limit=_PIECE_BYTES)
            except OSError as error:
                self._warnings.warn("Valkey does not answer: %s", error)
                return
            with contextlib.closing(back):
                pumps = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]
                self._connections[writer] = certificate
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    del self._connections[writer]
                    await end(*pumps)

    async def _shut_out(self) -> None:
        """Goes on for ever: connections end whose machines are shut out."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            refused = set(self._refused(self._connections.values()))
            for writer, certificate in list(self._connections.items()):
                if certificate in refused:
                    writer.transport.abort()

    def _refused(self, certificates: Collection[x509.Certificate]) -> Collection[x509.Certificate]:
        """Those of them with which a machine is spoken with no more."""
        try:
            names = self._revoked()
        except ConfigError as error:
            self._warnings.warn("Valkey is closed to other machines: %s", error.message)
            return certificates
        return [certificate for certificate in certificates if is_revoked(certificate, names)] if names else []


def _ask_when_silent(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _ASK_AFTER_S), ("TCP_KEEPINTVL", _ASK_EVERY_S), ("TCP_KEEPCNT", _ASK_TIMES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
