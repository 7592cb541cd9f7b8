"""In which order blocks go: an eviction policy's, but soft pins last, and on demand one tenant's blocks or those not on the SSD."""

from __future__ import annotations

from collections.abc import Container, Generator

from kvstore.core.block import Block
from kvstore.core.eviction import EvictionPolicy, new_policy
from kvstore.core.tenants import Tenant
from springtide.ids import BlockKey

EVERYBODY, OWN, DIRTY = 0, 1, 2
"""Lanes: a block can be in a heap of each."""


class PinnedLast:
    """Soft pins are prefix-closed and so is what is held, hence no unpinned block is an ancestor of a pinned one: those without a pin can
    all go before the first of the others."""

    def __init__(self, policy: EvictionPolicy, lane: int, pinned: Container[BlockKey]) -> None:
        self._pinned = pinned
        self._first = policy.new_queue(lane)
        self._last = new_policy("lru", 0).new_queue(lane)

    def add(self, block: Block) -> None:
        (self._last if block.key in self._pinned else self._first).add(block)

    def discard(self, block: Block) -> None:
        self._first.discard(block)
        self._last.discard(block)

    def pop(self, now: int) -> Block:
        return self._first.pop(now) if len(self._first) else self._last.pop(now)

    def __contains__(self, block: Block) -> bool:
        return block in self._first or block in self._last

    def __len__(self) -> int:
        return len(self._first) + len(self._last)


class EvictionOrder:
    """All blocks that may go now, and those of each tenant with a quota once more by themselves. A block's pin may change only while it is
    not in here. `pinned` holds the keys of soft pins. With `tells_dirty`, those that are not clean are known by themselves."""

    def __init__(self, policy: EvictionPolicy, pinned: Container[BlockKey], tells_dirty: bool) -> None:
        self._policy = policy
        self._pinned = pinned
        self._everybody = PinnedLast(policy, EVERYBODY, pinned)
        self._dirty = PinnedLast(policy, DIRTY, pinned) if tells_dirty else None
        self._own: dict[Tenant, PinnedLast] = {}

    def add(self, block: Block) -> None:
        self._everybody.add(block)
        if self._dirty is not None and not block.clean:
            self._dirty.add(block)
        if block.tenant.quota is not None:
            own = self._own.get(block.tenant)
            if own is None:
                own = self._own[block.tenant] = PinnedLast(self._policy, OWN, self._pinned)
            own.add(block)

    def discard(self, block: Block) -> None:
        self._everybody.discard(block)
        self._discard_own(block)
        self._discard_dirty(block)

    def pop(self, now: int, tenant: Tenant | None = None) -> Block:
        """Removes and returns the next victim, of `tenant` (which has a quota) if one is given. Raises IndexError when there is none."""
        if tenant is None:
            block = self._everybody.pop(now)
            self._discard_own(block)
            self._discard_dirty(block)
            return block
        if tenant not in self._own:
            raise IndexError(f"tenant {tenant.name!r} has no block that may go")
        block = self._own[tenant].pop(now)
        self._everybody.discard(block)
        self._discard_dirty(block)
        self._forget_empty(tenant)
        return block

    def dirty(self, now: int) -> Generator[Block, None, None]:
        """Those that are not clean, the next victim first. Nothing may change here before the iterator is closed."""
        assert self._dirty is not None, "made without tells_dirty"
        taken = []
        try:
            while len(self._dirty):
                taken.append(self._dirty.pop(now))
                yield taken[-1]
        finally:
            for block in taken:
                self._dirty.add(block)

    def _discard_dirty(self, block: Block) -> None:
        if self._dirty is not None:
            self._dirty.discard(block)

    def _discard_own(self, block: Block) -> None:
        own = self._own.get(block.tenant)
        if own is not None:
            own.discard(block)
            self._forget_empty(block.tenant)

    def _forget_empty(self, tenant: Tenant) -> None:
        if not len(self._own[tenant]):
            del self._own[tenant]

    def __contains__(self, block: Block) -> bool:
        return block in self._everybody

    def __len__(self) -> int:
        return len(self._everybody)
