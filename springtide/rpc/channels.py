"""gRPC channels and servers with the options that every process uses."""

from __future__ import annotations

import grpc
import grpc.aio

from springtide.config import in_url
from springtide.credentials import OPEN, Credentials
from springtide.rpc.authentication import CredentialedChannel, OnlyOfTheCluster, RenewedChannel

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MS, PING_TIMEOUT_MS = 2_000, 6_000
"""Whoever has sent nothing for so long is asked by a ping, and lost when the answer takes longer than that. gRPC's own threads answer,
whatever Python is at: this finds processes that are stopped and networks that are cut. Streams whose silence must be noticed sooner, or
where a process may live and do no work, have signs of life of their own (`ClusterConfig.silence_s`). A machine may stand still for some
seconds while a ping is on its way, and there always is one: longer than that, lest what was under way is lost."""
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # The option above bounds only how long data may stay unacknowledged; for the answer to a ping, 60 s are the default.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server hangs up on clients that ask more often.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # The time to connect in: a slow network takes most of a second for a packet and its answer. Who is not there is not waited for longer.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.so_reuseport", 0),
    # The processes of a cluster reach each other at their own addresses, whatever the environment says of proxies.
    ("grpc.enable_http_proxy", 0),
]

_PUBLIC_STREAMS = 1024
"""Calls that run at once over one connection; further ones wait in the client."""
_PUBLIC_CALLS = 1 << 15
"""Over all connections; each takes some 10 KB. Further ones are refused."""
_PUBLIC_WINDOW_BYTES = 16 << 10
"""Of each call, taken in before anybody reads it."""
_PUBLIC_IDLE_MS, _PUBLIC_HANDSHAKE_MS = 75_000, 10_000


def connect(address: str, credentials: Credentials = OPEN) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:PATH`. Connecting happens on first use and again after a loss. Its calls carry the credentials, and
    its connections are TLS where there are certificates, except over Unix sockets."""
    channel: grpc.aio.Channel
    if credentials.tls is None or address.startswith("unix:"):
        channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    else:
        channel = RenewedChannel(lambda tls: grpc.aio.secure_channel(address, tls, options=_OPTIONS), credentials.tls)
    return channel if credentials.token is None else CredentialedChannel(channel, credentials.token)


def new_server(credentials: Credentials = OPEN) -> grpc.aio.Server:
    """Serves who has these credentials; without any, whoever reaches it: for Unix sockets in the run directory, and what makes sure of its
    callers by itself."""
    return grpc.aio.server(options=_OPTIONS, interceptors=() if credentials.token is None else (OnlyOfTheCluster(credentials),))


def listen(server: grpc.aio.Server, address: str, credentials: Credentials) -> str:
    """Has the server listen at `host:port`, port 0 for a free one, with TLS where there are certificates. Returns the address, an IPv6 one
    in brackets. Raises ConfigError where other machines could come in without TLS, RuntimeError where the port is taken."""
    host, _, wanted = address.rpartition(":")
    host = in_url(host)
    credentials.check_host(host)
    tls, address = credentials.tls, f"{host}:{wanted}"
    port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.server_credentials())
    return f"{host}:{port}"


def new_public_server(max_message_bytes: int, max_connections: int, *interceptors: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
    """A server for anybody: with bounds on what one of them can have."""
    bounds: list[tuple[str, int]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", _PUBLIC_STREAMS),
        ("grpc.max_connection_idle_ms", _PUBLIC_IDLE_MS),
        ("grpc.server_handshake_timeout_ms", _PUBLIC_HANDSHAKE_MS),
        ("grpc.http2.lookahead_bytes", _PUBLIC_WINDOW_BYTES),
        # It would widen the windows of a client that is near to megabytes.
        ("grpc.http2.bdp_probe", 0),
    ]
    names = {name for name, _ in bounds}
    options = [*(option for option in _OPTIONS if option[0] not in names), *bounds]
    return grpc.aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=_PUBLIC_CALLS)
