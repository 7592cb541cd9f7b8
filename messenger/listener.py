"""A listening socket whose connections each get a session task."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from messenger.stream import SocketStream
from springtide.supervision import supervised

logger = logging.getLogger(__name__)

_RETRY_S = 0.2


class Listener:
    """A task that accepts, from its making to `close`. A session that fails is logged and touches no other; its stream is closed when it
    ends."""

    def __init__(self, sock: socket.socket, session: Callable[[SocketStream], Awaitable[None]], name: str) -> None:
        """Takes over `sock`, which is bound and listening."""
        self._listening = SocketStream(sock)
        self._session = session
        self._name = name
        self._closed = False
        self._sessions: dict[asyncio.Task[None], SocketStream] = {}
        self._accepting = supervised(self._accept, f"accept {name}")

    async def close(self) -> None:
        """Ends every session. Idempotent."""
        self._closed = True
        self._listening.close()
        for stream in self._sessions.values():
            stream.close()
        await asyncio.gather(self._accepting, *self._sessions, return_exceptions=True)

    async def _accept(self) -> None:
        while not self._closed:
            try:
                stream = SocketStream(await self._listening.accept())
            except OSError as error:
                if not self._closed:
                    # Out of file descriptors, for example: peers wait in the backlog meanwhile.
                    logger.error("%s cannot accept a connection: %s", self._name, error)
                    await asyncio.sleep(_RETRY_S)
                continue
            task = asyncio.create_task(self._serve(stream), name=f"session {self._name}")
            self._sessions[task] = stream
            task.add_done_callback(self._sessions.pop)
            await asyncio.sleep(0)  # it begins before another comes in, however many there are

    async def _serve(self, stream: SocketStream) -> None:
        try:
            await self._session(stream)
        except OSError as error:
            if not self._closed:
                logger.info("a session of %s ended: %s", self._name, error)
        except Exception:
            logger.exception("a session of %s failed", self._name)
        finally:
            stream.close()
