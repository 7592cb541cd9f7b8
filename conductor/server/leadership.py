"""Whether this Conductor is the one that answers: the only one always, one of several while it holds the leader's lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from conductor import metrics
from conductor.server.candidate import Candidate
from springtide.clock import Clock
from springtide.leader_lease import LeaderLease

logger = logging.getLogger(__name__)

_ASIDE_S = 1.0
"""How long beyond a lease a Conductor that has just started leaves the lease to others: by then one that knows the cluster has it, and if
there is none, this one has seen the cluster by then."""


class LeaseClock:
    """Monotonic, and unlike most such clocks it runs on while the machine is suspended, as leases do."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Standing:
    leads: bool
    epoch: int
    """The highest known; while it leads, its own leadership's. 0 for the only Conductor: there is nobody to tell it from."""
    leader_address: str
    """gRPC host:port of who leads, as far as is known; else empty."""


class Leadership(Protocol):
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
    """Answers whatever becomes of Valkey."""

    def __init__(self, address: str) -> None:
        self._standing = Standing(True, 0, address)

    def standing(self, heard_epoch: int = 0) -> Standing:
        return self._standing

    async def run(self) -> None:
        metrics.IS_LEADER.set(1)
        await asyncio.Event().wait()

    async def resign(self) -> None:
        pass


class OneOfSeveral:
    """Does what a Candidate decides. Used from the event loop only."""

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
