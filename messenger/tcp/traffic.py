"""What the kernel knows of a TCP connection: the bytes that came through, and how long they take."""

from __future__ import annotations

import socket
import struct

from messenger.base import Traffic

_INFO = struct.Struct("=68x2I44x2Q12xI")
"""Of struct tcp_info (linux/tcp.h): tcpi_rtt and tcpi_rttvar, in microseconds; tcpi_bytes_acked and tcpi_bytes_received; tcpi_min_rtt."""
_NO_ROUND_TRIP = 0xFFFFFFFF


def traffic_of(sock: socket.socket) -> Traffic:
    """That of a connected socket; none of one that is closed."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return Traffic()
    round_trip_us, variation_us, acknowledged, received, least_us = _INFO.unpack(info)
    least_s = 0.0 if least_us == _NO_ROUND_TRIP else least_us / 1e6
    return Traffic(received, acknowledged, (round_trip_us + 4 * variation_us) / 1e6, least_s)
