"""A formation: a group's time with one store, as its first stage sees it. The first stage computes in this process; a group of one has no
other, and nothing of what it computes takes a way through sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from messenger.base import Endpoint
from node_runtime.model_thread import ModelThread, ObservedSpan, Watchdog, stalled_after_s
from prefill_node import metrics
from prefill_node.core.actions import RunPass
from prefill_node.core.events import PassFailed, PassLeft
from prefill_node.server.passes import Launch, Pushes, StagedPass, conclude, longest_pass_s, waits_for_prefix
from prefill_node.server.stages import Stage
from prefill_node.stage.compute import Hooks, PassPart, compute, stage_order
from prefill_node.stage.process import ring_shape, ring_socket, ring_transports
from prefill_node.stage.ring import Entrance, Ring
from springtide.errors import PeerLost, SpringtideError
from springtide.ids import AttemptId, Incarnation, InstanceId
from springtide.process import ProcessArguments
from springtide.protocol.stages import (
    FetchNotice,
    ForgetAttempt,
    GroupJoined,
    JoinGroup,
    LayersComputed,
    SlotsGivenBack,
    StageOrder,
    StageOutcome,
    StagePassEnded,
)
from springtide.protocol.wire import STAGE_ORDER, STAGE_REPORT
from springtide.rpc import stage_pb2
from springtide.rpc.outgoing import Outgoing
from springtide.supervision import end

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
"""A stage that still has a pass of the last formation to end takes that long at most, and longer by what its arena takes to be pinned."""
PINNED_BYTES_PER_S = 1 << 30
"""Memory of the host is registered with a GPU at several times this rate."""
END_TIMEOUT_S = 10.0
"""A stage that is not at rest after so long is killed."""

WATCH_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class FormationArena:
    """The memory that a formation computes in: the arena of each stage's node, which the engine has by its `incarnation`; or, where that is
    None, scratch memory of each stage's own."""

    num_slots: int
    incarnation: Incarnation | None = None


