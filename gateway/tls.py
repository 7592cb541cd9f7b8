"""TLS for both APIs from certificate files, which are read again when they change: new connections get the new certificate, those that are
there go on. Files that do not fit are an error at the start; later the last ones that did go on, and the log says so."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from springtide.config import ServerConfig
from springtide.errors import ConfigError
from springtide.supervision import supervised

logger = logging.getLogger(__name__)

POLL_S = 0.5
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where certificate, key and the clients' certificate authorities are."""

    certificate: Path
    key: Path
    client_ca: Path | None

    @classmethod
    def of(cls, config: ServerConfig) -> TlsFiles | None:
        """None: there is to be no TLS."""
        if config.tls_certificate is None or config.tls_key is None:
            return None
        return cls(config.tls_certificate, config.tls_key, config.tls_client_ca)

    @property
    def named(self) -> dict[str, Path]:
        """By their settings."""
        files = {"server.tls_certificate": self.certificate, "server.tls_key": self.key}
        return files | ({} if self.client_ca is None else {"server.tls_client_ca": self.client_ca})


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What was read of files that fit together."""

    state: tuple[tuple[int, ...], ...]
    """Of the files before they were read."""
    context: ssl.SSLContext
    grpc_configuration: grpc.ServerCertificateConfiguration


class Tls:
    """The certificate that is served now."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError, naming the file that is wrong."""
        self._files = files
        self._loaded = _load(files)
        self._refused: tuple[tuple[int, ...], ...] | None = None
        """The state of the files that were found not to fit."""
        self._task: asyncio.Task[None] | None = None

    def http_context(self) -> ssl.SSLContext:
        """For a server's socket; each handshake goes on with the context of the newest files."""
        context = _context(self._files)
        context.sni_callback = self._on_hello
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """gRPC asks at each handshake, on a thread of its own."""
        handed_out = self._loaded

        def newest() -> grpc.ServerCertificateConfiguration | None:
            nonlocal handed_out
            if self._loaded is handed_out:
                return None
            handed_out = self._loaded
            return handed_out.grpc_configuration

        client_ca = self._files.client_ca is not None
        # None is for what has not changed; the stubs lack it.
        return grpc.dynamic_ssl_server_credentials(handed_out.grpc_configuration, newest, client_ca)  # type: ignore[arg-type]

    def start(self) -> None:
        self._task = supervised(self._watch, "tls-files")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_hello(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._loaded.context

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self._refresh)

    def _refresh(self) -> None:
        try:
            state = _state(self._files)
            if state in (self._loaded.state, self._refused):
                return
            self._refused = state
            self._loaded = _load(self._files)
            logger.info("TLS: the certificate of %s has been read again", self._files.certificate)
        except ConfigError as error:
            logger.error("TLS: the certificate as it was before is still served: %s", error.message)
        except OSError:
            logger.debug("TLS: the files are being changed", exc_info=True)


def _state(files: TlsFiles) -> tuple[tuple[int, ...], ...]:
    """Another one after each change. Raises OSError."""
    stats = [os.stat(path) for path in files.named.values()]
    return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


def _load(files: TlsFiles) -> _Loaded:
    """Raises ConfigError."""
    for setting, path in files.named.items():
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ConfigError(f"{setting}: {path} is larger than any PEM file of certificates", param=setting)
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}", param=setting) from None
    state = _state(files)
    authorities = None if files.client_ca is None else files.client_ca.read_bytes()
    pairs = [(files.key.read_bytes(), files.certificate.read_bytes())]
    configuration = grpc.ssl_server_certificate_configuration(pairs, authorities)
    return _Loaded(state, _context(files), configuration)


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_passphrase)
    except (ssl.SSLError, OSError, ValueError) as error:
        what = f"{files.certificate} and {files.key} are not a PEM certificate and its key without a passphrase: {error}"
        raise ConfigError(f"server.tls_certificate: {what}", param="server.tls_certificate") from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except (ssl.SSLError, OSError) as error:
            what = f"{files.client_ca} is no PEM file of certificate authorities: {error}"
            raise ConfigError(f"server.tls_client_ca: {what}", param="server.tls_client_ca") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_passphrase() -> str:
    """Instead of asking for one at the terminal."""
    raise ValueError("the key has a passphrase")
