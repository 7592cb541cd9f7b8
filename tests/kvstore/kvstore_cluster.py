"""Stores, each with an engine, in one process: real Messengers, sockets and shared memory, with faults in between; and what every block
must hold."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from kvstore_support import SPEC, WAIT_S, contents, keys_of, kind_of

from kvstore.link import StoreLink
from kvstore.server.shared.context import StoreOptions
from kvstore.server.store import Store
from messenger.arena_memory import SharedMemory
from messenger.base import Transport
from messenger.registry import TransportSite, make_transport
from springtide.errors import PeerLost
from springtide.ids import BlockKey, InstanceId, NodeId, new_incarnation
from springtide.protocol import wire
from springtide.protocol.storage import EngineHello, Notice, StoreLoad
from springtide.rpc import channels, common_pb2
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreStub
from tests.support.faulty_transport import FaultyTransport
from tests.support.inproc_transport import InprocHub, InprocTransport
from tests.support.tally import Ended, Tally
from tests.support.transport_faults import FaultPlan

_FAILURES = ("attempt_failed", "hand_over_failed")
cached_contents = lru_cache(maxsize=4096)(contents)


class Inbox:
    """What an engine hears of one attempt."""

    def __init__(self) -> None:
        self._notices: list[tuple[str, Any]] = []
        self._changed = asyncio.Event()
        self._ended: Ended | None = None

    def put(self, kind: str, message: Any) -> None:
        self._notices.append((kind, message))
        self._changed.set()

    def end(self, why: Ended) -> None:
        self._ended = why
        self._changed.set()

    def check(self) -> None:
        """Raises Ended once the attempt has failed or the engine is gone."""
        for kind, message in self._notices:
            if kind in _FAILURES:
                raise Ended(f"{kind} {message.failure.code.value}")
        if self._ended is not None:
            raise self._ended

    def has(self, kind: str) -> bool:
        return any(found == kind for found, _ in self._notices)

    async def next(self, kind: str) -> Any:
        """Raises Ended, and TimeoutError when nothing of the sort is heard."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for found, message in self._notices:
                    if found == kind:
                        return message
                self.check()
                self._changed.clear()
                await self._changed.wait()


class EngineSide:
    """An engine without a model. After `gone` it touches nothing any more."""

    def __init__(self) -> None:
        self.inboxes: dict[str, Inbox] = {}
        self.gone: Ended | None = None
        self.link: StoreLink

    @classmethod
    async def connect(cls, node_id: str, store_socket: Path, arena_socket: Path) -> EngineSide:
        engine = cls()
        hello = EngineHello(InstanceId(node_id), new_incarnation())
        engine.link = await StoreLink.connect(store_socket, arena_socket, hello, engine._on_notice, engine._on_lost)
        return engine

    def inbox(self, attempt_id: str) -> Inbox:
        inbox = self.inboxes.setdefault(attempt_id, Inbox())
        if self.gone is not None:
            inbox.end(self.gone)
        return inbox

    def send(self, **command: Any) -> None:
        if self.gone is not None:
            raise self.gone
        order = wire.ENGINE_COMMAND.decode(pb.EngineCommand(**command))
        assert not isinstance(order, EngineHello)
        self.link.send(order)

    def slot(self, slot: int) -> np.ndarray:
        """uint8 [layers, bytes_per_slab]"""
        if self.gone is not None:
            raise self.gone
        return self.link.arena[slot * SPEC.bytes_per_slot : (slot + 1) * SPEC.bytes_per_slot].reshape(SPEC.layers, -1)

    async def close(self, why: str) -> None:
        self._go(Ended(why))
        await self.link.close()

    def _on_notice(self, notice: Notice) -> None:
        if not isinstance(notice, StoreLoad):
            self.inbox(notice.attempt_id).put(kind_of(notice), notice)

    def _on_lost(self, error: PeerLost) -> None:
        self._go(Ended("store lost"))

    def _go(self, why: Ended) -> None:
        if self.gone is None:
            self.gone = why
            for inbox in self.inboxes.values():
                inbox.end(why)


