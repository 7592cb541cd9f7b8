"""A group's time with one store, as its first stage sees it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import grpc.aio
import torch

from engine.runner import ModelRunner
from kvstore.link import StoreLink
from messenger.base import Endpoint
from node_runtime.model_thread import ModelThread
from node_runtime.watchdog import Seen, Watchdog, stalled_after_s
from prefill_node import metrics
from prefill_node.core.actions import RunPass
from prefill_node.core.events import PassEnded, PassFailed, PassLeft
from prefill_node.server.passes import Pushes, conclude, longest_pass_s, waits_for_prefix
from prefill_node.server.stages import StageProcess
from prefill_node.stage import wire
from prefill_node.stage.compute import Hooks, Outcome, Part, Result, compute
from prefill_node.stage.process import ring_shape, ring_socket
from prefill_node.stage.ring import Entrance, Ring
from springtide.errors import PeerLost, SpringtideError
from springtide.ids import AttemptId
from springtide.process import ProcessArguments
from springtide.protocol import storage
from springtide.protocol.wire import STORE_NOTICE
from springtide.rpc import stage_pb2

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
"""A stage that still has a pass of the last formation to end takes that long at most."""
END_TIMEOUT_S = 10.0
"""A stage that is not at rest after so long is killed."""

WATCH_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Place:
    """Where a formation computes. `arena_socket` is empty for scratch memory of each stage's own, `incarnation` then without meaning."""

    arena_socket: str
    num_slots: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Launch:
    """`link` is None where nothing is handed over. `tell` is called in the event loop; before it tells of the pass's end, `results` is
    called with what each stage says."""

    run: RunPass
    link: StoreLink | None
    tell: Callable[[RunPass, PassLeft | PassEnded], None]
    results: Callable[[Sequence[Result]], None] = lambda results: None


@dataclass(slots=True)
class _Flying:
    launch: Launch
    pushes: Sequence[Pushes]
    """Of each stage."""
    results: list[Result | None]
    began: float = field(default_factory=time.perf_counter)

    @property
    def ended(self) -> bool:
        return None not in self.results


