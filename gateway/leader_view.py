"""Which Conductor a gateway takes for the leader, and whose answers it accepts. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LeaderView:
    """To ask the wrong one costs a round trip; to believe it is what `accepts` prevents: an epoch that was seen is never gone back on."""

    epoch: int = 0
    """The highest seen; 0 while the cluster has one Conductor only."""
    address: str | None = None
    """Who leads, as last heard."""
    doubted: bool = False
    """It did not answer, or not as a leader does: the others may know of another."""

    def read(self, address: str, epoch: int) -> bool:
        """The lease, or membership, names `address`. A lease of a lower epoch than was seen means that Valkey has lost its count; the
        holder finds out when it is asked. Returns whether the leader is another now."""
        self.epoch = max(self.epoch, epoch)
        if address == self.address:
            return False
        self.address, self.doubted = address, False
        return True

    def answered(self, address: str, epoch: int) -> bool:
        """It has decided under an epoch that `accepts`. Returns whether the leader is another now."""
        changed = self.read(address, epoch)
        self.doubted = False
        return changed

    def hinted(self, by: str, address: str, epoch: int) -> bool:
        """The Conductor `by` does not lead; it says who does, if it knows. Returns whether the leader is another now."""
        if by == self.address:
            self.doubted = True
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return bool(address) and self.read(address, epoch)

    def lost(self, address: str) -> None:
        """It does not answer."""
        self.doubted = self.doubted or address == self.address

    def accepts(self, epoch: int) -> bool:
        """Whether an answer given under `epoch` counts: not when it is a deposed leader's."""
        return epoch == 0 or epoch >= self.epoch
