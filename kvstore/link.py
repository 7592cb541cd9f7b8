"""The engine's side of its store: the arena, commands, notices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import grpc.aio
import numpy as np

from messenger.arena_memory import SharedMemory, attach_session, attached
from messenger.base import Identity, TransferTimeout
from messenger.notices import introduction
from springtide.errors import PeerLost
from springtide.ids import AttemptId
from springtide.protocol import wire
from springtide.protocol.outputs import AttemptFailed
from springtide.protocol.storage import (
    Acquired,
    EngineCommand,
    EngineHello,
    FetchProgress,
    FetchTruncated,
    Notice,
    Order,
    Release,
    StoreHello,
)
from springtide.rpc import channels
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import LocalStoreStub
from springtide.supervision import end

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
NoticeHandler = Callable[[Notice], None]
LostHandler = Callable[[PeerLost], None]


def engine_identity(instance_id: str, incarnation: int) -> Identity:
    """The identity by which an engine's store and the transports of its arena know it."""
    return Identity(f"engine {instance_id}", incarnation)


@dataclass(slots=True)
class _FetchState:
    layers_ready: int = 0
    valid_blocks: int | None = None
    """None unless the fetch has ended short."""


class FetchBoard:
    """A board of how far the fetch of each attempt is. Written by the event loop, waited for by the thread that runs the model."""

    def __init__(self) -> None:
        self._fetches: dict[AttemptId, _FetchState] = {}
        self._changed = threading.Condition()
        self._lost: PeerLost | None = None

    def update(self, notice: Notice) -> None:
        with self._changed:
            match notice:
                case Acquired(attempt_id) if notice.remote_blocks:
                    self._fetches[attempt_id] = _FetchState()
                case FetchProgress(attempt_id, layers_ready):
                    if (state := self._fetches.get(attempt_id)) is not None:
                        state.layers_ready = max(state.layers_ready, layers_ready)
                case FetchTruncated(attempt_id, valid_blocks):
                    if (state := self._fetches.get(attempt_id)) is not None:
                        state.valid_blocks = valid_blocks
                case AttemptFailed(attempt_id):
                    self._fetches.pop(attempt_id, None)
                case _:
                    return
            self._changed.notify_all()

    def forget(self, attempt_id: AttemptId) -> None:
        with self._changed:
            if self._fetches.pop(attempt_id, None) is not None:
                self._changed.notify_all()

    def lose(self, error: PeerLost) -> None:
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def waits(self, attempt_id: AttemptId, num_layers: int) -> bool:
        """Whether some of the attempt's prefix has yet to arrive, in one of these layers."""
        with self._changed:
            state = self._fetches.get(attempt_id)
            return state is not None and state.valid_blocks is None and state.layers_ready < num_layers

    def wait_layer(self, attempt_id: AttemptId, layer: int, timeout_s: float) -> int | None:
        """Waits for it, as StoreLink.wait_layer."""
        deadline = monotonic() + timeout_s
        with self._changed:
            while True:
                if self._lost is not None:
                    raise self._lost
                state = self._fetches.get(attempt_id)
                if state is None:
                    return None
                if state.valid_blocks is not None:
                    return state.valid_blocks
                if layer < state.layers_ready:
                    return None
                if not self._changed.wait(deadline - monotonic()):
                    raise TransferTimeout(f"layer {layer} of the prefix of {attempt_id} did not arrive within {timeout_s:g} s")


