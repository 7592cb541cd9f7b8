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

import numpy as np

from messenger.rdma.nic import Nic, Registration, RemoteRegion
from messenger.rdma.path import RdmaPath
from messenger.rdma.plan import TransferPlan
from messenger.rdma.queue_pair import Opcode, WorkRequest

STRIPE_BYTES = 4 << 20
STRIPE_PIECES = 128
STRIPES_IN_FLIGHT = 4
"""Stripes that a lane moves at once, of all batches: that bounds what is outstanding on its NIC."""
MAX_WORK = STRIPES_IN_FLIGHT * 2 * STRIPE_PIECES + 16
"""Work requests that may be outstanding: a piece and its generation each, and a few for notifications and heartbeats."""
WORD = 8
"""Bytes of a generation."""
_GAP = 16
"""Granules that are read along rather than asked for apart: 128 bytes cost less than another request."""
_SHORT_BYTES = 64 << 10


class GenerationCheck:
    """Whether granules still have the generations that the handles of some pieces say."""

    def __init__(self, granules: np.ndarray, wanted: np.ndarray) -> None:
        """`granules`: int64 [pieces], each a granule of the peer; `wanted`: uint64 [pieces], the generation that it must have. At least one
        piece."""
        self._wanted = wanted
        distinct, of_piece = np.unique(granules, return_inverse=True)
        heads = np.flatnonzero(np.concatenate(([True], np.diff(distinct) > _GAP)))
        first, last = distinct[heads], distinct[np.append(heads[1:], len(distinct)) - 1]
        counts = last - first + 1
        starts = np.cumsum(counts) - counts
        run = np.searchsorted(heads, np.arange(len(distinct)), side="right") - 1
        self._place = (starts[run] + distinct - first[run])[of_piece]
        self.runs = list(zip(first.tolist(), starts.tolist(), counts.tolist(), strict=True))
        """(first granule, index in the answer, number of granules) of every stretch of the generations that is to be read."""

    @staticmethod
    def most_words(pieces: int) -> int:
        """The most words that the answer for so many pieces can take."""
        return pieces * (_GAP + 1)

    def stale(self, answer: np.ndarray) -> np.ndarray:
        """Which pieces are stale, bool [pieces], from what was read: uint64 [at least the end of the last run]."""
        stale: np.ndarray = answer[self._place] != self._wanted
        return stale


class RdmaLane:
    """A path and the memory at its end."""

    def __init__(self, path: RdmaPath, nic: Nic, local: Registration, remote: RemoteRegion) -> None:
        """Takes over `path`. `local` is this side's region as registered with `nic`. Raises SpringtideError."""
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
        """Returns when the peer's memory could be reached. Raises PathLost or PeerLost."""
        await self.path.run(list(self._ask(GenerationCheck(np.zeros(1, np.int64), np.zeros(1, np.uint64)), 0, fenced=False)))

    @contextlib.asynccontextmanager
    async def turn(self, wait: Callable[[Awaitable[int]], Awaitable[int]]) -> AsyncIterator[int]:
        """Waits, by `wait`, until another stripe may be in flight; the context is given the place for its generations."""
        row = await wait(self._free.get()) if self._free.empty() else self._free.get_nowait()
        try:
            yield row
        finally:
            self._free.put_nowait(row)

    async def move(self, opcode: Opcode, plan: TransferPlan, stripe: slice, row: int) -> np.ndarray:
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
        """Closes the path. Idempotent."""
        self.path.close()
        self.nic.forget(self._registered)

    def _pieces(self, opcode: Opcode, plan: TransferPlan, stripe: slice, wanted: np.ndarray) -> Iterator[WorkRequest]:
        columns = (plan.local, plan.remote, plan.length)
        key, remote = self._local.local_key, self.remote.memory
        for here, there, length in zip(*(column[stripe][wanted].tolist() for column in columns), strict=True):
            yield WorkRequest(opcode, self._local.address + here, key, remote.address + there, remote.key, length)

    def _ask(self, check: GenerationCheck, row: int, *, fenced: bool) -> Iterator[WorkRequest]:
        """Brings the generations that `check` needs into an answer's row; `fenced`, after all reads before it."""
        answer = self._registered.address + row * self._answers.strides[0]
        remote = self.remote.generations
        for number, (first, place, count) in enumerate(check.runs):
            local, there = answer + place * WORD, remote.address + first * WORD
            key, waits = self._registered.local_key, fenced and number == 0
            yield WorkRequest(Opcode.READ, local, key, there, remote.key, count * WORD, fenced=waits)
