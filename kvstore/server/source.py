"""A prefix at another store, kept there by a lease for as long as it is being read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import grpc.aio

from kvstore.server.failures import error_of
from kvstore.server.node import Node
from kvstore.server.peers import CALL_TIMEOUT_S
from kvstore.server.slabs import Pace
from messenger.base import Connection
from springtide.rpc import common_pb2
from springtide.rpc import store_pb2 as pb
from springtide.supervision import supervised


class Source:
    """Made by `open`, to be closed."""

    def __init__(self, node: Node, address: str, lease: pb.LeaseReply) -> None:
        self._node = node
        self._lease = lease
        self._renewing = supervised(self._renew, f"renew lease {lease.lease_id}")
        self.address = address
        self.connection: Connection | None = None
        self.pace = Pace()
        self.in_flight = 0
        """Reads."""
        self.heard_at = asyncio.get_running_loop().time()
        """When it last did what it was asked for, or said that it lives."""
        self.given_up = False
        """It failed, or was far too slow: it is asked for nothing more."""

    @classmethod
    async def open(cls, node: Node, address: str, keys: Sequence[bytes], tenant: str | None) -> Source:
        """Leases the longest prefix of `keys` that is held there. Raises SpringtideError when the store cannot be reached."""
        source = cls(node, address, await _lease(node, address, keys, tenant))
        try:
            if source.handles:
                source.connection = await node.peers.connect(address, source.handles[0].incarnation)
        except BaseException:
            await source.close()
            raise
        return source

    @property
    def handles(self) -> Sequence[common_pb2.BlockHandle]:
        """Of the prompt's first blocks."""
        return self._lease.handles

    @property
    def num_blocks(self) -> int:
        return len(self._lease.handles)

    @property
    def tenant(self) -> str:
        """Whose blocks they are, if there are any."""
        return self._lease.tenant

    async def close(self) -> None:
        self._renewing.cancel()
        if self._lease.lease_id:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it expires
                request = pb.ReleaseLeaseRequest(lease_id=self._lease.lease_id)
                await self._node.peers.stub(self.address).ReleaseLease(request, timeout=CALL_TIMEOUT_S)

    async def _renew(self) -> None:
        request = pb.RenewLeaseRequest(lease_ids=[self._lease.lease_id])
        while self._lease.lease_id:
            await asyncio.sleep(self._lease.ttl_ms / 3000)
            with contextlib.suppress(grpc.aio.AioRpcError):  # a block that is lost by it is refused when it is read
                await self._node.peers.stub(self.address).RenewLease(request, timeout=CALL_TIMEOUT_S)


async def _lease(node: Node, address: str, keys: Sequence[bytes], tenant: str | None) -> pb.LeaseReply:
    request = pb.LeaseRequest(reader=node.options.node_id, keys=keys, tenant=tenant)
    try:
        reply: pb.LeaseReply = await node.peers.stub(address).Lease(request, timeout=CALL_TIMEOUT_S)
        return reply
    except grpc.aio.AioRpcError as error:
        raise error_of(error, f"leasing at {address}") from error