class StoreLink:
    """The link of an engine to its store, made by `connect`. When the store is lost, `on_lost` is called once, and what is in the arena is
    worth nothing any more: whoever needs a store again closes this link and connects anew, to another incarnation with an empty arena."""

    def __init__(
        self,
        memory: SharedMemory,
        attachment: socket.socket,
        hello: StoreHello,
        channel: grpc.aio.Channel,
        stream: grpc.aio.StreamStreamCall[pb.EngineCommand, pb.StoreNotice],
        commands: _Commands,
        on_notice: NoticeHandler,
        on_lost: LostHandler,
    ) -> None:
        self.memory, self.attachment = memory, attachment
        """What `attach_arena` returned; this link closes them."""
        self._channel = channel
        self._stream = stream
        self._commands = commands
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._fetches = FetchBoard()
        self.heard: object = object()
        """Another one with each notice that comes. The store sends some twice a second, whatever happens."""
        self.arena: np.ndarray = memory.region.memory
        """uint8 [num_slots * bytes_per_slot], shared with the store: slot s begins at s * bytes_per_slot. Write only slots that an attempt
        of this engine holds privately."""
        self.num_slots = hello.num_slots
        self.node_id = hello.node_id
        self.incarnation = hello.incarnation
        self.address = hello.address
        """gRPC host:port of the store, for other stores."""
        self._receiving = asyncio.create_task(self._receive(), name="store notices")

    @classmethod
    async def connect(
        cls, store_socket: Path, arena_socket: Path, hello: EngineHello, on_notice: NoticeHandler, on_lost: LostHandler
    ) -> StoreLink:
        """Connects to the store of the node. `on_notice` and `on_lost` are called in this event loop and must not block. Raises PeerLost
        when there is no store, NoMemory when this process cannot map its arena."""
        channel = channels.connect(f"unix:{store_socket}")
        commands = _Commands(hello)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                stream = LocalStoreStub(channel).Engine(commands.stream())
                greeting = await stream.read()
                if not isinstance(greeting, pb.StoreNotice) or not isinstance(welcome := wire.STORE_NOTICE.decode(greeting), StoreHello):
                    raise PeerLost(f"the store at {store_socket} closed at once")
                engine = engine_identity(hello.instance_id, hello.incarnation)
                attaching = asyncio.get_running_loop().run_in_executor(None, attach_arena, arena_socket, engine)
                memory, attachment = await attached(attaching)
        except (grpc.aio.AioRpcError, TimeoutError, PeerLost) as error:
            await channel.close(None)
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error) or "no answer"
            raise PeerLost(f"no store at {store_socket}: {reason}") from error
        except BaseException:
            await channel.close(None)
            raise
        if memory.header.incarnation != welcome.incarnation:
            memory.close()
            attachment.close()
            await channel.close(None)
            raise PeerLost(f"the store at {store_socket} restarted meanwhile")
        return cls(memory, attachment, welcome, channel, stream, commands, on_notice, on_lost)

    def send(self, order: Order) -> None:
        """Sends it, from any thread, without waiting; orders keep their order. After a loss they go nowhere."""
        if isinstance(order, Release):
            self._fetches.forget(order.attempt_id)
        self._commands.put(order)

    def wait_layer(self, attempt_id: AttemptId, layer: int, timeout_s: float) -> int | None:
        """Blocks a thread (never the event loop's) until the remote blocks of the attempt are here in this layer.

        Returns None then, and at once where nothing is being fetched. Returns a number of blocks when the fetch ended short: only so many
        of the prefix are valid, in all layers, and what was computed on the rest is void. Raises TransferTimeout; PeerLost with the store.
        """
        return self._fetches.wait_layer(attempt_id, layer, timeout_s)

    def waits(self, attempt_id: AttemptId, num_layers: int) -> bool:
        """Whether some of the attempt's prefix has yet to arrive, in one of the first `num_layers`. From any thread."""
        return self._fetches.waits(attempt_id, num_layers)

    async def close(self, at_rest: Callable[[], Awaitable[object]] | None = None) -> None:
        """Lets go of the store, which releases every attempt of this engine: once `at_rest` has returned, when nothing of the engine writes
        into the arena any more. `on_lost` is not called."""
        await end(self._receiving)
        self._fetches.lose(PeerLost("the link to the store was closed"))
        self._commands.end()
        self._stream.cancel()
        await self._channel.close(None)
        if at_rest is not None:
            await at_rest()
        self._unmap()

    async def _receive(self) -> None:
        reason = "it closed the stream"
        try:
            while isinstance(message := await self._stream.read(), pb.StoreNotice):
                self.heard = message
                notice = wire.STORE_NOTICE.decode(message)
                if not isinstance(notice, StoreHello):
                    self._fetches.update(notice)
                    self._on_notice(notice)
        except grpc.aio.AioRpcError as error:
            reason = str(error.details())
        except Exception as error:
            logger.exception("a notice of the store could not be taken in")
            reason = f"a notice could not be taken in: {error!r}"
            self._stream.cancel()
        loss = PeerLost(f"lost the store of {self.node_id}: {reason}")
        self._fetches.lose(loss)
        self._commands.end()
        with contextlib.suppress(Exception):
            await self._channel.close(None)
        self._on_lost(loss)

    def _unmap(self) -> None:
        """The mapping goes with the last view of it, which may be the engine's."""
        self.arena = np.empty(0, np.uint8)
        self.memory.close()
        self.attachment.close()


def attach_arena(arena_socket: Path, engine: Identity) -> tuple[SharedMemory, socket.socket]:
    """Maps the arena. The socket tells the store that a process of this engine may write, until it is closed. Blocks. Raises PeerLost,
    NoMemory."""
    memory, attachment = attach_session(arena_socket, False, CONNECT_TIMEOUT_S)
    try:
        attachment.sendall(introduction(engine))
    except OSError as error:
        memory.close()
        attachment.close()
        raise PeerLost(f"lost the arena at {arena_socket}: {error}") from error
    return memory, attachment


class _Commands:
    """What is to be sent, by any thread, and the iterator that gRPC sends from. One wake-up of the loop takes all that has gathered."""

    def __init__(self, first: EngineCommand) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[EngineCommand] = deque((first,))
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._waking = False
        self._ended = False

    def put(self, command: EngineCommand) -> None:
        with self._lock:
            if self._ended:
                return
            self._queue.append(command)
            if self._waking:
                return
            self._waking = True
        self._loop.call_soon_threadsafe(self._wake.set)

    def end(self) -> None:
        """Ends the stream. In the loop's thread."""
        with self._lock:
            self._ended = True
        self._wake.set()

    async def stream(self) -> AsyncIterator[pb.EngineCommand]:
        while True:
            while self._queue:
                yield wire.ENGINE_COMMAND.encode(self._queue.popleft())
            if self._ended:
                return
            await self._wake.wait()
            with self._lock:
                self._waking = False
            self._wake.clear()
