"""One open stream for each member: what a store holds, how an engine is doing. Loss is told to the core at once; opening is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod

import grpc
import grpc.aio

from conductor.core.types.events import InstanceDown, InstanceUp, LoadReported, RequestSnapshot, StoreDown, StoreStillHere, StoreWatched
from conductor.server.service import CoreRunner
from springtide.clock import Silence
from springtide.credentials import OPEN, Credentials
from springtide.ids import InstanceId, NodeId
from springtide.membership import Member
from springtide.protocol import wire
from springtide.protocol.instances import InstanceRef, LoadReport, Role
from springtide.protocol.storage import StillHere
from springtide.rpc.channels import connect
from springtide.rpc.node_pb2 import WatchLoadRequest
from springtide.rpc.node_pb2_grpc import DecodeNodeStub, PrefillNodeStub
from springtide.rpc.store_pb2 import WatchStoreRequest
from springtide.rpc.store_pb2_grpc import StoreStub
from springtide.supervision import supervised

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0
_CUT_OFF = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.ABORTED}
"""Codes with which a living store ends a watch that lagged too far behind."""


class Watcher(ABC):
    """Follows one incarnation of one member until it is stopped. Who is silent for `silence_s` is lost."""

    def __init__(self, member: Member, runner: CoreRunner, silence_s: float, credentials: Credentials = OPEN) -> None:
        self.member = member
        self.hung = False
        """It was last lost because it was silent, or said that it makes no headway."""
        self._silence_s = silence_s
        self.connected = False
        self.missing_since: float | None = None
        """Since when the membership lists, where they could be read, lack the member."""
        self._runner = runner
        self._credentials = credentials
        self._task = supervised(self._run, f"watch-{member.role}-{member.member_id}")

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    @abstractmethod
    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Opens the stream and feeds what comes. Returns when it should be opened anew with nothing lost, raises when it is lost."""

    @abstractmethod
    def _lost(self) -> None:
        """Tells the core."""

    async def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        try:
            while True:
                try:
                    async with connect(self.member.address, self._credentials) as channel:
                        while True:
                            await self._follow(channel)
                            await asyncio.sleep(_FIRST_DELAY_S)
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name} {error.details()}"
                except TimeoutError as error:
                    self.hung = True
                    reason = str(error)
                except ConnectionError as error:
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
            self.connected, self.hung = True, False
            logger.info("%s %s at %s is connected", self.member.role, self.member.member_id, self.member.address)

    def _disconnect(self, reason: str, level: int = logging.WARNING) -> None:
        if not self.connected:
            level = logging.DEBUG
        logger.log(level, "%s %s at %s is not connected: %s", self.member.role, self.member.member_id, self.member.address, reason)
        if self.connected:
            self.connected = False
            self._lost()


class StoreWatcher(Watcher):
    """Store.Watch: a snapshot, then events in order. When some were missed, it is opened anew while the old knowledge goes on serving."""

    @property
    def _node_id(self) -> NodeId:
        return NodeId(self.member.node_id or self.member.member_id)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        call = StoreStub(channel).Watch(WatchStoreRequest(watcher="conductor"))
        try:
            async with Silence(self._silence_s) as silence:
                async for message in call:
                    silence.heard()
                    if not self.connected:
                        self._runner.feed(StoreWatched(self._node_id, self.member.address))
                        self._connect()
                    told = wire.STORE_EVENT.decode(message)
                    event = StoreStillHere(self._node_id, told.sequence) if isinstance(told, StillHere) else told
                    if any(isinstance(action, RequestSnapshot) for action in self._runner.feed(event)):
                        return
        except grpc.aio.AioRpcError as error:
            if error.code() in _CUT_OFF:
                return
            raise
        finally:
            call.cancel()
        raise ConnectionError("the store ended the stream")

    def _lost(self) -> None:
        self._runner.feed(StoreDown(self._node_id))


class LoadWatcher(Watcher):
    """WatchLoad of an engine. The instance is up while reports of the announced incarnation come that it makes headway."""

    def __init__(self, member: Member, runner: CoreRunner, silence_s: float, credentials: Credentials = OPEN) -> None:
        self._ref = InstanceRef(
            instance_id=InstanceId(member.member_id),
            role=Role(member.role),
            address=member.address,
            node_id=NodeId(member.node_id),
            store_address=member.details["store_address"],
        )
        super().__init__(member, runner, silence_s, credentials)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        stub = PrefillNodeStub(channel) if self._ref.role is Role.PREFILL else DecodeNodeStub(channel)
        call = stub.WatchLoad(WatchLoadRequest())
        try:
            async with Silence(self._silence_s) as silence:
                async for report in call:
                    silence.heard()
                    self._take(wire.LOAD_REPORT.decode(report))
            raise ConnectionError("the engine ended the stream")
        finally:
            call.cancel()

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
        self._runner.feed(InstanceDown(self._ref.instance_id, self.member.incarnation, self.hung))
