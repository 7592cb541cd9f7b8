"""A stage's time in its group: from JoinGroup until the orders end, in the arena of one store."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from engine.runner import ModelRunner
from kvstore.link import FetchBoard, attach_arena, engine_identity
from messenger.arena_memory import SharedMemory
from messenger.base import Endpoint
from node_runtime.arenas import shared_arena
from node_runtime.model_thread import ModelThread
from prefill_node.stage import wire
from prefill_node.stage.compute import Hooks, Outcome, Part, Result, compute
from prefill_node.stage.ring import Arrival, Entrance, Ring, RingShape
from springtide.errors import PeerLost, SpringtideError
from springtide.ids import AttemptId
from springtide.protocol.storage import StoreHello, StoreNotice
from springtide.protocol.wire import STORE_NOTICE
from springtide.rpc import stage_pb2

logger = logging.getLogger(__name__)


class Session:
    """Everything runs in one event loop, but for the layers, which run on `thread`. What cannot be gone on after ends the reports with an
    error: a pass that has been lost on its way would keep the group waiting for ever."""

    def __init__(
        self,
        join: stage_pb2.JoinGroup,
        runner: ModelRunner,
        thread: ModelThread,
        shape: RingShape,
        name: str,
        ring_socket: Path,
        buffers: torch.Tensor | None,
        prefix_timeout_s: float,
    ) -> None:
        """`buffers`: as a Ring has them."""
        self._join = join
        self._runner = runner
        self._thread = thread
        self._prefix_timeout_s = prefix_timeout_s
        self._last = not join.next_endpoint
        self._ring = Ring(name, ring_socket, shape, self._arrived, buffers)
        self._fetches = FetchBoard()
        self._arena: tuple[SharedMemory, socket.socket] | None = None
        self._orders: asyncio.Queue[Part] = asyncio.Queue()
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._reports: asyncio.Queue[stage_pb2.StageReport | BaseException | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, orders: AsyncIterator[stage_pb2.StageOrder], report_to: Callable[[stage_pb2.StageReport], Awaitable[None]]) -> None:
        """Raises SpringtideError, OSError."""
        try:
            await report_to(stage_pb2.StageReport(joined=await self._begin()))
            self._start(self._take_in(orders))
            self._start(self._work())
            while (report := await self._reports.get()) is not None:
                if isinstance(report, BaseException):
                    raise report
                await report_to(report)
        finally:
            await self._end()

    async def _begin(self) -> stage_pb2.GroupJoined:
        join = self._join
        if join.arena_socket:
            engine = engine_identity(join.instance_id, join.incarnation)
            self._arena = await asyncio.to_thread(attach_arena, Path(join.arena_socket), engine)
            await self._thread.run(self._runner.set_arena, shared_arena(*self._arena), join.num_slots)
            await self._thread.run(self._runner.warm_up)
        entrance = await self._ring.start()
        if not self._last:
            await self._ring.connect(Entrance(Endpoint.from_json(join.next_endpoint), join.next_device_buffers))
        return stage_pb2.GroupJoined(endpoint=entrance.endpoint.to_json(), device_buffers=entrance.buffers)

    async def _end(self) -> None:
        """The store learns last that the arena is free of this stage: when its connection closes."""
        for task in self._tasks:
            task.cancel()
        self._fetches.lose(PeerLost("the group was dissolved"))
        await self._thread.at_rest()
        await self._ring.close()
        if self._arena is not None:
            memory, attachment = self._arena
            try:
                await self._thread.run(self._runner.leave_arena)
            finally:
                memory.close()
                attachment.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._reports.put_nowait(error)

    def _arrived(self, arrival: Arrival) -> None:
        self._arrivals.put_nowait(arrival)

    async def _take_in(self, orders: AsyncIterator[stage_pb2.StageOrder]) -> None:
        async for order in orders:
            match order.WhichOneof("order"):
                case "run":
                    self._orders.put_nowait(wire.part_from(order.run, self._last))
                case "notice":
                    self._take_notice(STORE_NOTICE.decode(order.notice))
                case "forget":
                    self._fetches.forget(AttemptId(order.forget))
                case "slots_given_back":
                    self._thread.run(self._runner.forget, tuple(order.slots_given_back.slots))
                case other:
                    raise SpringtideError(f"a stage does not know the order {other}")
        self._reports.put_nowait(None)

    def _take_notice(self, notice: StoreNotice) -> None:
        if not isinstance(notice, StoreHello):
            self._fetches.update(notice)

    async def _work(self) -> None:
        while True:
            part, arrival = await self._orders.get(), await self._arrivals.get()
            if part.pass_id != arrival.pass_id:
                raise SpringtideError(f"the activations are of pass {arrival.pass_id}, those of pass {part.pass_id} were due")
            result = Result(Outcome.VOID) if arrival.void else await self._compute(part, arrival)
            if not self._last:
                self._start(self._ring.send(part.pass_id, part.num_tokens, void=result.outcome is not Outcome.DONE))
            self._reports.put_nowait(wire.ended_report(part.pass_id, result))

    async def _compute(self, part: Part, arrival: Arrival) -> Result:
        def computed(layer_end: int) -> None:
            report = stage_pb2.StageReport(layers=stage_pb2.LayersComputed(pass_id=part.pass_id, layer_end=layer_end))
            self._loop.call_soon_threadsafe(self._reports.put_nowait, report)

        hooks = Hooks(part, self._runner.model.begin, self._fetches.wait_layer, self._prefix_timeout_s, computed)
        incoming = self._ring.incoming(arrival, part.num_tokens)
        outgoing = None if self._last else self._ring.outgoing(part.pass_id, part.num_tokens)
        return await self._thread.run(compute, self._runner, part, incoming, outgoing, hooks)
