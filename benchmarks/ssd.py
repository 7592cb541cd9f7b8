"""The SSD tier beside fio, at the best of its settings, on the same disk (`make bench-ssd`; needs the command `fio`)."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.driven import compared, console, others_at_work, rate, with_remarks
from benchmarks.results import Row, show, write
from kvstore.server.transfer.demotion import BATCHES_IN_FLIGHT, STAGED_BYTES
from kvstore.ssd.disk import aligned_memory
from kvstore.ssd.tier import PutBlock, SsdTier
from springtide.ids import BlockKey

ROUNDS = 9
BLOCK_BYTES = 30 * 2 * 64 * 3 * 64 * 2
"""A block of the demo model: layers, K and V, tokens, heads, head size, bytes of a bfloat16."""
BATCH = STAGED_BYTES // BLOCK_BYTES
"""Blocks of a batch as demotion has them: from and to little staging memory, which stays in the processor's cache as fio's buffers do."""
NUM_BLOCKS = 154 * BATCH
DEPTHS, JOBS = (1, 4, BATCH * BATCHES_IN_FLIGHT, 32, 64), (1, 2)
"""Requests that fio keeps in flight, among them as many as blocks are handed to the tier at a time; processes that do so, each for its part
of the bytes."""
SWEEPS = 2
AS_OURS = "fio, as much memory as ours"
"""With as many blocks in flight as ours has staged. Where it keeps fewer, fio writes the same few pages from the processor's cache all the
time, which nobody's data are in."""
RESTART_BLOCKS, RESTART_BLOCK_BYTES = 20_000 * BATCH, 4096
SCALE = rate(NUM_BLOCKS * BLOCK_BYTES)
OPERATIONS = {"write, new files": "write", "write, in place of removed blocks": "write", "read": "read"}
WANTED = 0.8
REST_S = 1.0
"""Before each measurement, the same for both: a disk that is rented grants bursts after a pause, and fio pauses while it starts."""
NOTES = (
    f"{NUM_BLOCKS} blocks of {BLOCK_BYTES / (1 << 20):.1f} MiB, ours in batches of {BATCH} through `put` and `get`, {BATCHES_IN_FLIGHT} at "
    "a time, checksums and table included; fio sequential, direct, libaio, same blocks and as many bytes, its settings the best for each "
    f"operation of a sweep before ({SWEEPS} runs each with {', '.join(map(str, DEPTHS))} requests in flight in each of "
    f"{' or '.join(map(str, JOBS))} processes, the quickest run counts): {{best}}. Ours is not swept. The {AS_OURS}, has "
    f"{BATCH * BATCHES_IN_FLIGHT} in flight: with fewer it writes a buffer or two over and over from the processor's cache. All take "
    f"turns in each of {ROUNDS} rounds. Restart: the index of {RESTART_BLOCKS} small blocks."
)


@dataclass(frozen=True, slots=True)
class FioSettings:
    depth: int
    jobs: int

    def __str__(self) -> str:
        return f"{self.depth} in flight" + (f" in each of {self.jobs} processes" if self.jobs > 1 else "")


class Fio:
    """Writes files anew, writes them again, reads them: a file for each job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "fio"
        self._written_by = 0
        """So many jobs wrote what is there."""

    def run(self, operation: str, settings: FioSettings) -> float:
        """Seconds, as fio measured them. Files that other jobs wrote are written anew beforehand."""
        if operation == "write, new files":
            self._remove()
        elif settings.jobs != self._written_by:
            self._remove()
            self._fio("write", settings)
            time.sleep(REST_S)
        self._written_by = settings.jobs
        return self._fio(OPERATIONS[operation], settings)

    def sweep(self) -> dict[str, FioSettings]:
        """The settings with the quickest run of each operation."""
        seconds: dict[str, dict[FioSettings, float]] = {operation: {} for operation in OPERATIONS}
        for settings in itertools.starmap(FioSettings, SWEEPS * list(itertools.product(DEPTHS, JOBS))):
            for operation, found in seconds.items():
                time.sleep(REST_S)
                found[settings] = min(self.run(operation, settings), found.get(settings, float("inf")))
        for operation, found in seconds.items():
            console.print(f"fio, {operation}, GB/s:", {str(setting): round(SCALE.figure(s), 2) for setting, s in found.items()})
        return {operation: min(found, key=lambda settings: found[settings]) for operation, found in seconds.items()}

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()

    def _fio(self, kind: str, settings: FioSettings) -> float:
        options = {
            "name": "springtide",
            "directory": self._directory,
            "rw": kind,
            "bs": BLOCK_BYTES,
            "size": NUM_BLOCKS // settings.jobs * BLOCK_BYTES,
            "numjobs": settings.jobs,
            "ioengine": "libaio",
            "iodepth": settings.depth,
            "direct": 1,
            "output-format": "json",
        }
        command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        return max(float(job[kind]["runtime"]) for job in json.loads(done.stdout)["jobs"]) / 1e3


class Ours:
    """The same with a tier."""

    def __init__(self, directory: Path, bytes_per_slot: int = BLOCK_BYTES, num_blocks: int = NUM_BLOCKS) -> None:
        self._directory, self._bytes_per_slot = directory / "tier", bytes_per_slot
        self._keys = [BlockKey(i.to_bytes(16, "big")) for i in range(num_blocks)]
        self._stagings = [self._staging(bytes_per_slot) for _ in range(BATCHES_IN_FLIGHT)]

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


def throughput(directory: Path) -> tuple[list[Row], Mapping[str, FioSettings]]:
    """The rows, and the settings of fio that they are compared with."""
    ours, fio = Ours(directory), Fio(directory)
    console.print("fio's settings")
    best = fio.sweep()
    as_ours = FioSettings(BATCH * BATCHES_IN_FLIGHT, 1)
    seconds: dict[str, tuple[list[float], list[float], list[float]]] = {operation: ([], [], []) for operation in OPERATIONS}
    for index in range(-1, ROUNDS):
        for operation, (mine, theirs, alike) in seconds.items():
            sides = (
                (ours.run, mine),
                (partial(fio.run, settings=best[operation]), theirs),
                (partial(fio.run, settings=as_ours), alike),
            )
            for run, figures in sides if index % 2 else reversed(sides):
                time.sleep(REST_S)
                duration = run(operation)
                if index >= 0:  # the first round warms up
                    figures.append(duration)
    rows = [
        row
        for operation, (mine, theirs, alike) in seconds.items()
        for row in (compared(operation, SCALE, mine, theirs, "fio", WANTED), compared(operation, SCALE, mine, alike, AS_OURS, None))
    ]
    return rows, best


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
    return Row("restart, for each block", "us", statistics.median(per_block), (min(per_block), max(per_block)), rounds=ROUNDS)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/var/tmp", help="on the disk to be measured")
    parent = parser.parse_args(arguments).directory
    if shutil.which("fio") is None:
        sys.exit("fio is not there; on Debian and Ubuntu: apt-get install fio")
    remark = others_at_work()
    with tempfile.TemporaryDirectory(prefix="springtide-ssd-", dir=parent) as scratch:
        rows, best = throughput(Path(scratch))
        shutil.rmtree(Path(scratch, "tier"))
        rows.append(asyncio.run(restart(Path(scratch))))
    show("SSD tier", rows)
    settings = "; ".join(f"{operation}: {chosen}" for operation, chosen in best.items())
    console.print(write("ssd", "make bench-ssd", rows, with_remarks(NOTES.format(best=settings), [], remark)))


if __name__ == "__main__":
    main(sys.argv[1:])
