"""Follows the cluster: whom to watch, by its membership, and one open stream for each member: what a store holds, how an engine is doing.

Loss is told to the core at once; opening is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import grpc

from conductor import metrics
from conductor.core.types.events import InstanceDown, InstanceUp, LoadReported, RequestSnapshot, StoreDown, StoreStillHere, StoreWatched
from conductor.server.report_queue import ReportQueue
from conductor.server.runner import CoreRunner
from conductor.server.silence import Silence, Silences
from conductor.server.streaming import CallFailed, Reading, follow
from springtide.credentials import OPEN, Credentials
from springtide.ids import InstanceId, NodeId
from springtide.membership import Member, Membership
from springtide.protocol import wire
from springtide.protocol.instances import InstanceRef, LoadReport, Role
from springtide.protocol.storage import BlocksRemoved, BlocksStored, SnapshotPart, StillHere
from springtide.rpc import node_pb2
from springtide.rpc.authentication import TOKEN_KEY
from springtide.rpc.store_pb2 import StoreEvent, WatchStoreRequest
from springtide.supervision import end, supervised

logger = logging.getLogger(__name__)

_POLLS_A_LEASE = 5
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0
_WATCH_LOAD = {Role.PREFILL: "/springtide.v1.PrefillNode/WatchLoad", Role.DECODE: "/springtide.v1.DecodeNode/WatchLoad"}
_WATCH_STORE = "/springtide.v1.Store/Watch"
_CUT_OFF = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.ABORTED}
"""Codes with which a living store ends a watch that lagged too far behind."""


class Watcher(ABC):
    """Follows one incarnation of one member until it is stopped. Who is silent for too long is lost."""

    def __init__(self, member: Member, runner: CoreRunner, silences: Silences, credentials: Credentials = OPEN) -> None:
        self.member = member
        self.hung = False
        """It was last lost because it was silent, or said that it makes no headway."""
        self.leaving = False
        """It was last lost because it said that it takes no more work."""
        self._silences = silences
        self.connected = False
        self.missing_since: float | None = None
        """Since when the membership lists, where they could be read, lack the member."""
        self._runner = runner
        self._metadata = [] if credentials.token is None else [(TOKEN_KEY, credentials.token)]
        self._tls = credentials.tls
        self._task = supervised(self._run, f"watch-{member.role}-{member.member_id}")

    async def stop(self) -> None:
        await end(self._task)

    @abstractmethod
    async def _follow(self) -> None:
        """Opens the stream and feeds what comes. Returns when it should be opened anew with nothing lost, raises when it is lost."""

    @abstractmethod
    def _lost(self) -> None:
        """Tells the core."""

    async def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        try:
            while True:
                try:
                    while True:
                        await self._follow()
                        await asyncio.sleep(_FIRST_DELAY_S)
                except TimeoutError as error:
                    self.hung = True
                    reason = str(error)
                except OSError as error:
                    reason = str(error)
                except Exception as error:
                    # Whatever one member sends, the others are still followed, and so is it when it comes to its senses.
                    logger.exception("%s %s sent what cannot be taken in", self.member.role, self.member.member_id)
                    reason = f"{type(error).__name__} {error}"
                delay_s = _FIRST_DELAY_S if self.connected else min(delay_s * 2, _LONGEST_DELAY_S)
                self._disconnect(reason)
                await asyncio.sleep(delay_s)
        finally:
            self._disconnect("no longer followed", logging.INFO)

    def _connect(self) -> None:
        if not self.connected:
            self.connected, self.hung, self.leaving = True, False, False
            logger.info("%s %s at %s is connected", self.member.role, self.member.member_id, self.member.address)

    def _disconnect(self, reason: str, level: int = logging.WARNING) -> None:
        if not self.connected:
            level = logging.DEBUG
        logger.log(level, "%s %s at %s is not connected: %s", self.member.role, self.member.member_id, self.member.address, reason)
        if self.connected:
            self.connected = False
            if self.hung:
                metrics.count_silence(self.member.node_id or self.member.member_id, self.member.role)
            self._lost()


class _SnapshotDue(Exception):
    """Events of a store were missed."""


class StoreWatcher(Watcher):
    """Store.Watch: a snapshot, then events in order. When some were missed, it is opened anew while the old knowledge goes on serving."""

    @property
    def _node_id(self) -> NodeId:
        return NodeId(self.member.node_id or self.member.member_id)

    async def _follow(self) -> None:
        request = WatchStoreRequest(watcher="conductor").SerializeToString()
        try:
            async with Silence(self._silences) as silence:

                def take(messages: Sequence[bytes]) -> None:
                    silence.heard()
                    for message in messages:
                        self._take(wire.STORE_EVENT.decode(StoreEvent.FromString(message)))

                await follow(self.member.address, _WATCH_STORE, request, self._metadata, take, tls=self._tls)
        except _SnapshotDue:
            return
        except CallFailed as error:
            if error.code in _CUT_OFF:
                return
            raise
        raise ConnectionError("the store ended the stream")

    def _take(self, told: StillHere | SnapshotPart | BlocksStored | BlocksRemoved) -> None:
        if not self.connected:
            self._runner.feed(StoreWatched(self._node_id, self.member.address))
            self._connect()
        event = StoreStillHere(self._node_id, told.sequence) if isinstance(told, StillHere) else told
        if any(isinstance(action, RequestSnapshot) for action in self._runner.feed(event)):
            raise _SnapshotDue

    def _lost(self) -> None:
        self._runner.feed(StoreDown(self._node_id))


class LoadWatcher(Watcher):
    """WatchLoad of an engine. The instance is up while reports of the announced incarnation come that it makes headway."""

    def __init__(
        self, member: Member, runner: CoreRunner, reports: ReportQueue, silences: Silences, credentials: Credentials = OPEN
    ) -> None:
        self._reports = reports
        self._reading = Reading()
        self._nonsense: Exception | None = None
        """What was wrong with a report."""
        self._ref = InstanceRef(
            instance_id=InstanceId(member.member_id),
            role=Role(member.role),
            address=member.address,
            node_id=NodeId(member.node_id),
            store_address=member.details["store_address"],
        )
        super().__init__(member, runner, silences, credentials)

    async def _follow(self) -> None:
        self._nonsense, self._reading = None, Reading()
        try:
            async with Silence(self._silences) as silence:

                def take(messages: Sequence[bytes]) -> None:
                    silence.heard()
                    if self._nonsense is not None:
                        raise self._nonsense
                    self._reports.put(self, messages[-1])

                await follow(self.member.address, _WATCH_LOAD[self._ref.role], b"", self._metadata, take, self._reading, self._tls)
        except TimeoutError:
            if self._reading.paused:
                # It may have spoken all the time: so many are there that its turn did not come.
                return
            raise
        finally:
            self._reports.discard(self)
        self.leaving = True
        raise ConnectionError("the engine ended the stream")

    def report(self, message: bytes) -> None:
        """Takes in a report that has come. What makes no sense ends the stream with the next one."""
        try:
            self._take(wire.LOAD_REPORT.decode(node_pb2.LoadReport.FromString(message)))
        except Exception as error:
            self._nonsense = error

    def pause(self) -> None:
        """What it says lies unread until its turn comes."""
        self._reading.pause()

    def resume(self) -> None:
        """It is read again."""
        self._reading.resume()

    def _take(self, report: LoadReport) -> None:
        if report.incarnation != self.member.incarnation:
            # It lost its store and begins anew: what was announced is no more, and its next announcement is on the way.
            self._disconnect(f"it is now incarnation {report.incarnation}")
            return
        if report.stalled:
            self.hung = True
            self._disconnect(report.stalled)
            return
        if not self.connected:
            self._runner.feed(InstanceUp(self._ref, self.member.incarnation))
            self._connect()
        self._runner.feed(LoadReported(self._ref.instance_id, self.member.incarnation, report.load))

    def _lost(self) -> None:
        self._runner.feed(InstanceDown(self._ref.instance_id, self.member.incarnation, self.hung, self.leaving))


class ClusterFollower:
    """Keeps one watcher for each store and engine of the cluster. Valkey says whom to watch; only the watch itself says who is alive.

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
        self._silences = Silences(silence_s)
        self._fingerprint = fingerprint
        self._reports = ReportQueue()
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
            return StoreWatcher(member, self._runner, self._silences, self._credentials)
        return LoadWatcher(member, self._runner, self._reports, self._silences, self._credentials)

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
