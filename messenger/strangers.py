"""Connections that have not shown yet who they are: few at a time, for a short time, and with few words about them in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from messenger.stream import Stream
from springtide.telemetry import FewWarnings

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
HANDSHAKE_TIMEOUT_S = 2.0


class Strangers:
    """At one port. Whoever comes when there are MAX_STRANGERS makes the oldest go: those that are silent do not keep others out."""

    def __init__(self) -> None:
        self._present: dict[Stream, None] = {}
        self._warnings = FewWarnings(logger)

    @contextlib.asynccontextmanager
    async def handshake(self, stream: Stream) -> AsyncIterator[None]:
        """The context in which `stream` is a stranger's. Raises TimeoutError; ConnectionError when it had to go."""
        if len(self._present) >= MAX_STRANGERS:
            oldest = next(iter(self._present))
            del self._present[oldest]
            oldest.close()
        self._present[stream] = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                yield
        except OSError as error:
            if stream not in self._present:
                raise ConnectionAbortedError(f"{MAX_STRANGERS} others came before it had shown who it is") from error
            raise
        finally:
            self._present.pop(stream, None)

    def complain(self, error: Exception) -> None:
        """Logs why one was sent away, a few times in a while."""
        reason = f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else error
        self._warnings.warn("closing a connection of a stranger: %s", reason)