class ControlProxy:
    """Between the control connections of stores, to be cut and frozen."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def freeze(self, seconds: float) -> None:
        self._open.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._open.set()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        try:
            there = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there[1]}
        for source, sink in ((reader, there[1]), (there[0], writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


class Site:
    """One node. `plan` befalls the transfers that its store makes; its control connections come through `proxy`."""

    def __init__(
        self,
        name: str,
        directory: Path,
        transports: Sequence[str],
        hub: InprocHub,
        plan: FaultPlan,
        num_slots: int,
        batch_timeout_s: float = 1.0,
    ) -> None:
        self.plan = plan
        self._hub = hub
        self._options = StoreOptions(
            node_id=NodeId(name),
            spec=SPEC,
            num_slots=num_slots,
            bind_host="127.0.0.1",
            store_socket=directory / f"{name}.store.sock",
            arena_socket=directory / f"{name}.arena.sock",
            transports=transports,
            lease_s=1.0,
            batch_timeout_s=batch_timeout_s,
            layer_group_bytes=SPEC.bytes_per_slab,
        )
        self.store: Store
        self.engine: EngineSide
        self.proxy: ControlProxy

    @property
    def name(self) -> str:
        return self._options.node_id

    def as_source(self, keys: Sequence[BlockKey]) -> common_pb2.PrefixSource:
        return common_pb2.PrefixSource(store_address=self.proxy.address, node_id=self.name, num_blocks=len(keys))

    async def start(self) -> None:
        """A new store on the sockets of the last one, and an engine."""
        store = Store(self._options, self._transport)
        armed, self.plan.armed = self.plan.armed, False  # a store that fails its self-test does not start
        await store.start()
        self.plan.armed = armed
        proxy = ControlProxy(store.address)
        await proxy.start()
        self.store, self.proxy, self.engine = store, proxy, await self._new_engine()

    async def _new_engine(self) -> EngineSide:
        return await EngineSide.connect(self.name, self._options.store_socket, self._options.arena_socket)

    async def lose_store(self) -> None:
        engine, self.engine.gone = self.engine, self.engine.gone or Ended("store lost")
        for inbox in engine.inboxes.values():
            inbox.end(self.engine.gone)
        await self.proxy.close()
        await self.store.close()
        await engine.link.close()
        await self.start()

    async def lose_engine(self, replaced: bool) -> None:
        """`replaced`: by the next one, without a farewell."""
        lost = self.engine
        if replaced:
            lost._go(Ended("engine lost"))
            self.engine = await self._new_engine()
            await lost.link.close()
        else:
            await lost.close("engine lost")
            self.engine = await self._new_engine()

    async def close(self) -> None:
        await self.engine.close("over")
        await self.proxy.close()
        await self.store.close()

    def _transport(self, name: str, arena: SharedMemory) -> Transport:
        inner: Transport
        if name == "inproc":
            inner = InprocTransport(self._hub, self.name)
        else:
            site = TransportSite(arena, self._options.bind_host, self._options.arena_socket)
            inner = make_transport(name, site, self._options.transport_options)
        return FaultyTransport(inner, self.plan)


class Shadow:
    """Which bytes every key must have, and every chain of keys that was ever used."""

    def __init__(self) -> None:
        self._outputs: dict[bytes, np.ndarray] = {}
        self.chains: list[list[BlockKey]] = []

    def of(self, key: bytes) -> np.ndarray:
        """uint8 [layers, bytes_per_slab]"""
        found = self._outputs.get(key)
        return cached_contents(key) if found is None else found

    def chain(self, labels: Sequence[int]) -> list[BlockKey]:
        keys = keys_of(*labels)
        self.chains.append(keys)
        return keys

    def output(self, prompt: Sequence[BlockKey], labels: Sequence[int], data: np.ndarray) -> BlockKey:
        """The key of the block that a decode node completes after `prompt`: it holds `data`."""
        keys = keys_of(*labels)
        assert keys[:-1] == list(prompt)
        self._outputs[keys[-1]] = data
        self.chains.append(keys)
        return keys[-1]


async def audit(site: Site, shadow: Shadow, tally: Tally) -> None:
    """Waits until nothing is held for anybody, then looks at every slot and at every block that is kept."""
    pool = site.store.pool

    def at_rest() -> bool:
        counts = pool.counts()
        return counts.free + counts.cached == counts.total and counts.leases == counts.ingests == 0

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while not at_rest():  # noqa: ASYNC110 (leases run out, writers are probed)
                await asyncio.sleep(0.02)
    counts = pool.counts()
    tally.slots_leaked += counts.total - counts.available
    assert at_rest(), f"{site.name}: {counts}"
    pool.validate()
    channel = channels.connect(site.store.address)
    audited: set[bytes] = set()
    for chain in shadow.chains:
        lease = await StoreStub(channel).Lease(pb.LeaseRequest(reader="audit", keys=chain), timeout=WAIT_S)
        for key, slot in zip(chain, lease.slots, strict=False):
            audited.add(key)
            tally.wrong_bytes += int((site.engine.slot(slot) != shadow.of(key)).sum())
        if lease.lease_id:
            await StoreStub(channel).ReleaseLease(pb.ReleaseLeaseRequest(lease_id=lease.lease_id), timeout=WAIT_S)
    await channel.close(None)
    assert set(pool.held_keys()) <= audited, "a key that nobody stored"


def random_labels(rng: random.Random) -> list[int]:
    """Prompts share prefixes: few beginnings, then a path in a small tree."""
    return [rng.randrange(3), *(rng.randrange(2) for _ in range(rng.randrange(6)))]
