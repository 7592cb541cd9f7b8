"""A connected, non-blocking socket whose bytes go straight to and from lent memory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable, Sequence

_MAX_BUFFERS = 1000
"""Of one system call; Linux allows 1024."""
_CREDENTIALS = struct.Struct("3i")
_PARTS_OF_PATIENCE = 4
_TURN_BYTES = 4 << 20
"""After so much without waiting, others get their turn in the event loop."""


class PeerClosed(ConnectionError):
    """The peer ended the stream between two messages."""


class Vector:
    """Buffers that one message fills or is sent from, with what is left of them."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Empty buffers are left out: no system call could get past them."""
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._next = 0

    def window(self) -> list[memoryview]:
        return self._buffers[self._next : self._next + _MAX_BUFFERS]

    def rest(self) -> list[memoryview]:
        return self._buffers[self._next :]

    @property
    def done(self) -> bool:
        return self._next == len(self._buffers)

    def advance(self, num_bytes: int) -> None:
        while num_bytes > 0:
            buffer = self._buffers[self._next]
            if num_bytes < len(buffer):
                self._buffers[self._next] = buffer[num_bytes:]
                return
            num_bytes -= len(buffer)
            self._next += 1

    def divert(self, index: int) -> None:
        """What is left of buffer `index` goes to, or comes from, scratch memory of zeros: the stream keeps its shape."""
        if index >= self._next:
            self._buffers[index] = memoryview(bytearray(len(self._buffers[index])))


def _nothing() -> None:
    pass


class Stream:
    """At most one task may receive and one may send at a time. Every method but `close` raises OSError once the peer is lost."""

    def __init__(self, sock: socket.socket, patience_s: float | None = None) -> None:
        """A peer that neither sends nor takes anything for `patience_s` while it is waited for is lost: TimeoutError."""
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._watches: dict[asyncio.Future[None], asyncio.TimerHandle] = {}

    def fileno(self) -> int:
        """Below 0 once closed."""
        return self._fd

    def detach(self) -> socket.socket:
        """Hands the socket over, with nothing of it read ahead. This stream is closed."""
        assert not self._waiters, "nobody waits in a stream that is handed over"
        self._fd = -1
        return self._sock

    def peer_pid(self) -> int:
        """Of the process that listens, or listened, at the other end of a Unix socket; 0 when it cannot be seen from here."""
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[0])

    async def receive(self, num_bytes: int) -> bytearray:
        """Raises PeerClosed when the stream ended before the first of them, ConnectionError when within them."""
        data = bytearray(num_bytes)
        if num_bytes:
            await self.receive_into(Vector([memoryview(data)]))
        return data

    async def receive_into(self, vector: Vector, before: Callable[[], None] = _nothing) -> None:
        """Fills `vector`. `before` runs just before each system call, in one step with it: it may divert buffers."""
        total = since_wait = 0
        while not vector.done:
            before()
            window = vector.window()
            try:
                received = self._sock.recv_into(window[0]) if len(window) == 1 else self._sock.recvmsg_into(window)[0]
            except BlockingIOError:
                await self._wait("read")
                since_wait = 0
                continue
            if received == 0:
                raise PeerClosed("the peer closed the connection") if total == 0 else ConnectionError("the peer closed within a message")
            vector.advance(received)
            total += received
            since_wait += received
            if since_wait >= _TURN_BYTES:
                since_wait = 0
                await asyncio.sleep(0)

    async def send(self, vector: Vector, before: Callable[[], None] = _nothing) -> None:
        """Hands all of `vector` to the kernel; `before` as in `receive_into`."""
        since_wait = 0
        while not vector.done:
            before()
            try:
                sent = self._sock.sendmsg(vector.window())
            except BlockingIOError:
                await self._wait("write")
                since_wait = 0
                continue
            vector.advance(sent)
            since_wait += sent
            if since_wait >= _TURN_BYTES:
                since_wait = 0
                await asyncio.sleep(0)

    def send_with_fd(self, data: bytes, fd: int) -> None:
        """For a few bytes on a fresh Unix socket, whose buffer takes them at once."""
        if socket.send_fds(self._sock, [data], [fd]) != len(data):
            raise ConnectionError("the socket's buffer did not take a header and a file descriptor at once")

    async def accept(self) -> socket.socket:
        """For a listening socket."""
        while True:
            try:
                return self._sock.accept()[0]
            except BlockingIOError:
                await self._wait("read")

    def at_end(self) -> bool:
        """Whether the peer is known to have closed, without waiting and without taking a byte."""
        try:
            return self._fd < 0 or not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def finish_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def discard_unsent(self) -> None:
        """`close` then resets a TCP connection instead of delivering later what the kernel still holds."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def lose_if_untaken(self, timeout_s: float) -> None:
        """The peer is lost when it takes nothing of what was sent for so long, be it that it is busy and its buffer is full. Of TCP."""
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))

    async def drain(self) -> bool:
        """Takes and drops everything. Returns whether the peer has ended the stream; else it is lost."""
        scratch = bytearray(1 << 16)
        try:
            while True:
                try:
                    if not self._sock.recv_into(scratch):
                        return True
                except BlockingIOError:
                    await self._wait("read")
                await asyncio.sleep(0)
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent. Tasks that wait in this stream get a ConnectionError."""
        if self._fd < 0:
            return
        for kind, waiter in self._waiters.items():
            (self._loop.remove_reader if kind == "read" else self._loop.remove_writer)(self._fd)
            if not waiter.done():
                waiter.set_exception(ConnectionAbortedError("the connection was closed here"))
        self._waiters.clear()
        self._fd = -1
        self._sock.close()

    async def _wait(self, kind: str) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters[kind] = waiter
        add, remove = (
            (self._loop.add_reader, self._loop.remove_reader) if kind == "read" else (self._loop.add_writer, self._loop.remove_writer)
        )
        add(self._fd, _wake, waiter)
        if self._patience_s is not None:
            self._watch(waiter, self._patience_s / _PARTS_OF_PATIENCE, 0, self._unsent())
        try:
            await waiter
        finally:
            if waiter in self._watches:
                self._watches.pop(waiter).cancel()
            if self._waiters.get(kind) is waiter:
                del self._waiters[kind]
                remove(self._fd)

    def _unsent(self) -> int:
        """Bytes that the peer's kernel has not taken yet."""
        taken = bytearray(4)
        with contextlib.suppress(OSError):  # not a TCP socket
            fcntl.ioctl(self._fd, termios.TIOCOUTQ, taken)
        return int.from_bytes(taken, "little")

    def _watch(self, waiter: asyncio.Future[None], part_s: float, quiet: int, unsent_before: int) -> None:
        """In parts that pass without anything to see, so that what stops this process, or its loop, is not laid to the peer."""
        unsent = self._unsent()
        if unsent and unsent != unsent_before:  # what is on its way counts as progress
            quiet = 0
        if quiet < _PARTS_OF_PATIENCE:
            self._watches[waiter] = self._loop.call_later(part_s, self._watch, waiter, part_s, quiet + 1, unsent)
        elif not waiter.done():
            waiter.set_exception(TimeoutError(f"it was silent for {self._patience_s:g} s"))


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
