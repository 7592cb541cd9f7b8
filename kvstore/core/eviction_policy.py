"""Which of the evictable blocks goes first. A policy judges blocks; that only leaves go, whatever it says, is the index's doing."""

from __future__ import annotations

from typing import Protocol

from kvstore._native import Block


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
    def observer(self) -> Observer | None: ...

    def new_queue(self, lane: int) -> VictimQueue:
        """`lane` as in BlockHeap."""
        ...
