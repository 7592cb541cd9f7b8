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
from messenger.router import Messenger
from springtide.errors import PeerLost
from springtide.ids import AttemptId, Incarnation, NodeId
from springtide.protocol import wire
from springtide.protocol.outputs import AttemptFailed
from springtide.protocol.storage import Ingested, IngestSeal, IngestTargets, IngestUnit, Notice, Writer
from springtide.rpc import store_pb2 as pb

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.4
PROBE_TIMEOUT_S = 0.5
SILENCE_UNTIL_LOST_S = 1.3
"""The silence after which a writer is lost: one that is gone is known within two seconds, as two probes fail, or three are refused."""
OPEN_WAIT_S = 0.7
"""The most that a writer waits which asks before the reservation is made; then it asks again."""


class Ingests:
    """The ingests of a store. `notify` reaches its engine."""

    def __init__(self, shared: StoreContext, notify: Callable[[Notice], None]) -> None:
        self._shared = shared
        self._notify = notify
        self._waiting: dict[AttemptId, set[asyncio.Future[None]]] = {}
        """The writers that asked before the reservation was made."""
        self._heard_at: dict[Writer, float] = {}
        """The observed time (`Peers.observed_s`) when a writer last answered, or was first asked."""
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
        while True:
            writers = self._shared.pool.writers()
            await asyncio.gather(*(self._probe(writer, messenger) for writer in writers))
            self._heard_at = {writer: when for writer, when in self._heard_at.items() if writer in writers}
            self._idle = not self._shared.pool.writers()
            with contextlib.suppress(TimeoutError):
                # Not wait_for: until Python 3.12 it swallows a cancellation that comes together with the kick.
                async with asyncio.timeout(None if self._idle else PROBE_INTERVAL_S):
                    await self._kick.wait()
            self._kick.clear()

    async def _probe(self, writer: Writer, messenger: Messenger) -> None:
        peers = self._shared.peers
        stub, heard_at = peers.stub(writer.address), self._heard_at.setdefault(writer, peers.observed_s())
        try:
            description = await stub.Describe(pb.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if peers.observed_s() - heard_at >= SILENCE_UNTIL_LOST_S:
                await self._lose(writer, f"{writer.node_id} at {writer.address} does not answer: {error.details()}", messenger)
            return
        self._heard_at[writer] = peers.observed_s()
        if description.incarnation != writer.incarnation:
            await self._lose(writer, f"{writer.node_id} has restarted", messenger)
            return
        for attempt_id in [attempt_id for attempt_id, by in self._shared.pool.quarantined_ingests() if by == writer]:
            with contextlib.suppress(grpc.aio.AioRpcError):  # asked again in the next round
                reply = await stub.CancelHandOver(pb.CancelHandOverRequest(attempt_id=attempt_id), timeout=PROBE_TIMEOUT_S)
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
