"""A trace of requests as the block keys of their prompts, in the format that `simulator.workload.records` describes: through the pool's own
core, under an eviction policy, and the best that any policy could do."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.eviction_policy import EvictionPolicy, Ranking
from kvstore.core.pool import Pool
from simulator.workload.records import read_records
from springtide.blocks import block_keys, namespace_root
from springtide.ids import AttemptId, BlockKey

_ROOT = namespace_root("trace", "", 1)
_PROGRESS_EVERY = 256


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """When a request came, and the keys of its prompt."""

    timestamp_ms: float
    keys: list[BlockKey]
    """Chained, as those of real prompts are: equal up to where the ids differ for the first time."""


def read_trace(path: Path) -> list[TracedPrompt]:
    """The requests of a trace, in order of time. Raises ConfigError, naming the line and the field, where the file is not such a trace."""
    requests = [TracedPrompt(record["timestamp"], block_keys(_ROOT, record["hash_ids"], 1)) for _, record in read_records(path)]
    return sorted(requests, key=lambda request: request.timestamp_ms)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay: every block of every request is looked up once; `hits` were there."""

    lookups: int
    hits: int
    refused_requests: int
    """Longer than the whole pool: all their blocks are misses."""
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups


def replay(
    requests: Sequence[TracedPrompt],
    capacity: int,
    policy: EvictionPolicy,
    on_progress: Callable[[int], None] = lambda requests: None,
    before_release: Callable[[int], None] = lambda request: None,
) -> Replayed:
    """Plays requests to a pool: each takes its cached prefix and slots for the rest, commits all of its blocks and lets go, before the next
    one comes."""
    pool = Pool(array("Q", bytes(8 * capacity)), 1, policy=policy)
    refused = 0
    started = time.perf_counter()
    for number, request in enumerate(requests):
        if len(request.keys) <= capacity:
            attempt_id = AttemptId(str(number))
            pool.acquire(attempt_id, request.keys, len(request.keys), len(request.keys))
            pool.commit(attempt_id, 0, request.keys)
            before_release(number)
            pool.release(attempt_id)
            pool.take_events()
        else:
            refused += 1
        if (number + 1) % _PROGRESS_EVERY == 0 or number + 1 == len(requests):
            on_progress(number % _PROGRESS_EVERY + 1)
    lookups = sum(len(request.keys) for request in requests)
    return Replayed(lookups, pool.hit_blocks, refused, time.perf_counter() - started)


def replay_clairvoyant(
    requests: Sequence[TracedPrompt], capacity: int, on_progress: Callable[[int], None] = lambda requests: None
) -> Replayed:
    """Belady's optimum: what is needed again last goes first.

    No policy, even one that knows the future, has more hits in this pool with this order of requests, where all the blocks of a request are
    held while it runs. That only leaves go costs nothing: whoever needs a block needs its ancestors, so that none of these is needed
    again later than the block, and where both are needed again by the same request the block, dropped from its prompt's end, goes first.
    What is left is to choose which of the intervals between two uses of a block to bridge, with no more of them at any time than there is
    room beside the running request; for intervals that are worth the same, giving up the one that ends last is optimal.
    """
    next_use: dict[BlockKey, float] = {}
    coming = _next_requests(requests, capacity)

    def before_release(number: int) -> None:
        next_use.update(zip(requests[number].keys, coming[number], strict=True))

    return replay(requests, capacity, Ranking(lambda block: -next_use[block.key]), on_progress, before_release)


def infinite_hits(requests: Sequence[TracedPrompt]) -> int:
    """The hits with room for everything."""
    return sum(len(request.keys) for request in requests) - len({key for request in requests for key in request.keys})


def _next_requests(requests: Sequence[TracedPrompt], capacity: int) -> list[list[float]]:
    """For every block of every request: the next request that is served and has it."""
    coming: list[list[float]] = [[] for _ in requests]
    following: dict[BlockKey, float] = {}
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys
        coming[number] = [following.get(key, math.inf) for key in keys]
        if len(keys) <= capacity:
            following.update(dict.fromkeys(keys, number))
    return coming
