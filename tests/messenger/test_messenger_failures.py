"""What a peer's failure costs: its own operations, typed and soon; nothing of anybody else's. Each test prints a tally."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from messenger_proxy import GarblingProxy
from messenger_support import GRANULE, NUM_GRANULES, TIMEOUT_S, Node, PeerProcess, until

from messenger.arena_memory import SharedMemory
from messenger.base import Completion, Connection, Endpoint, Identity, Slice
from messenger.options import TcpOptions
from messenger.shm import ShmTransport
from messenger.tcp.transport import TcpTransport
from springtide.errors import SpringtideError
from springtide.ids import new_incarnation
from tests.support.netns import Namespace
from tests.support.tally import Ended, Tally

HALF = NUM_GRANULES // 2
PATIENT_S = 60.0
"""Far beyond the time in which a failure is to be told: no deadline is what ends an operation."""
WORKERS = 3
TRANSPORTS = pytest.mark.parametrize("kind", ["shm", "tcp"])


@pytest.fixture
async def new_node(tmp_path: Path) -> AsyncIterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(kind: str, options: TcpOptions | None = None, host: str = "127.0.0.1") -> Node:
        """Half of its memory is sent from, half received into, for each of two peers."""
        memory = SharedMemory.create(2 * NUM_GRANULES, GRANULE, new_incarnation())
        memory.region.generations[:] = np.arange(1, 2 * NUM_GRANULES + 1)
        name = f"here-{len(made)}"
        transport = ShmTransport(memory, tmp_path / f"{name}.sock") if kind == "shm" else TcpTransport(host, options=options)
        made.append(Node(name, memory, transport))
        return made[-1]

    yield make
    for node in made:
        await node.close()


@pytest.fixture
async def new_peer(tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    made: list[PeerProcess] = []

    async def make(kind: str, **options: object) -> PeerProcess:
        directory = tmp_path / f"peer-{len(made)}"
        directory.mkdir()
        made.append(await PeerProcess.start(kind, directory, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for peer in made:
        await peer.kill()


class Traffic:
    """Writes random bytes to a peer, with notifications, and reads them back, several at a time; until told to stop or the peer fails."""

    def __init__(self, node: Node, connection: Connection, tally: Tally, base: int, timeout_s: float = PATIENT_S) -> None:
        """Uses granules [base, base + NUM_GRANULES) of the node's memory."""
        self._node, self._connection, self._tally, self._base, self._timeout_s = node, connection, tally, base, timeout_s
        self._stopped = False
        self.rounds = 0
        self.failures: list[SpringtideError] = []
        self._workers = [asyncio.create_task(self._work(worker)) for worker in range(WORKERS)]

    @property
    def failed(self) -> bool:
        return len(self.failures) == WORKERS

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._workers)

    async def _work(self, worker: int) -> None:
        mine = range(worker * HALF // WORKERS, (worker + 1) * HALF // WORKERS)
        rng = np.random.default_rng(worker)
        try:
            while not self._stopped:
                await self._round(mine, rng)
                self.rounds += 1
        except SpringtideError as error:
            self.failures.append(error)

    async def _round(self, granules: range, rng: np.random.Generator) -> None:
        memory = self._node.bytes.reshape(-1, GRANULE)[self._base : self._base + NUM_GRANULES]
        memory[granules.start : granules.stop] = rng.integers(0, 256, GRANULE, np.uint8)
        out = [self._slice(granule, granule) for granule in granules]
        back = [self._slice(HALF + granule, granule) for granule in granules]
        with self._tally.operation("write"):
            _check(await self._connection.write(out, self._timeout_s, notify=b"round"))
        with self._tally.operation("read"):
            _check(await self._connection.read(back, self._timeout_s))
        sent, received = memory[granules.start : granules.stop], memory[HALF + granules.start : HALF + granules.stop]
        self._tally.wrong_bytes += int((sent != received).sum())

    def _slice(self, local: int, remote: int) -> Slice:
        return Slice((self._base + local) * GRANULE, remote * GRANULE, GRANULE, remote + 1)


def _check(completion: Completion) -> None:
    for error in completion.failed.values():
        raise error


async def go_through(victim: Traffic, bystander: Traffic, tally: Tally, strike: Callable[[], object]) -> None:
    """`strike` makes the victim's peer fail, while both are at work: the one ends, the other goes on."""
    await until(lambda: victim.rounds >= WORKERS and bystander.rounds >= WORKERS)
    struck = asyncio.get_running_loop().time()
    outcome = strike()
    if asyncio.iscoroutine(outcome):
        await outcome
    await until(lambda: victim.failed)
    tally.ended_after(asyncio.get_running_loop().time() - struck)
    so_far = bystander.rounds
    await until(lambda: bystander.rounds >= so_far + 2 * WORKERS or bystander.failures)
    await asyncio.gather(victim.stop(), bystander.stop())
    assert bystander.failures == []
    tally.check()


async def connect_again(here: Node, endpoint: Endpoint) -> Connection:
    """As soon as the way is open: neighbours that were not found are looked for again after a while."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with contextlib.suppress(SpringtideError):
                return await here.connect(endpoint)
            await asyncio.sleep(0.05)


@TRANSPORTS
@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_a_peer_that_dies_or_stops_fails_alone(
    new_node: Callable[..., Node], new_peer: Callable, tally: Tally, kind: str, fault: str
) -> None:
    here = new_node(kind)
    lost, other = await new_peer(kind), await new_peer(kind)
    victim = Traffic(here, await here.connect(lost.endpoint), tally, 0)
    bystander = Traffic(here, await here.connect(other.endpoint), tally, NUM_GRANULES)
    tally.injected[fault] += 1
    await go_through(victim, bystander, tally, lost.stop if fault == "stopped" else lambda: lost.signal(signal.SIGKILL))


async def test_a_peer_that_was_cut_off_fails_alone_and_comes_back(
    new_node: Callable[..., Node], new_peer: Callable, tally: Tally, namespace: Namespace
) -> None:
    here = new_node("tcp", TcpOptions(open_to_strangers=True))
    lost, other = await new_peer("tcp", host=namespace.there, prefix=namespace.prefix), await new_peer("tcp")
    victim = Traffic(here, await here.connect(lost.endpoint), tally, 0)
    bystander = Traffic(here, await here.connect(other.endpoint), tally, NUM_GRANULES)
    tally.injected["cut off"] += 1
    await go_through(victim, bystander, tally, namespace.cut)
    with pytest.raises(SpringtideError):
        await here.connect(lost.endpoint)
    namespace.mend()
    again = Traffic(here, await connect_again(here, lost.endpoint), tally, 0)
    await until(lambda: again.rounds >= WORKERS)
    await again.stop()
    assert again.failures == []
    tally.check()


async def test_a_slow_peer_misses_deadlines_alone_and_recovers(
    new_node: Callable[..., Node], new_peer: Callable, tally: Tally, namespace: Namespace
) -> None:
    here = new_node("tcp", TcpOptions(open_to_strangers=True))
    slow, other = await new_peer("tcp", host=namespace.there, prefix=namespace.prefix), await new_peer("tcp")
    connection = await here.connect(slow.endpoint)
    victim = Traffic(here, connection, tally, 0, timeout_s=1.0)
    bystander = Traffic(here, await here.connect(other.endpoint), tally, NUM_GRANULES)
    tally.injected["slowed to 4 Mbit/s"] += 1

    await go_through(victim, bystander, tally, lambda: namespace.slow(4))
    namespace.slow(4000)
    await connection.drain()  # what the given up writes still had on the way is not to land in the next ones
    again = Traffic(here, connection, tally, 0)
    await until(lambda: again.rounds >= WORKERS)
    await again.stop()
    assert again.failures == []
    tally.check()


@pytest.mark.parametrize("direction", ["answers", "requests"])
async def test_a_peer_that_turns_to_garbage_in_the_middle_of_a_batch_fails_alone(
    new_node: Callable[..., Node], new_peer: Callable, tally: Tally, direction: str
) -> None:
    """From some byte on, what goes through is random. With checksums that is noticed wherever it begins."""
    seed = 11
    print(f"seed {seed}")
    here = new_node("tcp", TcpOptions(checksums=True))
    garbler, other = await new_peer("tcp"), await new_peer("tcp")
    async with GarblingProxy(garbler.endpoint.addresses["tcp"], direction, random.Random(seed)) as proxy:
        through = replace(garbler.endpoint, addresses={"tcp": proxy.address})
        victim = Traffic(here, await here.connect(through), tally, 0)
        bystander = Traffic(here, await here.connect(other.endpoint), tally, NUM_GRANULES)
        tally.injected[f"garbage in {direction}"] += 1
        await go_through(victim, bystander, tally, proxy.begin)


GARBAGE: dict[str, Callable[[random.Random], bytes]] = {
    "nothing": lambda rng: b"",
    "a few bytes": lambda rng: rng.randbytes(7),
    "noise": lambda rng: rng.randbytes(1 << 16),
    "zeros": lambda rng: bytes(1 << 16),
    "ones": lambda rng: b"\xff" * (1 << 16),
    "http": lambda rng: b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@TRANSPORTS
async def test_strangers_that_talk_garbage_disturb_nobody(
    new_node: Callable[..., Node], new_peer: Callable, tally: Tally, kind: str
) -> None:
    """To a peer's port, while it is at work for somebody: whole floods, half frames, and silence."""
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    here, peer = new_node(kind), await new_peer(kind)
    traffic = Traffic(here, await here.connect(peer.endpoint), tally, 0)
    await until(lambda: traffic.rounds >= WORKERS)
    strangers: list[socket.socket] = []
    for name, make in GARBAGE.items():
        for hang_up in (False, True):
            tally.injected[f"garbage: {name}"] += 1
            with contextlib.suppress(OSError):
                strangers.append(_call(peer.endpoint))
                strangers[-1].sendall(make(rng))
                if hang_up:
                    strangers.pop().close()
    so_far = traffic.rounds
    await until(lambda: traffic.rounds >= so_far + 2 * WORKERS or traffic.failures)
    fresh = await here.connect(peer.endpoint)
    with tally.operation("write"):
        await fresh.write([Slice(0, (NUM_GRANULES - 1) * GRANULE, GRANULE, NUM_GRANULES)], TIMEOUT_S, notify=b"still there")
    await traffic.stop()
    for stranger in strangers:
        stranger.close()
    assert traffic.failures == []
    tally.check()


def _call(endpoint: Endpoint) -> socket.socket:
    if "shm" in endpoint.addresses:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(endpoint.addresses["shm"])
        sock.settimeout(1.0)
        return sock
    host, _, port = endpoint.addresses["tcp"].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=1.0)


