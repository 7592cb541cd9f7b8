"""The client of Valkey/Redis, what it fails with, and what it is told and answers."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import redis.asyncio as redis
from redis.asyncio.connection import ConnectionPool, RedisSSLContext, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from springtide.errors import ConfigError, Unavailable
from springtide.supervision import heeds_cancellation

UNREACHABLE = (RedisError, OSError, TimeoutError, RuntimeError)
"""What redis-py raises when Valkey cannot be asked. RuntimeError is uvloop's, of a connection that was reset while nobody used it."""
_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_DEFAULT_SENTINEL_PORT = 26379


class ValkeyClient(redis.Redis):
    """A client whose commands end as cancelled when their task has been cancelled meanwhile: redis-py may forget it, and a loop over
    commands would never end."""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ValkeyClient:  # type: ignore[override]  # fewer arguments than redis-py's
        """A client of what the URL names: `redis://`, `rediss://` (TLS) and `unix://` as of redis-py, certificates by `ssl_ca_certs`,
        `ssl_certfile` and `ssl_keyfile`, which are read at each connection, and given authorities are believed alone; or of the master that
        Sentinels name: `redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT…]/SERVICE[/DB]`, with `sentinel_username` and
        `sentinel_password` where those want any, and `rediss+sentinel://` for TLS to both. Raises ValueError, ConfigError for what is no
        such URL."""
        parts = urlsplit(url)
        pool = _sentinel_pool(parts, options) if parts.scheme in _SENTINEL_SCHEMES else ConnectionPool.from_url(url, **options)
        if pool.connection_class is SSLConnection:
            pool.connection_class = _RenewedConnection
        client = cls(connection_pool=pool)
        client.auto_close_connection_pool = True
        return client

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Hangs up, also on a Valkey that does not take part in that: nobody who ends has failed for it. And on Sentinels."""
        with contextlib.suppress(*UNREACHABLE):
            await super().aclose(close_connection_pool)
        if isinstance(self.connection_pool, SentinelConnectionPool):
            with contextlib.suppress(*UNREACHABLE):
                await self.connection_pool.sentinel_manager.aclose()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        command: Callable[..., Awaitable[Any]] = super().execute_command
        return await heeds_cancellation(command)(*args, **options)


class _RenewedConnection(SSLConnection):
    """Reads the files of its certificates each time that it connects: redis-py's reads them once."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = _context(self.ssl_context)
        return super()._connection_arguments()


class _RenewedSentinelConnection(_RenewedConnection, SentinelManagedSSLConnection):
    """The same for the master that Sentinels name."""


def _context(settings: RedisSSLContext) -> ssl.SSLContext:
    """Believes the given authorities, or the system's where there are none: redis-py's believes these beside them."""
    context = ssl.create_default_context(cafile=settings.ca_certs, capath=settings.ca_path, cadata=settings.ca_data)
    context.check_hostname, context.verify_mode = settings.check_hostname, ssl.VerifyMode(settings.cert_reqs)
    for flag in settings.include_verify_flags or ():
        context.verify_flags |= flag
    for flag in settings.exclude_verify_flags or ():
        context.verify_flags &= ~flag
    if settings.certfile is not None:
        context.load_cert_chain(settings.certfile, settings.keyfile, settings.password)
    if settings.min_version is not None:
        context.minimum_version = settings.min_version
    if settings.ciphers is not None:
        context.set_ciphers(settings.ciphers)
    return context


def _sentinel_pool(parts: SplitResult, options: dict[str, Any]) -> ConnectionPool:
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not hosts or not service:
        raise ConfigError(
            f"redis_url: {parts.scheme}://{hosts}{parts.path} must name Sentinels and a service: {parts.scheme}://HOST:PORT,HOST:PORT/SERVICE"
        )
    query = dict(parse_qsl(parts.query))
    of_sentinels: dict[str, Any] = {name: query.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in query}
    # redis-py says what the options of a URL are.
    plain = SplitResult(_SENTINEL_SCHEMES[parts.scheme], "nobody", f"/{database or 0}", urlencode(query), "")
    settings = {**options, **ConnectionPool.from_url(urlunsplit(plain)).connection_kwargs}
    settings.pop("host", None)
    secure = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    if parts.scheme.startswith("rediss"):
        of_sentinels["ssl"] = True
    # The next one is asked at once: redis-py would try for 20 s, and a master often dies with a Sentinel beside it.
    of_sentinels["retry"] = Retry(NoBackoff(), 0)
    sentinel = Sentinel([_host_and_port(host) for host in hosts.split(",")], sentinel_kwargs={**options, **secure, **of_sentinels})  # type: ignore[no-untyped-call]
    for each in sentinel.sentinels:
        if each.connection_pool.connection_class is SSLConnection:
            each.connection_pool.connection_class = _RenewedConnection
    user, _, password = credentials.rpartition(":")
    if password:
        settings["password"] = unquote(password)
    if user:
        settings["username"] = unquote(user)
    kind = _RenewedSentinelConnection if parts.scheme.startswith("rediss") else SentinelManagedConnection
    return SentinelConnectionPool(service, sentinel, connection_class=kind, **settings)  # type: ignore[no-untyped-call]


def member_key(cluster: str, role: str, member_id: str) -> str:
    """Of a member's record (springtide.membership)."""
    return f"{cluster}:member:{role}:{member_id}"


def hosts_in_the_clear(url: str) -> list[str]:
    """Those that the URL names, where it is one without TLS; of Sentinels, for the master may be as far away as they are."""
    parts = urlsplit(url)
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return [_host_and_port(host)[0] or "localhost" for host in hosts] if parts.scheme in ("redis", "redis+sentinel") else []


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        return text.strip("[]"), _DEFAULT_SENTINEL_PORT
    return host.strip("[]"), int(port)


def with_certificates(url: str, certificate: str, key: str, authorities: str) -> str:
    """The `rediss://` URL with the files of a certificate to show and of the authorities to believe."""
    files = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": authorities}
    return f"{url}?{urlencode(files, quote_via=quote)}"


async def asked(command: Any, code: str = "records_unreachable") -> Any:
    """What Valkey answers to a command. Raises Unavailable, of this code, when it cannot be asked."""
    try:
        return await command
    except UNREACHABLE as error:
        raise Unavailable(f"Valkey cannot be asked: {error}", code=code) from None


def text_of(answer: bytes | str) -> str:
    """A part of an answer, whether or not the client decodes them."""
    return answer.decode() if isinstance(answer, bytes) else answer


def bytes_of(answer: bytes | str | None) -> bytes:
    """The same of what may be no text, for others write there, too; empty for what is not there."""
    return answer.encode() if isinstance(answer, str) else answer or b""


def exactly(number: float) -> str:
    """As a word of a command, which Valkey reads and gives back as the same number."""
    return format(number, ".17g")
