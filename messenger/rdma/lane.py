"""A path together with what it leads to: moves pieces of a plan, and checks the peer's generations before and after.

The owner of the memory does not see one-sided operations, so the fence is kept by this side, as with `shm`: generations are read before
anything is moved and again behind the last byte. Work on one queue pair takes effect at the peer in the order in which it was posted (reads
wait for earlier reads by the fence flag), so a piece whose generation is right in both readings was right throughout, for generations never
return. The second reading also flushes the writes before it into the peer's memory, whatever its other NICs do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from messenger.plan import Plan
from messenger.rdma.generations import WORD, GenerationCheck
from messenger.rdma.nic import Nic, Registration
from messenger.rdma.path import Path
from messenger.rdma.queue_pair import Opcode, Work

STRIPE_BYTES = 4 << 20
STRIPE_PIECES = 128
STRIPES_IN_FLIGHT = 4
"""A lane moves so many at once, of all batches: that bounds what is outstanding on its NIC."""
MAX_WORK = STRIPES_IN_FLIGHT * 2 * STRIPE_PIECES + 16
"""A piece and its generation each, and a few for notifications and heartbeats."""
_SHORT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Memory of the peer, as one of its NICs knows it. Travels over the control RPC."""

    address: int
    num_bytes: int
    key: int


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    memory: RemoteMemory
    generations: RemoteMemory
    mailbox: RemoteMemory
    """Where notifications are put."""


class Lane:
    """Owns `path`. `local` is this side's region as registered with `nic`."""

    def __init__(self, path: Path, nic: Nic, local: Registration, remote: RemoteRegion) -> None:
        self.path = path
        self.nic = nic
        self.remote = remote
        self._local = local
        words = GenerationCheck.most_words(STRIPE_PIECES)
        self._answers = np.zeros((STRIPES_IN_FLIGHT, words), np.uint64)
        try:
            self._registered = nic.register(self._answers, peers_read=False, peers_write=False)
        except BaseException:
            path.close()
            raise
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for row in range(STRIPES_IN_FLIGHT):
            self._free.put_nowait(row)

    async def probe(self) -> None:
        """Whether the peer's memory can be reached at all. Raises PathLost or PeerLost."""
        await self.path.run(list(self._ask(GenerationCheck(np.zeros(1, np.int64), np.zeros(1, np.uint64)), 0, fenced=False)))

    @contextlib.asynccontextmanager
    async def turn(self, wait: Callable[[Awaitable[int]], Awaitable[int]]) -> AsyncIterator[int]:
        """Waits, by `wait`, until another stripe may be under way; the context is given the place for its generations."""
        row = await wait(self._free.get()) if self._free.empty() else self._free.get_nowait()
        try:
            yield row
        finally:
            self._free.put_nowait(row)

    async def move(self, opcode: Opcode, plan: Plan, stripe: slice, row: int) -> np.ndarray:
        """Moves the pieces `stripe` of `plan`, at most STRIPE_PIECES, by READ or WRITE; `row` is of `turn`. Returns which were stale, bool
        [pieces]: not moved, or not to be used. Raises PathLost or PeerLost, after which an unknown part was moved and none of it is on
        its way."""
        check = GenerationCheck(plan.granule[stripe], plan.generation[stripe])
        short = int(plan.length[stripe].sum()) <= _SHORT_BYTES
        await self.path.run(list(self._ask(check, row, fenced=False)), short=short)
        stale = check.stale(self._answers[row])
        if not stale.all():
            work = [*self._pieces(opcode, plan, stripe, ~stale), *self._ask(check, row, fenced=opcode is Opcode.READ)]
            await self.path.run(work, short=short)
            stale |= check.stale(self._answers[row])
        return stale

    def close(self) -> None:
        """Idempotent."""
        self.path.close()
        self.nic.forget(self._registered)

    def _pieces(self, opcode: Opcode, plan: Plan, stripe: slice, wanted: np.ndarray) -> Iterator[Work]:
        columns = (plan.local, plan.remote, plan.length)
        key, remote = self._local.local_key, self.remote.memory
        for here, there, length in zip(*(column[stripe][wanted].tolist() for column in columns), strict=True):
            yield Work(opcode, self._local.address + here, key, remote.address + there, remote.key, length)

    def _ask(self, check: GenerationCheck, row: int, *, fenced: bool) -> Iterator[Work]:
        """Brings the generations that `check` needs into an answer's row; `fenced`, after all reads before it."""
        answer = self._registered.address + row * self._answers.strides[0]
        remote = self.remote.generations
        for number, (first, place, count) in enumerate(check.runs):
            local, there = answer + place * WORD, remote.address + first * WORD
            yield Work(Opcode.READ, local, self._registered.local_key, there, remote.key, count * WORD, fenced=fenced and number == 0)
