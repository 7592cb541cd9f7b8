"""gRPC channels and servers with the options that every process uses."""

from __future__ import annotations

import grpc
import grpc.aio

from springtide.credentials import OPEN, Credentials
from springtide.rpc.authentication import CredentialedChannel, OnlyOfTheCluster

MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.so_reuseport", 0),
]


def connect(address: str, credentials: Credentials = OPEN) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:PATH`. Connecting happens on first use and again after a loss. Its calls carry the credentials."""
    channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    return channel if credentials.token is None else CredentialedChannel(channel, credentials.token)


def new_server(credentials: Credentials = OPEN) -> grpc.aio.Server:
    """Serves who has these credentials; without any, whoever reaches it: for the public API, Unix sockets in the run directory, and what
    makes sure of its callers by itself."""
    return grpc.aio.server(options=_OPTIONS, interceptors=() if credentials.token is None else (OnlyOfTheCluster(credentials),))
