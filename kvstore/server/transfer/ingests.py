"""The receiving side of hand-overs: who asks where to write, what arrives, and who has to be asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc.aio
from google.protobuf.message import DecodeError

from kvstore import metrics
from kvstore.core.results import IngestFailed
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.failures import failure_of
from kvstore.server.shared.peers import Peers
from messenger.base import Traffic
from messenger.router import Messenger
from springtide.clock import patience_s
from springtide.errors import PeerLost
from springtide.ids import AttemptId, Incarnation, NodeId
from springtide.protocol import wire
from springtide.protocol.outputs import AttemptFailed
from springtide.protocol.storage import Ingested, IngestSeal, IngestTargets, IngestUnit, Notice, Writer
from springtide.rpc import store_pb2 as pb

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.4
SILENCE_UNTIL_LOST_S = 1.3
"""The silence after which a writer is lost on a network that is not slow: one that is gone is known within two seconds."""
_CANCEL_TIMEOUT_S = 0.5
OPEN_WAIT_S = 0.7
"""The most that a writer waits which asks before the reservation is made; then it asks again."""


class Ingests:
    """The ingests of a store. `notify` reaches its engine."""

    def __init__(self, shared: StoreContext, notify: Callable[[Notice], None]) -> None:
        self._shared = shared
        self._notify = notify
        self._waiting: dict[AttemptId, set[asyncio.Future[None]]] = {}
        """The writers that asked before the reservation was made."""
        self._watched: dict[Writer, _Watched] = {}
        self.has_engine = False
        self._idle = True
        """Nobody may write here, so nobody is watched."""
        self._kick = asyncio.Event()

    async def open(self, attempt_id: AttemptId, writer: Writer) -> IngestTargets:
        """The slots that the writer is to write; none when the engine has reserved nothing within OPEN_WAIT_S. Raises as Pool.open_ingest,
        and PeerLost when there is no engine that could."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WAIT_S):
                while (targets := self._shared.pool.open_ingest(attempt_id, writer)) is None:
                    if not self.has_engine:
                        raise PeerLost(f"{self._shared.options.node_id} has no engine that could reserve slots for attempt {attempt_id}")
                    await self._reservation(attempt_id)
                if self._idle:
                    self._kick.set()
                return targets
        return IngestTargets(self._shared.incarnation)

    async def _reservation(self, attempt_id: AttemptId) -> None:
        """Returns when it is worth asking the pool again."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(attempt_id, set()).add(waiter)
        try:
            await waiter
        finally:
            waiters = self._waiting.get(attempt_id, set())
            waiters.discard(waiter)
            if not waiters:
                self._waiting.pop(attempt_id, None)

    def engine_changed(self, present: bool) -> None:
        """Takes note that an engine has come, or gone with whatever it might have reserved."""
        self.has_engine = present
        for attempt_id in list(self._waiting):
            self.reserved(attempt_id)

    def reserved(self, attempt_id: AttemptId) -> None:
        """Lets whoever waits for the reservation look again: it is made, or given up."""
        for waiter in self._waiting.pop(attempt_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def released(self) -> None:
        """Takes note that the engine has let go of attempts: where they are being written, the writer is asked to stop."""
        if self._shared.pool.quarantined_ingests():
            self._kick.set()

    def on_notify(self, peer: str, payload: bytes) -> None:
        """Takes in a notification by Messenger: the bytes that it follows are in place."""
        try:
            notice = wire.INGEST_NOTICE.decode(pb.IngestNotice.FromString(payload))
        except DecodeError:
            logger.warning("%s sent %d bytes that are no notice", peer, len(payload))
            return
        except ValueError as error:
            logger.warning("%s sent a notice without meaning here: %s", peer, error)
            return
        match notice:
            case IngestUnit(attempt_id, unit):
                self._tell(self._shared.pool.cover(attempt_id, NodeId(peer), unit))
            case IngestSeal(attempt_id, first_token):
                self._tell(self._shared.pool.seal(attempt_id, NodeId(peer), first_token))

    def close(self, attempt_id: AttemptId, writer: NodeId, incarnation: Incarnation) -> None:
        """Ends the ingest by this writer, which will not write again."""
        self._tell(self._shared.pool.close_ingest(attempt_id, writer, incarnation))

    async def watch_writers(self, messenger: Messenger) -> None:
        """Watches them for ever: asks whoever may write here whether it lives, and to stop where nobody waits for it any more."""
        try:
            while True:
                for writer in self._current_writers() - self._watched.keys():
                    self._watched[writer] = _Watched(writer, self._shared.peers, messenger)
                await asyncio.gather(*(self._look_at(watched, messenger) for watched in self._watched.values()))
                # Before the wait, which may be long: one that comes back is not asked why it was not heard meanwhile.
                self._idle = not self._current_writers()
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: until Python 3.12 it swallows a cancellation that comes together with the kick.
                    async with asyncio.timeout(None if self._idle else PROBE_INTERVAL_S):
                        await self._kick.wait()
                self._kick.clear()
        finally:
            for watched in self._watched.values():
                watched.close()

    def _current_writers(self) -> set[Writer]:
        """Whoever may write now. The others are watched no longer."""
        writers = self._shared.pool.writers()
        for gone in self._watched.keys() - writers:
            self._watched.pop(gone).close()
        return writers

    async def _look_at(self, watched: _Watched, messenger: Messenger) -> None:
        writer = watched.writer
        if (why := watched.look()) is not None:
            await self._lose(writer, why, messenger)
            return
        quarantined = [attempt_id for attempt_id, by in self._shared.pool.quarantined_ingests() if by == writer]
        await asyncio.gather(*(self._ask_to_stop(writer, attempt_id) for attempt_id in quarantined))

    async def _ask_to_stop(self, writer: Writer, attempt_id: AttemptId) -> None:
        request, peers = pb.CancelHandOverRequest(attempt_id=attempt_id), self._shared.peers
        with contextlib.suppress(grpc.aio.AioRpcError):  # asked again in the next round
            reply = await peers.stub(writer.address).CancelHandOver(request, timeout=_CANCEL_TIMEOUT_S)
            if reply.incarnation == writer.incarnation:
                self.close(attempt_id, writer.node_id, writer.incarnation)

    async def _lose(self, writer: Writer, why: str, messenger: Messenger) -> None:
        """Tells the engine now. The slots leave quarantine once nothing of the writer can land any more; it may take more rounds."""
        error = PeerLost(why)
        failures = [self._shared.pool.fail_ingest(attempt_id, error) for attempt_id in self._shared.pool.ingests_of(writer)]
        for failure in failures:
            self._tell(failure)
        parts = ((writer.node_id, writer.incarnation), *((store.node_id, store.incarnation) for store in writer.beside))
        if all([await messenger.fence(node_id, incarnation) for node_id, incarnation in parts]):
            logger.warning("fenced %s", why)
            metrics.WRITERS_LOST.inc()
            self._shared.pool.fence(writer)
            self._shared.changed()

    def _tell(self, outcome: Ingested | IngestFailed | None) -> None:
        self._shared.changed()
        if isinstance(outcome, Ingested):
            metrics.INGESTED_PROMPTS.labels("complete").inc()
            self._notify(outcome)
        elif isinstance(outcome, IngestFailed):
            metrics.INGESTED_PROMPTS.labels("failed").inc()
            logger.info("ingest failed: %s", outcome.error, extra={"attempt_id": outcome.attempt_id})
            self._notify(AttemptFailed(outcome.attempt_id, failure_of(outcome.error)))
            self._kick.set()


class _Watched:
    """What is heard of one writer: bytes of its, whatever they are, and its answers to questions that are asked one after the other."""

    def __init__(self, writer: Writer, peers: Peers, messenger: Messenger) -> None:
        self.writer = writer
        self._peers = peers
        self._messenger = messenger
        self._incarnations = (writer.incarnation, *(store.incarnation for store in writer.beside))
        self._received_bytes = self._traffic().received_bytes
        self._heard_s = peers.observed_s()
        self._question: asyncio.Task[pb.DescribeReply] | None = None
        self._error = "no answer yet"

    def look(self) -> str | None:
        """Takes in what has come of it since the last look, and asks again. Returns why it is lost, if it is."""
        traffic = self._traffic()
        if traffic.received_bytes > self._received_bytes:
            self._heard_s = self._peers.observed_s()
        self._received_bytes = traffic.received_bytes
        if self._question is None or self._question.done():
            if self._question is not None and (why := self._hear(self._question)) is not None:
                return why
            self._question = asyncio.create_task(self._ask(), name=f"does {self.writer.node_id} live")
            self._question.add_done_callback(lambda question: question.cancelled() or question.exception())  # it may be asked in vain
        round_trip_s = max(traffic.round_trip_s, self._peers.round_trip_s(self.writer.address))
        if self._peers.observed_s() - self._heard_s >= patience_s(SILENCE_UNTIL_LOST_S, round_trip_s):
            return f"{self.writer.node_id} at {self.writer.address} does not answer: {self._error}"
        return None

    def close(self) -> None:
        if self._question is not None:
            self._question.cancel()

    async def _ask(self) -> pb.DescribeReply:
        description = await self._peers.describe(self.writer.address, SILENCE_UNTIL_LOST_S, longest_s=0.0)
        self._heard_s = self._peers.observed_s()
        return description

    def _hear(self, question: asyncio.Task[pb.DescribeReply]) -> str | None:
        try:
            description = question.result()
        except grpc.aio.AioRpcError as error:
            self._error = error.details() or error.code().name
            return None
        return None if description.incarnation == self.writer.incarnation else f"{self.writer.node_id} has restarted"

    def _traffic(self) -> Traffic:
        return sum((self._messenger.traffic(incarnation) for incarnation in self._incarnations), Traffic())
