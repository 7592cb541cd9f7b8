"""The order in which blocks go: an eviction policy's, but soft pins last, and on demand one tenant's blocks or those not on the SSD."""

from __future__ import annotations

from collections.abc import Container, Generator

from kvstore._native import Block
from kvstore.core.eviction import lru
from kvstore.core.eviction_policy import EvictionPolicy
from kvstore.core.tenants import Tenant
from springtide.ids import BlockKey

EVERYBODY, OWN, DIRTY, OWN_DIRTY = 0, 1, 2, 3
"""The lanes: a block can be in a heap of each."""


class PinnedLast:
    """A policy's order, soft pins last. They are prefix-closed and so is what is held, hence no unpinned block is an ancestor of a pinned
    one: those without a pin can all go before the first of the others."""

    def __init__(self, policy: EvictionPolicy, lane: int, pinned: Container[BlockKey]) -> None:
        self._pinned = pinned
        self._first = policy.new_queue(lane)
        self._last = lru(0).new_queue(lane)

    def add(self, block: Block) -> None:
        (self._last if self._pinned and block.key in self._pinned else self._first).add(block)

    def discard(self, block: Block) -> None:
        self._first.discard(block)
        self._last.discard(block)

    def pop(self, now: int) -> Block:
        return self._first.pop(now) if not self._pinned or len(self._first) else self._last.pop(now)

    def __contains__(self, block: Block) -> bool:
        return block in self._first or block in self._last

    def __len__(self) -> int:
        return len(self._first) + len(self._last)


class EvictionOrder:
    """All blocks that may go now, and those of each tenant with a quota once more by themselves. A block's pin may change only while it is
    not in here. `pinned` holds the keys of soft pins. With `tells_dirty`, those of each that are not clean are known by themselves."""

    def __init__(self, policy: EvictionPolicy, pinned: Container[BlockKey], tells_dirty: bool) -> None:
        self._policy = policy
        self._pinned = pinned
        self._everybody = PinnedLast(policy, EVERYBODY, pinned)
        self._dirty = PinnedLast(policy, DIRTY, pinned) if tells_dirty else None
        self._own: dict[Tenant, PinnedLast] = {}
        self._own_dirty: dict[Tenant, PinnedLast] = {}

    def add(self, block: Block) -> None:
        self._everybody.add(block)
        owned = block.tenant.quota is not None
        if owned:
            self._queue_of(block.tenant, self._own, OWN).add(block)
        if self._dirty is not None and not block.clean:
            self._dirty.add(block)
            if owned:
                self._queue_of(block.tenant, self._own_dirty, OWN_DIRTY).add(block)

    def discard(self, block: Block) -> None:
        self._everybody.discard(block)
        self._discard_own(block)
        self._discard_dirty(block)

    def _queue_of(self, tenant: Tenant, queues: dict[Tenant, PinnedLast], lane: int) -> PinnedLast:
        queue = queues.get(tenant)
        if queue is None:
            queue = queues[tenant] = PinnedLast(self._policy, lane, self._pinned)
        return queue

    def pop(self, now: int, tenant: Tenant | None = None) -> Block:
        """Removes and returns the next victim, of `tenant` (which has a quota) if one is given. Raises IndexError when there is none."""
        if tenant is None:
            block = self._everybody.pop(now)
            if self._own:
                self._discard_own(block)
            if self._dirty is not None:
                self._discard_dirty(block)
            return block
        if tenant not in self._own:
            raise IndexError(f"tenant {tenant.name!r} has no block that may go")
        block = self._own[tenant].pop(now)
        self._everybody.discard(block)
        self._discard_dirty(block)
        _forget_empty(tenant, self._own)
        return block

    def dirty(self, now: int, tenant: Tenant | None = None) -> Generator[Block, None, None]:
        """The blocks (of `tenant`, which has a quota, if one is given) that are not clean, the next victim first. Nothing may change here
        before the iterator is closed."""
        queue = self._dirty if tenant is None else self._own_dirty.get(tenant)
        if queue is None:
            return
        taken = []
        try:
            while len(queue):
                taken.append(queue.pop(now))
                yield taken[-1]
        finally:
            for block in taken:
                queue.add(block)

    def _discard_dirty(self, block: Block) -> None:
        if self._dirty is not None:
            self._dirty.discard(block)
            _discard(block, self._own_dirty)

    def _discard_own(self, block: Block) -> None:
        _discard(block, self._own)

    def __contains__(self, block: Block) -> bool:
        return block in self._everybody

    def __len__(self) -> int:
        return len(self._everybody)


def _discard(block: Block, queues: dict[Tenant, PinnedLast]) -> None:
    queue = queues.get(block.tenant) if queues else None
    if queue is not None:
        queue.discard(block)
        _forget_empty(block.tenant, queues)


def _forget_empty(tenant: Tenant, queues: dict[Tenant, PinnedLast]) -> None:
    if not len(queues[tenant]):
        del queues[tenant]
