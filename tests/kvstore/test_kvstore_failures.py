"""Stores as processes that die, stop, are cut off, slowed or talked to in garbage while they hand over and fetch. Each prints a tally."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from kvstore_cluster import EngineSide, cached_contents
from kvstore_support import SPEC, WAIT_S, StoreProcess, keys_of

from messenger.base import Endpoint
from springtide.errors import PeerLost
from springtide.ids import AttemptId, BlockKey
from springtide.rpc import channels, common_pb2
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreStub
from tests.support.netns import Namespace
from tests.support.tally import Ended, Tally
from tests.support.waiting import until

NUM_BLOCKS, NUM_SLOTS, WORKERS = 6, 64, 2
_numbers = itertools.count(1)
GATEWAY_ABORTS_AFTER_S = 3.0
"""What of a hand-over has not ended by then is given up, as the gateway would, at once where it knows that the other side has failed."""
ABORTED = "aborted by the gateway"


class Node:
    """A store process, and an engine that this process plays."""

    def __init__(self, store: StoreProcess, engine: EngineSide) -> None:
        self.store, self.engine = store, engine
        self._channel = channels.connect(f"unix:{store.store_socket}")
        self.stub = StoreStub(self._channel)

    @property
    def source(self) -> common_pb2.PrefixSource:
        return common_pb2.PrefixSource(store_address=self.engine.link.address, node_id=self.store.node_id, num_blocks=NUM_BLOCKS)

    async def cache(self, keys: Sequence[BlockKey]) -> None:
        attempt_id = f"cached-{next(_numbers)}"
        self.engine.send(acquire=pb.Acquire(attempt_id=attempt_id, keys=keys, num_blocks=len(keys)))
        acquired = await self.engine.inbox(attempt_id).next("acquired")
        for key, slot in zip(keys, acquired.slots, strict=True):
            self.engine.slot(slot)[:] = cached_contents(key)
        self.engine.send(commit=pb.Commit(attempt_id=attempt_id, keys=keys))
        self.engine.send(release=pb.Release(attempt_id=attempt_id))

    async def leaked_slots(self) -> int:
        """Those that are neither free nor cached once there has been time for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while True:
                    stat = await self.stub.Stat(pb.StatRequest(), timeout=WAIT_S)
                    if stat.slots_free + stat.slots_cached == stat.slots_total:
                        break
                    await asyncio.sleep(0.02)
        assert (await self.stub.Verify(pb.VerifyRequest(), timeout=WAIT_S)).problem == ""
        return int(stat.slots_total - stat.slots_free - stat.slots_cached)

    async def close(self) -> None:
        await self._channel.close(None)
        await self.engine.close("over")
        self.store.kill(signal.SIGCONT)
        self.store.kill(signal.SIGTERM)
        await asyncio.to_thread(self.store.process.wait, WAIT_S)


NewNode = Callable[..., "asyncio.Future[Node]"]


@pytest.fixture
async def new_node(tmp_path: Path) -> AsyncIterator[NewNode]:
    made: list[Node] = []

    async def new_node(node_id: str, **options: object) -> Node:
        store = StoreProcess(tmp_path, node_id, num_slots=NUM_SLOTS, layer_group_size=SPEC.bytes_per_slab, lease_s=3.0, **options)  # type: ignore[arg-type]
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    engine = await EngineSide.connect(node_id, store.store_socket, store.arena_socket)
                    break
                except PeerLost:
                    assert store.process.poll() is None, store.log.read_text()
                    await asyncio.sleep(0.02)
        made.append(Node(store, engine))
        return made[-1]

    yield new_node  # type: ignore[misc]
    await asyncio.gather(*(node.close() for node in made))


