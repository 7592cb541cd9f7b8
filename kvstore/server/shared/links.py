"""The way to one other store, which all hand-overs to it share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from kvstore.core.turns import Transfer, Turn, Turns


class Link:
    """Lets batches of several hand-overs go one after another, as `Turns` decides."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._waiting: dict[Turn, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(
        self, transfer: Transfer, lengths: Sequence[int], unless: Callable[[Awaitable[None]], Awaitable[None]]
    ) -> AsyncIterator[Turn]:
        """Entered when it is the turn of a batch of as many of the pieces of these lengths as the turn then says. The batch has ended when
        this is left, after the turn was told what came of it (`moved`, and `round_trips_s`). `unless` awaits what it is given, or raises
        why that is not waited for any more."""
        turn = self._turns.ask(transfer, lengths)
        come = self._waiting[turn] = asyncio.get_running_loop().create_future()
        self._let_in()
        try:
            await unless(come)
            yield turn
        finally:
            self._waiting.pop(turn, None)
            self._turns.end(turn, asyncio.get_running_loop().time())
            self._let_in()

    def _let_in(self) -> None:
        while (turn := self._turns.next(asyncio.get_running_loop().time())) is not None:
            come = self._waiting.pop(turn)
            if not come.done():  # whoever was cancelled at this moment gives it back
                come.set_result(None)
