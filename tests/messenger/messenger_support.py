"""Real parts for the tests of the Messenger: nodes with an arena and a listening transport, in this process or in one of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from messenger.arena_memory import SharedMemory
from messenger.base import Connection, Endpoint, Identity, Slice, Transport
from messenger.options import RdmaOptions, TcpOptions
from messenger.registry import TransportOptions, TransportSite, make_transport
from messenger.router import host_id
from springtide.ids import new_incarnation
from tests.support import waiting
from tests.support.faulty_transport import FaultyTransport
from tests.support.inproc_transport import InprocHub, InprocTransport
from tests.support.transport_faults import FaultPlan

ROOT = Path(__file__).parents[2]
GRANULE = 1 << 20
NUM_GRANULES = 24
TIMEOUT_S = 20.0
"""For operations that are to succeed."""
RDMA_OPTIONS = RdmaOptions(connect_timeout_s=8.0, silence_s=2.0)
"""Patient: these tests run in an emulated machine."""
OPTIONS = TransportOptions(tcp=TcpOptions(lanes=3), rdma=RDMA_OPTIONS)


@dataclass
class Node:
    """One side. `generations` start at 1 + the granule's number."""

    name: str
    memory: SharedMemory
    transport: Transport
    endpoint: Endpoint = field(init=False)
    notes: list[tuple[str, bytes]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    observe: Callable[[Node], bool] | None = None
    """Called at every notification; what it returns goes to `observed`."""
    observed: list[bool] = field(default_factory=list)

    @property
    def bytes(self) -> np.ndarray:
        return self.memory.region.memory

    @property
    def generations(self) -> np.ndarray:
        return self.memory.region.generations

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.memory.header.incarnation)

    def on_notify(self, peer: str, payload: bytes) -> None:
        self.notes.append((peer, payload))
        self.changed.set()
        if self.observe is not None:
            self.observed.append(self.observe(self))

    async def start(self) -> None:
        address = await self.transport.listen(self.memory.region, self.identity, self.on_notify)
        self.endpoint = Endpoint(host_id(), self.identity.incarnation, {self.transport.name: address})

    async def connect(self, endpoint: Endpoint) -> Connection:
        return await self.transport.connect(endpoint, self.memory.region, self.identity)

    async def noted(self, count: int) -> list[bytes]:
        """The payloads of all notifications, once there are `count`."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.notes) < count:
                self.changed.clear()
                await self.changed.wait()
        return [payload for _, payload in self.notes]

    async def close(self) -> None:
        await self.transport.close()
        self.memory.close()


class Workshop:
    """Makes nodes that can reach each other by one transport."""

    def __init__(self, transport: str, directory: Path) -> None:
        self.transport = transport
        self.directory = directory
        self.hub = InprocHub()
        self.nodes: list[Node] = []

    async def node(
        self,
        name: str,
        num_granules: int = NUM_GRANULES,
        granule: int = GRANULE,
        on_notify: Callable[[Node], bool] | None = None,
        transport: Transport | None = None,
    ) -> Node:
        """`transport`: another than usual."""
        memory = SharedMemory.create(num_granules, granule, new_incarnation())
        memory.region.generations[:] = np.arange(1, num_granules + 1)
        node = Node(name, memory, transport or self._transport(name, memory), observe=on_notify)
        self.nodes.append(node)
        await node.start()
        return node

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()

    def _transport(self, name: str, memory: SharedMemory) -> Transport:
        match self.transport:
            case "inproc":
                return InprocTransport(self.hub, name)
            case "faulty":
                return FaultyTransport(InprocTransport(self.hub, name), FaultPlan())
            case registered:
                return make_transport(registered, TransportSite(memory, "127.0.0.1", self.directory / f"{name}.sock"), OPTIONS)


def fill(node: Node, seed: int) -> np.ndarray:
    """Random bytes in all of the node's memory; returns a copy of them."""
    node.bytes[:] = np.random.default_rng(seed).integers(0, 256, node.bytes.nbytes, np.uint8)
    return node.bytes.copy()


def random_batch(rng: np.random.Generator, local: Node, remote: Node, count: int, longest: int) -> list[Slice]:
    """Slices that overlap on neither side: both memories are cut into `count` cells and paired at random."""
    cell = local.bytes.nbytes // count
    places = rng.permutation(count)
    batch = []
    for index in range(count):
        start = int(places[index]) * cell
        granule = start // GRANULE
        room = min(cell, (granule + 1) * GRANULE - start)
        length = int(rng.integers(1, min(longest, room) + 1))
        batch.append(Slice(index * cell, start, length, int(remote.generations[granule])))
    return batch


def whole(node: Node, granule: int, local_granule: int | None = None) -> Slice:
    """All of one granule."""
    local = granule if local_granule is None else local_granule
    return Slice(local * GRANULE, granule * GRANULE, GRANULE, int(node.generations[granule]))


class PeerProcess:
    """A node in a process of its own (messenger_peer.py): generations are 1 + the granule's number, memory is zero."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: Endpoint) -> None:
        self._process = process
        self.endpoint = endpoint

    @classmethod
    async def start(
        cls,
        transport: str,
        directory: Path,
        num_granules: int = NUM_GRANULES,
        on_notify: str = "ignore",
        connect_to: Endpoint | None = None,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        pattern: int | None = None,
    ) -> PeerProcess:
        """`on_notify`: "hang" makes it hold Python's lock for ever at the first notification. It opens a connection to `connect_to` and,
        given a `pattern`, writes that byte there all the time. `prefix` is a command that runs it elsewhere."""
        script = Path(__file__).with_name("messenger_peer.py")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        arguments = (transport, str(directory / "peer.sock"), str(num_granules), on_notify, connect_to.to_json() if connect_to else "")
        more = (host, "" if pattern is None else str(pattern))
        process = await asyncio.create_subprocess_exec(
            *prefix, sys.executable, str(script), *arguments, *more, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        return cls(process, Endpoint.from_json((await process.stdout.readline()).decode()))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def stop(self) -> None:
        """SIGSTOP, and returns when it has taken effect."""
        self.signal(signal.SIGSTOP)
        status = Path(f"/proc/{self._process.pid}/stat")
        await until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")

    async def said(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            return (await self._process.stdout.readline()).decode().strip()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
            await self._process.wait()


until = partial(waiting.until, within_s=TIMEOUT_S, poll_s=0)
"""What it waits for may be so for a moment alone."""


def open_files() -> dict[str, str]:
    """What every file descriptor of this process stands for."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def mappings() -> str:
    """What is mapped into this process."""
    return Path("/proc/self/maps").read_text()
