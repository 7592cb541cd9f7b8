"""The store's own engine: its commands, in order, and the notices back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvstore.core.ingest import Unit
from kvstore.core.results import UnknownAttempt
from kvstore.server.departed import DepartedEngines
from kvstore.server.failures import failure_of
from kvstore.server.fetch import Fetch
from kvstore.server.handover import HandOver
from kvstore.server.ingests import Ingests
from kvstore.server.node import Node
from messenger.base import Identity
from springtide.errors import InvalidRequest, SpringtideError
from springtide.ids import AttemptId, BlockKey, Slot
from springtide.protocol import wire
from springtide.protocol.outputs import AttemptFailed
from springtide.protocol.storage import (
    Acquire,
    Commit,
    EngineCommand,
    EngineHello,
    Grow,
    Grown,
    Notice,
    OpenHandOver,
    Push,
    Release,
    Reserve,
    Seal,
)
from springtide.rpc import store_pb2 as pb

logger = logging.getLogger(__name__)


class Transfers:
    """What this store is reading or writing for attempts. Outlives the engine that asked for it until it has come to rest."""

    def __init__(self) -> None:
        self.fetches: dict[AttemptId, Fetch] = {}
        self.hand_overs: dict[AttemptId, HandOver] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start_fetch(self, attempt_id: AttemptId, fetch: Fetch, on_error: Callable[[BaseException], None]) -> None:
        self.fetches[attempt_id] = fetch
        self._start(fetch.run(), lambda: self.fetches.pop(attempt_id, None), on_error)

    def start_hand_over(self, attempt_id: AttemptId, hand_over: HandOver, on_error: Callable[[BaseException], None]) -> None:
        self.hand_overs[attempt_id] = hand_over
        self._start(hand_over.run(), lambda: self.hand_overs.pop(attempt_id, None), on_error)

    async def cancel_hand_over(self, attempt_id: AttemptId) -> None:
        """Returns when nothing will be written for the attempt any more."""
        hand_over = self.hand_overs.get(attempt_id)
        if hand_over is not None:
            hand_over.cancel()
            await hand_over.ended.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None], forget: Callable[[], object], on_error: Callable[[BaseException], None]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            forget()
            if not task.cancelled() and (error := task.exception()) is not None:
                on_error(error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)


class EngineSession:
    """One engine's stream. `notify` queues a notice for it; after `close` it goes nowhere."""

    def __init__(self, node: Node, transfers: Transfers, ingests: Ingests, departed: DepartedEngines, engine: Identity) -> None:
        self._node = node
        self._transfers = transfers
        self._ingests = ingests
        self._departed = departed
        self.engine = engine
        self.notices: asyncio.Queue[Notice | None] = asyncio.Queue()
        """None ends the stream."""
        self._closed = False
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Acquire: self._acquire,
            Reserve: self._reserve,
            Grow: self._grow,
            Commit: self._commit,
            OpenHandOver: self._open_hand_over,
            Push: self._push,
            Seal: self._seal,
            Release: self._release,
        }

    def notify(self, notice: Notice) -> None:
        if not self._closed:
            self.notices.put_nowait(notice)

    def take(self, message: pb.EngineCommand) -> None:
        """As `handle`, of what came over the stream."""
        try:
            command = wire.ENGINE_COMMAND.decode(message)
        except InvalidRequest as error:
            self._fail(getattr(message, message.WhichOneof("command") or "").attempt_id, error)
        except ValueError as error:
            logger.warning("%s sent a command without meaning here: %s", self.engine.name, error)
        else:
            self.handle(command)

    def handle(self, command: EngineCommand) -> None:
        """Never blocks. What cannot be done is said to the engine as AttemptFailed; messages for attempts that are over are ignored."""
        if self._closed:
            return
        if isinstance(command, EngineHello):
            logger.warning("%s said hello again", self.engine.name)
            return
        try:
            self._handlers[type(command)](command)
        except UnknownAttempt as error:
            logger.debug("late %s: %s", type(command).__name__, error)
            if isinstance(command, Grow):
                self._fail(command.attempt_id, error)
        except SpringtideError as error:
            self._fail(command.attempt_id, error)
        self._node.changed()

    def close(self) -> None:
        """The engine's stream has ended, or it is replaced: its attempts are over and its transfers cancelled."""
        if self._closed:
            return
        self._closed = True
        self.notices.put_nowait(None)
        departed = self._node.pool.engine_departed()
        for attempt_id in departed:
            self._end_transfers(attempt_id, finish_hand_over=False)
        self._departed.add(self.engine, departed)
        self._node.changed()

    def _acquire(self, command: Acquire) -> None:
        attempt_id, keys = command.attempt_id, command.keys
        acquired = self._node.pool.acquire(
            attempt_id,
            keys,
            command.num_blocks,
            command.max_reused_blocks,
            command.tenant,
            command.leave_available,
            command.leave_in_quota,
        )
        elsewhere = [source for source in command.sources if source.node_id != self._node.options.node_id]
        most = min(command.max_reused_blocks, len(keys))
        ssd_blocks = self._on_ssd(keys[:most], acquired.local_blocks, command)
        wanted = max(min(max((source.num_blocks for source in elsewhere), default=0), most), ssd_blocks)
        if wanted > acquired.local_blocks:
            fetch = Fetch(self._node, self.notify, attempt_id, command.tenant, acquired, keys[:wanted], elsewhere, ssd_blocks)
            self._transfers.start_fetch(attempt_id, fetch, lambda error: self._broken(attempt_id, error))
            return
        self.notify(acquired)

    def _on_ssd(self, keys: Sequence[BlockKey], local_blocks: int, command: Acquire) -> int:
        """Up to which block the prompt is to be read from the SSD."""
        if self._node.ssd is None:
            return local_blocks
        return self._node.ssd.worth_reading(keys, local_blocks, command.recompute_us_per_block)

    def _reserve(self, command: Reserve) -> None:
        attempt_id = command.attempt_id
        reserved = self._node.pool.reserve(
            attempt_id, command.keys, command.num_blocks, command.tenant, command.leave_available, command.leave_in_quota
        )
        self.notify(reserved)
        self._ingests.reserved(attempt_id)

    def _grow(self, command: Grow) -> None:
        slots: list[Slot] = self._node.pool.grow(command.attempt_id, command.num_blocks)
        self.notify(Grown(command.attempt_id, tuple(slots)))

    def _commit(self, command: Commit) -> None:
        self._node.pool.commit(command.attempt_id, command.first_block, command.keys)

    def _open_hand_over(self, command: OpenHandOver) -> None:
        attempt_id = command.attempt_id
        slots = self._node.pool.begin_hand_over(attempt_id)
        hand_over = HandOver(self._node, self.notify, attempt_id, slots, command.address)
        self._transfers.start_hand_over(attempt_id, hand_over, lambda error: self._broken(attempt_id, error))

    def _push(self, command: Push) -> None:
        hand_over = self._transfers.hand_overs.get(command.attempt_id)
        if hand_over is not None:
            hand_over.push(Unit(command.layer_begin, command.layer_end, command.block_begin, command.block_end))

    def _seal(self, command: Seal) -> None:
        hand_over = self._transfers.hand_overs.get(command.attempt_id)
        if hand_over is not None:
            hand_over.seal(command.first_token)

    def _release(self, command: Release) -> None:
        attempt_id = command.attempt_id
        self._node.pool.release(attempt_id)
        self._end_transfers(attempt_id, command.finish_hand_over)

    def _end_transfers(self, attempt_id: AttemptId, finish_hand_over: bool) -> None:
        fetch, hand_over = self._transfers.fetches.get(attempt_id), self._transfers.hand_overs.get(attempt_id)
        if fetch is not None:
            fetch.cancel()
        if hand_over is not None and not (finish_hand_over and hand_over.sealed):
            hand_over.cancel()
        self._ingests.reserved(attempt_id)
        self._ingests.released()

    def _fail(self, attempt_id: AttemptId, error: SpringtideError) -> None:
        self.notify(AttemptFailed(attempt_id, failure_of(error)))

    def _broken(self, attempt_id: AttemptId, error: BaseException) -> None:
        logger.error("a transfer broke", exc_info=error, extra={"attempt_id": attempt_id})
        self._fail(attempt_id, SpringtideError(f"the store failed in a transfer: {error!r}"))
