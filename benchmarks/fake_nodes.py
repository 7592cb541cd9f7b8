"""Stores and engines of many nodes in one process, as the Conductor sees them: streams of events and load reports, over real sockets.

`python -m benchmarks.fake_nodes REDIS_URL CLUSTER WORKERS LIVE LENGTH...` announces them, WORKERS prefill instances and as many decode
nodes with LIVE attempts on them (`LiveCluster`) and prompts of these lengths in their stores, and says when it has (`Announced` as JSON).
Each line that it is sent then is answered with what it has done until then (`Done` as JSON), and it ends when its input does.

Each engine and each store has a loopback address of its own, as on a machine of its own, so the Conductor holds a connection to each.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

import redis.asyncio as redis
import uvloop

from benchmarks.live_cluster import BLOCK_TOKENS, LiveCluster, instance_id
from benchmarks.streams import StreamConnection, framed
from node_runtime.servicer import REST_S, SAY_EVERY_S
from springtide.credentials import Credentials
from springtide.ids import Incarnation, InstanceId
from springtide.membership import Member, write_record
from springtide.process import raise_file_limit
from springtide.protocol import wire
from springtide.protocol.instances import Load, LoadReport, Role
from springtide.rpc import store_pb2

SECRET = "that of a cluster of fakes"
INCARNATION = Incarnation(1)
PROMPTS, SHARED_BLOCKS = 32, 64
"""Of each length. All begin with the same blocks, which every store holds; all of a prompt is held by one to three."""
SIGN_EVERY_S = 0.5
STORED_EVERY_S = 10.0
"""By each store, an event of EVENT_BLOCKS blocks."""
EVENT_BLOCKS = 128
SNAPSHOT_BLOCKS = 4096
TURNS = 25
"""In each time of REST_S; the engines share them out."""
IDLE_ROUNDS = round(SAY_EVERY_S / REST_S)
"""Of which an engine without work reports in one."""
LEASE_S = 3600
BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Announced:
    """When the first of them was announced, and when all were; as of `time.monotonic`, which is the same for all of a machine."""

    first_at: float
    all_at: float


@dataclass(slots=True)
class Done:
    """Each report counts once for each Conductor that it is for."""

    reports: int = 0
    """Load reports that were sent."""
    held_back: int = 0
    """That were due and were not sent: the Conductor had not taken in those before, or this process was late."""


def give_way() -> None:
    """This process runs when nobody else of the machine wants to: those that it plays are on other machines."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


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


class Engine:
    """What one engine says of itself, encoded beforehand, to whoever watches it."""

    def __init__(self, name: InstanceId, loads: Sequence[Load], idle_turn: int) -> None:
        """`idle_turn`: of IDLE_ROUNDS, the one in which it reports when it has no work."""
        self._reports = itertools.cycle(
            [framed(wire.LOAD_REPORT.encode(LoadReport(name, INCARNATION, load)).SerializeToString()) for load in loads]
        )
        self._idle_turn = None if len(loads) > 1 else idle_turn
        self._watchers: list[StreamConnection] = []

    def watched_by(self, connection: StreamConnection) -> None:
        self._watchers = [*self.watchers, connection]
        connection.send(next(self._reports))

    @property
    def watchers(self) -> list[StreamConnection]:
        """Who is still there of them."""
        return [watcher for watcher in self._watchers if watcher.calls]

    def is_due(self, round_number: int) -> bool:
        return self._idle_turn is None or round_number % IDLE_ROUNDS == self._idle_turn

    def report(self) -> int:
        """Sends the next report to all who watch; returns to how many it was sent."""
        report = next(self._reports)
        return sum(watcher.send(report) for watcher in self._watchers)


