"""A bundle of stores with its engine, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from kvstore_support import SPEC, Engine, contents

from kvstore.link import attach_arena, engine_identity
from kvstore.server.layer_store import LayerStore
from kvstore.server.shared.bundle import Bundle
from kvstore.server.shared.context import StoreOptions
from kvstore.server.shared.ssd import SsdOptions
from kvstore.server.store import Store
from springtide.credentials import OPEN
from springtide.errors import PeerLost
from springtide.ids import BlockKey, NodeId, new_incarnation
from springtide.protocol.layer_stores import JoinBundle

SPLITS = {2: (range(1), range(1, 4)), 3: (range(2), range(2, 3), range(3, 4))}
NUM_SLOTS = 16


def options(directory: Path, name: str, layers: range | None = None, num_slots: int = NUM_SLOTS, **further: Any) -> StoreOptions:
    return StoreOptions(
        node_id=NodeId(name),
        spec=SPEC,
        num_slots=num_slots,
        bind_host="127.0.0.1",
        store_socket=directory / f"{name}.store.sock",
        arena_socket=directory / f"{name}.arena.sock",
        lease_s=1.0,
        layer_group_bytes=SPEC.bytes_per_slab,
        layers=layers,
        **{"transports": ("tcp",), **further},
    )


def ssd_options(directory: Path, name: str, layers: range) -> SsdOptions:
    return SsdOptions(directory / "ssd" / name, 64 << 20, f"{layers}", demote_below=1.0, demote_until=1.0)


class BundleEngine:
    """The engine of a bundle, whose every stage maps the arena of its own store. It behaves as the Engine of a store of its own, except
    that its slots are in pieces."""

    def __init__(self, split: Sequence[range]) -> None:
        self.split = split
        self.arenas: list[np.ndarray] = []
        self.engine: Engine

    async def take_up(self, stack: AsyncExitStack, engine: Engine, arena_sockets: Sequence[Path]) -> None:
        """`engine`: of the first store. `arena_sockets`: of the others."""
        self.engine = engine
        stack.push_async_callback(engine.close)
        self.arenas = [engine.link.arena]
        for arena_socket in arena_sockets:
            identity = engine_identity(engine.link.node_id, engine.link.incarnation)
            memory, attachment = await asyncio.to_thread(attach_arena, arena_socket, identity)
            stack.callback(memory.close)
            stack.callback(attachment.close)
            self.arenas.append(memory.region.memory)
            stack.callback(self.arenas.clear)

    def slot(self, slot: int) -> Sequence[np.ndarray]:
        """uint8 [layers of the stage, bytes_per_slab] of each stage."""
        sizes = [len(layers) * SPEC.bytes_per_slab for layers in self.split]
        parts = [arena[slot * size : (slot + 1) * size] for arena, size in zip(self.arenas, sizes, strict=True)]
        return [part.reshape(-1, SPEC.bytes_per_slab) for part in parts]

    def write(self, slot: int, what: np.ndarray) -> None:
        for part, layers in zip(self.slot(slot), self.split, strict=True):
            part[:] = what[layers.start : layers.stop]

    def read(self, slot: int) -> np.ndarray:
        return np.concatenate(self.slot(slot))

    async def cache(self, keys: Sequence[BlockKey]) -> None:
        acquired = await self.engine.acquire(keys, len(keys) + 1)
        for key, slot in zip(keys, acquired.slots, strict=False):
            self.write(slot, contents(key))
        self.engine.commit(acquired.attempt_id, 0, keys)
        self.engine.release(acquired.attempt_id)


class Bundled(BundleEngine):
    """A bundle in this process, with its engine."""

    def __init__(self, name: str, directory: Path, split: Sequence[range], ssd: bool = False, **further: Any) -> None:
        """`ssd`: each store has one in the directory, and copies all that is not in use. `further` options are those of every store."""
        super().__init__(split)
        self.name = name
        names = [name, *(f"{name}.stage-{i}" for i in range(1, len(split)))]
        self.options = [
            options(directory, each, layers, NUM_SLOTS + i, ssd=ssd_options(directory, each, layers) if ssd else None, **further)
            for i, (each, layers) in enumerate(zip(names, split, strict=True))
        ]
        self.layer_stores = [LayerStore(each) for each in self.options[1:]]
        self.lost: list[PeerLost] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for store in self.layer_stores:
            stack.push_async_callback(store.close)
            await store.start()
        incarnation = new_incarnation()
        join = JoinBundle(NodeId(self.name), incarnation)
        addresses = [store.address for store in self.layer_stores]
        bundle = await Bundle.form(addresses, OPEN, join, SPEC, self.split[0], self.lost.append)
        assert bundle.num_slots == NUM_SLOTS + 1
        self.store = Store(self.options[0], bundle=bundle, incarnation=incarnation)
        stack.push_async_callback(self.store.close)
        await self.store.start()
        engine = await Engine.connect(self.store.options)
        await self.take_up(stack, engine, [store.options.arena_socket for store in self.layer_stores])


async def whole(stack: AsyncExitStack, directory: Path, name: str, **further: Any) -> tuple[Store, Engine]:
    store = Store(options(directory, name, **further))
    stack.push_async_callback(store.close)
    await store.start()
    engine = await Engine.connect(store.options)
    stack.push_async_callback(engine.close)
    return store, engine


async def bundled(stack: AsyncExitStack, directory: Path, name: str, stages: int, **options: Any) -> Bundled:
    bundle = Bundled(name, directory, SPLITS[stages], **options)
    await bundle.start(stack)
    return bundle
