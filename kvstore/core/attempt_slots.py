"""What one attempt holds in the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvstore._native import Block
from kvstore.core.ingest import Ingest
from kvstore.core.tenants import Tenant
from springtide.ids import AttemptId, BlockKey, Slot


class Holder(Enum):
    """Who may still touch an attempt's slots. A slot is given back when the last of them lets go."""

    ENGINE = auto()
    """Reads and writes all of them, until Release or its end."""
    UNFENCED_ENGINE = auto()
    """An engine whose stream has ended, but that may still be writing: quarantined until it is fenced, as it has let go of the arena."""
    STORE = auto()
    """This store itself, for a replica that it was told to take: the engine's part."""
    FETCH = auto()
    """This store reads from a peer into them."""
    HAND_OVER = auto()
    """This store writes them to a peer: it only reads them."""
    INGEST = auto()
    """A peer writes them: quarantined once the engine has let go, until the peer closes the ingest or is fenced."""

    # Members are looked up for every block: by identity, as they are single, rather than by their names' hashes.
    __hash__ = object.__hash__


OWNERS = frozenset({Holder.ENGINE, Holder.STORE})
"""Who wants an attempt's blocks. Each attempt begins with one of them."""
WRITERS = frozenset({Holder.ENGINE, Holder.UNFENCED_ENGINE, Holder.FETCH, Holder.INGEST})


@dataclass(slots=True)
class AttemptSlots:
    """The slots and blocks of one attempt, and who may still touch them."""

    attempt_id: AttemptId
    tenant: Tenant
    """Who pays for its slots."""
    keys: list[BlockKey]
    """Known keys, of the first blocks."""
    slots: list[Slot | None]
    """One for each block; None once given back. It is the attempt's own as long as it is not the slot of the block at its place."""
    blocks: list[Block | None]
    """The committed block of each key, referenced by the attempt; None while there is none, and once given back. It has another slot than
    the own one when an equal block was there first."""
    complete: int
    """Blocks before this one are final in every layer, and committed."""
    holders: dict[Holder, range]
    """Which blocks each may touch."""
    ingest: Ingest | None = None
    num_private: int = field(default=0)
    """Slots that belong to the attempt alone."""

    def held(self, position: int) -> bool:
        """Whether somebody may still touch this place."""
        return any(position in held for held in self.holders.values())

    def private(self, position: int) -> bool:
        """Whether there is a slot at this place that is the attempt's own."""
        slot, block = self.slots[position], self.blocks[position]
        return slot is not None and (block is None or block.slot != slot)

    @property
    def held_in_full(self) -> bool:
        """Whether somebody may still touch every place."""
        return any(len(held) == len(self.slots) for held in self.holders.values())

    @property
    def wanted(self) -> bool:
        """Whether an owner still holds it."""
        return not OWNERS.isdisjoint(self.holders)

    @property
    def quarantined(self) -> bool:
        """Whether nobody wants it any more, but somebody may still write."""
        return not self.wanted and not WRITERS.isdisjoint(self.holders)
