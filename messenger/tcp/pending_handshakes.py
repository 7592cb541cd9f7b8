"""Pending handshakes: connections that have not shown yet who they are. Few at a time, for a short time, and with few words in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from messenger.stream import SocketStream
from springtide.clock import MOST_PATIENCE_S
from springtide.telemetry import FewWarnings

logger = logging.getLogger(__name__)

MAX_PENDING_HANDSHAKES = 64
HANDSHAKE_TIMEOUT_S = MOST_PATIENCE_S


class PendingHandshakes:
    """The handshakes that have not ended at one port. When there are MAX_PENDING_HANDSHAKES and another begins, the oldest is given up:
    those that are silent do not keep others out."""

    def __init__(self) -> None:
        self._pending: dict[SocketStream, None] = {}
        self._warnings = FewWarnings(logger)

    @contextlib.asynccontextmanager
    async def begun(self, stream: SocketStream) -> AsyncIterator[None]:
        """The context in which the handshake over `stream` is pending. Raises TimeoutError; ConnectionError when it was given up."""
        if len(self._pending) >= MAX_PENDING_HANDSHAKES:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.close()
        self._pending[stream] = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                yield
        except OSError as error:
            if stream not in self._pending:
                raise ConnectionAbortedError(f"{MAX_PENDING_HANDSHAKES} others came before it had shown who it is") from error
            raise
        finally:
            self._pending.pop(stream, None)

    def warn(self, error: Exception) -> None:
        """Logs why a handshake failed, a few times in a while."""
        reason = f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else error
        self._warnings.warn("closing a connection whose handshake failed: %s", reason)
