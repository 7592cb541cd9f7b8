"""Block key -> holders, with a dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from springtide.ids import BlockKey

Share = Callable[[int], int]


class HolderTable:
    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}
        self._swept: list[BlockKey] = []

    def __len__(self) -> int:
        return len(self._holders)

    def get(self, key: BlockKey) -> int:
        return self._holders.get(key, 0)

    def items(self) -> list[tuple[BlockKey, int]]:
        return list(self._holders.items())

    def add(self, keys: Sequence[BlockKey], mask: int, share: Share) -> int:
        added, others, together = 0, 0, mask
        for key in keys:
            holders = self._holders.get(key, 0)
            if holders & mask:
                continue
            if holders is not others:
                others, together = holders, share(holders | mask) if holders else mask
            self._holders[key] = together
            added += 1
        return added

    def discard(self, keys: Sequence[BlockKey], mask: int, share: Share) -> int:
        return sum(self._clear(key, mask, share) for key in keys)

    def sweep(self, first: int, count: int, mask: int, share: Share) -> tuple[int, int]:
        if first == 0:
            self._swept = list(self._holders)
        cleared = sum(self._clear(key, mask, share) for key in islice(self._swept, first, first + count))
        return (first + count if first + count < len(self._swept) else 0), cleared

    def _clear(self, key: BlockKey, mask: int, share: Share) -> int:
        """How many bits."""
        holders = self._holders.get(key, 0)
        left = holders & ~mask
        if left and left != holders:
            self._holders[key] = share(left)
        elif holders and not left:
            del self._holders[key]
        return (holders & mask).bit_count()
