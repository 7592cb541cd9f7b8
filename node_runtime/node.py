"""The loop of an engine server: receive, decide, act. What a prefill and a decode server do alike."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from engine.batch import Int32Array
from engine.runner import ModelRunner
from kvstore.link import StoreLink
from node_runtime import load
from node_runtime.arenas import shared_arena
from node_runtime.events import SessionEnded, StoreLost, StoreUp
from node_runtime.model_thread import ModelThread
from node_runtime.requests import check_request
from node_runtime.role_switch import PendingSwitch
from node_runtime.sessions import Sessions
from node_runtime.slotuse import SlotUse
from node_runtime.watchdog import Seen
from springtide.clock import Clock, Tick
from springtide.errors import InvalidRequest, PeerLost
from springtide.ids import AttemptId, Incarnation, InstanceId
from springtide.process import ProcessArguments
from springtide.protocol import storage, wire
from springtide.protocol.codec import Decoder, Encoder
from springtide.protocol.instances import Load, LoadReport, Role
from springtide.protocol.outputs import AttemptFailed, AttemptSign, AttemptSigns, DecodeUpdate, Failure, FailureCode, PrefillUpdate
from springtide.protocol.starts import AbortAttempt, DecodeStart, PrefillStart
from springtide.rpc import node_pb2
from springtide.supervision import supervised

logger = logging.getLogger(__name__)

TICK_S = 0.25
TICKS_A_SIGN = 2
OFFERS_UNTIL = 0.5
"""An engine whose store is silent offers nothing after this share of what makes it stalled: the Conductor sends it no new work."""

ActionT = TypeVar("ActionT")
StartT = TypeVar("StartT", PrefillStart, DecodeStart)
UpdateT = TypeVar("UpdateT", PrefillUpdate, DecodeUpdate)


class Core(Protocol[ActionT]):
    """Decides. Free of I/O and clock."""

    def handle(self, event: Any, now: float) -> list[ActionT]: ...

    def signs(self) -> Iterable[tuple[int, AttemptSign]]:
        """Of each attempt that is here, with its session."""
        ...


class EngineNode(ABC, Generic[ActionT, StartT, UpdateT]):
    """Everything here runs in one event loop; the model runs on `thread`. `link` is None while there is no store."""

    def __init__(
        self,
        role: Role,
        commands: Decoder[Any, StartT | AbortAttempt],
        updates: Encoder[UpdateT],
        arguments: ProcessArguments,
        core: Core[ActionT],
        runner: ModelRunner,
        thread: ModelThread,
        clock: Clock,
    ) -> None:
        self.pending_switch = PendingSwitch(role)
        self.link: StoreLink | None = None
        self.incarnation = Incarnation(0)
        self.store_load = storage.StoreLoad(0, 0)
        self.runner = runner
        self.thread = thread
        self.sessions: Sessions[Any, UpdateT] = Sessions(self._on_command, lambda session: self.tell(SessionEnded(session)))
        self._commands: Decoder[Any, StartT | AbortAttempt] = commands
        self._updates: Encoder[UpdateT] = updates
        self._core = core
        self._arguments = arguments
        self._instance_id = InstanceId(arguments.instance_id)
        self._info = arguments.model_info
        self._clock = clock
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._slot_use = SlotUse()
        self._changes = load.Changes()
        self._silence_s = arguments.config.silence_s
        self._store_seen = Seen(TICK_S)
        self._store_silent_s = 0.0
        self._ticks = 0

    async def run(self) -> None:
        """Until cancelled. What the core decides wrongly is an error of this process: it ends, and is started afresh."""
        ticking = supervised(self._tick, "tick")
        try:
            while True:
                event = await self._inbox.get()
                for action in self._core.handle(event, self._clock.now()):
                    self.act(action)
                self.handled(event)
                if isinstance(event, Tick):
                    self._ticked()
                self._changes.note()
        finally:
            ticking.cancel()

    def tell(self, event: Any) -> None:
        self._inbox.put_nowait(event)

    def act(self, action: ActionT) -> None:
        """Does what the core decided. Must not block."""
        if not isinstance(action, storage.Order):
            self.perform(action)
        elif self.link is not None:
            self.link.send(action)
        if isinstance(action, storage.Release) and (gone := self._slot_use.give_back(action.attempt_id)):
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

    def _ticked(self) -> None:
        self._store_silent_s = self._store_seen.look(self.link.heard) if self.link is not None else 0.0
        self._ticks += 1
        if self._ticks % TICKS_A_SIGN:
            return
        signs: defaultdict[int, list[AttemptSign]] = defaultdict(list)
        for session, sign in self._core.signs():
            signs[session].append(sign)
        for session, its in signs.items():
            self.sessions.send(session, self.signs_update(AttemptSigns(tuple(its))))

    @property
    def stalled(self) -> str:
        """Why there is no headway here just now; empty: there is, or nothing to do."""
        return "its store is silent" if self._store_silent_s >= self._silence_s else self.stalled_work

    # ---- the kind's own ----

    @property
    @abstractmethod
    def stalled_work(self) -> str:
        """What the model's thread, or whoever computes with it, is at for too long; empty: nothing."""

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Adds the kind's service."""

    @abstractmethod
    def perform(self, action: ActionT) -> None:
        """Does what is not an order to the store. Must not block."""

    @abstractmethod
    def handled(self, event: Any) -> None:
        """For the metrics: the core has taken this in, and its actions are under way."""

    @abstractmethod
    def start_event(self, session: int, start: StartT) -> Any:
        """The event of a start that has been checked."""

    @abstractmethod
    def failed_update(self, failed: AttemptFailed) -> UpdateT: ...

    @abstractmethod
    def signs_update(self, signs: AttemptSigns) -> UpdateT: ...

    @abstractmethod
    def work(self) -> Load:
        """Without what only the store knows."""

    # ---- gateways and watchers ----

    async def session(self, commands: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """A gateway's: its commands' messages in, those of the updates for it out."""
        async for update in self.sessions.serve(commands):
            yield self._updates.encode(update)

    def watch_load(self) -> AsyncIterator[node_pb2.LoadReport]:
        """While the engine takes work."""
        return load.watch(lambda: None if self.pending_switch.order is not None else self.load_report(), self._changes, self._clock)

    async def switch_role(
        self, request: node_pb2.SwitchRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> node_pb2.SwitchRoleReply:
        try:
            self.pending_switch.take(wire.ROLE_SWITCH.decode(request))
            self._changes.note()
        except (ValueError, InvalidRequest) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return node_pb2.SwitchRoleReply()

    @property
    def has_work(self) -> bool:
        """Attempts are here, or what they computed is still on its way elsewhere."""
        return len(self.work().attempt_ids) > 0

    def load_report(self) -> LoadReport:
        offers = self.link is not None and self._store_silent_s < OFFERS_UNTIL * self._silence_s
        doing = replace(
            self.work(),
            slots_total=self.link.num_slots if self.link is not None and offers else 0,
            slots_available=self.store_load.slots_available,
            ssd_read_us_per_block=self.store_load.ssd_read_us_per_block,
        )
        return LoadReport(self._instance_id, self.incarnation, doing, self.stalled)

    def _on_command(self, session: int, message: Any) -> None:
        try:
            command = self._commands.decode(message)
            if not isinstance(command, AbortAttempt):
                check_request(command.request, self._info, self.runner.kv_spec.block_tokens)
        except (ValueError, InvalidRequest) as error:
            failure = Failure(FailureCode.INVALID, str(error))
            self.sessions.send(session, self.failed_update(AttemptFailed(message.start.request.attempt_id, failure)))
            return
        if isinstance(command, AbortAttempt):
            self.tell(command)
            return
        request = command.request
        logger.debug("start", extra={"request_id": request.request_id, "attempt_id": request.attempt_id})
        self.tell(self.start_event(session, command))

    # ---- store ----

    def on_notice(self, notice: storage.Notice) -> None:
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
        # What is computed on a device must have room there, too.
        pages = self.runner.most_blocks if self.runner.keeps_pages else None
        self.tell(StoreUp(min(link.num_slots, self.runner.most_blocks), pages))

    async def broken(self) -> PeerLost:
        """Returns when the engine can go on only from the beginning, as after the loss of its store, for another reason than that."""
        never: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        return await never

    async def at_rest(self) -> None:
        """Returns when nothing of the engine writes into the arena of the store that it was detached from."""
        await self.thread.run(self.runner.leave_arena)

    async def close(self) -> None:
        """Ends what belongs to it beside its thread."""
        await self.thread.run(self.runner.close)

    def detach(self, error: PeerLost) -> None:
        """The store is gone, and every slot with it. A pass under way ends on memory that stays mapped until then."""
        self.link = None
        self._slot_use.clear()
        self.store_load = storage.StoreLoad(0, 0)
        self.tell(StoreLost(error.message))
