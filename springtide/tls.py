"""TLS from certificate files, which are read again when they change: new connections get the new certificate, those that are there go on.
Files that do not fit are an error at the start; later the last ones that did go on, and the log says so."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import grpc

from springtide.config import ServerConfig, TlsConfig
from springtide.errors import ConfigError
from springtide.metrics import CERTIFICATE_EXPIRY

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
HANDSHAKE_S = 10.0
"""A server waits for a handshake for so long."""
_ACCEPT_AGAIN_S = 1.0
_MAX_FILE_BYTES = 1 << 20
_EXPLICIT_VERSION, _UTC_TIME = 0xA0, 0x17
"""Tags of DER."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where a certificate, its key and the certificate authorities of the other side are, and what the settings are called that say so."""

    certificate: Path
    """PEM: the chain, the own certificate first."""
    key: Path
    authorities: Path | None
    """PEM: whose certificates are believed. None: the other side need not have one."""
    settings: tuple[str, str, str]
    """Of the certificate, the key and the authorities."""

    @property
    def named(self) -> dict[str, Path]:
        """By their settings."""
        paths = (self.certificate, self.key, self.authorities)
        return {setting: path for setting, path in zip(self.settings, paths, strict=True) if path is not None}


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What was read of files that fit together."""

    state: tuple[tuple[int, ...], ...]
    """Of the files before they were read."""
    number: int
    expires_at: float
    """Of the certificate, Unix time."""
    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes
    key: bytes
    authorities: bytes | None


class Tls:
    """A certificate, as it is now. Looks at the files when there is a connection, twice a second at the most. Any thread may use it."""

    def __init__(self, files: TlsFiles, name: str = "") -> None:
        """`name`: what the metrics call it, where they tell when it ends. Raises ConfigError, naming the file that is wrong."""
        self.files = files
        self._lock = threading.Lock()
        self._loaded = _load(files, 0)
        self._looked_at = time.monotonic()
        self._refused: tuple[tuple[int, ...], ...] | None = None
        """The state of the files that were found not to fit."""
        if name:
            CERTIFICATE_EXPIRY.labels(name).set_function(lambda: self._newest().expires_at)

    @property
    def number(self) -> int:
        """How often the files have been read again: the same number, the same certificate."""
        return self._newest().number

    def server_context(self) -> ssl.SSLContext:
        """For one connection of a server's. Who would resume a session that was begun with other files has to begin anew, and is asked for
        a certificate again: OpenSSL resumes those of one context, whatever that believes by then."""
        return self._newest().server

    def client_context(self) -> ssl.SSLContext:
        """For one connection of gRPC's: shows the newest certificate, and believes the authorities alone."""
        return self._newest().client

    def server_credentials(self) -> grpc.ServerCredentials:
        """gRPC asks at each handshake, on a thread of its own, whether there is a newer certificate."""
        handed_out = self._loaded

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal handed_out
            newest = self._newest()
            if newest is handed_out:
                return None
            handed_out = newest
            return _configuration(newest)

        # None is for what has not changed; the stubs lack it.
        certified_only = self.files.authorities is not None
        return grpc.dynamic_ssl_server_credentials(_configuration(handed_out), newer, certified_only)  # type: ignore[arg-type]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel, which shows this certificate as long as there is the channel."""
        newest = self._newest()
        return grpc.ssl_channel_credentials(newest.authorities, newest.key, newest.certificate)

    def _newest(self) -> _Loaded:
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= LOOK_EVERY_S:
                self._look()
                self._looked_at = now
            return self._loaded

    def _look(self) -> None:
        try:
            state = _state(self.files)
            if state in (self._loaded.state, self._refused):
                return
            self._refused = state
            self._loaded = _load(self.files, self._loaded.number + 1)
            logger.info("TLS: the certificate of %s has been read again", self.files.certificate)
        except ConfigError as error:
            logger.error("TLS: the certificate as it was before is still used: %s", error.message)
        except OSError:
            logger.debug("TLS: the files are being changed", exc_info=True)


def public_tls(server: ServerConfig) -> Tls | None:
    """What a gateway's APIs are served with; None: without TLS. Raises ConfigError."""
    if server.tls_certificate is None or server.tls_key is None:
        return None
    settings = ("server.tls_certificate", "server.tls_key", "server.tls_client_ca")
    return Tls(TlsFiles(server.tls_certificate, server.tls_key, server.tls_client_ca, settings), "public")


