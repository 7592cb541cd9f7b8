"""Whether this Conductor is the one that answers: the only one always, one of several while it holds the leader's lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from conductor import metrics
from springtide.clock import Clock
from springtide.leader_lease import Answer, Claim, Free, Granted, Held, Leader, LeaderLease

logger = logging.getLogger(__name__)

_ASIDE_S = 1.0
"""How long beyond a lease a Conductor that has just started leaves the lease to others: by then one that knows the cluster has it, and if
there is none, this one has seen the cluster by then."""
_RENEWALS_A_LEASE = 3
_LOOKS_A_LEASE = 10
_LONGEST_LOOK_S = 0.25
"""How soon a standby learns that a leader has resigned."""
_MARGIN = 0.05
"""Share of a lease that its holder does not use: Valkey counts whole milliseconds, and clocks run at slightly different rates."""
_EXPIRY_S = 0.002
"""By when a lease that was seen to end is gone in Valkey too."""


class LeaseClock:
    """Monotonic, and unlike most such clocks it runs on while the machine is suspended, as leases do."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether this Conductor leads, and who does."""

    leads: bool
    epoch: int
    """The highest known; while it leads, its own leadership's. 0 for the only Conductor: there is nobody to tell it from."""
    leader_address: str
    """gRPC host:port of who leads, as far as is known; else empty."""


class Leadership(Protocol):
    """One Conductor's part in the election of the leader."""

    def standing(self, heard_epoch: int = 0) -> Standing:
        """The standing as of now, in the light of an epoch that a gateway says it has seen."""
        ...

    async def run(self) -> None:
        """Takes part in the election until cancelled."""
        ...

    async def resign(self) -> None:
        """Stops leading and lets another begin at once. Idempotent."""
        ...


class OnlyConductor:
    """The leadership of one without standbys: it answers whatever becomes of Valkey."""

    def __init__(self, address: str) -> None:
        self._standing = Standing(True, 0, address)

    def standing(self, heard_epoch: int = 0) -> Standing:
        return self._standing

    async def run(self) -> None:
        metrics.IS_LEADER.set(1)
        await asyncio.Event().wait()

    async def resign(self) -> None:
        pass


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


class OneOfSeveral:
    """The leadership of one among others: does what a Candidate decides. Used from the event loop only."""

    def __init__(self, lease: LeaderLease, lease_s: float, address: str, clock: Clock) -> None:
        self._lease = lease
        self._address = address
        self._clock = clock
        self._candidate = Candidate(lease_s)
        self._aside_until = clock.now() + lease_s + _ASIDE_S
        self._sooner = asyncio.Event()
        self._led = False
        self._resigned = False

    def standing(self, heard_epoch: int = 0) -> Standing:
        now = self._clock.now()
        self._candidate.heard(heard_epoch, now)
        if self._candidate.due_at <= now:
            self._sooner.set()
        if self._candidate.leads(now):
            return Standing(True, self._candidate.epoch, self._address)
        leader = self._candidate.leader
        return Standing(False, self._candidate.epoch, leader.address if leader is not None else "")

    async def run(self) -> None:
        while True:
            now = self._clock.now()
            claim = self._candidate.claim(now, eligible=now >= self._aside_until)
            if claim is None:
                await self._wait(self._candidate.due_at - now)
                continue
            answer = await self._lease.claim(claim)
            self._candidate.answered(answer, now, self._clock.now())
            self._note()

    async def resign(self) -> None:
        if self._resigned:
            return
        self._resigned = True
        self._candidate.resign()
        self._note()
        await self._lease.release()
        await self._lease.close()

    async def _wait(self, seconds: float) -> None:
        self._sooner.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._sooner.wait()

    def _note(self) -> None:
        leads, epoch = self._candidate.leads(self._clock.now()), self._candidate.epoch
        metrics.IS_LEADER.set(leads)
        metrics.LEADER_EPOCH.set(epoch)
        if leads != self._led:
            self._led = leads
            metrics.LEADERSHIP_CHANGES.labels("gained" if leads else "lost").inc()
            leader = self._candidate.leader
            whose = f"{leader.member_id} leads" if leader is not None else "nobody is known to lead"
            logger.warning("this Conductor %s (epoch %d)", "leads now" if leads else f"leads no longer: {whose}", epoch)
