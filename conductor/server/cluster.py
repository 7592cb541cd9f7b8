"""Follows the cluster's membership and keeps one watcher for each store and engine in it."""

from __future__ import annotations

import asyncio
import logging

from conductor.server.service import CoreRunner
from conductor.server.watch import LoadWatcher, StoreWatcher, Watcher
from springtide.credentials import OPEN, Credentials
from springtide.membership import Member, Membership

logger = logging.getLogger(__name__)

_POLLS_A_LEASE = 5


class ClusterFollower:
    """Valkey says whom to watch; only the watch itself says who is alive.

    While Valkey is away nobody is dropped. A member that a readable list lacks is dropped once its stream is gone too, or after a lease: a
    Valkey that restarted empty lists everybody again within a third of that, while an engine that withdrew stays unlisted.
    """

    def __init__(
        self,
        membership: Membership,
        runner: CoreRunner,
        lease_s: float,
        silence_s: float,
        fingerprint: str,
        credentials: Credentials = OPEN,
    ) -> None:
        self._membership = membership
        self._credentials = credentials
        self._runner = runner
        self._lease_s = lease_s
        self._silence_s = silence_s
        self._fingerprint = fingerprint
        self._watchers: dict[tuple[str, str], Watcher] = {}
        self._refused: set[tuple[str, int]] = set()
        self._settled: list[Member] | None = None
        """The last list, if exactly those are followed who were to be by it."""
        self.joined = 0
        """How many were begun to be followed, so far."""

    @property
    def left(self) -> int:
        """How many are followed no longer."""
        return self.joined - len(self._watchers)

    async def run(self) -> None:
        """Follows until cancelled; then every watcher is stopped."""
        try:
            while True:
                members = await self._membership.members()
                if members is not None:
                    self._refused &= {(member.member_id, member.incarnation) for member in members}
                # Most lists are as the one before, and of thousands.
                if members is not None and members != self._settled:
                    in_full = await self._reconcile([member for member in members if self._concerns_us(member)])
                    self._settled = members if in_full else None
                await asyncio.sleep(self._lease_s / _POLLS_A_LEASE)
        finally:
            for watcher in self._watchers.values():
                await watcher.stop()

    async def _reconcile(self, members: list[Member]) -> bool:
        """Whether exactly these are followed now."""
        listed: dict[tuple[str, str], Member] = {(member.role, member.member_id): member for member in members}
        for key, member in listed.items():
            watcher = self._watchers.get(key)
            if watcher is not None and (watcher.member.incarnation, watcher.member.address) != (member.incarnation, member.address):
                await watcher.stop()
                watcher = None
            if watcher is None:
                watcher = self._watchers[key] = self._watch(member)
            watcher.missing_since = None
        for key in [key for key in self._watchers if key not in listed]:
            if self._is_gone(self._watchers[key]):
                await self._watchers.pop(key).stop()
        return len(self._watchers) == len(listed)

    def _is_gone(self, watcher: Watcher) -> bool:
        now = self._runner.clock.now()
        if watcher.missing_since is None:
            watcher.missing_since = now
        return not watcher.connected or now - watcher.missing_since > self._lease_s

    def _watch(self, member: Member) -> Watcher:
        self.joined += 1
        if member.role == "store":
            return StoreWatcher(member, self._runner, self._silence_s, self._credentials)
        return LoadWatcher(member, self._runner, self._silence_s, self._credentials)

    def _concerns_us(self, member: Member) -> bool:
        if member.role == "store":
            return True
        if member.role not in ("prefill", "decode"):
            return False
        problem = ""
        if not member.details.get("store_address"):
            problem = "announces no details.store_address"
        elif member.details.get("fingerprint", self._fingerprint) != self._fingerprint:
            problem = f"serves a model with fingerprint {member.details['fingerprint']}, not {self._fingerprint}"
        identity = (member.member_id, member.incarnation)
        if problem and identity not in self._refused:
            self._refused.add(identity)
            logger.error("%s %s %s: it is left out", member.role, member.member_id, problem)
        return not problem
