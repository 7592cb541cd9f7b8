"""The session of a further stage: its time in the group, from JoinGroup until the orders end, in the arena of one store."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from engine.runner import ModelRunner
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from kvstore.link import FetchBoard, attach_arena, engine_identity
from messenger.arena_memory import SharedMemory
from messenger.base import Endpoint
from node_runtime.loading import shared_arena
from node_runtime.model_thread import ModelThread
from prefill_node.stage.compute import Hooks, PassPart, compute
from prefill_node.stage.ring import Arrival, Entrance, Ring, RingShape, RingTransports
from springtide.errors import PeerLost, SpringtideError
from springtide.protocol.stages import (
    ForgetAttempt,
    GroupJoined,
    JoinGroup,
    LayersComputed,
    SlotsGivenBack,
    StageOutcome,
    StagePass,
    StagePassEnded,
    StageReport,
)
from springtide.protocol.wire import STAGE_ORDER, STAGE_REPORT
from springtide.rpc import stage_pb2
from springtide.supervision import uninterrupted

logger = logging.getLogger(__name__)

REST_TIMEOUT_S = 10.0


class StageSession:
    """The session. Everything runs in one event loop, but for the layers, which run on `thread`. What cannot be gone on after ends the
    reports with an error: a pass that has been lost on its way would keep the group waiting for ever."""

    def __init__(
        self,
        join: JoinGroup,
        runner: ModelRunner,
        sampler: Sampler,
        grammars: Grammars,
        thread: ModelThread,
        shape: RingShape,
        name: str,
        arena_socket: Path,
        transports: RingTransports,
        buffers: torch.Tensor | None,
        prefix_timeout_s: float,
        on_hang: Callable[[], None] | None,
    ) -> None:
        """`transports` and `buffers`, those on the stage's device: as a Ring has them. `on_hang` is called when the stage does not come to
        rest at the end; None: whoever ends it sees to that."""
        self._join = join
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._thread = thread
        self._prefix_timeout_s = prefix_timeout_s
        self._last = not join.next_endpoint
        self._arena_socket = arena_socket
        self._on_hang = on_hang
        self._ring = Ring(name, transports, shape, self._arrived, buffers)
        self._fetches = FetchBoard()
        self._arena: tuple[SharedMemory, socket.socket] | None = None
        self._orders: asyncio.Queue[PassPart] = asyncio.Queue()
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._reports: asyncio.Queue[StageReport | BaseException | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, orders: AsyncIterator[stage_pb2.StageOrder], report_to: Callable[[stage_pb2.StageReport], Awaitable[None]]) -> None:
        """Takes orders and reports until they end. Raises SpringtideError, OSError."""
        try:
            await report_to(STAGE_REPORT.encode(await self._begin()))
            self._start(self._take_in(orders))
            self._start(self._work())
            while (report := await self._reports.get()) is not None:
                if isinstance(report, BaseException):
                    raise report
                await report_to(STAGE_REPORT.encode(report))
        finally:
            # Who is gone has ended the orders, and cancels this a moment later.
            await uninterrupted(self._end())

    async def _begin(self) -> GroupJoined:
        join = self._join
        if join.incarnation is not None:
            engine = engine_identity(join.instance_id, join.incarnation)
            self._arena = await asyncio.to_thread(attach_arena, self._arena_socket, engine)
            await self._thread.run(self._runner.set_arena, shared_arena(*self._arena), join.num_slots)
            await self._thread.run(self._runner.warm_up)
        entrance = await self._ring.start()
        if not self._last:
            await self._ring.connect(Entrance(Endpoint.from_json(join.next_endpoint), join.next_device_buffers))
        return GroupJoined(entrance.endpoint.to_json(), entrance.buffers)

    async def _end(self) -> None:
        """The store learns last that the arena is free of this stage: when its connection closes."""
        for task in self._tasks:
            task.cancel()
        self._fetches.lose(PeerLost("the group was dissolved"))
        try:
            await self._come_to_rest()
            await self._ring.close()
            if self._arena is not None:
                await self._thread.run(self._runner.leave_arena)
        finally:
            for held in self._arena or ():
                held.close()

    async def _come_to_rest(self) -> None:
        """A thread that hangs cannot be ended, and may yet write to the arena."""
        resting = asyncio.ensure_future(self._thread.at_rest())
        if self._on_hang is not None and not (await asyncio.wait({resting}, timeout=REST_TIMEOUT_S))[0]:
            logger.critical("the stage has not come to rest within %g s of its session's end: the process ends", REST_TIMEOUT_S)
            self._on_hang()
        await resting

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
            match STAGE_ORDER.decode(order):
                case StagePass() as run:
                    self._prepare(run)
                    self._orders.put_nowait(PassPart.of_order(run, self._last))
                case ForgetAttempt(attempt_id):
                    self._fetches.forget(attempt_id)
                case SlotsGivenBack(slots):
                    self._thread.run(self._runner.forget, slots)
                case JoinGroup():
                    raise SpringtideError("a stage joins its group once in a session")
                case notice:
                    self._fetches.update(notice)
        self._reports.put_nowait(None)

    def _prepare(self, run: StagePass) -> None:
        """Has the grammars of a pass compiled while the stages before are at it."""
        for row in run.rows:
            if row.sampling is not None and row.sampling.params.grammar:
                self._grammars.prepare(row.sampling.params.grammar)

    async def _work(self) -> None:
        while True:
            part, arrival = await self._orders.get(), await self._arrivals.get()
            if part.pass_id != arrival.pass_id:
                raise SpringtideError(f"the activations are of pass {arrival.pass_id}, those of pass {part.pass_id} were due")
            ended = StagePassEnded(part.pass_id, StageOutcome.VOID) if arrival.void else await self._compute(part, arrival)
            if not self._last:
                self._start(self._ring.send(part.pass_id, part.num_tokens, void=ended.outcome is not StageOutcome.DONE))
            self._reports.put_nowait(ended)

    async def _compute(self, part: PassPart, arrival: Arrival) -> StagePassEnded:
        def computed(layer_end: int) -> None:
            self._loop.call_soon_threadsafe(self._reports.put_nowait, LayersComputed(part.pass_id, layer_end))

        hooks = Hooks(part, self._runner.model.begin, self._fetches.wait_layer, self._prefix_timeout_s, computed)
        incoming = self._ring.incoming(arrival, part.num_tokens)
        outgoing = None if self._last else self._ring.outgoing(part.pass_id, part.num_tokens)
        return await self._thread.run(compute, self._runner, part, incoming, outgoing, hooks, self._sampler.sample)
