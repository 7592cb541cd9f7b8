"""The server of a prefill group."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from engine.profiling import measure_prefill
from engine.runner import ModelRunner
from kvstore.link import StoreLink
from node_runtime.node import EngineNode
from node_runtime.process import Kind, Parts
from prefill_node import metrics
from prefill_node.core import PrefillCore
from prefill_node.core.actions import Action, Reply, RunPass
from prefill_node.core.events import PassDone, PassEnded, PassFailed, PassLeft, Start
from prefill_node.core.pushing import LayerGroups
from prefill_node.core.schedule import Policy
from prefill_node.server.passes import OwnPasses, Passes
from prefill_node.server.transfers import Transfers
from springtide.chunking import Chunking
from springtide.clock import Tick
from springtide.cost import PrefillCost
from springtide.errors import PeerLost
from springtide.ids import Incarnation
from springtide.process import ProcessArguments
from springtide.protocol import storage, wire
from springtide.protocol.instances import Load, Role
from springtide.protocol.outputs import AttemptFailed, AttemptSigns, PrefillDone, PrefillUpdate
from springtide.protocol.starts import PrefillStart
from springtide.rpc import node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)

MEASURE_BUDGET_S = 2.0


def kind(arguments: ProcessArguments) -> Kind[PrefillCost]:
    config = arguments.config.prefill_node

    def measure(runner: ModelRunner, scratch: Sequence[int]) -> PrefillCost:
        return PrefillCost.fit(measure_prefill(runner, scratch, config.chunk_tokens, MEASURE_BUDGET_S))

    return Kind(Role.PREFILL, config.threads, PrefillCost, measure, PrefillServer)


class PrefillServer(EngineNode[Action, PrefillStart, PrefillUpdate], node_pb2_grpc.PrefillNodeServicer):
    def __init__(self, parts: Parts, cost: PrefillCost, group: Passes | None = None) -> None:
        """Without a `group` of stages the runner has all layers."""
        arguments, spec = parts.arguments, parts.runner.kv_spec
        config = arguments.config
        self._passes = group or OwnPasses(parts.runner, parts.thread, config.kv.lease_s, config.silence_s)
        self._passes.tell = self._told
        self.core = PrefillCore(
            Policy(Chunking(cost, config.prefill_node.chunk_tokens, config.prefill_node.chunk_ms)),
            LayerGroups(spec.layers, spec.bytes_per_slab, config.kv.layer_group_size),
            spec.block_tokens,
            arguments.model_info.eos_token_ids,
            config.prefill_node.stages,
            config.silence_s,
        )
        super().__init__(
            Role.PREFILL, wire.PREFILL_COMMAND, wire.PREFILL_UPDATE, arguments, self.core, parts.runner, parts.thread, parts.clock
        )
        self._transfers = Transfers()

    def register(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_PrefillNodeServicer_to_server(self, server)

    async def Session(
        self, request_iterator: AsyncIterator[node_pb2.PrefillCommand], context: Any
    ) -> AsyncIterator[node_pb2.PrefillUpdate]:
        async for update in self.session(request_iterator):
            yield update

    async def WatchLoad(self, request: node_pb2.WatchLoadRequest, context: Any) -> AsyncIterator[node_pb2.LoadReport]:
        async for report in self.watch_load():
            yield report

    async def SwitchRole(self, request: node_pb2.SwitchRoleRequest, context: Any) -> node_pb2.SwitchRoleReply:
        return await self.switch_role(request, context)

    # ---- store ----

    async def attach(self, link: StoreLink, incarnation: Incarnation) -> None:
        await self._passes.attach(link, incarnation)
        await super().attach(link, incarnation)

    def on_notice(self, notice: storage.Notice) -> None:
        self._passes.relay(notice)
        super().on_notice(notice)

    async def broken(self) -> PeerLost:
        return await self._passes.broken()

    async def at_rest(self) -> None:
        await self._passes.at_rest()
        await super().at_rest()

    async def close(self) -> None:
        await self._passes.close()
        await super().close()

    # ---- what the core decides ----

    def act(self, action: Action) -> None:
        super().act(action)
        if isinstance(action, storage.Release):
            self._passes.forget(action.attempt_id)

    def forget(self, slots: Sequence[int]) -> None:
        super().forget(slots)
        self._passes.forget_slots(slots)

    def perform(self, action: Action) -> None:
        match action:
            case RunPass():
                self._launch(action)
            case Reply(session, update):
                self._count_reply(update)
                self.sessions.send(session, update)

    def _launch(self, run: RunPass) -> None:
        if self.link is None:
            # Lost already; the core will hear of it by the event that follows.
            self.tell(PassFailed(run.pass_id, "the node's store is away"))
            return
        metrics.PASS_TOKENS.observe(sum(len(row.chunk.token_ids) for row in run.rows))
        for row in run.rows:
            self.note_slots(row.attempt_id, row.chunk.slots)
        self._passes.launch(run, self.link)

    def _told(self, run: RunPass, event: PassLeft | PassEnded) -> None:
        if isinstance(event, PassDone):
            metrics.PASS_SECONDS.observe(event.elapsed_ms / 1000)
            metrics.CHUNKS.inc(len(run.rows))
            metrics.TOKENS.inc(sum(len(row.chunk.token_ids) for row in run.rows))
        self.tell(event)

    def start_event(self, session: int, start: PrefillStart) -> Start:
        return Start(session, start)

    def failed_update(self, failed: AttemptFailed) -> PrefillUpdate:
        return failed

    def signs_update(self, signs: AttemptSigns) -> PrefillUpdate:
        return signs

    # ---- how it is doing ----

    @property
    def stalled_work(self) -> str:
        return self._passes.stalled

    def work(self) -> Load:
        return self.core.load()

    def handled(self, event: Any) -> None:
        match event:
            case Start(_, start):
                self._transfers.started(start.request)
            case Tick():
                load = self.core.load()
                metrics.RUNNING.set(load.running)
                metrics.WAITING.set(load.waiting)
                metrics.QUEUE_SECONDS.set(load.queue_ms / 1000)
                self._transfers.keep(load.attempt_ids)
            case storage.HandedOver():
                metrics.HAND_OVER_BYTES.inc(event.num_bytes)
                self._transfers.handed_over(event, self._clock.now())

    def _count_reply(self, update: PrefillUpdate) -> None:
        match update:
            case AttemptFailed(attempt_id, failure):
                logger.info("%s: %s", failure.code.name, failure.message, extra={"attempt_id": attempt_id})
                metrics.FAILURES.labels(failure.code.value).inc()
            case PrefillDone():
                self._transfers.computed(update, self._clock.now())
                metrics.QUEUE_WAIT_SECONDS.observe(update.queue_ms / 1000)
                metrics.CACHED_TOKENS.labels("local").inc(update.cached_tokens - update.remote_tokens)
                metrics.CACHED_TOKENS.labels("remote").inc(update.remote_tokens)
