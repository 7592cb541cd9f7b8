"""Mooncake Store over TCP: a client without memory of its own in the pool, a store process that lends a segment, and the master. Timed
are `batch_put_from` and `batch_get_into` from and to the client's registered memory."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

from benchmarks.drivers.blocks import Blocks, KeyValueJob
from benchmarks.drivers.protocol import Target, end, run

MODULE = "benchmarks.drivers.mooncake_store"
BUFFER_BYTES = 64 << 20
CLIENT_TTL_S = 24 * 3600
"""A benchmark stops whoever is not being measured: the master must not take that for death."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def connect(master: str, segment_bytes: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    status = store.setup(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master)
    if status != 0:
        raise RuntimeError(f"MooncakeDistributedStore.setup returned {status}")
    return store


class Master:
    def __init__(self) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                Path(sys.executable).with_name("mooncake_master"),
                f"--rpc_port={port}",
                f"--metrics_port={free_port()}",
                f"--client_ttl={CLIENT_TTL_S}",
            ]
        )
        while self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return
            except ConnectionRefusedError:
                continue
        raise RuntimeError(f"mooncake_master ended with {self._process.returncode}")

    def close(self) -> None:
        self._process.terminate()
        end(self._process)


class MooncakeJob(KeyValueJob):
    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(Blocks.from_arguments(arguments))
        self._master = Master()
        self._target = Target(MODULE, [self._master.address, *arguments])
        self._store = connect(self._master.address, 0)
        if self._store.register_buffer(self.memory.ctypes.data, self.memory.nbytes) != 0:
            raise RuntimeError("register_buffer failed")
        self._pointers = [self.memory.ctypes.data + index * self.blocks.size for index in range(self.blocks.count)]
        self._sizes = [self.blocks.size] * self.blocks.count

    def put(self, keys: Sequence[str]) -> None:
        self._check("put", self._store.batch_put_from(keys, self._pointers, self._sizes), 0)

    def get(self, keys: Sequence[str]) -> object:
        self._check("got", self._store.batch_get_into(keys, self._pointers, self._sizes), self.blocks.size)
        return None

    def arrived(self, got: object) -> np.ndarray:
        return self.memory

    def remove(self, keys: Sequence[str]) -> None:
        self._check("removed", self._store.batch_remove(keys, force=True), 0)

    def close(self) -> None:
        self._store.close()
        self._target.close()
        self._master.close()

    def _check(self, what: str, statuses: Sequence[int], good: int) -> None:
        if any(status != good for status in statuses):
            raise RuntimeError(f"a block was not {what}: {[status for status in statuses if status != good][:3]}")


def serve_target(arguments: Sequence[str]) -> tuple[dict[str, Any], object]:
    blocks = Blocks.from_arguments(arguments)
    return {}, connect(arguments[0], 4 * blocks.count * blocks.size)


if __name__ == "__main__":
    run(MooncakeJob, serve_target)
