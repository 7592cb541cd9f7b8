"""Which of the evictable blocks goes first: what a policy is, the policies by name, and those that rank blocks by a value.

A policy judges blocks; that only leaves go, whatever it says, is the index's doing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

from kvstore._native import MAX_USES, Block, BlockHeap
from kvstore.core.hit_density import HitDensity

PolicyName = Literal["hit-density", "lru", "lfu", "length-aware"]

DEPTH_WEIGHT = 0.1
"""What a doubled depth counts, against doubled uses."""


class VictimQueue(Protocol):
    """An order of the blocks that may go now: leaves without references. The index adds a block when it becomes one and discards it when it
    ceases to be one; while it is in, nothing about the block changes."""

    def add(self, block: Block) -> None: ...

    def discard(self, block: Block) -> None:
        """Takes it out; a no-op when it is not in."""
        ...

    def pop(self, now: int) -> Block:
        """Removes and returns the next victim. Raises IndexError when there is none."""
        ...

    def __contains__(self, block: Block) -> bool: ...

    def __len__(self) -> int: ...


class Observer(Protocol):
    """A part of a policy that learns from how some of the blocks are used. Time (`now`) is counted in uses of blocks: the ticks of
    `Block.last_used`."""

    def observes(self, block: Block) -> bool:
        """Whether to be told of blocks of this key. They become `sampled`."""
        ...

    def used(self, block: Block, now: int) -> None:
        """Takes note that it has been stored, or was found while nobody else used it."""
        ...

    def rested(self, block: Block, now: int) -> None:
        """Takes note that nobody uses it any more."""
        ...


class EvictionPolicy(Protocol):
    """A rule by which blocks go. Add one: a class like this, its name in `PolicyName` and in `new_policy`."""

    @property
    def observer(self) -> Observer | None: ...

    def new_queue(self, lane: int) -> VictimQueue:
        """An empty queue of this policy. `lane` as in BlockHeap."""
        ...


def new_policy(name: PolicyName, capacity: int) -> EvictionPolicy:
    """The policy of a tier that holds `capacity` blocks."""
    if name == "hit-density":
        return HitDensity(capacity)
    return Ranking(ranking(name, capacity))


def ranking(name: Literal["lru", "lfu", "length-aware"], capacity: int) -> Callable[[Block], float]:
    """The value of a block, from the moment of its last use on: the tick at which an LRU would have used it last.

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
    """The blocks of one order, in a heap."""

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
