"""One batch on its way: what is left to do, and whether anybody still wants it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import TypeVar

import numpy as np

from messenger.plan import Plan
from messenger.rdma.lane import STRIPE_BYTES, STRIPE_PIECES
from messenger.rdma.queue_pair import Opcode
from springtide.errors import SpringtideError

T = TypeVar("T")


class Abandoned(SpringtideError):
    """The batch is over before its end; its caller is told why by `run_to_rest`."""


class Job:
    def __init__(self, opcode: Opcode, plan: Plan) -> None:
        self.opcode = opcode
        self.plan = plan
        self.stripes = deque(plan.stripes(STRIPE_BYTES, STRIPE_PIECES))
        """Of pieces, not yet begun. Empty once it is abandoned."""
        self.stale = np.zeros(plan.num_pieces, np.bool_)
        self._abandoned = asyncio.Event()

    def abandon(self) -> None:
        """Begins nothing more. What a NIC has been given, it ends."""
        self.stripes.clear()
        self._abandoned.set()

    def put_back(self, stripe: slice) -> None:
        """It was begun in vain."""
        if not self._abandoned.is_set():
            self.stripes.append(stripe)

    def check(self) -> None:
        """Raises Abandoned."""
        if self._abandoned.is_set():
            raise Abandoned("the batch was abandoned")

    async def unless_abandoned(self, work: Awaitable[T]) -> T:
        """Cancels `work` and raises Abandoned when the batch is."""
        task, abandoned = asyncio.ensure_future(work), asyncio.create_task(self._abandoned.wait())
        try:
            await asyncio.wait((task, abandoned), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check()
            return task.result()
        finally:
            task.cancel()
            abandoned.cancel()
