"""gRPC channels and servers with the options that every process uses."""

from __future__ import annotations

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MS, PING_TIMEOUT_MS = 2_000, 4_000
"""Whoever has sent nothing for so long is asked by a ping, and lost when the answer takes longer than that. gRPC's own threads answer,
whatever Python is at: this finds processes that are stopped and networks that are cut. Streams whose silence must be noticed sooner, or
where a process may live and do no work, have signs of life of their own (`ClusterConfig.silence_s`)."""
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
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.so_reuseport", 0),
]


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:PATH`. Connecting happens on first use and again after a loss."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def new_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_OPTIONS)
