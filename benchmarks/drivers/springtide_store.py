"""Two of our store processes, `here` and `there`, that reach each other by tcp, and an engine's link to each. Arguments: layers and KV
heads of the model, then the blocks as in blocks.py.

- put: a hand-over of blocks that lie in the arena here, from the reservation there to `Ingested`: committed, found by everybody.
- get: an acquire here of a prefix that only the store there holds, from the command to the last `FetchProgress`: leased, read, committed.
- hit: an acquire of a prefix that the store here holds, from the command to `Acquired`: the engine maps the blocks and may read them.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import yaml

from benchmarks.drivers.blocks import Blocks
from benchmarks.drivers.protocol import end, run
from kvstore.link import StoreLink
from springtide.blocks import block_keys, namespace_root
from springtide.errors import PeerLost
from springtide.ids import AttemptId, BlockKey, InstanceId, NodeId, new_id, new_incarnation
from springtide.modelinfo import ModelInfo
from springtide.protocol.outputs import AttemptFailed
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.storage import (
    Acquire,
    Acquired,
    EngineHello,
    FetchProgress,
    FetchTruncated,
    HandedOver,
    HandOverFailed,
    Ingested,
    Notice,
    OpenHandOver,
    Push,
    Release,
    Reserve,
    Seal,
)

BLOCK_TOKENS = 64
HEAD_DIM = 64
SETS_THERE = 2
TIMEOUT_S = 30.0


class StoreProcess:
    """`python -m kvstore`, and an engine's link to it."""

    def __init__(self, directory: Path, node_id: str, model: ModelInfo, num_slots: int) -> None:
        spec = model.kv_spec("bfloat16", BLOCK_TOKENS)
        config, description = directory / f"{node_id}.yaml", directory / "model.json"
        kv = {"block_tokens": BLOCK_TOKENS, "arena_size": num_slots * spec.bytes_per_slot, "transports": ["tcp"], "open_to_strangers": True}
        config.write_text(yaml.safe_dump({"dtype": "bfloat16", "kv": kv}))
        model.save(description)
        arguments = ["--config", config, "--model-info", description, "--run-dir", directory, "--node-id", node_id]
        self._directory = directory
        self._node_id = node_id
        self._process = subprocess.Popen([sys.executable, "-m", "kvstore", *map(str, arguments)])
        self._notices: dict[tuple[type[Any], str], asyncio.Future[Any]] = {}
        self.num_layers = model.layers
        self.link: StoreLink

    async def connect(self) -> None:
        """Connects as soon as the store serves."""
        hello = EngineHello(InstanceId(self._node_id), new_incarnation())
        sockets = [self._directory / f"{self._node_id}.{kind}.sock" for kind in ("store", "arena")]
        while True:
            try:
                self.link = await StoreLink.connect(sockets[0], sockets[1], hello, self._on_notice, self._on_lost)
                return
            except PeerLost:
                if self._process.poll() is not None:
                    raise
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.link.close()
        self._process.terminate()
        end(self._process)

    def expect(self, kind: type[Any], attempt_id: str) -> asyncio.Future[Any]:
        """The notice of that kind about the attempt that comes next. For FetchProgress: that of the last layer."""
        return self._notices.setdefault((kind, attempt_id), asyncio.get_running_loop().create_future())

    async def acquire(self, keys: Sequence[BlockKey], num_blocks: int) -> Acquired:
        """Acquires what is here."""
        attempt_id = AttemptId(new_id("attempt"))
        acquired = self.expect(Acquired, attempt_id)
        self.link.send(Acquire(attempt_id, tuple(keys), num_blocks, max_reused_blocks=len(keys)))
        reply: Acquired = await asyncio.wait_for(acquired, TIMEOUT_S)
        return reply

    def release(self, attempt_id: AttemptId) -> None:
        self.link.send(Release(attempt_id))

    def _on_notice(self, notice: Notice) -> None:
        attempt_id = getattr(notice, "attempt_id", "")
        if isinstance(notice, AttemptFailed | HandOverFailed | FetchTruncated):
            for waiting in [key for key in self._notices if key[1] == attempt_id]:
                self._notices.pop(waiting).set_exception(RuntimeError(str(notice)))
        elif not isinstance(notice, FetchProgress) or notice.layers_ready == self.num_layers:
            waiter = self._notices.pop((type(notice), attempt_id), None)
            if waiter is not None:
                waiter.set_result(notice)

    def _on_lost(self, error: PeerLost) -> None:
        for waiter in self._notices.values():
            waiter.set_exception(error)