class Flow:
    """Prompts that go from one node to the other, several at a time, until told to stop or one fails."""

    def __init__(self, giver: Node, taker: Node, tally: Tally) -> None:
        self._giver, self._taker, self._tally = giver, taker, tally
        self._stopped = False
        self.rounds = 0
        self.ends: list[str] = []
        self.told_at: list[float] = []
        """When stores said that something had failed."""
        self._workers = [asyncio.create_task(self._work(worker)) for worker in range(WORKERS)]

    @property
    def failed(self) -> bool:
        return len(self.ends) == WORKERS

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._workers)

    @contextlib.contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        try:
            with self._tally.operation(name):
                yield
        except Ended as end:
            if end.reason != ABORTED:
                self.told_at.append(asyncio.get_running_loop().time())
            raise

    async def _work(self, worker: int) -> None:
        try:
            while not self._stopped:
                await self._round(worker)
                self.rounds += 1
        except Ended as end:
            self.ends.append(end.reason)

    async def _round(self, worker: int) -> None:
        raise NotImplementedError

    def _compare(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        for slot, key in zip(slots, keys, strict=False):
            self._tally.wrong_bytes += int((self._taker.engine.slot(slot) != cached_contents(key)).sum())


class HandOvers(Flow):
    async def _round(self, worker: int) -> None:
        attempt_id = f"attempt-{next(_numbers)}"
        keys: list[bytes] = [f"{attempt_id}/{block}".encode() for block in range(NUM_BLOCKS)]
        sides = [asyncio.create_task(self._give(attempt_id, keys)), asyncio.create_task(self._take(attempt_id, keys))]
        await asyncio.wait(sides, timeout=GATEWAY_ABORTS_AFTER_S)
        for node in (self._giver, self._taker):
            node.engine.inbox(attempt_id).end(Ended(ABORTED))
        await asyncio.gather(*sides, return_exceptions=True)
        for side in sides:
            side.result()

    async def _give(self, attempt_id: str, keys: Sequence[bytes]) -> None:
        engine = self._giver.engine
        inbox = engine.inbox(attempt_id)
        try:
            with self._operation("hand over"):
                engine.send(acquire=pb.Acquire(attempt_id=attempt_id, num_blocks=NUM_BLOCKS))
                slots = (await inbox.next("acquired")).slots
                engine.send(open_hand_over=pb.OpenHandOver(attempt_id=attempt_id, address=self._taker.engine.link.address))
                for layer in range(SPEC.layers):
                    for key, slot in zip(keys, slots, strict=True):
                        engine.slot(slot)[layer] = cached_contents(key)[layer]
                    unit = pb.Push(attempt_id=attempt_id, layer_begin=layer, layer_end=layer + 1, block_end=NUM_BLOCKS)
                    engine.send(push=unit)
                    await asyncio.sleep(0)
                engine.send(seal=pb.Seal(attempt_id=attempt_id, first_token=7))
                await inbox.next("handed_over")
        finally:
            _release(engine, attempt_id)

    async def _take(self, attempt_id: str, keys: Sequence[bytes]) -> None:
        engine = self._taker.engine
        inbox = engine.inbox(attempt_id)
        try:
            with self._operation("take over"):
                engine.send(reserve=pb.Reserve(attempt_id=attempt_id, num_blocks=NUM_BLOCKS))
                slots = (await inbox.next("reserved")).slots
                await inbox.next("ingested")
                self._compare(slots, keys)
        finally:
            _release(engine, attempt_id)


class Fetches(Flow):
    async def _round(self, worker: int) -> None:
        engine, attempt_id = self._taker.engine, f"attempt-{next(_numbers)}"
        keys = prefix_of(self._giver, worker)
        try:
            with self._operation("fetch"):
                command = pb.Acquire(attempt_id=attempt_id, keys=keys, num_blocks=NUM_BLOCKS + 1, max_reused_blocks=NUM_BLOCKS)
                command.sources.append(self._giver.source)
                engine.send(acquire=command)
                acquired = await engine.inbox(attempt_id).next("acquired")
                if acquired.local_blocks + acquired.remote_blocks < NUM_BLOCKS:
                    raise Ended("no prefix")
                last = SPEC.layers - 1
                if await asyncio.to_thread(engine.link.wait_layer, AttemptId(attempt_id), last, WAIT_S) is not None:
                    raise Ended("prefix truncated")
                self._compare(acquired.slots, keys)
        finally:
            _release(engine, attempt_id)
        await engine_idle(engine)
        await self._taker.stub.Evict(pb.EvictRequest(keys=keys[1:2]), timeout=WAIT_S)


def prefix_of(node: Node, worker: int) -> list[BlockKey]:
    return keys_of(ord(node.store.node_id[0]), *[worker] * (NUM_BLOCKS - 1))


async def engine_idle(engine: EngineSide) -> None:
    """Commands are taken in order: the answer to another says that those before were done."""
    attempt_id = f"idle-{next(_numbers)}"
    engine.send(acquire=pb.Acquire(attempt_id=attempt_id, num_blocks=1))
    await engine.inbox(attempt_id).next("acquired")
    _release(engine, attempt_id)


def _release(engine: EngineSide, attempt_id: str) -> None:
    if engine.gone is None:
        engine.send(release=pb.Release(attempt_id=attempt_id))


FLOWS: dict[str, tuple[type[Flow], str]] = {"writer": (HandOvers, "giver"), "receiver": (HandOvers, "taker"), "source": (Fetches, "giver")}
"""By what the failing node is: what flows, and which side of it fails."""


class Scene:
    """Three nodes: the one that will fail, one that deals with it and with the third."""

    def __init__(self, role: str, failing: Node, common: Node, other: Node, tally: Tally) -> None:
        self.failing, self.common, self.other, self.tally = failing, common, other, tally
        kind, side = FLOWS[role]
        self.victim = kind(failing, common, tally) if side == "giver" else kind(common, failing, tally)
        self.bystander = kind(other, common, tally) if side == "giver" else kind(common, other, tally)

    @classmethod
    async def set(cls, role: str, new_node: NewNode, tally: Tally, failing: dict[str, object], common: dict[str, object]) -> Scene:
        nodes = await asyncio.gather(new_node("failing", **failing), new_node("common", **common), new_node("other", **common))
        if role == "source":
            for node in (nodes[0], nodes[2]):
                for worker in range(WORKERS):
                    await node.cache(prefix_of(node, worker))
        return cls(role, *nodes, tally)

    async def play(self, strike: Callable[[], object]) -> None:
        """`strike` makes a node fail: what it is part of ends, typed; the rest goes on."""
        await until(lambda: self.victim.rounds >= WORKERS and self.bystander.rounds >= WORKERS)
        struck = asyncio.get_running_loop().time()
        outcome = strike()
        if asyncio.iscoroutine(outcome):
            await outcome
        await until(lambda: self.victim.failed)
        self.tally.ended_after(max(self.victim.told_at, default=struck) - struck)
        await self.go_on(self.bystander)

    async def go_on(self, flow: Flow) -> None:
        so_far = flow.rounds
        await until(lambda: flow.rounds >= so_far + 2 * WORKERS or flow.ends)
        assert flow.ends == []

    async def end(self, *survivors: Node) -> None:
        await asyncio.gather(self.victim.stop(), self.bystander.stop())
        self.tally.slots_leaked += sum(await asyncio.gather(*(node.leaked_slots() for node in survivors)))
        self.tally.check()


def loopback(transport: str) -> dict[str, object]:
    return {"transports": (transport,)}


ROLES = pytest.mark.parametrize("role", list(FLOWS))
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@ROLES
@TRANSPORTS
async def test_a_store_that_is_killed_fails_alone(new_node: NewNode, tally: Tally, role: str, transport: str) -> None:
    scene = await Scene.set(role, new_node, tally, loopback(transport), loopback(transport))
    tally.injected["killed"] += 1
    await scene.play(scene.failing.store.kill)
    await scene.end(scene.common, scene.other)


@ROLES
@TRANSPORTS
async def test_a_store_that_stops_fails_alone_and_writes_nothing_late(new_node: NewNode, tally: Tally, role: str, transport: str) -> None:
    scene = await Scene.set(role, new_node, tally, loopback(transport), loopback(transport))
    tally.injected["stopped"] += 1
    await scene.play(scene.failing.store.stop)
    await scene.bystander.stop()
    if transport == "shm":
        # Only the process itself can let go of memory that it has mapped: until then its slots stay in quarantine.
        scene.failing.store.kill(signal.SIGCONT)
    tally.slots_leaked += await scene.common.leaked_slots()
    slots = await hold_everything(scene.common)
    memory = [scene.common.engine.slot(slot) for slot in slots]
    for view in memory:
        view[:] = 3
    scene.failing.store.kill(signal.SIGCONT)
    tally.slots_leaked += await scene.failing.leaked_slots()
    tally.wrong_bytes += sum(int((view != 3).sum()) for view in memory)
    _release(scene.common.engine, "everything")
    await scene.end(scene.common, scene.other, scene.failing)


async def hold_everything(node: Node) -> list[int]:
    node.engine.send(acquire=pb.Acquire(attempt_id="everything", num_blocks=NUM_SLOTS))
    return list((await node.engine.inbox("everything").next("acquired")).slots)


@ROLES
async def test_a_store_that_is_cut_off_fails_alone_and_comes_back(new_node: NewNode, tally: Tally, namespace: Namespace, role: str) -> None:
    scene = await Scene.set(role, new_node, tally, *across(namespace))
    tally.injected["cut off"] += 1
    await scene.play(namespace.cut)
    await scene.bystander.stop()
    tally.slots_leaked += await scene.common.leaked_slots()
    namespace.mend()
    await scene.end(scene.common, scene.other, scene.failing)


@ROLES
async def test_a_slow_store_is_waited_for_and_holds_nobody_up(new_node: NewNode, tally: Tally, namespace: Namespace, role: str) -> None:
    """At 4 Mbit/s a prompt takes a fifth of a second, and a store's word with another still comes through."""
    scene = await Scene.set(role, new_node, tally, *across(namespace))
    await until(lambda: scene.victim.rounds >= WORKERS and scene.bystander.rounds >= WORKERS)
    namespace.slow(4)
    tally.injected["slowed to 4 Mbit/s"] += 1
    slow, fast = scene.victim.rounds, scene.bystander.rounds
    await scene.go_on(scene.victim)
    assert scene.bystander.rounds - fast > scene.victim.rounds - slow
    await scene.go_on(scene.bystander)
    namespace.slow(4000)
    await scene.end(scene.common, scene.other, scene.failing)


def across(namespace: Namespace) -> tuple[dict[str, object], dict[str, object]]:
    """One store in the namespace, the others outside of it."""
    shared = {"transports": ("tcp",), "open_to_strangers": True}
    return {**shared, "host": namespace.there, "prefix": namespace.prefix}, {**shared, "host": namespace.here}


@TRANSPORTS
async def test_garbage_at_its_ports_does_not_disturb_a_store(new_node: NewNode, tally: Tally, transport: str) -> None:
    seed = 3
    print(f"seed {seed}")
    rng = random.Random(seed)
    scene = await Scene.set("writer", new_node, tally, loopback(transport), loopback(transport))
    await until(lambda: scene.victim.rounds >= WORKERS)
    description = await scene.common.stub.Describe(pb.DescribeRequest(), timeout=WAIT_S)
    endpoint = Endpoint.from_json(description.endpoint)
    strangers: list[socket.socket] = []
    for address in (*endpoint.addresses.values(), scene.common.engine.link.address, str(scene.common.store.store_socket)):
        for length in (0, 3, 200, 1 << 16):
            with contextlib.suppress(OSError):
                strangers.append(_call(address))
                strangers[-1].sendall(rng.randbytes(length))
            tally.injected[f"garbage of {length} bytes"] += 1
    await scene.go_on(scene.victim)
    await scene.go_on(scene.bystander)
    for stranger in strangers:
        stranger.close()
    await scene.end(scene.common, scene.other, scene.failing)


def _call(address: str) -> socket.socket:
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(1.0)
        sock.connect(address)
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=1.0)