class Store:
    """What one store says to whoever watches it: what it holds, signs of life, and now and then that it has stored more."""

    def __init__(self, name: str, keys: Sequence[bytes]) -> None:
        self._name = name
        self._keys = keys
        self._tells: set[asyncio.Task[None]] = set()

    def watched_by(self, connection: StreamConnection) -> None:
        task = asyncio.create_task(self._tell(connection))
        self._tells.add(task)
        task.add_done_callback(self._tells.discard)

    async def _tell(self, connection: StreamConnection) -> None:
        with contextlib.suppress(ConnectionError):
            for event in self._snapshot():
                await connection.send_in_time(framed(event.SerializeToString()))
            chance = random.Random(self._name)
            signs = round(STORED_EVERY_S / SIGN_EVERY_S)
            silent = chance.randrange(signs)
            for sequence in itertools.count(1):
                for _ in range(silent):
                    await asyncio.sleep(SIGN_EVERY_S)
                    sign = store_pb2.StoreEvent(still_here=store_pb2.StillHere(sequence=sequence - 1))
                    await connection.send_in_time(framed(sign.SerializeToString()))
                keys = [chance.randbytes(16) for _ in range(EVENT_BLOCKS)]
                stored = store_pb2.BlocksStored(
                    node_id=self._name, incarnation=INCARNATION, sequence=sequence, keys=keys, tier=store_pb2.TIER_DRAM
                )
                await connection.send_in_time(framed(store_pb2.StoreEvent(stored=stored).SerializeToString()))
                silent = signs

    def _snapshot(self) -> Iterator[store_pb2.StoreEvent]:
        parts = [self._keys[first : first + SNAPSHOT_BLOCKS] for first in range(0, len(self._keys), SNAPSHOT_BLOCKS)]
        for number, part in enumerate(parts, 1):
            yield store_pb2.StoreEvent(
                snapshot=store_pb2.SnapshotPart(
                    node_id=self._name, incarnation=INCARNATION, keys=part, tier=store_pb2.TIER_DRAM, complete=number == len(parts)
                )
            )


class Watch(StreamConnection):
    """The Conductor's connection to one of them; the address to which it connected says to which."""

    def __init__(self, watched: Mapping[str, Engine | Store]) -> None:
        super().__init__()
        self._watched = watched

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.address not in self._watched:
            self.abort()

    def begun(self) -> None:
        self._watched[self.address].watched_by(self)


def address_of(kind: int, number: int) -> str:
    """Every address of 127.0.0.0/8 is this machine's."""
    return f"127.{kind}.{number >> 8}.{number & 255}"


async def report(engines: Sequence[Engine], done: Done) -> None:
    """Has each engine report in its turn, for ever. What is later than the next one of the same engine is due is left out."""
    now, turns = asyncio.get_running_loop().time, [engines[turn::TURNS] for turn in range(TURNS)]
    began = now()
    for number in itertools.count():
        late_s = now() - began - number * REST_S / TURNS
        await asyncio.sleep(max(0.0, -late_s))
        round_number, turn = divmod(number, TURNS)
        due = [engine for engine in turns[turn] if engine.is_due(round_number)]
        num_due = sum(len(engine.watchers) for engine in due)
        sent = sum(engine.report() for engine in due) if late_s < REST_S else 0
        done.reports += sent
        done.held_back += num_due - sent


def answer(done: Done) -> None:
    """Answers each line of the input until that ends."""
    for _ in sys.stdin:
        print(json.dumps(asdict(done)), flush=True)


async def serve(redis_url: str, cluster: str, live: LiveCluster, lengths: Sequence[int]) -> None:
    nodes = [(role, number) for number in range(live.workers) for role in Role]
    engines = [
        Engine(instance_id(role, number), live.reports_of(role, number), place // TURNS % IDLE_ROUNDS)
        for place, (role, number) in enumerate(nodes)
    ]
    stores = [Store(instance_id(*node), keys) for node, keys in zip(nodes, held_by(len(nodes), lengths), strict=True)]
    watched: dict[str, Engine | Store] = {address_of(1, place): engine for place, engine in enumerate(engines)}
    watched |= {address_of(2, place): store for place, store in enumerate(stores)}
    server = await asyncio.get_running_loop().create_server(lambda: Watch(watched), "0.0.0.0", 0, backlog=BACKLOG)
    port = server.sockets[0].getsockname()[1]
    credentials = Credentials(SECRET.encode(), cluster)
    async with redis.Redis.from_url(redis_url) as valkey, valkey.pipeline(transaction=False) as announcing:
        for place, (role, number) in enumerate(nodes):
            name, address, store_address = instance_id(role, number), f"{address_of(1, place)}:{port}", f"{address_of(2, place)}:{port}"
            for member in (
                Member("store", name, INCARNATION, store_address, name),
                Member(role.value, name, INCARNATION, address, name, details={"store_address": store_address}),
            ):
                announcing.set(f"{cluster}:member:{member.role}:{name}", write_record(member, credentials), ex=LEASE_S)
        done = Done()
        reporting = asyncio.create_task(report(engines, done))
        first_at = time.monotonic()
        await announcing.execute()
        print(json.dumps(asdict(Announced(first_at, time.monotonic()))), flush=True)
    await asyncio.to_thread(answer, done)
    reporting.cancel()
    server.close()


if __name__ == "__main__":
    give_way()
    raise_file_limit()
    uvloop.run(serve(sys.argv[1], sys.argv[2], LiveCluster(int(sys.argv[3]), int(sys.argv[4])), [int(length) for length in sys.argv[5:]]))
