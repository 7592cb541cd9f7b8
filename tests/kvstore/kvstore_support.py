"""Parts that the kvstore tests build from."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kvstore.link import StoreLink
from kvstore.server.shared.context import StoreOptions
from springtide.blocks import block_keys, namespace_root
from springtide.errors import PeerLost
from springtide.ids import BlockKey, InstanceId, new_id, new_incarnation
from springtide.modelinfo import KVSpec, ModelInfo
from springtide.protocol import wire
from springtide.protocol.storage import EngineHello, Notice
from springtide.rpc import channels, common_pb2
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreStub
from tests.support.waiting import until

ROOT = namespace_root("a model", "bfloat16", 8)
MODEL = ModelInfo(
    path="", name="tiny", architecture="llama", fingerprint="f", context_length=4096, layers=4, kv_heads=2, head_dim=64, vocab_size=100,
    eos_token_ids=(2,),
)  # fmt: skip
SPEC: KVSpec = MODEL.kv_spec("bfloat16", 8)
WAIT_S = float(os.environ.get("TEST_WAIT_S", "20"))
"""Until what must come is given up. An emulated machine needs longer."""


def keys_of(*labels: int) -> list[BlockKey]:
    """A chain of keys: the same labels, the same keys."""
    return block_keys(ROOT, labels, 1)


class StoreProcess:
    """`python -m kvstore` of one node."""

    def __init__(
        self,
        run_dir: Path,
        node_id: str,
        *,
        transports: Sequence[str] = ("shm", "tcp"),
        num_slots: int = 32,
        redis_url: str | None = None,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        split: Sequence[range] = (),
        stage: int = 0,
        **kv: Any,
    ) -> None:
        """Serves at `host`; `prefix` is a command that runs it elsewhere. `split`: the layers of each store of a bundle; it is that of
        `stage`."""
        self.run_dir, self.node_id = run_dir, node_id
        config = run_dir / f"{node_id}.yaml"
        settings = {"block_tokens": SPEC.block_tokens, "arena_size": num_slots * SPEC.bytes_per_slot, "transports": list(transports)}
        settings |= {"open_to_strangers": True, **kv}
        spread = {"stages": len(split), "stage_layers": [len(layers) for layers in split], "spread_stages": True} if split else {}
        config.write_text(yaml.safe_dump({"kv": settings, "redis_url": redis_url, "prefill_node": spread}))
        MODEL.save(run_dir / "model.json")
        arguments = ["--config", config, "--model-info", run_dir / "model.json", "--run-dir", run_dir, "--node-id", node_id]
        arguments += ["--bind-host", host, "--stage", stage]
        self.log = run_dir / f"{node_id}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*prefix, sys.executable, "-m", "kvstore", *map(str, arguments)], stdout=log, stderr=log)

    @property
    def store_socket(self) -> Path:
        return self.run_dir / f"{self.node_id}.store.sock"

    @property
    def arena_socket(self) -> Path:
        return self.run_dir / f"{self.node_id}.arena.sock"

    async def engine(self) -> Engine:
        """A new engine, as soon as the store serves."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    return await Engine.connect(self)
                except PeerLost:
                    assert self.process.poll() is None, self.log.read_text()
                    await asyncio.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    async def stop(self) -> None:
        """SIGSTOP, and returns when it has taken effect."""
        self.kill(signal.SIGSTOP)
        status = Path(f"/proc/{self.process.pid}/stat")
        await until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")


Starter = Callable[..., Awaitable[tuple[StoreProcess, "Engine"]]]
"""Starts a store and connects an engine to it."""


def kind_of(notice: Notice) -> str:
    """Its name among a store's notices, as the schema has it."""
    return wire.STORE_NOTICE.encode(notice).WhichOneof("notice") or ""


