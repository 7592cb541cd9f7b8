"""Nodes as the Conductor's server sees them: the two services it watches, over real sockets, with contents that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from springtide.ids import new_incarnation
from springtide.membership import Member, Membership
from springtide.rpc import conductor_pb2, node_pb2, node_pb2_grpc, store_pb2, store_pb2_grpc
from springtide.rpc.channels import new_server

COSTS = {
    "prefill": {"prefill_cost": node_pb2.PrefillCost(per_token_ms=1.0, slowest_share=1.0)},
    "decode": {"decode_cost": node_pb2.DecodeCost(fixed_ms=10.0, per_sequence_ms=1.0, per_context_token_ms=0.01)},
}


class Store(store_pb2_grpc.StoreServicer):
    """Holds `keys`; every event reaches every watcher, unless the test drops it on the way."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.incarnation = new_incarnation()
        self.keys: list[bytes] = []
        self.sequence = 0
        self.silent = False
        self.watches = 0
        self._queues: set[asyncio.Queue[store_pb2.StoreEvent]] = set()

    async def Watch(self, request: store_pb2.WatchStoreRequest, context: Any) -> AsyncIterator[store_pb2.StoreEvent]:
        queue: asyncio.Queue[store_pb2.StoreEvent] = asyncio.Queue()
        self._queues.add(queue)
        self.watches += 1
        yield store_pb2.StoreEvent(snapshot=store_pb2.SnapshotPart(**self._held(self.keys), complete=True))
        try:
            while True:
                try:
                    async with asyncio.timeout(0.2):
                        event = await queue.get()
                except TimeoutError:
                    event = store_pb2.StoreEvent(still_here=store_pb2.StillHere(sequence=self.sequence))
                if not self.silent:
                    yield event
        finally:
            self._queues.discard(queue)

    async def Replicate(self, request: store_pb2.ReplicateRequest, context: Any) -> store_pb2.ReplicateReply:
        """Takes whatever it is told to at once."""
        missing = [key for key in request.keys if key not in self.keys]
        self.store(missing)
        return store_pb2.ReplicateReply(blocks=len(request.keys), fetched_blocks=len(missing))

    def store(self, keys: Sequence[bytes], dropped: bool = False) -> None:
        self.keys += keys
        self.sequence += 1
        event = store_pb2.StoreEvent(stored=store_pb2.BlocksStored(**self._held(keys)))
        for queue in () if dropped else self._queues:
            queue.put_nowait(event)

    def _held(self, keys: Sequence[bytes]) -> dict[str, Any]:
        return {
            "node_id": self.node_id,
            "incarnation": self.incarnation,
            "sequence": self.sequence,
            "keys": keys,
            "tier": store_pb2.TIER_DRAM,
        }


class Engine(node_pb2_grpc.PrefillNodeServicer):
    """Reports what `load` says, at once when it is told to and several times a second. Prefill and decode nodes report alike."""

    def __init__(self, instance_id: str, role: str) -> None:
        self.incarnation = new_incarnation()
        self.load: dict[str, Any] = {}
        self.stalled = ""
        self._role = role
        self._instance_id = instance_id
        self._changed = asyncio.Event()
        self.goes_on = asyncio.Event()
        """Unset: it hangs."""
        self.goes_on.set()

    async def WatchLoad(self, request: node_pb2.WatchLoadRequest, context: Any) -> AsyncIterator[node_pb2.LoadReport]:
        while True:
            await self.goes_on.wait()
            yield node_pb2.LoadReport(
                instance_id=self._instance_id,
                incarnation=self.incarnation,
                load=node_pb2.Load(**{"slots_total": 1000, "slots_available": 1000, "max_batch": 8, **COSTS[self._role], **self.load}),
                stalled=self.stalled,
            )
            try:
                async with asyncio.timeout(0.2):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    def report(self, stalled: str = "", **load: Any) -> None:
        self.load, self.stalled = load, stalled
        self._changed.set()


class Node:
    """A store and an engine, each with its own gRPC server and membership, like the two processes of a node."""

    def __init__(self, name: str, role: Any, redis_url: str, cluster: str, lease_s: float) -> None:
        self.name, self.role = name, role
        self.store, self.engine = Store(name), Engine(name, role)
        self._membership = [Membership(redis_url, cluster, lease_s) for _ in range(2)]
        self._servers = [new_server(), new_server()]

    async def start(self, **details: str) -> None:
        store_server, engine_server = self._servers
        store_pb2_grpc.add_StoreServicer_to_server(self.store, store_server)
        if self.role == "prefill":
            node_pb2_grpc.add_PrefillNodeServicer_to_server(self.engine, engine_server)
        else:
            node_pb2_grpc.add_DecodeNodeServicer_to_server(self.engine, engine_server)  # type: ignore[arg-type]
        self.store_address, self.engine_address = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for server in self._servers]
        for server in self._servers:
            await server.start()
        await self._membership[0].announce(Member("store", self.name, self.store.incarnation, self.store_address, self.name))
        await self.announce_engine(**details)

    async def announce_engine(self, **details: str) -> None:
        details = {"store_address": self.store_address, **details}
        await self._membership[1].announce(
            Member(self.role, self.name, self.engine.incarnation, self.engine_address, self.name, details=details)
        )

    async def withdraw_engine(self, membership: Membership) -> None:
        """The engine is no longer listed; its process and its streams live on."""
        await self._membership[1].close()
        self._membership[1] = membership

    async def kill_engine(self) -> None:
        await self._servers[1].stop(None)

    async def kill_store(self) -> None:
        await self._servers[0].stop(None)

    async def close(self) -> None:
        for membership in self._membership:
            await membership.close()
        for server in self._servers:
            await server.stop(None)


def schedule_request(attempt: str, keys: Sequence[bytes], num_tokens: int, **fields: Any) -> conductor_pb2.ScheduleRequest:
    return conductor_pb2.ScheduleRequest(
        attempt_id=attempt,
        request_id="request",
        gateway_id="gateway-0",
        block_keys=b"".join(keys),
        num_tokens=num_tokens,
        min_new_tokens=0,
        **fields,
    )