class Formation:
    """`begin`, then passes, `end`."""

    def __init__(
        self,
        arguments: ProcessArguments,
        runner: ModelRunner,
        thread: ModelThread,
        watchdog: Watchdog,
        ranges: Sequence[range],
        place: Place,
    ) -> None:
        self._arguments = arguments
        self._watchdog = watchdog
        self._runner = runner
        self._thread = thread
        self._ranges = ranges
        self._place = place
        socket = ring_socket(arguments.run_dir, f"{arguments.instance_id}.stage-0")
        self._ring = Ring(arguments.instance_id, socket, ring_shape(arguments.config, runner), lambda arrival: None)
        self._orders = [_Orders() for _ in ranges[1:]]
        self._reading: dict[StageProcess, asyncio.Task[None]] = {}
        self._flying: dict[int, _Flying] = {}
        self._last_end = float("-inf")
        self.stalled = ""
        """Which pass is under way for too long; empty: none."""
        self._broken: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, stages: Sequence[StageProcess]) -> None:
        """From the last stage to the first, so that each knows the next one's buffers. Raises OSError, SpringtideError."""
        await self._ring.start()
        following: stage_pb2.GroupJoined | None = None
        for stage in reversed(stages):
            following = await self._join(stage, following)
        assert following is not None, "a group has several stages"
        await self._ring.connect(Entrance(Endpoint.from_json(following.endpoint), following.device_buffers))
        self._start(self._watch())

    async def _join(self, stage: StageProcess, following: stage_pb2.GroupJoined | None) -> stage_pb2.GroupJoined:
        """`following`: what the stage behind it has said, if there is one."""
        place, orders = self._place, self._orders[stage.number - 1]
        join = stage_pb2.JoinGroup(
            instance_id=self._arguments.instance_id,
            incarnation=place.incarnation,
            arena_socket=place.arena_socket,
            num_slots=place.num_slots,
            next_endpoint=following.endpoint if following is not None else "",
            next_device_buffers=following.device_buffers if following is not None else b"",
        )
        orders.put(stage_pb2.StageOrder(join=join))
        call = stage.stub.Serve(orders.stream())
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                report = await call.read()
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"stage {stage.number} did not join the group: {error.details()}") from error
        except TimeoutError as error:
            await stage.kill()
            raise PeerLost(f"stage {stage.number} did not join the group within {JOIN_TIMEOUT_S:g} s and was killed") from error
        if not isinstance(report, stage_pb2.StageReport) or not report.HasField("joined"):
            raise PeerLost(f"stage {stage.number} did not join the group")
        self._reading[stage] = asyncio.create_task(self._take_in(stage.number, call))
        self._reading[stage].add_done_callback(self._ended)
        return report.joined

    async def broken(self) -> PeerLost:
        return await asyncio.shield(self._broken)

    async def end(self) -> None:
        """Returns when no stage is at a pass any more; what was under way has failed. A stage that does not come to rest is killed."""
        if not self._broken.done():
            self._broken.set_result(PeerLost("the group was dissolved"))
        for orders in self._orders:
            orders.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._thread.at_rest()
        if self._reading:
            # A call whose reader is cancelled is cancelled: they read until the stages have ended.
            await asyncio.wait(self._reading.values(), timeout=END_TIMEOUT_S)
        for stage, reading in self._reading.items():
            if not reading.done():
                logger.warning("stage %d does not come to rest; killing it", stage.number)
                await stage.kill()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        await self._ring.close()
        flying, self._flying = self._flying, {}
        for one in flying.values():
            one.launch.tell(one.launch.run, PassFailed(one.launch.run.pass_id, self._broken.result().message))

    # ---- passes ----

    def launch(self, launch: Launch) -> None:
        run, block_tokens = launch.run, self._runner.kv_spec.block_tokens
        pushes = [Pushes(push for push in run.pushes if layers.start < push.layer_end <= layers.stop) for layers in self._ranges]
        flying = self._flying[run.pass_id] = _Flying(launch, pushes, [None] * len(self._ranges))
        for number, orders in enumerate(self._orders, 1):
            orders.put(wire.pass_order(run, pushes[number].layer_ends, number == len(self._orders), block_tokens))
        self._start(self._first_stage(flying))

    def relay(self, notice: storage.Notice) -> None:
        for orders in self._orders:
            orders.put(stage_pb2.StageOrder(notice=STORE_NOTICE.encode(notice)))

    def forget(self, attempt_id: str) -> None:
        for orders in self._orders:
            orders.put(stage_pb2.StageOrder(forget=attempt_id))

    def forget_slots(self, slots: Sequence[int]) -> None:
        for orders in self._orders:
            orders.put(stage_pb2.StageOrder(slots_given_back=stage_pb2.SlotsGivenBack(slots=slots)))

    async def _first_stage(self, flying: _Flying) -> None:
        run, link = flying.launch.run, flying.launch.link
        part = wire.part_of(run, flying.pushes[0].layer_ends, last=False)

        def computed(layer_end: int) -> None:
            if link is not None:
                flying.pushes[0].send(link, layer_end)

        hooks = Hooks(part, 0, link.wait_layer if link is not None else _nothing_arrives, self._arguments.config.kv.lease_s, computed)
        outgoing = self._ring.outgoing(run.pass_id, part.num_tokens)
        result = await self._thread.run(self._compute, run, part, outgoing, hooks)
        sending = asyncio.ensure_future(self._ring.send(run.pass_id, part.num_tokens, void=result.outcome is not Outcome.DONE))
        flying.launch.tell(run, PassLeft(run.pass_id))
        await sending
        self._take_result(0, flying, result)

    def _compute(self, run: RunPass, part: Part, outgoing: torch.Tensor, hooks: Hooks) -> Result:
        """When this stage hangs, the formation ends first, and its attempts with it."""
        with self._watchdog.during(f"pass {run.pass_id}", self._longest_s(run) + END_TIMEOUT_S, inf):
            return compute(self._runner, part, None, outgoing, hooks)

    def _longest_s(self, run: RunPass) -> float:
        return longest_pass_s(run, self._arguments.config.kv.lease_s, self._runner.kv_spec.layers)

    async def _take_in(self, number: int, call: grpc.aio.StreamStreamCall[stage_pb2.StageOrder, stage_pb2.StageReport]) -> None:
        try:
            while isinstance(report := await call.read(), stage_pb2.StageReport):
                self._take_report(number, report)
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"lost stage {number} of the group: {error.details()}") from error
        raise PeerLost(f"lost stage {number} of the group: it ended its session")

    def _take_report(self, number: int, report: stage_pb2.StageReport) -> None:
        if report.HasField("layers"):
            flying = self._flying[report.layers.pass_id]
            if flying.launch.link is not None:
                flying.pushes[number].send(flying.launch.link, report.layers.layer_end)
        elif report.HasField("ended"):
            self._take_result(number, self._flying[report.ended.pass_id], wire.result_from(report.ended))

    def _take_result(self, number: int, flying: _Flying, result: Result) -> None:
        """A pass has ended when no stage is at it any more and all its pushes are with the store: those of an early stage may come after
        what the last one says."""
        flying.results[number] = result
        for one in list(self._flying.values()):
            if not one.ended:
                return
            run, results = one.launch.run, [result for result in one.results if result is not None]
            now = time.perf_counter()
            ended = conclude(run, results, (now - self._front_since(one)) * 1000)
            del self._flying[run.pass_id]
            self._last_end = now
            for stage, part in enumerate(results):
                metrics.STAGE_BUSY_SECONDS.labels(str(stage)).inc(part.busy_ms / 1000)
            one.launch.results(results)
            one.launch.tell(run, ended)

    def _front_since(self, flying: _Flying) -> float:
        """Since when it, the oldest pass, has had no other one before it."""
        return max(flying.began, self._last_end)

    async def _watch(self) -> None:
        """A stage may hang in its pass while its process goes on talking. Raises PeerLost when it does."""
        seen, at_work = Seen(WATCH_EVERY_S), Seen(WATCH_EVERY_S)
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            oldest = next(iter(self._flying.values()), None)
            taken_s = seen.look(oldest)
            waits = oldest is not None and waits_for_prefix(oldest.launch.run, oldest.launch.link, self._runner.kv_spec.layers)
            self.stalled = self._stalled(oldest, at_work.look(None if waits else oldest))
            if oldest is None:
                continue
            run = oldest.launch.run
            limit_s = self._longest_s(run)
            if taken_s > limit_s:
                at = ", ".join(str(stage) for stage, result in enumerate(oldest.results) if result is None)
                raise PeerLost(f"pass {run.pass_id} has not ended within {limit_s:.0f} s; it is not through stage {at}")

    def _stalled(self, oldest: _Flying | None, working_s: float) -> str:
        if oldest is None:
            return ""
        run = oldest.launch.run
        limit_s = stalled_after_s(run.predicted_ms, self._arguments.config.silence_s)
        return f"pass {run.pass_id} has not come through the stages within {limit_s:.1f} s" if working_s >= limit_s else ""

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What cannot be gone on after ends the formation."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._broken.done():
            return
        if not isinstance(error, SpringtideError):
            logger.error("the group broke", exc_info=error)
        self._broken.set_result(error if isinstance(error, PeerLost) else PeerLost(f"the group broke: {error}"))


class _Orders:
    """To one stage."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[stage_pb2.StageOrder | None] = asyncio.Queue()

    def put(self, order: stage_pb2.StageOrder) -> None:
        self._queue.put_nowait(order)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def stream(self) -> AsyncIterator[stage_pb2.StageOrder]:
        while (order := await self._queue.get()) is not None:
            yield order


def _nothing_arrives(attempt_id: AttemptId, layer: int, timeout_s: float) -> int | None:
    return None
