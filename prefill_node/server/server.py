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
from prefill_node.core import PrefillCore
from prefill_node.core.actions import ForBeside, GiveWay, RunPass
from prefill_node.core.events import Event, PassDone, PassEnded, PassEvent, PassFailed, PassLeft
from prefill_node.server.group import StageGroup
from prefill_node.server.service import PREFILL_SERVICE, PromptCounters, settings_of
from springtide.clock import Tick
from springtide.cost import PrefillCost
from springtide.errors import PeerLost
from springtide.ids import AttemptId, Incarnation
from springtide.protocol import storage
from springtide.protocol.outputs import HandedOver, PrefillUpdate
from springtide.protocol.starts import PrefillStart

logger = logging.getLogger(__name__)


class PrefillServer(EngineServer[PrefillStart, PrefillUpdate, PassEvent, RunPass | GiveWay | ForBeside]):
    """The server: passes run in a group, of one stage or of several; the runner has the first one's layers."""

    def __init__(self, parts: Parts, cost: PrefillCost, group: StageGroup) -> None:
        prefill_node = parts.arguments.config.prefill_node
        settings = settings_of(parts.arguments, cost)
        breaks_off = prefill_node.stages == prefill_node.tensor_parallel == 1
        settings = replace(settings, num_stages=prefill_node.stages, breaks_off=breaks_off)
        self.core = PrefillCore(settings)
        super().__init__(PREFILL_SERVICE, parts, self.core, group.grammars)
        self._group = group
        self._counters = PromptCounters(self.vllm, parts.clock)
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

    def perform(self, action: RunPass | GiveWay | ForBeside) -> None:
        if isinstance(action, GiveWay):
            self._give_way.add(action.pass_id)
            return
        assert not isinstance(action, ForBeside), "nobody decodes here"
        self._beside[action.pass_id] = self.neighbours.do_idle_work
        if self.link is None:
            # Lost already; the core will hear of it by the event that follows.
            self.tell(PassFailed(action.pass_id, "the node's store is away"))
            return
        self._counters.launched(action)
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
            self._counters.passed(run, event.elapsed_ms)
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
                self._counters.started(start.request)
            case Tick():
                load = self.load()
                self._counters.doing(load, self.core.slowdown)
                self.vllm.doing(load, self.num_held)
            case HandedOver():
                self._counters.handed_over(event)

    def count_update(self, update: PrefillUpdate) -> None:
        self._counters.update(update)
