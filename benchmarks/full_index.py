"""The Conductor's index, full: its memory, and how fast it is then (`python -m benchmarks.full_index` prints the figures as JSON)."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass

import psutil

from conductor.core.prefix_index import PrefixIndex
from springtide.ids import BlockKey, NodeId
from springtide.protocol.storage import Tier

STORES, FULL, BLOCKS = 1000, 10_000_000, 128
"""Stores, blocks in all, blocks of a prompt."""
HOT_SHARE, HOT_STORES = 0.01, 200
"""Such a share of the prompts is held by so many stores; every other one by one to three."""
REMOVED, FINDS = 2000, 20_000


@dataclass(frozen=True, slots=True)
class Figures:
    blocks: int
    memory_bytes: int
    """That the process has grown by, keys included."""
    taken_in_per_s: float
    longest_event_s: float
    removed_per_s: float
    find_p50_s: float
    find_p99_s: float


class Filled:
    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._chance = random.Random(1)
        self._sequence = [0] * STORES
        for store in range(STORES):
            self.index.snapshot(NodeId(str(store)), 1, 0, [], Tier.DRAM, complete=True)

    def told(self, store: int, keys: list[BlockKey], stored: bool) -> float:
        """Seconds that an event of the store took."""
        self._sequence[store] += 1
        tell = self.index.stored if stored else self.index.removed
        started = time.perf_counter()
        assert tell(NodeId(str(store)), 1, self._sequence[store], keys, Tier.DRAM)
        return time.perf_counter() - started

    def fill(self) -> tuple[float, float, int]:
        """Seconds of all events and of the longest, and the blocks in them."""
        seconds, longest, told = 0.0, 0.0, 0
        for prompt in range(FULL // BLOCKS):
            for store in self.holders(prompt):
                took = self.told(store, keys_of(prompt), True)
                seconds, longest, told = seconds + took, max(longest, took), told + BLOCKS
        return seconds, longest, told

    def holders(self, prompt: int) -> list[int]:
        chance = random.Random(prompt)
        return chance.sample(range(STORES), HOT_STORES if chance.random() < HOT_SHARE else chance.randint(1, 3))


def keys_of(prompt: int) -> list[BlockKey]:
    """The keys of a prompt, made anew each time, as they come from the wire."""
    chance = random.Random(-prompt - 1)
    return [BlockKey(chance.randbytes(16)) for _ in range(BLOCKS)]


def measure() -> Figures:
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    filled = Filled()
    seconds, longest, told = filled.fill()
    gc.collect()
    memory = process.memory_info().rss - before
    durations = _find(filled)
    removed_s = sum(filled.told(filled.holders(prompt)[0], keys_of(prompt)[::-1], False) for prompt in range(REMOVED))
    return Figures(
        blocks=len(filled.index),
        memory_bytes=memory,
        taken_in_per_s=told / seconds,
        longest_event_s=longest,
        removed_per_s=REMOVED * BLOCKS / removed_s,
        find_p50_s=statistics.median(durations),
        find_p99_s=statistics.quantiles(durations, n=100)[98],
    )


def _find(filled: Filled) -> list[float]:
    prompts = random.Random(2).sample(range(FULL // BLOCKS), FINDS)
    durations = []
    for prompt in prompts:
        keys = keys_of(prompt)
        started = time.perf_counter()
        found = filled.index.match(keys)
        durations.append(time.perf_counter() - started)
        assert len(found) == len(filled.holders(prompt))
    return durations


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
