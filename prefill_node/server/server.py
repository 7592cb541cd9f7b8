"""The server of a prefill group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvstore.link import StoreLink
from node_runtime.events import Start
from node_runtime.loading import Parts
from node_runtime.server import EngineServer
from node_runtime.servicer import EngineService
from prefill_node import metrics
from prefill_node.core import PrefillCore
from prefill_node.core.actions import GiveWay, RunPass
from prefill_node.core.events import Event, PassDone, PassEnded, PassEvent, PassFailed, PassLeft
from prefill_node.core.layer_stream import LayerGroups
from prefill_node.core.settings import PrefillSettings
from prefill_node.server.group import StageGroup
from prefill_node.server.transfers import PromptTransfers
from springtide.chunking import Chunking
from springtide.clock import Tick
from springtide.cost import PrefillCost
from springtide.errors import PeerLost
from springtide.ids import AttemptId, Incarnation
from springtide.protocol import storage, wire
from springtide.protocol.instances import Role
from springtide.protocol.outputs import AttemptFailed, HandedOver, PrefillDone, PrefillUpdate
from springtide.protocol.starts import PrefillStart
from springtide.rpc import node_pb2_grpc

logger = logging.getLogger(__name__)

PREFILL_SERVICE: EngineService[PrefillStart, PrefillUpdate] = EngineService(
    Role.PREFILL,
    node_pb2_grpc.add_PrefillNodeServicer_to_server,
    wire.PREFILL_COMMAND,
    wire.PREFILL_UPDATE,
    failed=lambda failed: failed,
    signs=lambda signs: signs,
)


class PrefillServer(EngineServer[PrefillStart, PrefillUpdate, PassEvent, RunPass | GiveWay]):
    """The server: passes run in a group, of one stage or of several; the runner has the first one's layers."""

    def __init__(self, parts: Parts, cost: PrefillCost, group: StageGroup) -> None:
        config = parts.arguments.config
        spec = parts.arguments.model_info.kv_spec(config.dtype, config.kv.block_tokens)
        settings = PrefillSettings(
            chunking=Chunking(cost, config.prefill_node.chunk_tokens, config.prefill_node.chunk_ms),
            layer_groups=LayerGroups(spec.layers, spec.bytes_per_slab, config.kv.layer_group_size),
            block_tokens=spec.block_tokens,
            eos_token_ids=parts.arguments.model_info.eos_token_ids,
            num_stages=config.prefill_node.stages,
            answer_s=config.silence_s,
            idle_slowdown=config.slo.idle_slowdown,
            breaks_off=config.prefill_node.stages == config.prefill_node.tensor_parallel == 1,
        )
        self.core = PrefillCore(settings)
        super().__init__(PREFILL_SERVICE, parts, self.core, group.grammars)
        self._group = group
        self._transfers = PromptTransfers()
        self._beside: dict[int, bool] = {}
        """Of passes in flight: whether other engines did idle work when they began."""
        self._give_way: set[int] = set()
        """Passes in flight that are to be broken off. The model's thread looks."""

    # ---- store ----

    async def attach(self, link: StoreLink, incarnation: Incarnation) -> None:
        await self._group.attach(link, incarnation)
        await super().attach(link, incarnation)

    def on_notice(self, notice: storage.Notice) -> None:
        self._group.relay(notice)
        super().on_notice(notice)

    async def broken(self) -> PeerLost:
        return await self._group.broken()

    async def at_rest(self) -> None:
        await self._group.at_rest()
        await super().at_rest()

    async def close(self) -> None:
        await self._group.close()
        await super().close()

    def samples_first(self, start: PrefillStart) -> bool:
        return True

    # ---- what the core decides ----

    def perform(self, action: RunPass | GiveWay) -> None:
        if isinstance(action, GiveWay):
            self._give_way.add(action.pass_id)
            return
        self._beside[action.pass_id] = self.neighbours.do_idle_work
        if self.link is None:
            # Lost already; the core will hear of it by the event that follows.
            self.tell(PassFailed(action.pass_id, "the node's store is away"))
            return
        metrics.PASS_TOKENS.observe(action.num_tokens)
        for row in action.rows:
            self.note_slots(row.attempt_id, row.chunk.slots)
        self._group.launch(action, self.link, self._told, partial(self._give_way.__contains__, action.pass_id))

    def _told(self, run: RunPass, event: PassLeft | PassEnded) -> None:
        if not isinstance(event, PassLeft):
            self._give_way.discard(run.pass_id)
            beside = self._beside.pop(run.pass_id)
            if isinstance(event, PassDone) and beside == self.neighbours.do_idle_work:
                event = replace(event, beside_idle=beside)
        if isinstance(event, PassDone):
            metrics.PASS_SECONDS.observe(event.elapsed_ms / 1000)
            metrics.CHUNKS.inc(len(run.rows))
            metrics.TOKENS.inc(run.num_tokens)
        self.tell(event)

    def released(self, attempt_id: AttemptId) -> None:
        super().released(attempt_id)
        self._group.forget(attempt_id)

    def forget(self, slots: Sequence[int]) -> None:
        super().forget(slots)
        self._group.forget_slots(slots)

    # ---- how it is doing ----

    @property
    def stalled_work(self) -> str:
        return self._group.stalled

    def handled(self, event: Event) -> None:
        match event:
            case Start(_, start):
                self.vllm.started(start.request)
                self._transfers.started(start.request)
            case Tick():
                load = self.load()
                metrics.RUNNING.set(load.running)
                metrics.IDLE.set(load.idle.running)
                metrics.IDLE_SLOWDOWN.set(self.core.slowdown)
                metrics.WAITING.set(load.waiting)
                metrics.QUEUED_TOKENS.set(load.tokens)
                metrics.QUEUE_SECONDS.set(load.queue_ms / 1000)
                self.vllm.doing(load, self.num_held)
                self._transfers.keep(load.attempt_ids)
            case HandedOver():
                metrics.HAND_OVER_BYTES.inc(event.num_bytes)
                self._transfers.handed_over(event, self._clock.now())

    def count_update(self, update: PrefillUpdate) -> None:
        match update:
            case AttemptFailed(attempt_id, failure):
                logger.info("%s: %s", failure.code.name, failure.message, extra={"attempt_id": attempt_id})
                metrics.FAILURES.labels(failure.code.value).inc()
                self.vllm.failed(attempt_id, failure.code)
            case PrefillDone():
                self._transfers.computed(update, self._clock.now())
                self.vllm.prefilled(update)
                metrics.QUEUE_WAIT_SECONDS.observe(update.queue_ms / 1000)
                metrics.CACHED_TOKENS.labels("local").inc(update.cached_tokens - update.remote_tokens)
                metrics.CACHED_TOKENS.labels("fetched").inc(update.remote_tokens)
