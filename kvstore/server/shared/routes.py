"""The ways of bytes from store to store. Between two stores that have whole slots it is a Messenger's connection. Where either is a bundle,
each of its stores moves what its own memory has: to whoever orders the transfer it looks like one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from kvstore.core.stripes import Stripe, cut
from messenger.base import Completion, Connection, Endpoint, Slice
from messenger.ordering import TicketLock
from messenger.router import Messenger
from springtide.errors import SpringtideError
from springtide.supervision import all_of


class StoreRoute(Protocol):
    """A way to one store, as of messenger.base.Connection, of which the offsets count whole slots."""

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion: ...

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion: ...

    async def drain(self) -> None: ...


class Mover(Protocol):
    """What moves bytes between one memory of this side and others'."""

    async def move(self, endpoint: Endpoint, reads: bool, batch: Sequence[Slice], timeout_s: float) -> Completion:
        """Reads the slices from the peer, or writes them to it, as Connection.read and Connection.write do."""
        ...

    async def drain(self, endpoint: Endpoint) -> None:
        """As Connection.drain, of all that was moved to the peer."""
        ...


class MessengerMover(Mover):
    """The mover of the memory that a Messenger of this process serves."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._unsettled: dict[int, set[Connection]] = {}
        """By incarnations of peers: connections by which a write failed or was cancelled, of which something may land yet."""
        self._draining: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """One at a time for a peer: a second that found nothing left to wait for would return before the first has."""

    async def move(self, endpoint: Endpoint, reads: bool, batch: Sequence[Slice], timeout_s: float) -> Completion:
        connection = await self._messenger.connect(endpoint)
        if reads:
            return await connection.read(batch, timeout_s)
        try:
            return await connection.write(batch, timeout_s)
        except BaseException:
            self._unsettled.setdefault(endpoint.incarnation, set()).add(connection)
            raise

    async def drain(self, endpoint: Endpoint) -> None:
        async with self._draining.setdefault(endpoint.incarnation, asyncio.Lock()):
            unsettled = self._unsettled.pop(endpoint.incarnation, set())
            try:
                for connection in tuple(unsettled):
                    await connection.drain()
                    unsettled.discard(connection)
            finally:
                if unsettled:
                    self._unsettled.setdefault(endpoint.incarnation, set()).update(unsettled)


class StripedRoute(StoreRoute):
    """The route between two sides of which at least one is a bundle."""

    def __init__(
        self, slot_bytes: int, own: Sequence[tuple[Stripe, Mover]], theirs: Sequence[tuple[Stripe, Endpoint]], notifier: Connection
    ) -> None:
        """`notifier` is the way from this side's first store to the other's."""
        self._slot_bytes = slot_bytes
        self._own = own
        self._theirs = theirs
        self._notifier = notifier
        self._turns = TicketLock()

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        return await self._move(batch, True, timeout_s)

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        if notify is None:
            return await self._move(batch, False, timeout_s)
        async with self._turns.take() as come:
            completion = await self._move(batch, False, timeout_s)
            await come()
            if not completion.failed:
                await self._notifier.write([], timeout_s, notify)
        return completion

    async def drain(self) -> None:
        await self._notifier.drain()
        await asyncio.gather(*(mover.drain(endpoint) for _, mover in self._own for _, endpoint in self._theirs))

    async def _move(self, batch: Sequence[Slice], reads: bool, timeout_s: float) -> Completion:
        """Ends when every piece has: then all memory of this side is at rest."""
        cuts = cut(batch, self._slot_bytes, [stripe for stripe, _ in self._own], [stripe for stripe, _ in self._theirs])
        moves = [
            self._own[here][1].move(self._theirs[there][1], reads, [piece for _, piece in pieces], timeout_s)
            for (here, there), pieces in cuts.items()
        ]
        completions = await all_of(moves)
        failed: dict[int, SpringtideError] = {}
        for pieces, completion in zip(cuts.values(), completions, strict=True):
            failed |= {pieces[place][0]: error for place, error in completion.failed.items()}
        return Completion(sum(completion.num_bytes for completion in completions), failed)
