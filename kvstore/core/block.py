"""A committed block: visible to everybody who knows its key."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.ids import BlockKey, Slot


@dataclass(slots=True, eq=False)
class Block:
    """`slot` belongs to the block until it is evicted; nobody writes it meanwhile."""

    key: BlockKey
    slot: Slot
    parent: Block | None
    children: int = 0
    """Held blocks whose parent this is."""
    refs: int = 0
    """Places of attempts and leases. Whoever references a block references its ancestors too."""
    last_used: int = 0
    """Tick of the index when the last reference was dropped: larger is later."""

    @property
    def evictable(self) -> bool:
        return self.refs == 0 and self.children == 0
