"""Stores and engines of many nodes in one process, as the Conductor sees them: streams of events and load reports, over real sockets.

`python -m benchmarks.fake_nodes REDIS_URL CLUSTER INSTANCES LENGTH...` announces them, half of them prefill instances and half decode
nodes, with prompts of these lengths in their stores, prints a line when it has, and serves until its input ends. All are at one address, so
whoever watches next gets the next node that is watched by nobody yet.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from typing import Any

import redis.asyncio as redis

from springtide.credentials import Credentials
from springtide.membership import Member, MemberRole, write_record
from springtide.rpc import node_pb2, node_pb2_grpc, store_pb2, store_pb2_grpc
from springtide.rpc.channels import new_server

SECRET = "that of a cluster of fakes"
INCARNATION = 1
BLOCK_TOKENS = 64
PROMPTS, SHARED_BLOCKS = 32, 64
"""Of each length. All begin with the same blocks, which every store holds; all of a prompt is held by one to three."""
SIGN_EVERY_S = 0.5
STORED_EVERY_S = 10.0
"""By each store, an event of EVENT_BLOCKS blocks."""
EVENT_BLOCKS = 128
SNAPSHOT_BLOCKS = 4096
LEASE_S = 3600
LESS_URGENT = 10
"""Niceness: real nodes report from other machines, and take nothing of the Conductor's cores."""
COSTS = {
    "prefill": node_pb2.Load(prefill_cost=node_pb2.PrefillCost(fixed_ms=5.0, per_token_ms=0.05, per_pair_ms=1e-7, slowest_share=1.0)),
    "decode": node_pb2.Load(decode_cost=node_pb2.DecodeCost(fixed_ms=10.0, per_sequence_ms=0.1, per_context_token_ms=1e-5)),
}


def prompt_keys(prompt: int, num_tokens: int) -> list[bytes]:
    """An index does not mind whether keys are chained hashes."""
    own = num_tokens // BLOCK_TOKENS - SHARED_BLOCKS
    return [_key("shared", block) for block in range(SHARED_BLOCKS)] + [_key(f"{prompt} {num_tokens}", block) for block in range(own)]


def _key(text: str, block: int) -> bytes:
    return blake2b(f"{text} {block}".encode(), digest_size=16).digest()


def held_by(num_nodes: int, lengths: Sequence[int]) -> list[list[bytes]]:
    """Node -> keys of its store, parents first."""
    held: list[list[bytes]] = [prompt_keys(0, SHARED_BLOCKS * BLOCK_TOKENS) for _ in range(num_nodes)]
    chance = random.Random(1)
    for prompt, num_tokens in itertools.product(range(PROMPTS), lengths):
        for node in chance.sample(range(num_nodes), chance.randint(1, 3)):
            held[node] += prompt_keys(prompt, num_tokens)[SHARED_BLOCKS:]
    return held


class FakeStores(store_pb2_grpc.StoreServicer):
    """Whoever watches next is given the next store, in turn."""

    def __init__(self, names: Sequence[str], lengths: Sequence[int]) -> None:
        self._names = itertools.cycle(zip(names, held_by(len(names), lengths), strict=True))

    async def Watch(self, request: store_pb2.WatchStoreRequest, context: Any) -> AsyncIterator[store_pb2.StoreEvent]:
        name, keys = next(self._names)
        parts = [keys[first : first + SNAPSHOT_BLOCKS] for first in range(0, len(keys), SNAPSHOT_BLOCKS)]
        for number, part in enumerate(parts, 1):
            snapshot = store_pb2.SnapshotPart(
                node_id=name, incarnation=INCARNATION, keys=part, tier=store_pb2.TIER_DRAM, complete=number == len(parts)
            )
            yield store_pb2.StoreEvent(snapshot=snapshot)
        chance = random.Random(name)
        signs = round(STORED_EVERY_S / SIGN_EVERY_S)
        silent = chance.randrange(signs)
        for sequence in itertools.count(1):
            for _ in range(silent):
                await asyncio.sleep(SIGN_EVERY_S)
                yield store_pb2.StoreEvent(still_here=store_pb2.StillHere(sequence=sequence - 1))
            keys = [chance.randbytes(16) for _ in range(EVENT_BLOCKS)]
            stored = store_pb2.BlocksStored(node_id=name, incarnation=INCARNATION, sequence=sequence, keys=keys, tier=store_pb2.TIER_DRAM)
            yield store_pb2.StoreEvent(stored=stored)
            silent = signs


class FakeEngines(node_pb2_grpc.PrefillNodeServicer):
    """Prefill and decode nodes report alike."""

    def __init__(self, role: MemberRole) -> None:
        load = node_pb2.Load(slots_total=1_000_000, slots_available=1_000_000, max_batch=64)
        load.MergeFrom(COSTS[role])
        self._report = node_pb2.LoadReport(incarnation=INCARNATION, load=load)

    async def WatchLoad(self, request: node_pb2.WatchLoadRequest, context: Any) -> AsyncIterator[node_pb2.LoadReport]:
        yield self._report
        await asyncio.sleep(random.random() * SIGN_EVERY_S)
        while True:
            yield self._report
            await asyncio.sleep(SIGN_EVERY_S)


async def serve(redis_url: str, cluster: str, num_instances: int, lengths: Sequence[int]) -> None:
    roles: dict[str, MemberRole] = {f"node-{number}": "prefill" if number % 2 else "decode" for number in range(num_instances)}
    credentials = Credentials(SECRET.encode(), cluster)
    server = new_server(credentials)
    store_pb2_grpc.add_StoreServicer_to_server(FakeStores(list(roles), lengths), server)
    node_pb2_grpc.add_PrefillNodeServicer_to_server(FakeEngines("prefill"), server)
    node_pb2_grpc.add_DecodeNodeServicer_to_server(FakeEngines("decode"), server)  # type: ignore[arg-type]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with redis.Redis.from_url(redis_url) as valkey:
        for name, role in roles.items():
            for member in (
                Member("store", name, INCARNATION, address, name),
                Member(role, name, INCARNATION, address, name, details={"store_address": address}),
            ):
                await valkey.set(f"{cluster}:member:{member.role}:{name}", write_record(member, credentials), ex=LEASE_S)
    print("announced", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    os.nice(LESS_URGENT)
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), [int(length) for length in sys.argv[4:]]))