class Formation:
    """The formation: `begin`, then passes, `end`."""

    def __init__(
        self,
        arguments: ProcessArguments,
        runner: ModelRunner,
        sampler: Sampler,
        thread: ModelThread,
        watchdog: Watchdog,
        ranges: Sequence[range],
        arena: FormationArena,
    ) -> None:
        self._arguments = arguments
        self._watchdog = watchdog
        self._runner = runner
        self._sampler = sampler
        self._thread = thread
        self._ranges = ranges
        self._arena = arena
        self._ring: Ring | None = None
        """The way to the second stage, if there is one."""
        if len(ranges) > 1:
            socket = ring_socket(arguments.run_dir, f"{arguments.instance_id}.stage-0")
            shape, transports = ring_shape(arguments.config, runner), ring_transports(arguments, socket)
            self._ring = Ring(arguments.instance_id, transports, shape, lambda arrival: None)
        self._orders: list[Outgoing[StageOrder, stage_pb2.StageOrder]] = [Outgoing(STAGE_ORDER.encode) for _ in ranges[1:]]
        self._reading: dict[Stage, asyncio.Task[None]] = {}
        self._passes: dict[int, StagedPass] = {}
        self._last_end = float("-inf")
        self.stalled = ""
        """Which pass is in flight for too long; empty: none. It may yet end."""
        self._broken: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, stages: Sequence[Stage]) -> None:
        """Brings the further stages together. Raises OSError, SpringtideError."""
        if self._ring is not None:
            await self._connect(self._ring, stages)
        self._start(self._watch())

    async def _connect(self, ring: Ring, stages: Sequence[Stage]) -> None:
        """Brings them together from the last stage to the first, so that each knows the next one's buffers."""
        await ring.start()
        following: GroupJoined | None = None
        for stage in reversed(stages):
            following = await self._join(stage, following)
        assert following is not None, "there are further stages where there is a ring"
        await ring.connect(Entrance(Endpoint.from_json(following.endpoint), following.device_buffers))

    async def _join(self, stage: Stage, following: GroupJoined | None) -> GroupJoined:
        """`following`: what the stage behind it has said, if there is one."""
        arena, orders = self._arena, self._orders[stage.number - 1]
        within_s = JOIN_TIMEOUT_S + arena.num_slots * self._runner.kv_spec.bytes_per_slot / PINNED_BYTES_PER_S
        orders.put(
            JoinGroup(
                InstanceId(self._arguments.instance_id),
                arena.num_slots,
                arena.incarnation,
                following.endpoint if following is not None else "",
                following.device_buffers if following is not None else b"",
            )
        )
        call = stage.stub.Serve(orders.stream())
        try:
            async with asyncio.timeout(within_s):
                report = await call.read()
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"stage {stage.number} did not join the group: {error.details()}") from error
        except TimeoutError as error:
            await stage.kill()
            raise PeerLost(f"stage {stage.number} did not join the group within {within_s:.0f} s and was killed") from error
        joined = STAGE_REPORT.decode(report) if isinstance(report, stage_pb2.StageReport) else None
        if not isinstance(joined, GroupJoined):
            raise PeerLost(f"stage {stage.number} did not join the group")
        self._reading[stage] = asyncio.create_task(self._take_in(stage.number, call))
        self._reading[stage].add_done_callback(self._ended)
        return joined

    async def broken(self) -> PeerLost:
        """Returns when no pass can be run any more."""
        return await asyncio.shield(self._broken)

    async def end(self) -> None:
        """Returns when no stage is at a pass any more; what was in flight has failed. A stage that does not come to rest is killed."""
        if not self._broken.done():
            self._broken.set_result(PeerLost("the group was dissolved"))
        for orders in self._orders:
            orders.end()
        await end(*self._tasks)
        await self._thread.at_rest()
        if self._reading:
            # A call whose reader is cancelled is cancelled: they read until the stages have ended.
            await asyncio.wait(self._reading.values(), timeout=END_TIMEOUT_S)
        for stage, reading in self._reading.items():
            if not reading.done():
                logger.warning("stage %d does not come to rest; killing it", stage.number)
                await stage.kill()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        if self._ring is not None:
            await self._ring.close()
        passes, self._passes = self._passes, {}
        for one in passes.values():
            one.launch.tell(one.run, PassFailed(one.run.pass_id, self._broken.result().message))

    # ---- passes ----

    def launch(self, launch: Launch) -> None:
        """Tells of the pass as RunPass says. Its pushes go to the link as soon as their last layer is computed."""
        run, block_tokens = launch.run, self._runner.kv_spec.block_tokens
        pushes = [Pushes(push for push in run.pushes if layers.start < push.layer_end <= layers.stop) for layers in self._ranges]
        one = self._passes[run.pass_id] = StagedPass(launch, pushes, [None] * len(self._ranges))
        for number, orders in enumerate(self._orders, 1):
            orders.put(stage_order(run, pushes[number].layer_ends, number == len(self._orders), block_tokens))
        self._thread.run(self._compute, one).add_done_callback(partial(self._computed, one))

    def relay(self, notice: FetchNotice) -> None:
        """The store has said this."""
        for orders in self._orders:
            orders.put(notice)

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt's slots were given back."""
        for orders in self._orders:
            orders.put(ForgetAttempt(attempt_id))

    def forget_slots(self, slots: Sequence[int]) -> None:
        """No attempt uses them any more (ModelRunner.forget): for the further stages."""
        for orders in self._orders:
            orders.put(SlotsGivenBack(slots))

    def _compute(self, one: StagedPass) -> StagePassEnded:
        """The first stage's part, on the model's thread. When that hangs in a group of several stages, the formation ends first, and its
        attempts with it."""
        one.began = time.perf_counter()
        try:
            return self._compute_part(one)
        finally:  # Here, not where the event loop learns of it: the next pass may have ended by then.
            one.heard_at[0] = time.perf_counter()

    def _compute_part(self, one: StagedPass) -> StagePassEnded:
        run, link, pushes = one.run, one.launch.link, one.pushes[0]
        part = PassPart.of_run(run, pushes.layer_ends, last=self._ring is None)

        def computed(layer_end: int) -> None:
            if link is not None:
                pushes.send(link, layer_end)

        wait_layer = link.wait_layer if link is not None else _nothing_arrives
        hooks = Hooks(part, 0, wait_layer, self._arguments.config.kv.lease_s, computed, one.launch.gives_way)
        outgoing = self._ring.outgoing(run.pass_id, run.num_tokens) if self._ring is not None else None
        grace_s = END_TIMEOUT_S if self._ring is not None else 0.0
        with self._watchdog.during(f"pass {run.pass_id}", self._longest_s(run) + grace_s):
            return compute(self._runner, part, None, outgoing, hooks, self._sampler.sample)

    def _computed(self, one: StagedPass, computing: asyncio.Future[StagePassEnded]) -> None:
        """Whatever has come of it, the stages behind and the core are told: they wait for every pass."""
        if computing.cancelled():
            return
        run = one.run
        if (error := computing.exception()) is None:
            result = computing.result()
        else:
            logger.error("pass %d failed", run.pass_id, exc_info=error)
            result = StagePassEnded(run.pass_id, StageOutcome.FAILED, f"the pass failed: {error!r}")
        if self._broken.done():
            return
        if self._ring is None:
            self._take_result(0, one, result)
        else:
            self._start(self._send_on(self._ring, one, result))
            one.launch.tell(run, PassLeft(run.pass_id))

    async def _send_on(self, ring: Ring, one: StagedPass, result: StagePassEnded) -> None:
        await ring.send(one.run.pass_id, one.run.num_tokens, void=result.outcome is not StageOutcome.DONE)
        self._take_result(0, one, result)

    def _longest_s(self, run: RunPass) -> float:
        return longest_pass_s(run, self._arguments.config.kv.lease_s, self._arguments.model_info.layers)

    async def _take_in(self, number: int, call: grpc.aio.StreamStreamCall[stage_pb2.StageOrder, stage_pb2.StageReport]) -> None:
        try:
            while isinstance(report := await call.read(), stage_pb2.StageReport):
                self._take_report(number, report)
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"lost stage {number} of the group: {error.details()}") from error
        raise PeerLost(f"lost stage {number} of the group: it ended its session")

    def _take_report(self, number: int, message: stage_pb2.StageReport) -> None:
        match STAGE_REPORT.decode(message):
            case LayersComputed(pass_id, layer_end):
                one = self._passes[pass_id]
                if one.launch.link is not None:
                    one.pushes[number].send(one.launch.link, layer_end)
            case StagePassEnded() as result:
                one = self._passes[result.pass_id]
                one.heard_at[number] = time.perf_counter()
                self._take_result(number, one, result)

    def _take_result(self, number: int, one: StagedPass, result: StagePassEnded) -> None:
        """A pass has ended when no stage is at it any more and all its pushes are with the store: those of an early stage may come after
        what the last one says."""
        one.results[number] = result
        for oldest in list(self._passes.values()):
            if not oldest.ended:
                return
            self._conclude(oldest)

    def _conclude(self, one: StagedPass) -> None:
        run, results = one.run, [result for result in one.results if result is not None]
        # Since when it, the oldest pass, has had no other one before it, to when it was through.
        elapsed_s = max(one.through_at, self._last_end) - max(one.began, self._last_end)
        ended = conclude(run, results, elapsed_s * 1000, one.times())
        del self._passes[run.pass_id]
        self.stalled = ""
        self._last_end = max(one.through_at, self._last_end)
        for stage, result in enumerate(results):
            metrics.STAGE_BUSY_SECONDS.labels(str(stage)).inc(result.busy_ms / 1000)
        one.launch.results(results)
        one.launch.tell(run, ended)

    async def _watch(self) -> None:
        """A stage may hang in its pass while its process goes on talking. Raises PeerLost when a further one does: in a group of one it is
        the watchdog that ends what hangs, and the process with it."""
        seen, at_work = ObservedSpan(WATCH_EVERY_S), ObservedSpan(WATCH_EVERY_S)
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            oldest = next(iter(self._passes.values()), None)
            taken_s = seen.look(oldest)
            waits = oldest is not None and waits_for_prefix(oldest.run, oldest.launch.link, self._arguments.model_info.layers)
            self.stalled = self._stalled(oldest, at_work.look(None if waits else oldest))
            if oldest is None or self._ring is None:
                continue
            run = oldest.run
            limit_s = self._longest_s(run)
            if taken_s > limit_s:
                at = ", ".join(str(stage) for stage, result in enumerate(oldest.results) if result is None)
                raise PeerLost(f"pass {run.pass_id} has not ended within {limit_s:.0f} s; it is not through stage {at}")

    def _stalled(self, oldest: StagedPass | None, working_s: float) -> str:
        if oldest is None:
            return ""
        run = oldest.run
        limit_s = stalled_after_s(run.predicted_ms, self._arguments.config.silence_s)
        return f"pass {run.pass_id} has not ended within {limit_s:.1f} s" if working_s >= limit_s else ""

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


def _nothing_arrives(attempt_id: AttemptId, layer: int, timeout_s: float) -> int | None:
    return None
