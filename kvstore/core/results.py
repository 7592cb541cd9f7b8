"""What the pool answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from springtide.errors import SpringtideError
from springtide.ids import AttemptId, BlockKey


@dataclass(frozen=True, slots=True)
class IngestFailed:
    """The end of an ingest whose prompt will not arrive: the engine waits in vain."""

    attempt_id: AttemptId
    error: SpringtideError


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction by order came to."""

    blocks: int
    kept: int
    """The blocks in use or pinned, or with descendants that are."""
    copies: Sequence[BlockKey] = ()
    """Given up on the SSD: the tier has to remove them."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The arena's slots by state: each is in exactly one of the four."""

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
        """Slots that can be had."""
        return self.free + self.cached

    @property
    def total(self) -> int:
        """Slots of the arena."""
        return self.free + self.cached + self.in_use + self.quarantined


class UnknownAttempt(SpringtideError):
    """The attempt is not, or no longer, known here."""


class TransferCancelled(SpringtideError):
    """A transfer was given up: by order of an engine, or because the store at the other end has done so."""
