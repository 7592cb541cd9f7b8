"""What one attempt holds in the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvstore.core.block import Block
from kvstore.core.ingest import Ingest
from kvstore.core.tenants import Tenant
from springtide.ids import AttemptId, BlockKey, Slot


class Holder(Enum):
    """Who may still touch an attempt's slots. A slot is given back when the last of them lets go."""

    ENGINE = auto()
    """Reads and writes all of them, until Release or its end."""
    DEPARTED_ENGINE = auto()
    """An engine whose stream has ended, but that may still be writing: quarantined until it has let go of the arena."""
    STORE = auto()
    """This store itself, for a replica that it was told to take: the engine's part."""
    FETCH = auto()
    """This store reads from a peer into them."""
    HAND_OVER = auto()
    """This store writes them to a peer: it only reads them."""
    INGEST = auto()
    """A peer writes them: quarantined once the engine has let go, until the peer closes the ingest or is fenced."""


OWNERS = frozenset({Holder.ENGINE, Holder.STORE})
"""Who wants an attempt's blocks. Each attempt begins with one of them."""
WRITERS = frozenset({Holder.ENGINE, Holder.DEPARTED_ENGINE, Holder.FETCH, Holder.INGEST})


@dataclass(slots=True)
class Place:
    """One block of an attempt. `slot` is the attempt's own as long as it is not the slot of `block`."""

    slot: Slot
    block: Block | None = None
    """The committed block of this key, referenced by the attempt. Another slot than the own one when an equal block was there first."""

    @property
    def private(self) -> bool:
        return self.block is None or self.block.slot != self.slot


@dataclass(slots=True)
class Attempt:
    attempt_id: AttemptId
    tenant: Tenant
    """Who pays for its slots."""
    keys: list[BlockKey]
    """Known keys, of the first blocks."""
    places: list[Place | None]
    """None once given back."""
    complete: int
    """Blocks before this one are final in every layer, and committed."""
    holders: dict[Holder, range]
    """Which blocks each may touch."""
    ingest: Ingest | None = None
    num_private: int = field(default=0)
    """Slots that belong to the attempt alone."""

    def held(self, position: int) -> bool:
        return any(position in held for held in self.holders.values())

    @property
    def wanted(self) -> bool:
        return not OWNERS.isdisjoint(self.holders)

    @property
    def quarantined(self) -> bool:
        """Nobody wants it any more, but somebody may still write."""
        return not self.wanted and not WRITERS.isdisjoint(self.holders)