async def test_what_a_stopped_peer_wrote_does_not_land_once_it_is_fenced(
    new_node: Callable[..., Node], new_peer: Callable, tally: Tally
) -> None:
    """tcp: the owner cuts it off, and uses the memory again under the same generations; then the peer goes on."""
    here = new_node("tcp")
    await here.start()
    here.generations[:NUM_GRANULES] = np.arange(1, NUM_GRANULES + 1)
    writer = await new_peer("tcp", connect_to=here.endpoint, pattern=7)
    await until(lambda: bool((here.bytes[: NUM_GRANULES * GRANULE] == 7).all()))
    with tally.operation("fence"):
        await writer.stop()
        tally.injected["stopped"] += 1
        if not await here.transport.fence(Identity("peer", writer.endpoint.incarnation)):
            raise Ended("not fenced")
    here.bytes[:] = 3
    writer.signal(signal.SIGCONT)
    assert await writer.said() == "failed"
    tally.wrong_bytes += int((here.bytes != 3).sum())
    tally.check()


async def test_shared_memory_is_not_called_safe_while_a_stopped_writer_has_it(
    new_node: Callable[..., Node], new_peer: Callable, tally: Tally
) -> None:
    here = new_node("shm")
    await here.start()
    writer = await new_peer("shm", connect_to=here.endpoint, pattern=7)
    peer = Identity("peer", writer.endpoint.incarnation)
    await until(lambda: bool((here.bytes == 7).any()))
    await writer.stop()
    tally.injected["stopped"] += 1
    with contextlib.suppress(Ended), tally.operation("fence"):
        raise Ended("not fenced" if not await here.transport.fence(peer) else "fenced too early")
    assert tally.failed == {"not fenced": 1}
    await writer.kill()
    tally.injected["killed"] += 1
    with tally.operation("fence"):
        async with asyncio.timeout(TIMEOUT_S):
            while not await here.transport.fence(peer):
                pass
    here.bytes[:] = 3
    tally.wrong_bytes += int((here.bytes != 3).sum())
    tally.check()
