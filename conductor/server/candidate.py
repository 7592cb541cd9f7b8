"""Whether this Conductor leads, decided: answers of Valkey in, the next claim out."""

from __future__ import annotations

from springtide.leader_lease import Answer, Claim, Free, Granted, Held, Leader

_RENEWALS_A_LEASE = 3
_LOOKS_A_LEASE = 10
_LONGEST_LOOK_S = 0.25
"""How soon a standby learns that a leader has resigned."""
_MARGIN = 0.05
"""Share of a lease that its holder does not use: Valkey counts whole milliseconds, and clocks run at slightly different rates."""
_EXPIRY_S = 0.002
"""By when a lease that was seen to end is gone in Valkey too."""


class Candidate:
    """One Conductor's standing for the leader's lease, decided: answers of Valkey in, the next claim out. Free of I/O, clock and
    randomness.

    It leads from the moment a claim is granted until, by its own clock, the lease could be over in Valkey. Only one does at any time: a
    lease is another's when it is over in Valkey, which is later. Times are seconds on this process's own clock. Nothing here compares the
    clocks of two machines: a lease runs from before it was asked for as its holder counts, and from after it was seen as everybody else
    counts.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._look_s = min(lease_s / _LOOKS_A_LEASE, _LONGEST_LOOK_S)
        self._epoch = 0
        self._floor = 0
        """The highest epoch heard of. Who was granted a lower one must not lead."""
        self._valid_until = 0.0
        self._leader: Leader | None = None
        self.due_at = 0.0
        """When Valkey is to be asked next."""

    @property
    def epoch(self) -> int:
        """The highest that is known; of this Conductor's own leadership while it leads."""
        return self._floor

    @property
    def leader(self) -> Leader | None:
        """Somebody else who holds the lease, as last seen."""
        return self._leader

    def leads(self, now: float) -> bool:
        return now < self._valid_until and self._epoch >= self._floor

    def claim(self, now: float, eligible: bool) -> Claim | None:
        """What to ask Valkey now; None before `due_at`. Who is not `eligible` only looks, unless it leads."""
        if now < self.due_at:
            return None
        leads = self.leads(now)
        # Before the first leadership there is none to remember: that too may be a loss of memory.
        return Claim(max(self._floor, 1), take=leads or eligible, leads=leads)

    def answered(self, answer: Answer | None, asked_at: float, now: float) -> None:
        """Takes in what Valkey said to the claim that was made at `asked_at`; None: it could not be asked."""
        match answer:
            case Granted(epoch):
                self._epoch, self._leader = epoch, None
                self._valid_until = asked_at + self._lease_s * (1 - _MARGIN)
                # A higher epoch was heard of while this claim was in flight: the next one asks for a higher one.
                self.due_at = asked_at + self._lease_s / _RENEWALS_A_LEASE if epoch >= self._floor else now
                self._floor = max(self._floor, epoch)
            case Held(leader, left_s):
                self.resign()
                self._leader = leader
                self._floor = max(self._floor, leader.epoch if leader is not None else 0)
                self.due_at = now + min(left_s + _EXPIRY_S, self._look_s)
            case Free():
                self._leader = None
                self.due_at = now + self._look_s
            case None:
                self.due_at = now + self._look_s

    def heard(self, epoch: int, now: float) -> None:
        """A gateway has seen this epoch. If it is a higher one than any known here, this Conductor has been deposed or Valkey has lost its
        count: either way Valkey is to be asked before anything else is answered."""
        if epoch > self._floor:
            self._floor = epoch
            self.due_at = now

    def resign(self) -> None:
        """Stops leading from now on, whatever the lease says."""
        self._valid_until = 0.0
