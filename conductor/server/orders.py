"""What the core wants done at the nodes: copies of prefixes, and instances that switch their role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

import grpc
import grpc.aio

from conductor import metrics
from conductor.core.replication.planner import MOST_COPIES
from conductor.core.types.events import Action, Replicate, ReplicationEnded, SwitchFailed, SwitchRole
from conductor.server.leadership import Leadership
from conductor.server.runner import CoreRunner
from springtide.credentials import OPEN, Credentials
from springtide.protocol import wire
from springtide.protocol.instances import Role
from springtide.protocol.storage import ReplicatePrefix
from springtide.rpc.channels import connect
from springtide.rpc.node_pb2_grpc import DecodeNodeStub, PrefillNodeStub
from springtide.rpc.store_pb2_grpc import StoreStub
from springtide.supervision import end

logger = logging.getLogger(__name__)

_SWITCH_TIMEOUT_S = 5.0


class Orders:
    """Gives the core's orders to stores and engines. Only a Conductor that leads does. Used from the event loop only."""

    def __init__(self, runner: CoreRunner, leadership: Leadership, credentials: Credentials = OPEN) -> None:
        self._runner = runner
        self._leadership = leadership
        self._credentials = credentials
        self._places = asyncio.Semaphore(MOST_COPIES)
        self._tasks: set[asyncio.Task[None]] = set()

    def give(self, actions: Iterable[Action]) -> None:
        """Begins to do those that are orders; does not wait."""
        leads = self._leadership.standing().leads
        for action in actions:
            match action:
                case Replicate() if leads:
                    self._begin(self._replicate(action))
                case Replicate():
                    self._replicated(action, 0, failed=True)
                case SwitchRole() if leads:
                    self._begin(self._switch(action))
                case SwitchRole(instance):
                    self._runner.feed(SwitchFailed(instance.instance_id))

    async def close(self) -> None:
        """Stops. What is being copied goes on; its end is not waited for."""
        await end(*self._tasks)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replicate(self, order: Replicate) -> None:
        blocks = fetched = 0
        try:
            async with self._places, connect(order.store_address, self._credentials) as channel:
                request = wire.REPLICATE_PREFIX.encode(ReplicatePrefix(order.keys, order.sources))
                replicated = wire.REPLICATED.decode(await StoreStub(channel).Replicate(request, timeout=order.within_s))
            blocks, fetched = replicated.blocks, replicated.fetched_blocks
            logger.info("a popular prefix of %d blocks is at %s now, %d of them copied", blocks, order.node_id, fetched)
        except grpc.aio.AioRpcError as error:
            logger.warning("a copy of %d blocks to %s failed: %s %s", len(order.keys), order.node_id, error.code().name, error.details())
        except Exception:
            logger.exception("a copy of %d blocks to %s failed", len(order.keys), order.node_id)
        self._replicated(order, fetched, failed=blocks < len(order.keys))

    def _replicated(self, order: Replicate, fetched_blocks: int, failed: bool) -> None:
        metrics.REPLICATIONS.labels("failed" if failed else "done").inc()
        metrics.REPLICATED_BYTES.inc(fetched_blocks * self._runner.core.settings.bytes_per_block)
        self._runner.feed(ReplicationEnded(order.node_id, order.keys[-1], fetched_blocks, failed))

    async def _switch(self, action: SwitchRole) -> None:
        ref, to = action.instance, action.order.to
        outcome = "ordered"
        try:
            async with connect(ref.address, self._credentials) as channel:
                stub = PrefillNodeStub(channel) if ref.role is Role.PREFILL else DecodeNodeStub(channel)
                await stub.SwitchRole(wire.ROLE_SWITCH.encode(action.order), timeout=_SWITCH_TIMEOUT_S)
            logger.info("%s is to serve as a %s instance from now on", ref.instance_id, to)
        except grpc.aio.AioRpcError as error:
            outcome = "failed"
            logger.warning("%s cannot switch to %s: %s %s", ref.instance_id, to, error.code().name, error.details())
            self._runner.feed(SwitchFailed(ref.instance_id))
        metrics.ROLE_SWITCHES.labels(to, outcome).inc()
