"""A connection over tcp: data lanes for reads and writes, and a control lane for notifications and for noticing the peer's end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from messenger.base import Completion, Connection, Region, Slice, Traffic
from messenger.notices import NoticeSender
from messenger.options import TcpOptions
from messenger.stream import SocketStream
from messenger.tcp.handshake import Welcome
from messenger.tcp.lanes import DataLanes, OpenLane
from messenger.tcp.traffic import traffic_of
from springtide.errors import PeerLost


class TcpConnection(Connection):
    def __init__(
        self,
        peer: str,
        incarnation: int,
        control: SocketStream,
        welcome: Welcome,
        region: Region,
        open_data_lane: OpenLane,
        options: TcpOptions,
    ) -> None:
        """Takes over `control`, on which the peer said `welcome`. A lane that breaks ends the connection."""
        self._peer = peer
        self._incarnation = incarnation
        self._control = control
        self._lost: PeerLost | None = None
        self._closing: asyncio.Task[None] | None = None
        self._lanes = DataLanes(peer, welcome, region, open_data_lane, self._fail, options)
        self._notices = NoticeSender(control, peer, self._fail, self._lanes.ping)

    async def open(self) -> None:
        """Opens the data lanes, before anything else. Raises PeerLost, OSError, ValueError; then close it."""
        await self._lanes.open()

    @property
    def is_open(self) -> bool:
        return self._lost is None

    @property
    def incarnation(self) -> int:
        """The peer's."""
        return self._incarnation

    def traffic(self) -> Traffic:
        """That of all its lanes."""
        return self._lanes.traffic() + traffic_of(self._control.sock)

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        self._check()
        return await self._lanes.read(batch, timeout_s)

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        self._check()
        if notify is None:
            return await self._lanes.write(batch, timeout_s)

        async def write(timeout_s: float) -> Completion:
            return await self._lanes.write(batch, timeout_s)

        return await self._notices.after(write, notify, timeout_s, f"a write to {self._peer}")

    async def drain(self) -> None:
        await super().drain()
        await self._lanes.drain()

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
        self._lanes.lose(error)
        self._notices.fail(error)
        self._closing = asyncio.create_task(self._come_to_rest(), name=f"close lanes to {self._peer}")

    async def _come_to_rest(self) -> None:
        await self._lanes.close()
        await self._notices.close()