def cluster_tls(config: TlsConfig) -> Tls | None:
    """By what the processes of a cluster know each other, one for all of this process; None: they have no certificates. Raises
    ConfigError."""
    if config.certificate is None or config.key is None or config.ca is None:
        return None
    return _tls_of(TlsFiles(config.certificate, config.key, config.ca, ("tls.certificate", "tls.key", "tls.ca")))


@functools.cache
def _tls_of(files: TlsFiles) -> Tls:
    return Tls(files, "cluster")


async def accept(listening: socket.socket, tls: Tls, new_protocol: Callable[[], asyncio.BaseProtocol], most_handshakes: int) -> NoReturn:
    """Takes connections until it is cancelled, and gives each a protocol once its handshake is through. When `most_handshakes` have not
    ended and another begins, the oldest is given up: those that are silent do not keep others out."""
    loop = asyncio.get_running_loop()
    listening.setblocking(False)
    pending: dict[asyncio.Task[None], None] = {}
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, for one
                logger.error("TLS: no connection can be taken: %s", error.strerror)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(pending) >= most_handshakes:
                oldest = next(iter(pending))
                del pending[oldest]
                oldest.cancel()
            handshake = asyncio.create_task(_shake_hands(connection, tls.server_context(), new_protocol))
            pending[handshake] = None
            handshake.add_done_callback(lambda ended: pending.pop(ended, None))
            await asyncio.sleep(0)  # there may be connections without end
    finally:
        for handshake in pending:
            handshake.cancel()


async def _shake_hands(connection: socket.socket, context: ssl.SSLContext, new_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
    with contextlib.suppress(OSError):
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(new_protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_S)


def client_context(authorities: bytes | None) -> ssl.SSLContext:
    """For a client that believes these authorities (PEM) alone, without a certificate of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authorities is not None:
        # What is not ASCII is of comments, and as text OpenSSL takes none.
        context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
    return context


def _state(files: TlsFiles) -> tuple[tuple[int, ...], ...]:
    """Another one after each change. Raises OSError."""
    stats = [os.stat(path) for path in files.named.values()]
    return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


def _load(files: TlsFiles, number: int) -> _Loaded:
    """Raises ConfigError."""
    for setting, path in files.named.items():
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ConfigError(f"{setting}: {path} is larger than any PEM file of certificates", param=setting)
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}", param=setting) from None
    state, server = _state(files), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = files.certificate.read_bytes(), files.key.read_bytes()
    authorities = None if files.authorities is None else files.authorities.read_bytes()
    with _naming(files.settings[2], f"{files.authorities} is no PEM file of certificate authorities"):
        client = client_context(authorities)
        if files.authorities is not None:
            server.load_verify_locations(files.authorities)
            server.verify_mode = ssl.CERT_REQUIRED
    with _naming(files.settings[0], f"{files.certificate} and {files.key} are not a PEM certificate and its key without a passphrase"):
        for context in (server, client):
            context.load_cert_chain(files.certificate, files.key, password=_no_passphrase)
        expires_at = expiry_of(certificate)
    client.set_alpn_protocols(["h2"])
    return _Loaded(state, number, expires_at, server, client, certificate, key, authorities)


@contextlib.contextmanager
def _naming(setting: str, what: str) -> Iterator[None]:
    """What does not fit is a ConfigError that says so of the setting."""
    try:
        yield
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{setting}: {what}: {error}", param=setting) from None


def expiry_of(certificate: bytes) -> float:
    """The end of the first certificate in a PEM file, Unix time. Read here, as whoever is given certificates has nothing else to read: of
    RFC 5280's TBSCertificate the second time of `validity`. Raises ValueError, IndexError for what is none."""
    text = certificate.decode("latin-1")
    if ssl.PEM_HEADER not in text:
        raise ValueError(f"there is no {ssl.PEM_HEADER}")
    der = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)])
    tbs, *_ = _elements(_elements(der)[0][1])
    fields = _elements(tbs[1])
    validity = fields[4 if fields[0][0] == _EXPLICIT_VERSION else 3]
    tag, value = _elements(validity[1])[1]
    written = value.decode()
    if tag == _UTC_TIME:
        written = f"{'19' if written[:2] >= '50' else '20'}{written}"
    return datetime.strptime(written, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Tags and contents of DER's elements, one after another."""
    found, at = [], 0
    while at < len(der):
        tag, size, begin = der[at], der[at + 1], at + 2
        if size >= 0x80:
            begin += size - 0x80
            size = int.from_bytes(der[at + 2 : begin])
        at = begin + size
        found.append((tag, der[begin:at]))
    return found


def _configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)], loaded.authorities)


def _no_passphrase() -> str:
    """Instead of asking for one at the terminal."""
    raise ValueError("the key has a passphrase")
