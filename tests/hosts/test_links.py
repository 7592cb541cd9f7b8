"""The links that machines of the tests are on: as long and as narrow as they are said to be."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.netns import Plugged, Switch
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(os.geteuid() != 0, reason="wants root, for namespaces"), pytest.mark.timeout(60)]

DELAY_MS, MBIT_PER_S = 5.0, 80.0
PORT, BYTES = 9000, 4 << 20
# Takes in what comes over each connection, and says how much that was when there is no more.
TAKING = f"""
import socket
with socket.create_server(("", {PORT})) as server:
    while True:
        with server.accept()[0] as connection:
            taken = 0
            while piece := connection.recv(1 << 20):
                taken += len(piece)
            connection.sendall(taken.to_bytes(8, "big"))
"""


@pytest.fixture
def far(switch: Switch) -> Iterator[Plugged]:
    """A namespace in which somebody listens."""
    network = switch.plug(DELAY_MS)
    network.slow(MBIT_PER_S)
    listening = subprocess.Popen([*network.prefix, sys.executable, "-c", TAKING])
    try:
        wait_until(lambda: reached(network), "somebody to listen")
        yield network
    finally:
        listening.kill()
        listening.wait()


def reached(network: Plugged) -> bool:
    try:
        socket.create_connection((network.address, PORT), timeout=0.5).close()
    except OSError:
        return False
    return True


def test_a_connection_takes_a_round_trip(far: Plugged) -> None:
    took_ms = []
    for _ in range(20):
        began = time.monotonic()
        assert reached(far)
        took_ms.append(1000 * (time.monotonic() - began))
    assert min(took_ms) >= 2 * DELAY_MS
    assert statistics.median(took_ms) < 3 * DELAY_MS


def test_bytes_come_no_faster_than_the_rate_and_all_of_them_come(far: Plugged) -> None:
    began = time.monotonic()
    with socket.create_connection((far.address, PORT), timeout=20) as connection:
        connection.sendall(bytes(BYTES))
        connection.shutdown(socket.SHUT_WR)
        assert int.from_bytes(connection.recv(8), "big") == BYTES
    rate = 8e-6 * BYTES / (time.monotonic() - began)
    assert 0.5 * MBIT_PER_S < rate < 1.1 * MBIT_PER_S


@pytest.mark.parametrize("how", ["cut", "swallow"])
def test_nothing_comes_through_until_it_is_mended(far: Plugged, how: str) -> None:
    getattr(far, how)()
    assert not reached(far)
    far.mend()
    wait_until(lambda: reached(far), "it to be mended")
