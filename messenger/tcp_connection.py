"""A connection over tcp: a data plane for reads and writes, and a control lane for notifications and for noticing the peer's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from messenger.base import Completion, Connection, Slice
from messenger.notices import NoticeSender
from messenger.stream import Stream
from messenger.tcp_plane import DataPlane
from messenger.tcp_protocol import Op
from springtide.errors import PeerLost


class TcpConnection(Connection):
    def __init__(self, peer: str, control: Stream, make_plane: Callable[[Callable[[PeerLost], None]], DataPlane]) -> None:
        """Takes over `control`. `make_plane` is given what to call when a data lane is lost; one that is breaks them all."""
        self._peer = peer
        self._lost: PeerLost | None = None
        self._closing: asyncio.Task[None] | None = None
        self._plane = make_plane(self._fail)
        self._notices = NoticeSender(control, peer, self._fail, self._plane.ping)

    async def open(self) -> None:
        """Before anything else. Raises PeerLost, OSError, ValueError; then close it."""
        await self._plane.open()

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        self._check()
        return await self._plane.move(Op.READ, batch, timeout_s)

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        self._check()
        if notify is None:
            return await self._plane.move(Op.WRITE, batch, timeout_s)

        async def move(timeout_s: float) -> Completion:
            return await self._plane.move(Op.WRITE, batch, timeout_s)

        return await self._notices.after(move, notify, timeout_s, f"a write to {self._peer}")

    async def drain(self) -> None:
        await super().drain()
        await self._plane.drain()

    async def close(self) -> None:
        self._fail(PeerLost(f"the connection to {self._peer} was closed here"))
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _fail(self, error: PeerLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._plane.lose(error)
        self._notices.fail(error)
        self._closing = asyncio.create_task(self._come_to_rest(), name=f"close lanes to {self._peer}")

    async def _come_to_rest(self) -> None:
        await self._plane.close()
        await self._notices.close()
