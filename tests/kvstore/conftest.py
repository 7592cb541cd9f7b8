"""Store processes for the tests of this folder."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvstore_support import WAIT_S, Engine, Starter, StoreProcess


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Starter]:
    """Starts a store and connects an engine to it; ends both, orderly, after the test."""
    stores: list[StoreProcess] = []
    engines: list[Engine] = []

    async def start(node_id: str, **options: object) -> tuple[StoreProcess, Engine]:
        store = StoreProcess(tmp_path, node_id, **options)  # type: ignore[arg-type]
        stores.append(store)
        engine = await store.engine()
        engines.append(engine)
        return store, engine

    yield start
    for engine in engines:
        await engine.close()
    for store in stores:
        store.kill(signal.SIGTERM)
    for store in stores:
        assert await asyncio.to_thread(store.process.wait, WAIT_S) in (0, -signal.SIGKILL), store.log.read_text()
    for store in stores:
        if store.process.returncode == 0:
            assert not store.store_socket.exists() and not store.arena_socket.exists(), "nothing is left behind"
