"""The server of an engine: receive, decide, act. What a prefill and a decode server do alike."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Generic, Protocol, TypeVar

import grpc.aio

from engine.batch import Int32Array
from engine.sampling.grammars import Grammars
from kvstore.link import StoreLink
from node_runtime.events import EngineEvent, Ordered, Quiet, SendUpdate, StartT, StoreConnected, StoreLost, UpdateT
from node_runtime.held_starts import HeldStarts
from node_runtime.loading import Parts, shared_arena
from node_runtime.metrics import VllmMetrics
from node_runtime.model_thread import ObservedSpan
from node_runtime.neighbours import Neighbours
from node_runtime.role_switch import PendingSwitch
from node_runtime.servicer import EngineService, EngineServicer, check_command
from node_runtime.slot_claims import SlotUse
from springtide.clock import Tick
from springtide.errors import PeerLost
from springtide.ids import AttemptId, Incarnation, InstanceId
from springtide.protocol import storage
from springtide.protocol.instances import Load, LoadReport
from springtide.protocol.outputs import AttemptFailed, AttemptSign, AttemptSigns
from springtide.supervision import supervised

TICK_S = 0.25
TICKS_A_SIGN = 2
LOOK_BESIDE_S = 0.01
"""Between one look at whether others want quiet and the next, while there is idle work."""
OFFERS_UNTIL = 0.5
"""An engine whose store is silent offers nothing after this share of what makes it stalled: the Conductor sends it no new work."""

EventT = TypeVar("EventT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
ActionT = TypeVar("ActionT")
"""The kind's own events and actions: those of what it computes."""


class Core(Protocol[StartT, UpdateT, EventT_contra, ActionT]):
    """What decides, free of I/O and clock."""

    def handle(self, event: EngineEvent[StartT] | EventT_contra, now: float) -> list[storage.Order | SendUpdate[UpdateT] | ActionT]: ...

    def load(self, slots_total: int, slots_available: int) -> Load:
        """How the engine is doing; these slots, and more, only the store knows."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether attempts are here whose work is not over."""
        ...

    @property
    def has_idle(self) -> bool:
        """Whether attempts in idle capacity are here."""
        ...

    @property
    def idle_work(self) -> bool:
        """Whether any is under way."""
        ...

    def wants_quiet(self, now: float) -> bool:
        """Whether the machine's other engines are to rest from it."""
        ...

    def signs(self) -> Iterable[tuple[int, AttemptSign]]:
        """Signs of the attempts that are here, each with its session."""
        ...


