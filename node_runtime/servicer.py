"""The gRPC service of an engine, the same for both kinds: gateways' sessions, load reports, and the order to switch the role."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from node_runtime.events import Ordered, SessionEnded, Start, StartT, UpdateT
from node_runtime.role_switch import PendingSwitch
from springtide.clock import Clock
from springtide.errors import InvalidRequest
from springtide.modelinfo import ModelInfo
from springtide.protocol import wire
from springtide.protocol.codec import Decoder, Encoder
from springtide.protocol.instances import LoadReport, Role
from springtide.protocol.outputs import AttemptFailed, AttemptSigns, Failure, FailureCode
from springtide.protocol.starts import AbortAttempt, DecodeStart, ForetellTokens, PrefillStart
from springtide.rpc import node_pb2
from springtide.trace_context import TRACE_IDS

CommandT = TypeVar("CommandT")
OutgoingT = TypeVar("OutgoingT")

logger = logging.getLogger(__name__)

REST_S = 0.05
"""Between one look at the load and the next."""
SAY_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class EngineService(Generic[StartT, UpdateT]):
    """What is one kind's own of the service: its messages, and how an update of it says what either kind has to say."""

    role: Role
    add_to_server: Callable[[Any, grpc.aio.Server], None]
    """Registers a servicer: a function of the kind's stubs."""
    commands: Decoder[Any, StartT | AbortAttempt | ForetellTokens]
    updates: Encoder[UpdateT]
    failed: Callable[[AttemptFailed], UpdateT]
    signs: Callable[[AttemptSigns], UpdateT]


