"""What is cut off is not heard, and is heard again afterwards: in a network of the test's own."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.injectors import Nemesis, mount_disk
from tests.chaos.isolation import isolating
from tests.chaos.plan import Fault

PATIENCE_S = 0.5
_ECHO = """
import socket, sys, threading
def echo(client):
    while data := client.recv(100):
        client.sendall(data)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
for port in map(int, sys.argv[1:]):
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", 0))
    made.connect(("127.0.0.1", port))
    print(made.getsockname()[1], flush=True)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""


class OneNode:
    """As much of a cluster as the nemesis of networks needs: a process that answers, connected to others."""

    def __init__(self, *others: OneNode) -> None:
        self._node = subprocess.Popen((sys.executable, "-c", _ECHO, *(str(other.port) for other in others)), stdout=subprocess.PIPE)
        assert self._node.stdout is not None
        self.port = int(self._node.stdout.readline())
        self.ports_to_others = [int(self._node.stdout.readline()) for _ in others]

    def processes(self, name: str) -> dict[str, psutil.Process]:
        return {name: psutil.Process(self._node.pid)}

    def close(self) -> None:
        self._node.kill()


class Client:
    def __init__(self, port: int) -> None:
        self._port = port
        self._numbers = itertools.count()

    async def connect(self, from_port: int = 0) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", from_port))
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=sock)

    async def hears(self) -> bool:
        """Whether what is sent now comes back: late echoes of what was sent before are not taken for it."""
        line = b"%d\n" % next(self._numbers)
        self._writer.write(line)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while heard := await self._reader.readline():
                    if heard == line:
                        return True
        except (TimeoutError, ConnectionError):
            pass
        return False


async def in_isolation(ssd_dir: Path) -> None:
    others = OneNode(), OneNode()
    node = OneNode(others[0])
    try:
        nemesis = Nemesis(node, time.monotonic, lambda size: None, ssd_dir)  # type: ignore[arg-type]
        client = Client(node.port)
        await client.connect()
        beside = Client(others[1].port)
        await beside.connect(from_port=node.ports_to_others[0])
        assert await client.hears() and await beside.hears()

        cut = asyncio.create_task(nemesis.inject(Fault(0.0, "cut", "decode-0", 2.0)))
        async with asyncio.timeout(2.0):
            while await client.hears():
                pass
        assert await beside.hears(), "whoever has a port of the same number is not cut"
        with pytest.raises(TimeoutError):  # new connections fare no better, and are not told why
            async with asyncio.timeout(PATIENCE_S):
                await Client(node.port).connect()
        await cut
        async with asyncio.timeout(20.0):  # TCP sends again, after growing pauses
            while not await client.hears():
                pass

        await nemesis.inject(Fault(0.0, "reset", "decode-0"))
        assert not await client.hears()
        assert await beside.hears()
        await client.connect()
        assert await client.hears()

        await nemesis.inject(Fault(0.0, "narrow", "all", 0.1, amount=4))
        assert await client.hears()

        assert mount_disk(ssd_dir, 1 << 20)
        full = asyncio.create_task(nemesis.inject(Fault(0.0, "disk full", "decode-0", 1.0)))
        async with asyncio.timeout(10.0):
            while psutil.disk_usage(str(ssd_dir)).free:  # noqa: ASYNC110 (nothing signals it)
                await asyncio.sleep(0.01)
        await full
        assert psutil.disk_usage(str(ssd_dir)).free
        print(*(injection.not_injected for injection in nemesis.injections), sep="\n")
    finally:
        for each in (node, *others):
            each.close()


def test_networks_are_cut_reset_and_narrowed_and_disks_filled(tmp_path: Path) -> None:
    command = isolating([sys.executable, "-m", "tests.chaos.test_chaos_networks", str(tmp_path)])
    if command is None:
        pytest.skip("no namespaces can be made here")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    not_injected = [reason for reason in result.stdout.splitlines() if reason != "None" and "no token bucket" not in reason]
    assert not not_injected


if __name__ == "__main__":
    asyncio.run(in_isolation(Path(sys.argv[1])))
