"""The history of evicted blocks: how often each was used."""

from __future__ import annotations

from array import array

from kvstore._native import MAX_USES, Block

_USES_BITS = MAX_USES.bit_length()
_MIN_ENTRIES = 1 << 16
_ENTRIES_PER_BLOCK = 4


class UseHistory:
    """The uses of evicted blocks, in a direct-mapped table of 16-bit entries, each some bits of a key and its count: a newer key overwrites
    the older one in its place, and so the old are forgotten, after some four times as many evictions as the cache has blocks. One recall in
    4096 of an unknown key finds another one's count; that costs a misjudged block, nothing else."""

    def __init__(self, capacity: int) -> None:
        entries = _MIN_ENTRIES
        while entries < _ENTRIES_PER_BLOCK * capacity:
            entries *= 2
        self._mask = entries - 1
        self._entries = array("H", bytes(2 * entries))

    def remember(self, block: Block) -> None:
        bits = block.key_bits
        self._entries[bits & self._mask] = bits >> 48 & ~MAX_USES | block.uses

    def recall(self, block: Block) -> int:
        """The uses of the block that had its key before; 0 when none is known."""
        bits = block.key_bits
        entry = self._entries[bits & self._mask]
        return entry & MAX_USES if (entry ^ bits >> 48) >> _USES_BITS == 0 else 0