class EngineServicer(Generic[StartT, UpdateT]):
    """The service itself. What gateways say it tells as events; methods with capitals are called by gRPC."""

    def __init__(
        self,
        service: EngineService[StartT, UpdateT],
        check: Callable[[StartT | ForetellTokens], None],
        tell: Callable[[Ordered[StartT]], None],
        report: Callable[[], LoadReport],
        clock: Clock,
        keeps_role: str = "",
        first_session: int = 1,
    ) -> None:
        """`check` raises InvalidRequest for what can never succeed. All are called in the event loop. `keeps_role`: as of PendingSwitch.
        `first_session`: as of GatewaySessions."""
        self.pending_switch = PendingSwitch(service.role, keeps_role)
        self._service: EngineService[StartT, UpdateT] = service
        self._check: Callable[[StartT | ForetellTokens], None] = check
        self._tell: Callable[[Ordered[StartT]], None] = tell
        self._report = report
        self._clock = clock
        self._changes = Changes()
        self._sessions: GatewaySessions[Any, UpdateT] = GatewaySessions(
            self._on_command, lambda session: tell(SessionEnded(session)), first_session
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to the server."""
        self._service.add_to_server(self, server)

    def send(self, session: int, update: UpdateT) -> None:
        """Sends without waiting. To a session that has ended: nowhere."""
        self._sessions.send(session, update)

    def serves(self, session: int) -> bool:
        """Whether it is one of this service's."""
        return session in self._sessions

    def note_change(self) -> None:
        """The load may have changed."""
        self._changes.note()

    def leave(self) -> None:
        """Takes no more work from here on, and says so to those who watch the load: by its end."""
        self.pending_switch.leaving = True
        self._changes.note()

    async def Session(self, request_iterator: AsyncIterable[Any], context: Any) -> AsyncIterator[Any]:
        encode = self._service.updates.encode
        async for update in self._sessions.serve(request_iterator):
            yield encode(update)

    async def WatchLoad(self, request: node_pb2.WatchLoadRequest, context: Any) -> AsyncIterator[node_pb2.LoadReport]:
        """Load reports, while the engine takes work."""
        reports = watch(lambda: None if self.pending_switch.leaving else self._report(), self._changes, self._clock)
        async for report in reports:
            yield report

    async def SwitchRole(self, request: node_pb2.SwitchRoleRequest, context: Any) -> node_pb2.SwitchRoleReply:
        try:
            self.pending_switch.take(wire.ROLE_SWITCH.decode(request))
            self._changes.note()
        except (ValueError, InvalidRequest) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return node_pb2.SwitchRoleReply()

    def _on_command(self, session: int, message: Any) -> None:
        try:
            command = self._service.commands.decode(message)
            if not isinstance(command, AbortAttempt):
                self._check(command)
        except (ValueError, InvalidRequest) as error:
            if message.HasField("start"):
                failure = Failure(FailureCode.INVALID, str(error))
                self.send(session, self._service.failed(AttemptFailed(message.start.request.attempt_id, failure)))
            else:
                logger.warning("a gateway said what makes no sense, and nothing is done: %s", error)
            return
        if isinstance(command, AbortAttempt | ForetellTokens):
            self._tell(command)
            return
        request = command.request
        if request.traceparent:
            TRACE_IDS.note(request.request_id, request.traceparent)
        logger.debug("start", extra={"request_id": request.request_id, "attempt_id": request.attempt_id})
        self._tell(Start(session, command))


def check_command(command: PrefillStart | DecodeStart | ForetellTokens, info: ModelInfo, block_tokens: int) -> None:
    """Checks an attempt's input, or what it is foretold, against the model. Raises InvalidRequest, naming the field and the value."""
    if isinstance(command, ForetellTokens):
        _check_tokens(command.token_ids, info)
    else:
        _check_start(command, info, block_tokens)


def _check_tokens(token_ids: Sequence[int], info: ModelInfo) -> None:
    if max(token_ids, default=0) >= info.vocab_size:
        message = f"token_ids must be below the vocabulary size {info.vocab_size}, not {max(token_ids)}"
        raise InvalidRequest(message, param="token_ids")


def _check_start(start: PrefillStart | DecodeStart, info: ModelInfo, block_tokens: int) -> None:
    if isinstance(start, PrefillStart) and start.stays:
        raise InvalidRequest("decode_store_address must not be empty", param="decode_store_address")
    request = start.request
    if request.block_tokens != block_tokens:
        raise InvalidRequest(f"block_tokens must be {block_tokens}, as here, not {request.block_tokens}", param="block_tokens")
    _check_tokens(request.token_ids, info)
    total = request.num_prompt_tokens + request.params.max_tokens
    if total > info.context_length:
        raise InvalidRequest(
            f"prompt ({request.num_prompt_tokens} tokens) and params.max_tokens ({request.params.max_tokens}) make {total}, "
            f"more than the model's context of {info.context_length}",
            param="params.max_tokens",
        )


class GatewaySessions(Generic[CommandT, OutgoingT]):
    """Gateways' sessions with an engine: numbered, each with a queue of updates on their way out."""

    def __init__(self, on_command: Callable[[int, CommandT], None], on_end: Callable[[int], None], first: int = 1) -> None:
        """`on_command(session, command)` and `on_end(session)` are called in the event loop. `first`: the number of the first, 1 or 2; an
        engine's two services have the odd ones and the even ones."""
        self._on_command = on_command
        self._on_end = on_end
        self._ids = itertools.count(first, 2)
        self._outgoing: dict[int, asyncio.Queue[OutgoingT | None]] = {}

    def __contains__(self, session: int) -> bool:
        return session in self._outgoing

    def send(self, session: int, update: OutgoingT) -> None:
        """Sends without waiting. To a session that has ended: nowhere."""
        queue = self._outgoing.get(session)
        if queue is not None:
            queue.put_nowait(update)

    async def serve(self, commands: AsyncIterable[CommandT]) -> AsyncIterator[OutgoingT]:
        """One session: takes its commands and yields its updates until either side ends it."""
        session = next(self._ids)
        queue: asyncio.Queue[OutgoingT | None] = asyncio.Queue()
        self._outgoing[session] = queue
        receiving = asyncio.create_task(self._receive(session, commands, queue), name=f"session {session}")
        try:
            while (update := await queue.get()) is not None:
                yield update
        finally:
            receiving.cancel()
            del self._outgoing[session]
            self._on_end(session)

    async def _receive(self, session: int, commands: AsyncIterable[CommandT], queue: asyncio.Queue[OutgoingT | None]) -> None:
        try:
            async for command in commands:
                self._on_command(session, command)
        finally:
            queue.put_nowait(None)


class Changes:
    """What several wait for in one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def note(self) -> None:
        """Something may have changed."""
        self._next.set()
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """The event that the next `note` sets."""
        return self._next


async def watch(report: Callable[[], LoadReport | None], changes: Changes, clock: Clock) -> AsyncIterator[node_pb2.LoadReport]:
    """Yields the report when it has changed, and twice a second, until there is none."""
    said: LoadReport | None = None
    said_at = clock.now()
    while True:
        changed = changes.next
        if (current := report()) is None:
            return
        if current != said or clock.now() - said_at >= SAY_EVERY_S:
            said, said_at = current, clock.now()
            yield wire.LOAD_REPORT.encode(current)
        await asyncio.sleep(REST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(said_at + SAY_EVERY_S - clock.now()):
                await changed.wait()
