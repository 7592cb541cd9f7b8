"""The SSD tier beside fio on the same disk (`make bench-ssd`; needs the command `fio`)."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.driven import compared, console, rate
from benchmarks.results import Row, show, write
from kvstore.server.demotion import BATCHES_UNDER_WAY, STAGED_BYTES
from kvstore.ssd.disk import aligned_memory
from kvstore.ssd.tier import PutBlock, SsdTier
from springtide.ids import BlockKey

ROUNDS = 9
BLOCK_BYTES = 30 * 2 * 64 * 3 * 64 * 2
"""Of the demo model: layers, K and V, tokens, heads, head size, bytes of a bfloat16."""
BATCH = STAGED_BYTES // BLOCK_BYTES
"""As demotion does: from and to little staging memory, which stays in the processor's cache as fio's buffers do."""
NUM_BLOCKS = 154 * BATCH
DEPTH = BATCH * BATCHES_UNDER_WAY
"""Requests that fio keeps in flight: as many blocks as are handed to the tier at a time, so both work on as much memory."""
RESTART_BLOCKS, RESTART_BLOCK_BYTES = 20_000 * BATCH, 4096
OPERATIONS = {"write, new files": "write", "write, in place of removed blocks": "write", "read": "read"}
WANTED = 0.8
REST_S = 1.0
"""Before each measurement, the same for both: a disk that is rented grants bursts after a pause, and fio pauses while it starts."""
NOTES = (
    f"{NUM_BLOCKS} blocks of {BLOCK_BYTES / (1 << 20):.1f} MiB, ours in batches of {BATCH} through `put` and `get`, {BATCHES_UNDER_WAY} at "
    f"a time, checksums and table included; fio sequential, direct, libaio with {DEPTH} requests in flight, same block and file size. "
    "Both take turns in every round. "
    f"Restart: the index of {RESTART_BLOCKS} small blocks."
)


class Fio:
    """Writes one file anew, writes it again, reads it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "fio"

    def run(self, operation: str) -> float:
        """Seconds, as fio measured them."""
        if operation == "write, new files":
            self._path.unlink(missing_ok=True)
        kind = OPERATIONS[operation]
        options = {
            "name": "springtide",
            "filename": self._path,
            "rw": kind,
            "bs": BLOCK_BYTES,
            "size": NUM_BLOCKS * BLOCK_BYTES,
            "ioengine": "libaio",
            "iodepth": DEPTH,
            "direct": 1,
            "output-format": "json",
        }
        command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        milliseconds = json.loads(done.stdout)["jobs"][0][kind]["runtime"]
        return float(milliseconds) / 1e3


class Ours:
    """The same with a tier."""

    def __init__(self, directory: Path, bytes_per_slot: int = BLOCK_BYTES, num_blocks: int = NUM_BLOCKS) -> None:
        self._directory, self._bytes_per_slot = directory / "tier", bytes_per_slot
        self._keys = [BlockKey(i.to_bytes(16, "big")) for i in range(num_blocks)]
        self._stagings = [self._staging(bytes_per_slot) for _ in range(BATCHES_UNDER_WAY)]

    def _staging(self, bytes_per_slot: int) -> list[memoryview]:
        memory = aligned_memory(BATCH * bytes_per_slot)
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, len(memory), dtype=np.uint8)
        return [memory[i * bytes_per_slot : (i + 1) * bytes_per_slot] for i in range(BATCH)]

    def run(self, operation: str) -> float:
        """Seconds, without opening and closing."""
        if operation == "write, new files":
            shutil.rmtree(self._directory, ignore_errors=True)
        return asyncio.run(self._run(operation))

    async def open(self) -> SsdTier:
        return await SsdTier.open(self._directory, 2 * len(self._keys) * self._bytes_per_slot, self._bytes_per_slot, "benchmark")

    async def _run(self, operation: str) -> float:
        tier = await self.open()
        if operation == "write, in place of removed blocks":
            await tier.remove(self._keys)
        started = time.perf_counter()
        await (self.read(tier) if operation == "read" else self.write(tier))
        seconds = time.perf_counter() - started
        await tier.close()
        return seconds

    async def write(self, tier: SsdTier) -> None:
        async def put(keys: Sequence[BlockKey], slots: Sequence[memoryview]) -> None:
            stored = await tier.put([PutBlock(key, None, slot) for key, slot in zip(keys, slots, strict=True)])
            assert all(stored), f"refused: {tier.counts()}"

        await self._in_batches(put)

    async def read(self, tier: SsdTier) -> None:
        async def get(keys: Sequence[BlockKey], slots: Sequence[memoryview]) -> None:
            errors = await tier.get(keys, slots)
            assert not any(errors), errors

        await self._in_batches(get)

    async def _in_batches(self, move: Callable[[Sequence[BlockKey], Sequence[memoryview]], Awaitable[None]]) -> None:
        begins = iter(range(0, len(self._keys), BATCH))

        async def work(slots: Sequence[memoryview]) -> None:
            for begin in begins:
                await move(self._keys[begin : begin + BATCH], slots)

        await asyncio.gather(*(work(slots) for slots in self._stagings))


def throughput(directory: Path) -> list[Row]:
    ours, fio = Ours(directory), Fio(directory)
    seconds: dict[str, tuple[list[float], list[float]]] = {operation: ([], []) for operation in OPERATIONS}
    for index in range(-1, ROUNDS):
        for operation, (mine, theirs) in seconds.items():
            for system, figures in ((ours, mine), (fio, theirs)) if index % 2 else ((fio, theirs), (ours, mine)):
                time.sleep(REST_S)
                duration = system.run(operation)
                if index >= 0:  # the first round warms up
                    figures.append(duration)
    scale = rate(NUM_BLOCKS * BLOCK_BYTES)
    return [compared(operation, scale, mine, theirs, "fio", WANTED) for operation, (mine, theirs) in seconds.items()]


async def restart(directory: Path) -> Row:
    ours = Ours(directory, RESTART_BLOCK_BYTES, RESTART_BLOCKS)
    tier = await ours.open()
    await ours.write(tier)
    await tier.close()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        tier = await ours.open()
        seconds.append(time.perf_counter() - started)
        assert len(tier) == RESTART_BLOCKS, tier.counts()
        await tier.close()
    per_block = [1e6 * duration / RESTART_BLOCKS for duration in seconds]
    return Row("restart, for each block", "us", statistics.median(per_block), (min(per_block), max(per_block)))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/var/tmp", help="on the disk to be measured")
    parent = parser.parse_args(arguments).directory
    if shutil.which("fio") is None:
        sys.exit("fio is not there; on Debian and Ubuntu: apt-get install fio")
    with tempfile.TemporaryDirectory(prefix="springtide-ssd-", dir=parent) as scratch:
        rows = throughput(Path(scratch))
        shutil.rmtree(Path(scratch, "tier"))
        rows.append(asyncio.run(restart(Path(scratch))))
    show("SSD tier", rows)
    console.print(write("ssd", "make bench-ssd", rows, NOTES))


if __name__ == "__main__":
    main(sys.argv[1:])