class EngineServer(ABC, Generic[StartT, UpdateT, EventT, ActionT]):
    """Everything here runs in one event loop; the model runs on `thread`. `link` is None while there is no store."""

    def __init__(
        self,
        service: EngineService[StartT, UpdateT],
        parts: Parts,
        core: Core[StartT, UpdateT, EventT, ActionT],
        grammars: Grammars,
        keeps_role: str = "",
    ) -> None:
        """`keeps_role`: as of PendingSwitch."""
        arguments = parts.arguments
        self.runner = parts.runner
        self.thread = parts.thread
        self.link: StoreLink | None = None
        self.incarnation = Incarnation(0)
        self.store_load = storage.StoreLoad(0, 0)
        self.check = partial(check_command, info=arguments.model_info, block_tokens=parts.runner.kv_spec.block_tokens)
        """Raises InvalidRequest for what can never succeed."""
        if arguments.config.prefill_node.spread_stages:
            keeps_role = "its node's store has some of the layers alone"
        self.servicer: EngineServicer[StartT, UpdateT] = EngineServicer(
            service, self.check, self._commanded, self.load_report, parts.clock, keeps_role
        )
        self._service: EngineService[StartT, UpdateT] = service
        self._core: Core[StartT, UpdateT, EventT, ActionT] = core
        self._arguments = arguments
        self._clock = parts.clock
        model_name = arguments.config.served_model_name or arguments.model_info.name
        self.vllm = VllmMetrics(model_name, service.role, parts.clock)
        self._inbox: asyncio.Queue[EngineEvent[StartT] | EventT] = asyncio.Queue()
        self._grammars = grammars
        self._held: HeldStarts[StartT] = HeldStarts(grammars, self.samples_first, self.tell, self._refuse)
        self._slot_use = SlotUse()
        self._silence_s = arguments.config.silence_s
        self._store_seen = ObservedSpan(TICK_S)
        self._store_silent_s = 0.0
        self._ticks = 0
        self.neighbours = Neighbours(arguments.run_dir, arguments.instance_id)
        self._quiet = False
        """What the core was told last of them."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the kind's service to the server."""
        self.servicer.register(server)

    def leave(self) -> None:
        """Takes no more work from here on, and says so."""
        self.servicer.leave()

    def note_change(self) -> None:
        """The load may have changed."""
        self.servicer.note_change()

    async def run(self) -> None:
        """Runs until cancelled. What the core decides wrongly is an error of this process: it ends, and is started afresh."""
        ticking, looking = supervised(self._tick, "tick"), supervised(self._look_beside, "neighbours")
        try:
            while True:
                event = await self._inbox.get()
                if isinstance(event, Tick):
                    self.neighbours.look()
                self._heed_neighbours()
                self._handle(event)
                self.handled(event)
                if isinstance(event, Tick):
                    self._ticked()
                self.note_change()
        finally:
            ticking.cancel()
            looking.cancel()
            self.neighbours.close()

    def _handle(self, event: EngineEvent[StartT] | EventT) -> None:
        now = self._clock.now()
        for action in self._core.handle(event, now):
            self.act(action)
        self.neighbours.show(quiet=self._core.wants_quiet(now), idle=self._core.idle_work)

    def tell(self, event: EngineEvent[StartT] | EventT) -> None:
        """Hands the event to the core, after those before it."""
        self._inbox.put_nowait(event)

    def _commanded(self, event: Ordered[StartT]) -> None:
        if not self._held.keeps(event):
            self.tell(event)

    def _refuse(self, session: int, failed: AttemptFailed) -> None:
        update = self._service.failed(failed)
        self.count_update(update)
        self.servicer.send(session, update)

    def act(self, action: storage.Order | SendUpdate[UpdateT] | ActionT) -> None:
        """Does what the core decided. Must not block."""
        if isinstance(action, storage.Order):
            if self.link is not None:
                self.link.send(action)
            if isinstance(action, storage.Release):
                self.released(action.attempt_id)
        elif isinstance(action, SendUpdate):
            self.count_update(action.update)
            self.servicer.send(action.session, action.update)
        else:
            self.perform(action)

    def released(self, attempt_id: AttemptId) -> None:
        """The attempt's slots have been given back to the store."""
        if gone := self._slot_use.give_back(attempt_id):
            # The model's thread hears of it before any pass in which there is something else in them.
            self.forget(gone)

    def forget(self, slots: Sequence[int]) -> None:
        """No attempt of this engine uses them any more."""
        self.thread.run(self.runner.forget, slots)

    def note_slots(self, attempt_id: AttemptId, slots: Sequence[int] | Int32Array) -> None:
        """A pass of the attempt over these is about to be launched, or they are loaded for one. Where the store is gone its slots are those
        of no attempt, of which the core has yet to hear."""
        if self.runner.keeps_pages and self.link is not None:
            self._slot_use.note(attempt_id, slots)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tell(Tick())

    async def _look_beside(self) -> None:
        """Idle work begins and rests as soon as others let it, not at the next event."""
        while True:
            await asyncio.sleep(LOOK_BESIDE_S if self._core.has_idle else TICK_S)
            self._heed_neighbours()

    def _heed_neighbours(self) -> None:
        if self.neighbours.want_quiet is not self._quiet:
            self._quiet = not self._quiet
            self._handle(Quiet(self._quiet))

    def _ticked(self) -> None:
        self._store_silent_s = self._store_seen.look(self.link.heard) if self.link is not None else 0.0
        self._ticks += 1
        if self._ticks % TICKS_A_SIGN:
            return
        signs: defaultdict[int, list[AttemptSign]] = defaultdict(list)
        of_core = list(self._core.signs())
        self._held.keep_compiled({sign.attempt_id for _, sign in of_core})
        for session, sign in chain(of_core, self.held_signs()):
            signs[session].append(sign)
        for session, its in signs.items():
            self.send_signs(session, AttemptSigns(tuple(its)))

    def held_signs(self) -> Iterable[tuple[int, AttemptSign]]:
        """Of the attempts that wait for their grammars."""
        return self._held.signs()

    def send_signs(self, session: int, signs: AttemptSigns) -> None:
        """Sends signs of its attempts to the gateway of the session."""
        self.servicer.send(session, self._service.signs(signs))

    # ---- the kind's own ----

    @property
    @abstractmethod
    def stalled_work(self) -> str:
        """What the model's thread, or whoever computes with it, is at for too long; empty: nothing."""

    @abstractmethod
    def samples_first(self, start: StartT) -> bool:
        """Whether the attempt's first token is sampled here."""

    @abstractmethod
    def perform(self, action: ActionT) -> None:
        """Does what is the kind's own. Must not block."""

    @abstractmethod
    def handled(self, event: EngineEvent[StartT] | EventT) -> None:
        """Counts for the metrics: the core has taken this in, and its actions are under way."""

    @abstractmethod
    def count_update(self, update: UpdateT) -> None:
        """Counts for the metrics: this is about to be sent to a gateway."""

    # ---- how it is doing ----

    @property
    def pending_switch(self) -> PendingSwitch:
        return self.servicer.pending_switch

    @property
    def stalled(self) -> str:
        """Why there is no headway here just now; empty: there is, or nothing to do."""
        return "its store is silent" if self._store_silent_s >= self._silence_s else self.stalled_work

    @property
    def has_work(self) -> bool:
        """Attempts are here, or what they computed is still on its way elsewhere."""
        return self.num_held > 0 or self._core.has_work

    def load(self) -> Load:
        """How the engine is doing as its core sees it. Of a store that is away or silent, no slots are offered: their total is 0."""
        return self._core.load(*self.slots())

    def slots(self) -> tuple[int, int]:
        """All that the store has, and those that are available."""
        offers = self._store_silent_s < OFFERS_UNTIL * self._silence_s
        slots_total = self.link.num_slots if self.link is not None and offers else 0
        return slots_total, self.store_load.slots_available

    @property
    def num_held(self) -> int:
        """Attempts that wait for their grammars, of which the core does not know yet."""
        return len(self._held)

    def load_report(self) -> LoadReport:
        """What watchers are told."""
        doing = self.load()
        doing = replace(
            doing,
            waiting=doing.waiting + self.num_held,
            attempt_ids=doing.attempt_ids | self._held.attempt_ids,
            ssd_read_us_per_block=self.store_load.ssd_read_us_per_block,
        )
        return LoadReport(InstanceId(self._arguments.instance_id), self.incarnation, doing, self.stalled)

    # ---- store ----

    def on_notice(self, notice: storage.Notice) -> None:
        """The store has said this."""
        match notice:
            case storage.StoreLoad():
                self.store_load = notice
            case storage.Acquired(slots=slots) | storage.Reserved(slots=slots) | storage.Grown(slots=slots):
                # Promised until now; the store tells its load a moment later.
                left = max(0, self.store_load.slots_available - len(slots))
                self.store_load = replace(self.store_load, slots_available=left)
        self.tell(notice)

    async def attach(self, link: StoreLink, incarnation: Incarnation) -> None:
        """The engine computes in the link's arena from now on: once the model's thread has left the one before."""
        await self.thread.run(self.runner.set_arena, shared_arena(link.memory, link.attachment), link.num_slots)
        await self.thread.run(self.runner.warm_up)
        self.link, self.incarnation = link, incarnation
        self.store_load = storage.StoreLoad(link.num_slots, link.num_slots)
        self.vllm.connected(link.num_slots, self.runner.kv_spec)
        # What is computed on a device must have room there, too.
        pages = self.runner.most_blocks if self.runner.keeps_pages else None
        self.tell(StoreConnected(min(link.num_slots, self.runner.most_blocks), pages))

    async def broken(self) -> PeerLost:
        """Returns when the engine can go on only from the beginning, as after the loss of its store, for another reason than that."""
        never: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        return await never

    async def at_rest(self) -> None:
        """Returns when nothing of the engine writes into the arena of the store that it was detached from."""
        await self.thread.run(self.runner.leave_arena)

    async def close(self) -> None:
        """Ends what belongs to it beside its thread."""
        self._grammars.close()
        await self.thread.run(self.runner.close)

    def detach(self, error: PeerLost) -> None:
        """The store is gone, and every slot with it. A pass under way ends on memory that stays mapped until then."""
        self.link = None
        self._slot_use.clear()
        self.store_load = storage.StoreLoad(0, 0)
        self.tell(StoreLost(error.message))