class Engine:
    """An engine's behaviour towards its store, without a model: block contents are derived from keys."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.lost: list[PeerLost] = []
        self.link: StoreLink

    @classmethod
    async def connect(cls, store: StoreProcess | StoreOptions) -> Engine:
        engine = cls()
        hello = EngineHello(InstanceId(store.node_id), new_incarnation())
        engine.link = await StoreLink.connect(store.store_socket, store.arena_socket, hello, engine._take, engine.lost.append)
        engine._channel = channels.connect(engine.link.address)
        engine.stub = StoreStub(engine._channel)
        return engine

    def send(self, **command: Any) -> None:
        order = wire.ENGINE_COMMAND.decode(pb.EngineCommand(**command))
        assert not isinstance(order, EngineHello)
        self.link.send(order)

    def _take(self, notice: Notice) -> None:
        self.notices.append(notice)

    async def notice(self, kind: str, attempt_id: str) -> Any:
        """The next notice of that kind about the attempt; fails at once when the attempt failed instead."""

        def find() -> Any:
            for notice in self.notices:
                found = kind_of(notice)
                if getattr(notice, "attempt_id", None) != attempt_id or found not in (kind, "attempt_failed"):
                    continue
                assert found == kind, notice
                self.notices.remove(notice)
                return notice
            return None

        return await until(find)

    async def acquire(
        self,
        keys: Sequence[BlockKey],
        num_blocks: int,
        source: Engine | None = None,
        attempt_id: str = "",
        sources: Sequence[Engine] = (),
        tenant: str = "",
    ) -> pb.Acquired:
        attempt_id = attempt_id or new_id("attempt")
        command = pb.Acquire(attempt_id=attempt_id, keys=keys, num_blocks=num_blocks, max_reused_blocks=num_blocks - 1, tenant=tenant)
        command.sources.extend(each.as_source(keys) for each in (*sources, *([source] if source else [])))
        self.send(acquire=command)
        return await self.notice("acquired", attempt_id)

    def as_source(self, keys: Sequence[BlockKey]) -> common_pb2.PrefixSource:
        return common_pb2.PrefixSource(store_address=self.link.address, node_id=self.link.node_id, num_blocks=len(keys))

    async def reserve(self, keys: Sequence[BlockKey], num_blocks: int, attempt_id: str) -> pb.Reserved:
        self.send(reserve=pb.Reserve(attempt_id=attempt_id, keys=keys, num_blocks=num_blocks))
        return await self.notice("reserved", attempt_id)

    async def cache(self, keys: Sequence[BlockKey], tenant: str = "") -> None:
        """Computes and keeps these blocks in the pool; they are there when it returns."""
        acquired = await self.acquire(keys, len(keys) + 1, tenant=tenant)
        for key, slot in zip(keys, acquired.slots, strict=False):
            self.slot(slot)[:] = contents(key)
        self.commit(acquired.attempt_id, 0, keys)
        self.release(acquired.attempt_id)
        later = await self.acquire([], 1)  # commands are taken in order: its answer says that those before were done
        self.release(later.attempt_id)

    async def keep(self, *chains: Sequence[BlockKey]) -> None:
        """As `cache`, many at once and without contents."""
        for keys in chains:
            attempt_id = new_id("attempt")
            self.send(acquire=pb.Acquire(attempt_id=attempt_id, keys=keys, num_blocks=len(keys)))
            self.commit(attempt_id, 0, keys)
            self.release(attempt_id)
        later = await self.acquire([], 1)
        self.release(later.attempt_id)
        self.notices.clear()

    def commit(self, attempt_id: str, first_block: int, keys: Sequence[BlockKey]) -> None:
        self.send(commit=pb.Commit(attempt_id=attempt_id, first_block=first_block, keys=keys))

    def release(self, attempt_id: str, finish_hand_over: bool = False) -> None:
        self.send(release=pb.Release(attempt_id=attempt_id, finish_hand_over=finish_hand_over))

    def slot(self, slot: int) -> np.ndarray:
        """uint8 [layers, bytes_per_slab]"""
        return self.link.arena[slot * SPEC.bytes_per_slot : (slot + 1) * SPEC.bytes_per_slot].reshape(SPEC.layers, -1)

    async def stat(self) -> pb.StatReply:
        return await self.stub.Stat(pb.StatRequest(), timeout=WAIT_S)

    async def stat_until(self, condition: Callable[[pb.StatReply], bool]) -> pb.StatReply:
        async def reached() -> pb.StatReply | None:
            return stat if condition(stat := await self.stat()) else None

        stat = await until(reached)
        assert stat is not None
        return stat

    async def close(self) -> None:
        await self._channel.close(None)
        await self.link.close()


def contents(key: bytes) -> np.ndarray:
    """What the block of this key holds: uint8 [layers, bytes_per_slab]."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, (SPEC.layers, SPEC.bytes_per_slab), dtype=np.uint8)
