"""A connected queue pair in the event loop: work goes in, futures come out, and a silent peer is noticed."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from messenger.rdma.queue_pair import Opcode, QueuePair, WorkCompletion, WorkRequest
from springtide.errors import PeerLost, SpringtideError

_SIGNAL_EVERY = 32
"""Work requests in a list that is posted, of which the last completes."""
_POLL_BATCH = 32
_SPIN_S = 20e-6
"""Time for which short work is polled for before it is waited for: a NIC answers sooner than the kernel wakes a process."""
_BEATS_OF_SILENCE = 4
"""Times that a path is looked at while it may be silent. They are what is counted: a stop of this process is not laid to the peer."""


class PathLost(SpringtideError):
    """The path is broken; others may still lead to the peer."""


class RdmaPath:
    """A way from one port of this side to one of the peer's. When it breaks, work in progress raises PathLost, or PeerLost when the peer
    has refused it, so that no other path would do better; the NIC has then let go of the memory."""

    def __init__(
        self,
        pair: QueuePair,
        name: str,
        on_receive: Callable[[RdmaPath, int, int], None],
        on_lost: Callable[[RdmaPath, SpringtideError], None],
        silence_s: float,
    ) -> None:
        """Takes over `pair`, which is connected. `on_receive(path, immediate, length)` is called for every message of the peer,
        `on_lost(path, error)` once, unless it is closed first. `silence_s`: after so long without a sign of the peer's NIC it is lost."""
        self.name = name
        self._pair = pair
        self._on_receive = on_receive
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._lost: SpringtideError | None = None
        self._posted = 0
        self._done = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._quiet_beats = 0
        """Looks at outstanding work since the last sign of the peer's NIC."""
        self._loop.add_reader(pair.fd, self._on_event)
        self._heartbeat = self._loop.call_later(silence_s / _BEATS_OF_SILENCE, self._beat)

    @property
    def is_open(self) -> bool:
        return self._lost is None

    @property
    def outstanding(self) -> int:
        """Work requests that the NIC has not reported yet."""
        return self._posted - self._done

    async def run(self, work: Sequence[WorkRequest], *, short: bool = False) -> None:
        """Has the NIC do `work`, in order, and returns when all of it is done. `short`: it will not take long. The caller bounds what is
        outstanding. Raises PathLost or PeerLost."""
        ended = self.post(work)
        if short:
            self._spin(ended)
        await ended

    def post(self, work: Sequence[WorkRequest]) -> asyncio.Future[None]:
        """Does what `run` does, for callers that may not want to wait."""
        ended: asyncio.Future[None] = self._loop.create_future()
        ended.add_done_callback(_mark_retrieved)
        remaining = iter(work)
        if not self.outstanding:
            self._quiet_beats = 0
        while self._lost is None and (chunk := list(islice(remaining, _SIGNAL_EVERY))):
            try:
                self._pair.post(chunk, self._posted + len(chunk))
            except SpringtideError as error:
                self._fail(self._broken(error))
                break
            self._posted += len(chunk)
        if self._lost is not None:
            ended.set_exception(self._lost)
        else:
            self._waiting.append((self._posted, ended))
        return ended

    def close(self, error: SpringtideError | None = None) -> None:
        """Closes the queue pair: from now on the NIC touches no memory for it, and no byte of it leaves this side. Idempotent."""
        if self._lost is not None:
            return
        self._lost = error or PathLost(f"{self.name} was closed here")
        self._heartbeat.cancel()
        self._loop.remove_reader(self._pair.fd)
        self._pair.close()
        for _, ended in self._waiting:
            if not ended.done():
                ended.set_exception(self._lost)
        self._waiting.clear()

    def _fail(self, error: SpringtideError) -> None:
        if self._lost is None:
            self.close(error)
            self._on_lost(self, error)

    def _spin(self, ended: asyncio.Future[None]) -> None:
        until = time.perf_counter() + _SPIN_S
        while not ended.done() and time.perf_counter() < until:
            self._drain()

    def _on_event(self) -> None:
        self._pair.take_event()
        try:
            self._pair.arm()  # before looking, so that what comes after the last look makes an event
        except SpringtideError as error:
            self._fail(self._broken(error))
        self._drain()

    def _drain(self) -> None:
        try:
            while self._lost is None and (found := self._pair.poll(_POLL_BATCH)):
                self._quiet_beats = 0
                for done in found:
                    if self._lost is None:
                        self._take(done)
        except SpringtideError as error:
            self._fail(self._broken(error))

    def _broken(self, error: SpringtideError) -> PathLost:
        """What the queue pair could not do: nothing else would tell those who wait."""
        return PathLost(f"{self.name}: {error.message}")

    def _take(self, done: WorkCompletion) -> None:
        if done.error is not None:
            message = f"{self.name}: {done.error}"
            self._fail(PathLost(message) if done.path_fault else PeerLost(f"the peer or the own NIC refused an operation: {message}"))
        elif done.received:
            self._pair.post_receive()
            self._on_receive(self, done.immediate, done.length)
        else:
            self._done = done.work_id
            while self._waiting and self._waiting[0][0] <= self._done:
                _, ended = self._waiting.popleft()
                if not ended.done():
                    ended.set_result(None)

    def _beat(self) -> None:
        """Sends an empty write while nothing else shows whether the peer lives: the peer's NIC answers it."""
        self._drain()  # the loop may have been busy
        if self._lost is not None:
            return
        if not self.outstanding:
            self.post([WorkRequest(Opcode.WRITE)])
        elif self._quiet_beats == _BEATS_OF_SILENCE:
            self._fail(PathLost(f"{self.name}: nothing came back for {self._silence_s:g} s"))
            return
        else:
            self._quiet_beats += 1
        self._heartbeat = self._loop.call_later(self._silence_s / _BEATS_OF_SILENCE, self._beat)


def _mark_retrieved(ended: asyncio.Future[None]) -> None:
    # Not everybody awaits it: asyncio would log that as an error of ours.
    if not ended.cancelled():
        ended.exception()
