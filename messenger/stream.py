"""A connected, non-blocking socket in the event loop, read and written with nothing kept in between."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


class PeerClosed(ConnectionError):
    """The peer ended the stream between two messages."""


class SocketStream:
    """A socket that one task may receive from and one may send to at a time. Once the peer is lost, every method but `close` raises
    OSError."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over `sock`."""
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[str, asyncio.Future[None]] = {}

    def fileno(self) -> int:
        """The file descriptor; below 0 once closed."""
        return self._fd

    def detach(self) -> socket.socket:
        """Hands the socket over, with nothing of it read ahead. This stream is closed."""
        assert not self._waiters, "nobody waits in a stream that is handed over"
        self._fd = -1
        return self._sock

    @property
    def sock(self) -> socket.socket:
        """To be asked about: it stays the stream's."""
        return self._sock

    def peer_pid(self) -> int:
        """The process that listens, or listened, at the other end of a Unix socket; 0 when it cannot be seen from here."""
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[0])

    async def receive(self, num_bytes: int) -> bytes:
        """The next `num_bytes`. Raises PeerClosed when the stream ended before the first of them, ConnectionError when within them."""
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            try:
                received = self._sock.recv_into(rest)
            except BlockingIOError:
                await self._wait("read")
                continue
            if received == 0:
                whole = len(rest) == num_bytes
                raise PeerClosed("the peer closed the connection") if whole else ConnectionError("the peer closed within a message")
            rest = rest[received:]
        return bytes(data)

    async def send(self, data: bytes) -> None:
        """Hands all of `data` to the kernel."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                await self._wait("write")

    def send_with_fd(self, data: bytes, fd: int) -> None:
        """Sends a few bytes and a file descriptor over a fresh Unix socket, whose buffer takes them at once."""
        if socket.send_fds(self._sock, [data], [fd]) != len(data):
            raise ConnectionError("the socket's buffer did not take a header and a file descriptor at once")

    async def accept(self) -> socket.socket:
        """The next connection to a listening socket."""
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
        """Tells the peer that nothing more comes; what it sends can still be received."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def discard_unsent(self) -> None:
        """Makes `close` reset a TCP connection instead of delivering later what the kernel still holds."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def lose_if_untaken(self, timeout_s: float) -> None:
        """Has the kernel lose a TCP peer that takes nothing of what was sent for so long, be it that it is busy and its buffer is full."""
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
        """Closes the socket. Idempotent. Tasks that wait in this stream get a ConnectionError."""
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
        try:
            await waiter
        finally:
            if self._waiters.get(kind) is waiter:
                del self._waiters[kind]
                remove(self._fd)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
