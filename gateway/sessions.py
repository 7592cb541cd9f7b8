"""The gateway's streams to the nodes: one Session with each, opened at the first attempt that runs there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import grpc
import grpc.aio

from gateway import events as ev
from springtide.credentials import OPEN, Credentials
from springtide.ids import AttemptId, InstanceId
from springtide.protocol import wire
from springtide.protocol.codec import Encoder
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.outputs import AttemptFailed, AttemptSigns, DecodeUpdate, HandedOver, PrefillDone
from springtide.protocol.starts import AbortAttempt, DecodeCommand, DecodeStart, ForetellTokens, PrefillCommand, PrefillStart
from springtide.rpc import node_pb2_grpc
from springtide.rpc.channels import connect

logger = logging.getLogger(__name__)

Command = PrefillCommand | DecodeCommand
Post = Callable[[ev.Event], None]

CONNECT_TIMEOUT_S = 5.0


class NodeSession:
    """One stream with one process. Ends with that process or its connection; reports so once, with the attempts that ran over it."""

    def __init__(
        self, side: Role, instance: InstanceRef, post: Post, on_end: Callable[[NodeSession], None], credentials: Credentials = OPEN
    ) -> None:
        self.side = side
        self.instance = instance
        self.attempts: set[AttemptId] = set()
        self._post = post
        self._on_end = on_end
        self._credentials = credentials
        self._commands: asyncio.Queue[Command | None] = asyncio.Queue()
        """None ends them."""
        self._connected = False
        self._ended = False
        self._task = asyncio.create_task(self._run(), name=f"session-{instance.instance_id}")

    def send(self, command: Command) -> None:
        self._commands.put_nowait(command)

    def end(self) -> None:
        """Hangs up; the node aborts whatever it still runs for this session."""
        self._task.cancel()
        self._report("closed from here")

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        channel = connect(self.instance.address, self._credentials)
        reason = "the node ended it"
        try:
            await _connected(channel)
            self._connected = True
            async for update in self._stream(channel):
                for event in self._events(update):
                    self._post(event)
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        except TimeoutError:
            reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        except (ConnectionError, ValueError) as error:
            # ValueError: an update that does not make sense. The node is not what it should be.
            reason = str(error)
        finally:
            # gRPC goes on reading them after its call has ended, and would wait for ever.
            self._commands.put_nowait(None)
            self._report(reason)
            await channel.close(grace=None)

    def _stream(self, channel: grpc.aio.Channel) -> AsyncIterator[Any]:
        stub = node_pb2_grpc.PrefillNodeStub(channel) if self.side is Role.PREFILL else node_pb2_grpc.DecodeNodeStub(channel)
        stream: AsyncIterator[Any] = stub.Session(self._outgoing())
        return stream

    async def _outgoing(self) -> AsyncIterator[Any]:
        codec: Encoder[Any] = wire.PREFILL_COMMAND if self.side is Role.PREFILL else wire.DECODE_COMMAND
        while (command := await self._commands.get()) is not None:
            yield codec.encode(command)

    def _events(self, message: Any) -> Iterable[ev.Event]:
        """Raises ValueError when it makes no sense."""
        if self.side is Role.DECODE:
            return _decode_events(wire.DECODE_UPDATE.decode(message))
        match wire.PREFILL_UPDATE.decode(message):
            case AttemptSigns(signs):
                return [ev.Signs(self.side, signs)]
            case AttemptFailed() as failed:
                return [ev.SideFailed(self.side, failed)]
            case PrefillDone() | HandedOver() as event:
                return [event]

    def _report(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        level = logging.WARNING if self.attempts else logging.INFO
        logger.log(level, "session with %s at %s is over: %s; attempts there: %d", *self._names(), reason, len(self.attempts))
        self._on_end(self)
        self._post(ev.SessionLost(self.side, self.instance.instance_id, tuple(sorted(self.attempts)), self._connected))

    def _names(self) -> tuple[str, str]:
        return self.instance.instance_id, self.instance.address


def _decode_events(update: DecodeUpdate) -> Iterator[ev.Event]:
    for attempt_id in update.reserved:
        yield ev.DecodeReserved(attempt_id)
    yield from update.times
    yield from update.prefilled
    yield from update.outputs
    for failed in update.failed:
        yield ev.SideFailed(Role.DECODE, failed)
    if update.signs is not None:
        yield ev.Signs(Role.DECODE, update.signs.signs)


async def _connected(channel: grpc.aio.Channel) -> None:
    """Raises ConnectionError at the first failure to connect, TimeoutError when there is no answer at all."""
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise ConnectionError("connection refused or unreachable")
            await channel.wait_for_state_change(state)


class SessionPool:
    """The sessions with all nodes."""

    def __init__(self, post: Post, credentials: Credentials = OPEN) -> None:
        self._credentials = credentials
        self._post = post
        self._sessions: dict[tuple[Role, InstanceId], NodeSession] = {}

    def start(self, side: Role, instance: InstanceRef, start: PrefillStart | DecodeStart) -> None:
        session = self._sessions.get((side, instance.instance_id))
        if session is not None and session.instance.address != instance.address:
            # The instance has been started anew elsewhere: nobody is left at the old address.
            session.end()
            session = None
        if session is None:
            session = NodeSession(side, instance, self._post, self._forget_session, self._credentials)
            self._sessions[side, instance.instance_id] = session
        session.attempts.add(start.request.attempt_id)
        session.send(start)

    def tell(self, side: Role, instance_id: InstanceId, word: AbortAttempt | ForetellTokens) -> None:
        """Does nothing when the session over which the attempt ran is gone: the node has aborted it by itself."""
        session = self._sessions.get((side, instance_id))
        if session is not None and word.attempt_id in session.attempts:
            session.send(word)

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt is over: the loss of its sessions would no longer matter to it."""
        for session in self._sessions.values():
            session.attempts.discard(attempt_id)

    async def close(self) -> None:
        sessions = list(self._sessions.values())
        for session in sessions:
            session.end()
        for session in sessions:
            await session.wait_closed()

    def _forget_session(self, session: NodeSession) -> None:
        key = (session.side, session.instance.instance_id)
        if self._sessions.get(key) is session:
            del self._sessions[key]
