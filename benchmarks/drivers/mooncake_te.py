"""Mooncake's Transfer Engine over TCP. Timed is `batch_transfer_sync_write` or `_read`; for one slice `transfer_sync_write` or `_read`.

Its settings are the defaults: MC_TCP_ENABLE_CONNECTION_POOL and MC_TCP_LANES_PER_PEER made no difference when measured in turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

from benchmarks.drivers.protocol import Target, repeat, run
from benchmarks.drivers.slices import Slices, Transfer


def new_engine(memory: np.ndarray) -> TransferEngine:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("TransferEngine.initialize failed")
    if engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise RuntimeError("TransferEngine.register_memory failed")
    return engine


class MooncakeTransfer(Transfer):
    def __init__(self, arguments: Sequence[str]) -> None:
        self.slices = Slices.from_arguments(arguments)
        self.memory = self.slices.new_memory()
        self._target = Target("benchmarks.drivers.mooncake_te", self.slices.arguments)
        self._engine = new_engine(self.memory)
        self._here = [self.memory.ctypes.data + offset for offset in self.slices.here]
        self._there = [self._target.announced["memory"] + offset for offset in self.slices.there]

    def measure(self, operation: str, times: int) -> list[float]:
        peer, slices = self._target.announced["peer"], self.slices
        if slices.count == 1:
            move = partial(getattr(self._engine, f"transfer_sync_{operation}"), peer, self._here[0], self._there[0], slices.size)
        else:
            sizes = [slices.size] * slices.count
            move = partial(getattr(self._engine, f"batch_transfer_sync_{operation}"), peer, self._here, self._there, sizes)

        def once() -> None:
            if move() != 0:
                raise RuntimeError(f"a {operation} of {slices} failed")

        return repeat(once, times)

    def close(self) -> None:
        self._target.close()


def serve_target(arguments: Sequence[str]) -> tuple[dict[str, Any], object]:
    memory = Slices.from_arguments(arguments).new_memory()
    engine = new_engine(memory)
    return {"peer": f"127.0.0.1:{engine.get_rpc_port()}", "memory": memory.ctypes.data}, (engine, memory)


if __name__ == "__main__":
    run(MooncakeTransfer, serve_target)
