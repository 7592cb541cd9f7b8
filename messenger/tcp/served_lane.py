"""The owner's end of one data lane: a thread of the C part serves the region to the peer, whatever this process's Python does."""

from __future__ import annotations

import asyncio
import os
import socket

from messenger import _native
from messenger.base import Region
from messenger.stream import SocketStream
from messenger.tcp.handshake import ProtocolError


class ServedLane:
    """A data lane from its welcome to its end."""

    def __init__(self, stream: SocketStream, region: Region, checksums: bool) -> None:
        """Takes over the stream's socket. Raises OSError when the machine has no room for another thread."""
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sock = stream.detach()
        try:
            fd, signal = self._sock.fileno(), self._signal
            self._session = _native.LaneSession(fd, region.memory, region.generations, region.granule, signal, checksums)
        except BaseException:
            self._sock.close()
            os.close(self._signal)
            raise

    async def run(self) -> None:
        """Serves until the peer has closed, or `close`. Raises ProtocolError on garbage, OSError when the peer is lost."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._signal, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._signal)
            self._session.abort()
            self._session.join()
            self._sock.close()
            os.close(self._signal)
        if self._session.complaint is not None:
            raise ProtocolError(self._session.complaint)
        if self._session.error:
            raise OSError(self._session.error, os.strerror(self._session.error))

    @property
    def sock(self) -> socket.socket:
        """To be asked about: it stays the lane's."""
        return self._sock

    def close(self) -> None:
        """Ends it: from now on nothing of the peer lands through this lane."""
        self._session.abort()
        settle()


def settle() -> None:
    """Returns when no lane of this process writes on the strength of generations that have been changed."""
    _native.settle()
