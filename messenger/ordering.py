"""When a batch ends and when its notification goes out: the rules that every transport shares."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from messenger.base import NotifyHandler, TransferTimeout

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""The time for which a cancelled batch may go on before its connection is closed under it."""

T = TypeVar("T")


async def run_to_rest(
    work: Coroutine[Any, Any, T] | asyncio.Future[T],
    timeout_s: float,
    interrupt: Callable[[], None],
    what: str,
    wind_down: Callable[[], None] | None = None,
) -> T:
    """The result of `work`. When this ends, so has `work`, whatever happened: no memory of the batch is touched any more.

    `interrupt` is called when the time is up, and must make `work` end soon. `wind_down` is called when the caller is cancelled: it makes
    the work end where it can be left without harm, or CANCEL_GRACE_S later it is interrupted. Raises TransferTimeout when the time is up,
    and CancelledError after the caller was cancelled and the work has come to rest.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    deadline = loop.time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    expired = False
    while not task.done():
        try:
            await asyncio.wait((task,), timeout=None if expired else max(0.0, deadline - loop.time()))
        except asyncio.CancelledError as error:
            cancelled = error
            deadline = min(deadline, loop.time() + CANCEL_GRACE_S)
            if wind_down is not None:
                wind_down()
            continue
        if not task.done() and not expired:
            expired = True
            interrupt()
    failure = None if task.cancelled() else task.exception()
    if cancelled is not None:
        raise cancelled
    if expired:
        raise TransferTimeout(f"{what} took longer than {timeout_s:g} s") from failure
    return task.result()


class TicketLock:
    """A queue that lets holders pass in the order in which they asked, though what they do beforehand may end in any order."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
        """Takes a turn at once; the context is given a function that waits until everybody before has left."""
        before, mine = self._last, asyncio.get_running_loop().create_future()
        self._last = mine

        async def come() -> None:
            if before is not None:
                await asyncio.shield(before)

        try:
            yield come
        finally:
            if before is None or before.done():
                mine.set_result(None)
            else:  # left out of turn: those after still wait for those before
                before.add_done_callback(lambda _: mine.set_result(None))


def deliver(on_notify: NotifyHandler, peer: str, payload: bytes) -> None:
    """Hands a notification to its handler. One that fails is its owner's fault, not the peer's: logged, and the connection goes on."""
    try:
        on_notify(peer, payload)
    except Exception:
        logger.exception("the handler of a notification of %d bytes from %s failed", len(payload), peer)
