"""Other stores: their gRPC stubs by address, and Messenger connections to whoever answers there now."""

from __future__ import annotations

import grpc.aio

from kvstore.server.failures import error_of
from messenger.base import Connection, Endpoint
from messenger.router import Messenger
from springtide.errors import PeerLost
from springtide.rpc import channels
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreStub

CALL_TIMEOUT_S = 1.5
"""For a question that a living store answers at once."""
PROBE_TIMEOUT_S = 1.0
"""For the same, of a store that keeps others waiting."""


class Peers:
    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._endpoints: dict[str, Endpoint] = {}

    def stub(self, address: str) -> StoreStub:
        if address not in self._channels:
            self._channels[address] = channels.connect(address)
        return StoreStub(self._channels[address])

    async def answers(self, address: str) -> bool:
        """Whether the store there lives, however slow what is asked of it."""
        try:
            await self.stub(address).Describe(pb.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def connect(self, address: str, incarnation: int) -> Connection:
        """To the Messenger of the store at `address`. Raises PeerLost when that is away or another incarnation."""
        endpoint = self._endpoints.get(address)
        if endpoint is None or endpoint.incarnation != incarnation:
            endpoint = self._endpoints[address] = await self._describe(address)
        if endpoint.incarnation != incarnation:
            raise PeerLost(f"the store at {address} has restarted")
        try:
            return await self._messenger.connect(endpoint)
        except PeerLost:
            self._endpoints.pop(address, None)
            raise

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def _describe(self, address: str) -> Endpoint:
        try:
            reply = await self.stub(address).Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_S)
            return Endpoint.from_json(reply.endpoint)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, f"asking {address} for its endpoint") from error
