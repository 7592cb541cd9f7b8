"""A batch on its way: what is left to do, and whether anybody still wants it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import TypeVar

import numpy as np

from messenger.rdma.lane import STRIPE_BYTES, STRIPE_PIECES
from messenger.rdma.plan import TransferPlan
from messenger.rdma.queue_pair import Opcode
from springtide.errors import SpringtideError
from springtide.supervision import first_of

T = TypeVar("T")


class TransferAbandoned(SpringtideError):
    """The batch is over before its end; its caller is told why by `run_to_rest`."""


class RdmaTransfer:
    """A read or write, from its plan to its end."""

    def __init__(self, opcode: Opcode, plan: TransferPlan) -> None:
        self.opcode = opcode
        self.plan = plan
        self.stripes = deque(plan.stripes(STRIPE_BYTES, STRIPE_PIECES))
        """Stripes of pieces that are not begun yet; none once it is abandoned."""
        self.stale = np.zeros(plan.num_pieces, np.bool_)
        self._abandoned = asyncio.Event()

    def abandon(self) -> None:
        """Begins nothing more. What a NIC has been given, it ends."""
        self.stripes.clear()
        self._abandoned.set()

    def put_back(self, stripe: slice) -> None:
        """Has a stripe done again that was begun in vain."""
        if not self._abandoned.is_set():
            self.stripes.append(stripe)

    def check(self) -> None:
        """Raises TransferAbandoned when it is."""
        if self._abandoned.is_set():
            raise TransferAbandoned("the batch was abandoned")

    async def unless_abandoned(self, work: Awaitable[T]) -> T:
        """Cancels `work` and raises TransferAbandoned when the batch is."""
        task = asyncio.ensure_future(work)
        await first_of(task, self._abandoned.wait())
        if task.cancelled():
            self.check()
        return task.result()
