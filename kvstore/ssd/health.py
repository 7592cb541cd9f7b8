"""Whether the disk takes writes, and when to ask it again."""

from __future__ import annotations

import logging
from enum import Enum

from kvstore.ssd.errors import DiskError

logger = logging.getLogger(__name__)

RETRY_S = 5.0


class TierState(Enum):
    TAKING = "taking"
    DISK_FULL = "disk_full"
    """The file system has no room for all of the tier's capacity. What it has got is used; it asks for more every RETRY_S."""
    FAILING = "failing"
    """A write failed. Blocks are read but none is taken; a write is tried every RETRY_S."""


class Health:
    """Says each change once, in the log."""

    def __init__(self) -> None:
        self.state = TierState.TAKING
        self._write_at = float("-inf")
        self._grow_at = float("-inf")

    def may_write(self, now: float) -> bool:
        return self.state is not TierState.FAILING or now >= self._write_at

    def may_grow(self, now: float) -> bool:
        return self.may_write(now) and now >= self._grow_at

    def write_failed(self, error: DiskError, now: float) -> None:
        self._write_at = now + RETRY_S
        self._become(TierState.FAILING, error)

    def growth_failed(self, error: DiskError, now: float) -> None:
        if not error.no_room:
            self.write_failed(error, now)
            return
        self._grow_at = now + RETRY_S
        self._become(TierState.DISK_FULL, error)

    def wrote(self) -> None:
        """A write that was held to fail has worked."""
        if self.state is TierState.FAILING:
            self._become(TierState.TAKING)

    def grew(self) -> None:
        self._become(TierState.TAKING)

    def _become(self, state: TierState, error: DiskError | None = None) -> None:
        if state is self.state:
            return
        self.state = state
        if error is None:
            logger.info("the SSD tier takes blocks again")
        elif state is TierState.DISK_FULL:
            logger.warning("the SSD tier grows no more, the disk is full: %s", error)
        else:
            logger.error("the SSD tier takes no blocks, a write failed: %s", error)
