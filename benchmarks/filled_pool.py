"""A pool full of blocks: its memory, and how fast it is (`python -m benchmarks.filled_pool COUNT BLOCKS` prints them as JSON)."""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from array import array
from dataclasses import asdict, dataclass

import psutil

from benchmarks.drivers.prompts import Prompts
from kvstore.core.eviction import new_policy
from kvstore.core.pool import Pool
from springtide.ids import AttemptId, BlockKey

LOOK_UPS = 1_000_000
EVICTED_PROMPTS = 2000


@dataclass(frozen=True, slots=True)
class Figures:
    blocks: int
    memory_bytes: int
    """That the process has grown by, from before the pool was made until it was full."""
    stored_per_s: float
    """Blocks, while there was room: acquire, commit, release of whole prompts."""
    replaced_per_s: float
    """The same when it was full: each evicts another block."""
    look_ups_per_s: float
    look_up_p50_s: float
    look_up_p99_s: float


def new_pool(num_slots: int) -> Pool:
    """A pool with the policy that is the default of the configuration."""
    return Pool(array("Q", bytes(8 * num_slots)), 1, policy=new_policy("hit-density", num_slots))


def store(pool: Pool, prompt: int, keys: list[BlockKey]) -> None:
    attempt_id = AttemptId(str(prompt))
    pool.acquire(attempt_id, keys, len(keys), len(keys))
    pool.commit(attempt_id, 0, keys)
    pool.release(attempt_id)
    pool.take_events()


def measure(prompts: Prompts) -> Figures:
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    pool = new_pool(prompts.count * prompts.blocks)
    stored_s = _store(pool, prompts, range(prompts.count))
    gc.collect()
    memory = process.memory_info().rss - before
    look_ups = _look_up(pool, prompts)
    replaced_s = _store(pool, prompts, range(prompts.count, prompts.count + EVICTED_PROMPTS))
    return Figures(
        blocks=prompts.count * prompts.blocks,
        memory_bytes=memory,
        stored_per_s=prompts.count * prompts.blocks / stored_s,
        replaced_per_s=EVICTED_PROMPTS * prompts.blocks / replaced_s,
        look_ups_per_s=len(look_ups) / sum(look_ups),
        look_up_p50_s=statistics.median(look_ups),
        look_up_p99_s=statistics.quantiles(look_ups, n=100)[98],
    )


def _store(pool: Pool, prompts: Prompts, chosen: range) -> float:
    """Seconds that it took, without the making of keys."""
    seconds = 0.0
    for prompt in chosen:
        keys = [BlockKey(key) for key in prompts.keys(prompt)]
        started = time.perf_counter()
        store(pool, prompt, keys)
        seconds += time.perf_counter() - started
    return seconds


def _look_up(pool: Pool, prompts: Prompts) -> list[float]:
    """Seconds of each."""
    at_hand = [[BlockKey(key) for key in prompts.keys(prompt)] for prompt in prompts.some()]
    order = random.Random(2)
    durations = []
    while len(durations) < LOOK_UPS:
        order.shuffle(at_hand)
        for keys in at_hand[: LOOK_UPS - len(durations)]:
            started = time.perf_counter()
            found = pool.num_held(keys)
            durations.append(time.perf_counter() - started)
            assert found == prompts.blocks
    return durations


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Prompts(*map(int, sys.argv[1:3]))))))
