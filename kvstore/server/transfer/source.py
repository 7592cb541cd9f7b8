"""A prefix at another store, kept there by a lease for as long as it is being read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import grpc.aio

from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.failures import error_of
from kvstore.server.shared.peers import CALL_TIMEOUT_S
from kvstore.server.shared.routes import StoreRoute
from kvstore.server.transfer.pacing import Pace
from springtide.ids import BlockKey
from springtide.protocol import wire
from springtide.protocol.storage import LeasedPrefix, LeasePrefix
from springtide.rpc import store_pb2 as pb
from springtide.supervision import supervised


class Source:
    """A store that is read from: made by `open`, to be closed."""

    def __init__(self, shared: StoreContext, address: str, lease: LeasedPrefix) -> None:
        self._shared = shared
        self.lease = lease
        self._renewing = supervised(self._renew, f"renew lease {lease.lease_id}")
        self.address = address
        self.route: StoreRoute | None = None
        self.pace = Pace()
        self.in_flight = 0
        """The reads that are in flight."""
        self.given_up = False
        """Whether it failed, or was far too slow: it is asked for nothing more."""

    @classmethod
    async def open(cls, shared: StoreContext, address: str, keys: Sequence[BlockKey], tenant: str | None) -> Source:
        """Leases the longest prefix of `keys` that is held there. Raises SpringtideError when the store cannot be reached."""
        source = cls(shared, address, await _lease(shared, address, keys, tenant))
        try:
            if source.num_blocks:
                source.route = await shared.peers.connect(address, source.lease.incarnation)
        except BaseException:
            await source.close()
            raise
        return source

    @property
    def num_blocks(self) -> int:
        """The number of the prompt's first blocks that can be read here."""
        return len(self.lease.slots)

    async def close(self) -> None:
        """Gives back the lease."""
        self._renewing.cancel()
        if self.lease.lease_id:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it expires
                request = pb.ReleaseLeaseRequest(lease_id=self.lease.lease_id)
                await self._shared.peers.stub(self.address).ReleaseLease(request, timeout=CALL_TIMEOUT_S)

    async def _renew(self) -> None:
        request = pb.RenewLeaseRequest(lease_ids=[self.lease.lease_id])
        while self.lease.lease_id:
            await asyncio.sleep(self.lease.ttl_ms / 3000)
            with contextlib.suppress(grpc.aio.AioRpcError):  # a block that is lost by it is refused when it is read
                await self._shared.peers.ask(self.address, lambda stub, timeout_s: stub.RenewLease(request, timeout=timeout_s))


async def _lease(shared: StoreContext, address: str, keys: Sequence[BlockKey], tenant: str | None) -> LeasedPrefix:
    request = wire.LEASE_PREFIX.encode(LeasePrefix(shared.options.node_id, tuple(keys), tenant))
    try:
        # Asked twice, it may leave a lease behind that nobody renews.
        return wire.LEASED_PREFIX.decode(await shared.peers.ask(address, lambda stub, timeout_s: stub.Lease(request, timeout=timeout_s)))
    except grpc.aio.AioRpcError as error:
        raise error_of(error, f"leasing at {address}") from error
