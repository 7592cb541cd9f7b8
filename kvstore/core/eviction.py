"""The policies by name, and those that rank blocks by a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from kvstore._native import MAX_USES, Block, BlockHeap
from kvstore.core.eviction_policy import EvictionPolicy, VictimQueue
from kvstore.core.hit_density import HitDensity

PolicyName = Literal["hit-density", "lru", "lfu", "length-aware"]

DEPTH_WEIGHT = 0.1
"""Of a doubled depth, against doubled uses."""


def new_policy(name: PolicyName, capacity: int) -> EvictionPolicy:
    """The policy of a tier that holds `capacity` blocks."""
    if name == "hit-density":
        return HitDensity(capacity)
    return Ranking(ranking(name, capacity))


def ranking(name: Literal["lru", "lfu", "length-aware"], capacity: int) -> Callable[[Block], float]:
    """What a block is worth, from the moment of its last use on: the tick at which an LRU would have used it last.

    LFU: each doubling of its uses makes a block that much younger as it takes to fill the tier once. The frequent stay longer, but age wins
    in the end, which it never does in pure LFU. Length-aware is like LFU, but gives the later blocks of long prompts a longer stay too,
    for they cost more to compute (LengthAwareCache of the Mooncake paper, arXiv 2407.00079, section 4.2).
    """
    if name == "lru":
        return lambda block: block.last_used
    worth = [0.0, *(capacity * math.log2(uses) for uses in range(1, MAX_USES + 1))]
    if name == "lfu":
        return lambda block: block.last_used + worth[block.uses]
    per_doubling = capacity * DEPTH_WEIGHT
    return lambda block: block.last_used + worth[block.uses] + per_doubling * block.depth.bit_length()


class Ranking:
    """The policy that evicts the block of least value. O(log n) each."""

    observer = None

    def __init__(self, value: Callable[[Block], float]) -> None:
        self._value = value

    def new_queue(self, lane: int) -> VictimQueue:
        return RankedQueue(self._value, lane)


class RankedQueue:
    def __init__(self, value: Callable[[Block], float], lane: int) -> None:
        self._value = value
        self._heap = BlockHeap(lane)

    def add(self, block: Block) -> None:
        self._heap.push(block, self._value(block))

    def discard(self, block: Block) -> None:
        self._heap.discard(block)

    def pop(self, now: int) -> Block:
        return self._heap.pop()

    def __contains__(self, block: Block) -> bool:
        return block in self._heap

    def __len__(self) -> int:
        return len(self._heap)
