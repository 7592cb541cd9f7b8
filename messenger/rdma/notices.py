"""Notifications: the payload is written into a mailbox of the peer with an immediate, and acknowledged by an empty message.

One is in flight at a time. Its number travels in the immediate, so that one which is sent again over another path is delivered once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from messenger.base import NotifyHandler
from messenger.ordering import deliver
from messenger.rdma.lane import RdmaLane
from messenger.rdma.nic import Nic, Registration
from messenger.rdma.path import PathLost, RdmaPath
from messenger.rdma.queue_pair import Opcode, WorkRequest
from springtide.errors import SpringtideError

MAX_NOTIFY_BYTES = 1 << 20
MAILBOX_BYTES = 64 << 10
"""Bytes of a mailbox. A longer notification goes in several parts."""
_ASK_AFTER_S = 0.4
"""The sender asks by the control RPC whether anybody is there when an acknowledgement takes longer."""
_MORE = 1 << 31
_NUMBERS = 1 << 31


class Route(Protocol):
    """What the sending side asks of its connection. Every method raises PeerLost once there is no way to the peer."""

    def next_lane(self) -> RdmaLane:
        """A lane that works."""
        ...

    async def leave(self, path: RdmaPath) -> None:
        """Returns when nothing that was sent over a lost path can arrive any more."""
        ...

    async def check(self) -> None:
        """Returns when the peer's process has answered a question."""
        ...


class NoticeOutbox:
    """The sending side of one connection."""

    def __init__(self, nics: Sequence[Nic], route: Route) -> None:
        self._route = route
        self._staged = np.zeros(MAILBOX_BYTES, np.uint8)
        self._registered: dict[Nic, Registration] = {}
        try:
            for nic in nics:
                self._registered[nic] = nic.register(self._staged, peers_read=False, peers_write=False)
        except BaseException:
            self.close()
            raise
        self._number = 0
        self._acknowledged: asyncio.Future[None] | None = None
        self._through: RdmaPath | None = None
        self._last: asyncio.Task[None] | None = None

    async def send(self, payload: bytes) -> None:
        """Sends one notification, and returns when the peer's handler has had it. When the caller is cancelled it may still be delivered:
        what follows waits for that, since it needs the mailbox. Raises PeerLost."""
        sending = asyncio.create_task(self._send(payload, self._last), name=f"notification {self._number}")
        sending.add_done_callback(_mark_retrieved)
        self._last = sending
        await asyncio.shield(sending)

    async def _send(self, payload: bytes, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        parts = [payload[start : start + MAILBOX_BYTES] for start in range(0, len(payload), MAILBOX_BYTES)] or [b""]
        for index, part in enumerate(parts):
            self._staged[: len(part)] = np.frombuffer(part, np.uint8)
            immediate = self._number | (_MORE if index + 1 < len(parts) else 0)
            while not await self._sent(self._route.next_lane(), len(part), immediate):
                pass
            self._number = (self._number + 1) % _NUMBERS

    def on_acknowledged(self, number: int) -> None:
        if number == self._number and self._acknowledged is not None and not self._acknowledged.done():
            self._acknowledged.set_result(None)

    def on_lost(self, path: RdmaPath, error: SpringtideError) -> None:
        if path is self._through and self._acknowledged is not None and not self._acknowledged.done():
            self._acknowledged.set_exception(error)

    def close(self) -> None:
        """Ends the registrations of the staged bytes. Idempotent."""
        for nic, registered in self._registered.items():
            nic.forget(registered)

    async def _sent(self, lane: RdmaLane, length: int, immediate: int) -> bool:
        local, mailbox = self._registered[lane.nic], lane.remote.mailbox
        self._through = lane.path
        self._acknowledged = asyncio.get_running_loop().create_future()
        work = WorkRequest(Opcode.WRITE_WITH_IMMEDIATE, local.address, local.local_key, mailbox.address, mailbox.key, length, immediate)
        try:
            # The NIC may have to send it again until it has completed, so the staged bytes are kept as long.
            await asyncio.gather(lane.path.run([work], short=True), self._answer(self._acknowledged))
            return True
        except PathLost:
            await self._route.leave(lane.path)
            return False

    async def _answer(self, acknowledged: asyncio.Future[None]) -> None:
        """Waits for the acknowledgement. The peer's NIC takes what a stopped process will never see: one that is silent is asked whether it
        is there."""
        while not acknowledged.done():
            await asyncio.wait((acknowledged,), timeout=_ASK_AFTER_S)
            if not acknowledged.done():
                await self._route.check()
        acknowledged.result()


class NoticeInbox:
    """The receiving side of one connection: the peer writes into `memory`. Numbers are checked, so nothing is delivered twice."""

    def __init__(self, peer: str, on_notify: NotifyHandler) -> None:
        self.memory = np.zeros(MAILBOX_BYTES, np.uint8)
        self._peer = peer
        self._on_notify = on_notify
        self._expected = 0
        self._parts: list[bytes] = []

    def on_receive(self, path: RdmaPath, immediate: int, length: int) -> None:
        number = immediate & ~_MORE
        if number == self._expected:
            self._expected = (self._expected + 1) % _NUMBERS
            self._take(self.memory[:length].tobytes(), last=not immediate & _MORE)
        path.post([WorkRequest(Opcode.SEND_WITH_IMMEDIATE, immediate=number)])

    def _take(self, part: bytes, last: bool) -> None:
        self._parts.append(part)
        if last or sum(map(len, self._parts)) > MAX_NOTIFY_BYTES:
            payload, self._parts = b"".join(self._parts), []
            deliver(self._on_notify, self._peer, payload)


def _mark_retrieved(sending: asyncio.Task[None]) -> None:
    # Its caller may be gone: asyncio would log the error as one of ours.
    if not sending.cancelled():
        sending.exception()