class StoreJob:
    def __init__(self, arguments: Sequence[str]) -> None:
        layers, kv_heads = map(int, arguments[:2])
        self._blocks = blocks = Blocks.from_arguments(arguments)
        model = ModelInfo("", "benchmark", "llama", "f", 1 << 20, layers, kv_heads, HEAD_DIM, 1 << 15, (2,))
        assert model.kv_spec("bfloat16", BLOCK_TOKENS).bytes_per_slot == blocks.size, "layers and KV heads do not make this block size"
        self._directory = tempfile.TemporaryDirectory(prefix="springtide-")
        directory = Path(self._directory.name)
        self._here = StoreProcess(directory, "here", model, blocks.count + 1)
        self._there = StoreProcess(directory, "there", model, SETS_THERE * blocks.count)
        self._root = namespace_root("benchmark", "bfloat16", BLOCK_TOKENS)
        self._sets = itertools.count()
        self._held_there: list[list[BlockKey]] = []
        """Least recently used first."""
        self._held_here: list[BlockKey] = []
        self._loop = uvloop.new_event_loop()
        self._loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        await asyncio.gather(self._here.connect(), self._there.connect())

    def verify(self) -> None:
        self._loop.run_until_complete(self._verify())

    def measure(self, operation: str, times: int) -> list[float]:
        return self._loop.run_until_complete(self._measure(operation, times))

    def close(self) -> None:
        self._loop.run_until_complete(self._close())
        self._directory.cleanup()

    async def _close(self) -> None:
        await self._here.close()
        await self._there.close()

    async def _verify(self) -> None:
        sent = [self._blocks.random() for _ in range(SETS_THERE)]
        for contents in sent:
            await self._put(contents)
        for contents in sent:
            await self._get(contents)
        await self._hit(sent[-1])

    async def _measure(self, operation: str, times: int) -> list[float]:
        work = {"put": self._put, "get": self._get, "hit": self._hit}[operation]
        return [await work() for _ in range(times)]

    async def _put(self, contents: np.ndarray | None = None) -> float:
        """Puts keys that are new there; the least recently used blocks there make room, and that is timed too."""
        count = self._blocks.count
        acquired = await self._here.acquire([], count)
        attempt_id = acquired.attempt_id
        if contents is not None:
            for slot, block in zip(acquired.slots, contents, strict=True):
                self._block(slot)[:] = block
        keys = block_keys(self._root, [next(self._sets)] * BLOCK_TOKENS * count, BLOCK_TOKENS)
        ingested = self._there.expect(Ingested, attempt_id)
        handed_over = self._here.expect(HandedOver, attempt_id)
        everything = Push(attempt_id, 0, self._layers, 0, count)
        started = time.perf_counter()
        self._there.link.send(Reserve(attempt_id, tuple(keys), count))
        self._here.link.send(OpenHandOver(attempt_id, self._there.link.address, NodeId("there")))
        self._here.link.send(everything)
        self._here.link.send(Seal(attempt_id, 0))
        await asyncio.wait_for(ingested, TIMEOUT_S)
        seconds = time.perf_counter() - started
        await asyncio.wait_for(handed_over, TIMEOUT_S)
        self._here.release(attempt_id)
        self._there.release(attempt_id)
        self._held_there = [*self._held_there, keys][-SETS_THERE:]
        return seconds

    async def _get(self, contents: np.ndarray | None = None) -> float:
        """Gets keys that are not here: there is room for one set, so each get evicts the one before, and that is timed too."""
        self._held_there.append(keys := self._held_there.pop(0))
        count, attempt_id = self._blocks.count, AttemptId(new_id("attempt"))
        acquired = self._here.expect(Acquired, attempt_id)
        fetched = self._here.expect(FetchProgress, attempt_id)
        source = self._there.link
        order = Acquire(attempt_id, tuple(keys), count + 1, count, (PrefixSource(source.node_id, source.address, count),))
        started = time.perf_counter()
        self._here.link.send(order)
        await asyncio.wait_for(fetched, TIMEOUT_S)
        seconds = time.perf_counter() - started
        answer = acquired.result()
        assert answer.remote_blocks == count, f"{answer.local_blocks} blocks were here, {answer.remote_blocks} there, of {count}"
        self._check(answer, contents)
        self._here.release(attempt_id)
        self._held_here = keys
        return seconds

    async def _hit(self, contents: np.ndarray | None = None) -> float:
        """Acquires those that were got last."""
        keys = self._held_here
        started = time.perf_counter()
        acquired = await self._here.acquire(keys, len(keys) + 1)
        seconds = time.perf_counter() - started
        assert acquired.local_blocks == len(keys), f"only {acquired.local_blocks} blocks were here"
        self._check(acquired, contents)
        self._here.release(acquired.attempt_id)
        return seconds

    def _check(self, acquired: Acquired, contents: np.ndarray | None) -> None:
        if contents is not None:
            same = all(np.array_equal(self._block(slot), block) for slot, block in zip(acquired.slots, contents, strict=False))
            assert same, "the bytes that came are not those that were put"

    def _block(self, slot: int) -> np.ndarray:
        """A slot of the arena here: uint8 [size]."""
        return self._here.link.arena[slot * self._blocks.size : (slot + 1) * self._blocks.size]

    @property
    def _layers(self) -> int:
        return self._here.num_layers


if __name__ == "__main__":
    run(StoreJob)
