"""Which of the evictable blocks goes first. A policy judges blocks; that only leaves go, whatever it says, is the index's doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore._native import Block, BlockHeap


class VictimQueue(Protocol):
    """Orders blocks that may go now: leaves without references. The index adds a block when it becomes one and discards it when it ceases
    to be one; while it is in, nothing about the block changes."""

    def add(self, block: Block) -> None: ...

    def discard(self, block: Block) -> None:
        """No-op when it is not in."""
        ...

    def pop(self, now: int) -> Block:
        """Removes and returns the next victim. Raises IndexError when there is none."""
        ...

    def __contains__(self, block: Block) -> bool: ...

    def __len__(self) -> int: ...


class Observer(Protocol):
    """Learns from how some of the blocks are used. Time (`now`) is counted in uses of blocks: the ticks of `Block.last_used`."""

    def observes(self, block: Block) -> bool:
        """Whether to be told of blocks of this key. They become `sampled`."""
        ...

    def used(self, block: Block, now: int) -> None:
        """It has been stored, or was found while nobody else used it."""
        ...

    def rested(self, block: Block, now: int) -> None:
        """Nobody uses it any more."""
        ...


class EvictionPolicy(Protocol):
    @property
    def observer(self) -> Observer | None:
        """Who learns; None where nobody does."""
        ...

    def new_queue(self, lane: int) -> VictimQueue:
        """`lane` as in BlockHeap."""
        ...


class Ranking:
    """A policy that evicts the block of least value, which is what it is worth from the moment of its last use on: the tick at which an LRU
    would have used it last. O(log n) each."""

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
