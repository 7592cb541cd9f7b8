"""The ways of bytes from store to store: when what was written is known to be at rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvstore.server.shared.routes import MessengerMover
from messenger.base import Completion, Endpoint, Slice
from springtide.errors import PeerLost


class Unsettled:
    """A Messenger whose one connection loses every write, and drains when it may."""

    def __init__(self) -> None:
        self.may_drain = asyncio.Event()
        self.drains = 0

    async def connect(self, endpoint: Endpoint) -> Unsettled:
        return self

    async def write(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        raise PeerLost("cut off")

    async def drain(self) -> None:
        self.drains += 1
        await self.may_drain.wait()


async def test_none_of_several_who_wait_for_a_peer_goes_on_before_what_was_written_is_at_rest() -> None:
    messenger, endpoint = Unsettled(), Endpoint("host", 1, {})
    mover = MessengerMover(messenger)  # type: ignore[arg-type]
    with pytest.raises(PeerLost):
        await mover.move(endpoint, False, [], 1.0)
    drains = [asyncio.create_task(mover.drain(endpoint)) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(drain.done() for drain in drains)
    drains[0].cancel()  # it has the others wait as before
    await asyncio.wait([drains[0]])
    for _ in range(10):
        await asyncio.sleep(0)
    assert messenger.drains == 2 and not drains[1].done() and not drains[2].done()
    messenger.may_drain.set()
    await asyncio.gather(*drains[1:])
