"""The rdma transport: NICs opened, the region registered, connections made and served."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from messenger.base import Connection, Endpoint, Identity, NotifyHandler, Region, Transport, WrongSecret
from messenger.options import RdmaOptions, check_host
from messenger.rdma.connection import RdmaConnection
from messenger.rdma.control import ControlClient, ControlServer
from messenger.rdma.nic import DeviceMemory, Nic, Registration
from messenger.rdma.opening import PathMaker
from messenger.rdma.peer_sessions import LentNic, PeerSessions
from messenger.rdma.ports import find_ports
from springtide.config import host_of
from springtide.errors import PeerLost, SpringtideError

logger = logging.getLogger(__name__)


class RdmaTransport(Transport):
    """A transport whose bytes go from NIC to NIC; queue pairs are exchanged over a gRPC service of its own at `host`."""

    name = "rdma"

    def __init__(
        self,
        host: str = "127.0.0.1",
        options: RdmaOptions | None = None,
        device_memory: DeviceMemory | None = None,
    ) -> None:
        """`host` is where the control RPC is served and reached.

        `device_memory`: the region that is connected with lies on a GPU. Such a region cannot be lent (`listen`): its owner would have to
        flush it before it used what peers have written. Raises RdmaUnavailable when this machine has no usable port.
        """
        self._host = host
        self._options = options or RdmaOptions()
        self._device_memory = device_memory
        ports = find_ports(self._options.devices)
        with contextlib.ExitStack() as opened:
            self._nics = [opened.enter_context(contextlib.closing(Nic(port))) for port in ports]
            opened.pop_all()
        self._local: dict[int, tuple[Region, list[Registration]]] = {}
        self._sessions: PeerSessions | None = None
        self._server: ControlServer | None = None
        self._connections: list[RdmaConnection] = []
        self._closed = False

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        """Raises ConfigError where other hosts could come in without a secret, SpringtideError when the region cannot be registered,
        OSError when the control RPC cannot be served."""
        self._check_host(self._host)
        if self._device_memory is not None:
            raise ValueError("a region in device memory can be connected with, not lent")
        memory = [nic.register(region.memory, peers_read=True, peers_write=True) for nic in self._nics]
        generations = [nic.register(region.generations, peers_read=True, peers_write=False) for nic in self._nics]
        self._local[id(region)] = (region, memory)
        lent = [LentNic(*parts) for parts in zip(self._nics, memory, generations, strict=True)]
        self._sessions = PeerSessions(lent, region, on_notify, self._options)
        self._server = ControlServer(self._sessions, identity.incarnation, self._options)
        address = await self._server.start(f"{self._host}:0")
        logger.info("rdma over %s, control RPC at %s", ", ".join(str(nic.port) for nic in self._nics), address)
        return address

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        address = endpoint.addresses[self.name]
        self._check_host(host_of(address))
        control = ControlClient(address, self._options)
        try:
            maker = PathMaker(control, self._nics, self._registered(region), identity, endpoint.incarnation, self._options)
            async with asyncio.timeout(self._options.connect_timeout_s):
                answer, opened = await maker.open()
                try:
                    connection = RdmaConnection(address, region, control, answer, maker, self._options.silence_s)
                except BaseException:
                    for path in opened:
                        path.pair.close()
                    raise
                try:
                    await connection.join(opened)
                except BaseException:
                    await connection.close()
                    raise
        except BaseException as error:
            await control.close()
            if isinstance(error, TimeoutError):
                raise PeerLost(f"{address} did not answer within {self._options.connect_timeout_s:g} s") from error
            if isinstance(error, WrongSecret):
                raise
            if isinstance(error, SpringtideError):
                raise PeerLost(f"cannot connect to {address}: {error.message}") from error
            raise
        self._connections = [other for other in self._connections if other.is_open] + [connection]
        return connection

    async def fence(self, peer: Identity) -> bool:
        if self._sessions is not None:
            self._sessions.fence(peer)
        return True

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._connections.clear()
        if self._server is not None:
            await self._server.close()
        if self._sessions is not None:
            self._sessions.close()
        for nic in self._nics:
            nic.close()

    def _check_host(self, host: str) -> None:
        check_host(self.name, host, self._options)

    def _registered(self, region: Region) -> list[Registration]:
        """The registrations of `region` with every NIC; made at the first connection where it is not lent."""
        if id(region) not in self._local:
            self._local[id(region)] = (region, [self._register(nic, region) for nic in self._nics])
        return self._local[id(region)][1]

    def _register(self, nic: Nic, region: Region) -> Registration:
        if self._device_memory is not None:
            return nic.register_device(region.memory, self._device_memory)
        return nic.register(region.memory, peers_read=False, peers_write=False)
