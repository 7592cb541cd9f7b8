"""The store's own engine: its commands, in order, and the notices back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvstore import metrics
from kvstore.core.results import UnknownAttempt
from kvstore.link import engine_identity
from kvstore.server.service.fencing import EngineFencing
from kvstore.server.service.operations import Context
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.failures import failure_of
from kvstore.server.transfer.attempt_transfers import AttemptTransfers
from kvstore.server.transfer.fetch import PrefixFetch
from kvstore.server.transfer.hand_over import HandOverWriter
from kvstore.server.transfer.ingests import Ingests
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
    StoreHello,
    Unit,
)
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import LocalStoreServicer

logger = logging.getLogger(__name__)


class EngineSession:
    """The session of one engine: its stream. `notify` queues a notice for it; after `close` it goes nowhere."""

    def __init__(
        self, shared: StoreContext, transfers: AttemptTransfers, ingests: Ingests, fencing: EngineFencing, engine: Identity
    ) -> None:
        self._shared = shared
        self._transfers = transfers
        self._ingests = ingests
        self._fencing = fencing
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
        """Queues it."""
        if not self._closed:
            self.notices.put_nowait(notice)

    def take(self, message: pb.EngineCommand) -> None:
        """Handles what came over the stream."""
        try:
            command = wire.ENGINE_COMMAND.decode(message)
        except InvalidRequest as error:
            self._fail(getattr(message, message.WhichOneof("command") or "").attempt_id, error)
        except ValueError as error:
            logger.warning("%s sent a command without meaning here: %s", self.engine.name, error)
        else:
            self.handle(command)

    def handle(self, command: EngineCommand) -> None:
        """Does what is asked for, as far as it can be done; never blocks. What cannot be done is said to the engine as AttemptFailed;
        messages for attempts that are over are ignored."""
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
        self._shared.changed()

    def close(self) -> None:
        """Ends it, as the stream has ended or another engine has come: its attempts are over and its transfers cancelled."""
        if self._closed:
            return
        self._closed = True
        self.notices.put_nowait(None)
        unfenced = self._shared.pool.engine_ended()
        for attempt_id in unfenced:
            self._end_transfers(attempt_id, finish_hand_over=False)
        self._fencing.fence(self.engine, unfenced)
        self._shared.changed()

    def _acquire(self, command: Acquire) -> None:
        attempt_id, keys = command.attempt_id, command.keys
        acquired = self._shared.pool.acquire(
            attempt_id,
            keys,
            command.num_blocks,
            command.max_reused_blocks,
            command.tenant,
            command.leave_available,
            command.leave_in_quota,
        )
        metrics.REUSED_TOKENS.labels("dram").inc(acquired.local_blocks * self._shared.options.spec.block_tokens)
        elsewhere = [source for source in command.sources if source.node_id != self._shared.options.node_id]
        most = min(command.max_reused_blocks, len(keys))
        ssd_blocks = self._on_ssd(keys[:most], acquired.local_blocks, command)
        wanted = max(min(max((source.num_blocks for source in elsewhere), default=0), most), ssd_blocks)
        if wanted > acquired.local_blocks:
            fetch = PrefixFetch(self._shared, self.notify, attempt_id, command.tenant, acquired, keys[:wanted], elsewhere, ssd_blocks)
            self._transfers.start_fetch(attempt_id, fetch, lambda error: self._broken(attempt_id, error))
            return
        self.notify(acquired)

    def _on_ssd(self, keys: Sequence[BlockKey], local_blocks: int, command: Acquire) -> int:
        """The block up to which the prompt is to be read from the SSD."""
        if self._shared.ssd is None:
            return local_blocks
        return self._shared.ssd.worth_reading(keys, local_blocks, command.recompute_us_per_block)

    def _reserve(self, command: Reserve) -> None:
        attempt_id = command.attempt_id
        reserved = self._shared.pool.reserve(
            attempt_id, command.keys, command.num_blocks, command.tenant, command.leave_available, command.leave_in_quota
        )
        self.notify(reserved)
        self._ingests.reserved(attempt_id)

    def _grow(self, command: Grow) -> None:
        slots: list[Slot] = self._shared.pool.grow(command.attempt_id, command.num_blocks)
        self.notify(Grown(command.attempt_id, tuple(slots)))

    def _commit(self, command: Commit) -> None:
        self._shared.pool.commit(command.attempt_id, command.first_block, command.keys)

    def _open_hand_over(self, command: OpenHandOver) -> None:
        attempt_id = command.attempt_id
        slots = self._shared.pool.begin_hand_over(attempt_id)
        hand_over = HandOverWriter(self._shared, self.notify, attempt_id, slots, command.address)
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
        self._shared.pool.release(attempt_id)
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


class LocalStoreService(LocalStoreServicer):
    """The service `LocalStore`: what a node's engine asks of its store. `on_engine` is told of a new engine's session, and of None when it
    has gone."""

    def __init__(
        self,
        shared: StoreContext,
        transfers: AttemptTransfers,
        ingests: Ingests,
        fencing: EngineFencing,
        on_engine: Callable[[EngineSession | None], None],
    ) -> None:
        self._shared = shared
        self._transfers = transfers
        self._ingests = ingests
        self._fencing = fencing
        self._on_engine = on_engine
        self._session: EngineSession | None = None

    async def Engine(self, requests: AsyncIterator[pb.EngineCommand], context: Context) -> AsyncIterator[pb.StoreNotice]:
        hello = await anext(aiter(requests), None)
        if hello is None or not hello.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an engine's first command is EngineHello")
            return
        session = self._begin(engine_identity(hello.hello.instance_id, hello.hello.incarnation))
        commands = asyncio.create_task(_take_in(requests, session), name="engine commands")
        try:
            yield self._hello()
            while (notice := await session.notices.get()) is not None:
                yield wire.STORE_NOTICE.encode(notice)
        finally:
            commands.cancel()
            self._end(session)

    def _begin(self, engine: Identity) -> EngineSession:
        if self._session is not None:
            logger.warning("%s takes the place of %s", engine.name, self._session.engine.name)
            self._session.close()
        logger.info("%s connected", engine.name)
        self._session = EngineSession(self._shared, self._transfers, self._ingests, self._fencing, engine)
        self._on_engine(self._session)
        return self._session

    def _end(self, session: EngineSession) -> None:
        session.close()
        logger.info("%s disconnected", session.engine.name)
        if self._session is session:
            self._session = None
            self._on_engine(None)

    def _hello(self) -> pb.StoreNotice:
        options = self._shared.options
        return wire.STORE_NOTICE.encode(StoreHello(options.node_id, self._shared.incarnation, options.num_slots, self._shared.address))


async def _take_in(requests: AsyncIterator[pb.EngineCommand], session: EngineSession) -> None:
    """Takes in its commands until it ends the stream. What breaks here ends it too: the engine connects anew, and no attempt waits in
    vain."""
    try:
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            async for command in requests:
                session.take(command)
    except Exception:
        logger.exception("a command of %s broke; ending its session", session.engine.name)
    finally:
        session.close()
