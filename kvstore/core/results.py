"""What the pool answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from springtide.errors import SpringtideError
from springtide.ids import AttemptId, BlockKey, Slot
from springtide.protocol.storage import Tier


@dataclass(frozen=True, slots=True)
class Target:
    """Where the writer puts a block, or that it needn't (`present`)."""

    slot: Slot
    generation: int
    present: bool


@dataclass(frozen=True, slots=True)
class Leased:
    lease_id: int
    slots: Sequence[tuple[Slot, int]]
    """With their generations."""
    tenant: str
    """Whose blocks they are."""


@dataclass(frozen=True, slots=True)
class IngestFailed:
    """The engine waits in vain: the prompt will not arrive."""

    attempt_id: AttemptId
    error: SpringtideError


@dataclass(frozen=True, slots=True)
class Evicted:
    blocks: int
    kept: int
    """In use or pinned, or with descendants that are."""
    copies: Sequence[BlockKey] = ()
    """Given up on the SSD: the tier has to remove them."""


@dataclass(frozen=True, slots=True)
class Stored:
    sequence: int
    keys: Sequence[BlockKey]
    tier: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True)
class Removed:
    sequence: int
    keys: Sequence[BlockKey]
    tier: Tier = Tier.DRAM


PoolEvent = Stored | Removed


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Every slot is in exactly one of the four states."""

    free: int
    cached: int
    """Committed and referenced by nobody: evictable."""
    in_use: int
    quarantined: int
    """Let go by the engine, but a writer may still write them."""
    leases: int
    ingests: int
    """Open ones."""

    @property
    def available(self) -> int:
        return self.free + self.cached

    @property
    def total(self) -> int:
        return self.free + self.cached + self.in_use + self.quarantined


class UnknownAttempt(SpringtideError):
    """The attempt is not, or no longer, known here."""
