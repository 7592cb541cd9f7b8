"""A cluster that is played to a Conductor: requests of several tenants with documents in common, nodes that compute them about as long as
predicted, stores that fill and forget. The Conductor's core and services are the true ones; time goes as fast as wanted, then as it does.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from conductor.core.conductor import ConductorCore
from conductor.core.settings import ConductorSettings
from conductor.core.types.events import Decided, InstanceUp, LoadReported, Renewed, StoreWatched
from conductor.server.grpc_service import ConductorService
from conductor.server.leadership import OnlyConductor
from conductor.server.observer import ObserverService, sample_loads
from conductor.server.runner import CoreRunner
from springtide.blocks import block_keys, namespace_root
from springtide.clock import Tick
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import AttemptId, BlockKey, GatewayId, Incarnation, InstanceId, NodeId, RequestId, prefill_side
from springtide.protocol import wire
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import InstanceRef, Load, Role
from springtide.protocol.observation import Observe, ObservedPart
from springtide.protocol.scheduling import Assignment, Schedule
from springtide.protocol.storage import BlocksRemoved, BlocksStored, SnapshotPart, Tier
from springtide.rpc import conductor_pb2_grpc, observation_pb2_grpc
from springtide.rpc.channels import new_server
from springtide.slices import at_once

MODEL, HISTORY = "played-70b", 7
BLOCK_TOKENS = 64
SLOTS = 4000
_REPORT_S, _RENEW_S, _TICK_S, _SAMPLE_S = 0.5, 2.0, 1.0, 5.0
_PREFILL = PrefillCost(fixed_ms=15.0, per_token_ms=0.12, per_pair_ms=1e-6)
_DECODE = DecodeCost(fixed_ms=9.0, per_sequence_ms=0.35, per_context_token_ms=0.00004)
_GATEWAYS = (GatewayId("gateway-0:1"), GatewayId("gateway-1:1"))
_TENANTS = (("acme", 6), ("globex", 3), ("initech", 1))
SETTINGS = ConductorSettings(
    policy="kvcache-centric",
    admission="early-rejection",
    kvcache_balancing_threshold=1.5,
    block_tokens=BLOCK_TOKENS,
    bytes_per_block=BLOCK_TOKENS * 20_000,
    chunk_tokens=512,
    transfer_bytes_per_s=2e9,
    ttft_slo_ms=2000.0,
    tbt_slo_ms=40.0,
    lease_s=30.0,
    rejoin_s=5.0,
    overload_short_first=False,
    replication_bytes_per_s=1e9,
)


class PlayedClock:
    """Turned by hand until it is let go."""

    def __init__(self) -> None:
        self._at = 50_000.0
        self._live_since: float | None = None

    def now(self) -> float:
        return self._at if self._live_since is None else self._at + time.monotonic() - self._live_since

    def turn(self, seconds: float) -> None:
        self._at += seconds

    def let_go(self) -> None:
        self._live_since = time.monotonic()


@dataclass(slots=True)
class _Store:
    node_id: NodeId
    sequence: int = 0
    held: set[BlockKey] = field(default_factory=set)
    tails: deque[tuple[BlockKey, ...]] = field(default_factory=deque)
    on_ssd: int = 0


@dataclass(slots=True)
class _Engine:
    ref: InstanceRef
    store: _Store
    busy_until: float = 0.0
    attempts: dict[AttemptId, int] = field(default_factory=dict)
    """Those there, with their contexts in tokens."""


class PlayedCluster:
    """`rate`: requests a second. `instances`: so many do both."""

    def __init__(self, prefills: int, decodes: int, rate: float, seed: int = 1, instances: int = 0) -> None:
        self.clock = PlayedClock()
        self.core = ConductorCore(SETTINGS)
        self.runner = CoreRunner(self.core, self.clock)
        self.rate = rate
        self._leadership = OnlyConductor("played:1")
        self.observer = ObserverService(self.runner, self._leadership, MODEL, HISTORY)
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._engines: dict[InstanceId, _Engine] = {}
        self._live: dict[GatewayId, set[AttemptId]] = defaultdict(set)
        self._documents = [(tenant, self._random.choice((12, 24, 40, 64, 96))) for tenant, share in _TENANTS for _ in range(4 * share)]
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
            for number in range(count):
                self._add(f"{role.value}-{number}", {role: InstanceId(f"{role.value}-{number}")})
        for number in range(instances):
            name = InstanceId(f"instance-{number}")
            self._add(name, {Role.DECODE: name, Role.PREFILL: prefill_side(name)})
        self._after(0.0, self._arrive)
        for every, work in ((_REPORT_S, self._report), (_RENEW_S, self._renew), (_TICK_S, self._tick), (_SAMPLE_S, self._sample)):
            self._every(every, work)

    def play(self, seconds: float) -> None:
        """Turns the clock, and does all that falls due."""
        until = self.clock.now() + seconds
        while self._due and self._due[0][0] <= until:
            at, _, work = heapq.heappop(self._due)
            self.clock.turn(max(0.0, at - self.clock.now()))
            work()
        self.clock.turn(max(0.0, until - self.clock.now()))

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Lets the clock go, and does what falls due meanwhile."""
        self.clock.let_go()

        async def catch_up() -> None:
            while True:
                while self._due and self._due[0][0] <= self.clock.now():
                    heapq.heappop(self._due)[2]()
                await asyncio.sleep(0.05)

        catching_up = asyncio.create_task(catch_up())
        try:
            yield
        finally:
            catching_up.cancel()

    def silence(self, name: str) -> None:
        """From now on the instance is not heard of."""
        del self._engines[InstanceId(name)]

    async def observe(self, asked: Observe) -> AsyncIterator[ObservedPart]:
        """What its Conductor answers."""
        async for part in self.observer.Observe(wire.OBSERVE.encode(asked), cast(Any, None)):
            yield wire.OBSERVED_PART.decode(part)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The Conductor's services, at this address."""
        server, service = new_server(), ConductorService(self.runner, self._leadership, MODEL)
        await service.listen("127.0.0.1")
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        conductor_pb2_grpc.add_ConductorServicer_to_server(service, server)
        observation_pb2_grpc.add_ObserverServicer_to_server(self.observer, server)
        await server.start()
        try:
            yield address
        finally:
            await service.hang_up()
            await server.stop(None)

    # ---- time ----

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.clock.now() + seconds, next(self._numbers), work))

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        def again() -> None:
            work()
            self._after(seconds, again)

        self._after(seconds, again)

    # ---- nodes ----

    def _add(self, name: str, roles: Mapping[Role, InstanceId]) -> None:
        node_id = NodeId(f"node-{name}")
        store = _Store(node_id)
        self.runner.feed(StoreWatched(node_id, f"{name}:2"))
        self.runner.feed(SnapshotPart(node_id, Incarnation(1), 0, (), Tier.DRAM, complete=True))
        for role, instance_id in roles.items():
            engine = _Engine(InstanceRef(instance_id, role, f"{name}:1", node_id, f"{name}:2"), store)
            self._engines[instance_id] = engine
            self.runner.feed(InstanceUp(engine.ref, 1))
            self._report_of(engine)

    def _report(self) -> None:
        for engine in self._engines.values():
            self._report_of(engine)

    def _report_of(self, engine: _Engine) -> None:
        now, prefills = self.clock.now(), engine.ref.role is Role.PREFILL
        used = sum(tokens // BLOCK_TOKENS + 2 for tokens in engine.attempts.values())
        context = sum(engine.attempts.values())
        load = Load(
            running=min(1, len(engine.attempts)) if prefills else len(engine.attempts),
            waiting=max(0, len(engine.attempts) - 1) if prefills else 0,
            tokens=context,
            queue_ms=max(0.0, 1000 * (engine.busy_until - now)) if prefills else 0.0,
            step_ms=0.0 if prefills or not engine.attempts else _DECODE.predict_ms(len(engine.attempts), context),
            slots_total=SLOTS,
            slots_available=max(0, SLOTS - used),
            max_batch=64,
            attempt_ids=frozenset(engine.attempts),
            prefill_cost=_PREFILL if prefills else None,
            decode_cost=None if prefills else _DECODE,
        )
        self.runner.feed(LoadReported(engine.ref.instance_id, 1, load))

    def _renew(self) -> None:
        for gateway_id in _GATEWAYS:
            self.runner.feed(Renewed(gateway_id, tuple(self._live[gateway_id]), ()))

    def _tick(self) -> None:
        self.runner.feed(Tick())

    def _sample(self) -> None:
        at_once(sample_loads(self.runner))

    def _store(self, store: _Store, keys: tuple[BlockKey, ...], own: int) -> None:
        """`own`: the blocks at the end that are nobody else's."""
        new = tuple(key for key in keys if key not in store.held)
        if new:
            store.sequence += 1
            store.held.update(new)
            self.runner.feed(BlocksStored(store.node_id, Incarnation(1), store.sequence, new, Tier.DRAM))
        if own:
            store.tails.append(keys[-own:])
        while len(store.held) > 0.9 * SLOTS and store.tails:
            gone = tuple(key for key in reversed(store.tails.popleft()) if key in store.held)
            store.held.difference_update(gone)
            if gone:
                store.sequence += 1
                self.runner.feed(BlocksRemoved(store.node_id, Incarnation(1), store.sequence, gone, Tier.DRAM))

    def to_ssd(self, name: str, share: float) -> None:
        """What the store holds of documents goes to its SSD, that share of it."""
        store = self._engines[InstanceId(name)].store
        for blocks, keys in self._all_documents():
            kept = keys[: int(blocks * share)]
            if kept and kept[0] in store.held:
                store.sequence += 1
                self.runner.feed(BlocksStored(store.node_id, Incarnation(1), store.sequence, kept, Tier.SSD))
                gone = tuple(key for key in reversed(keys) if key in store.held)
                store.held.difference_update(gone)
                store.sequence += 1
                self.runner.feed(BlocksRemoved(store.node_id, Incarnation(1), store.sequence, gone, Tier.DRAM))

    def _all_documents(self) -> list[tuple[int, tuple[BlockKey, ...]]]:
        return [(blocks, self._document(number)) for number, (_, blocks) in enumerate(self._documents)]

    def _document(self, number: int) -> tuple[BlockKey, ...]:
        tenant, blocks = self._documents[number]
        root = namespace_root("played", "bfloat16", BLOCK_TOKENS, tenant)
        first = number * 100_000
        return tuple(block_keys(root, range(first, first + blocks * BLOCK_TOKENS), BLOCK_TOKENS))

    # ---- requests ----

    def _arrive(self) -> None:
        self._after(self._random.expovariate(self.rate), self._arrive)
        number = next(self._numbers)
        (tenant,) = self._random.choices([name for name, _ in _TENANTS], [share for _, share in _TENANTS])
        theirs = [number for number, (name, _) in enumerate(self._documents) if name == tenant]
        place = theirs[min(int(self._random.paretovariate(0.9)) - 1, len(theirs) - 1)]
        own = self._random.choice((1, 2, 4, 8, 16, 60))
        tail = tuple(BlockKey(number.to_bytes(8, "big") + block.to_bytes(8, "big")) for block in range(own))
        keys = (*self._document(place), *tail)
        gateway_id = self._random.choice(_GATEWAYS)
        request_id = f"chatcmpl-{self._random.getrandbits(96):024x}"
        most = self._random.choice((64, 256, 1024))
        request = Schedule(
            attempt_id=AttemptId(f"{request_id}.1"),
            request_id=RequestId(request_id),
            gateway_id=gateway_id,
            block_keys=keys,
            num_tokens=len(keys) * BLOCK_TOKENS + 1 + number % BLOCK_TOKENS,
            max_new_tokens=most,
            tenant=tenant,
        )
        (decided,) = self.runner.feed(request)
        assert isinstance(decided, Decided)
        at_once(self.runner.history.explain())
        if decided.assignment is not None:
            self._run(request, decided.assignment, own, most)

    def _run(self, request: Schedule, assignment: Assignment, own: int, most: int) -> None:
        prefill, decode = (self._engines.get(ref.instance_id) for ref in (assignment.prefill, assignment.decode))
        self._live[request.gateway_id].add(request.attempt_id)
        if prefill is None or decode is None:
            return  # it hangs, and so does what is there
        noise = self._random.lognormvariate(0.0, 0.2)
        now, predicted = self.clock.now(), assignment.prediction
        work_s = noise * (predicted.transfer_ms + predicted.prefill_ms) / 1000
        prefill.busy_until = max(prefill.busy_until, now) + work_s
        ttft_s = prefill.busy_until - now
        prefill.attempts[request.attempt_id] = request.num_tokens
        output = max(1, min(most, int(self._random.expovariate(1 / 180)) + 1))
        cached = assignment.local_blocks
        if assignment.sources:
            cached = max(cached, assignment.sources[0].num_blocks)

        def first_token() -> None:
            prefill.attempts.pop(request.attempt_id, None)
            decode.attempts[request.attempt_id] = request.num_tokens
            self._store(prefill.store, tuple(request.block_keys), own)
            self._store(decode.store, tuple(request.block_keys), own)
            fetched = (cached - assignment.local_blocks) * BLOCK_TOKENS
            self.runner.feed(
                Progress(
                    request.attempt_id,
                    Phase.DECODE,
                    cached_tokens=min(cached * BLOCK_TOKENS, request.num_tokens - 1),
                    ttft_ms=1000 * ttft_s,
                    remote_tokens=fetched,
                    fetch_ms=predicted.transfer_ms * noise,
                    queue_ms=1000 * (ttft_s - work_s),
                    compute_ms=predicted.prefill_ms * noise,
                )
            )
            step_ms = _DECODE.predict_ms(len(decode.attempts), sum(decode.attempts.values()))
            self._after(output * step_ms * self._random.lognormvariate(0.0, 0.1) / 1000, ended)

        def ended() -> None:
            decode.attempts.pop(request.attempt_id, None)
            self._live[request.gateway_id].discard(request.attempt_id)
            failed = self._random.random() < 0.002
            self.runner.feed(Progress(request.attempt_id, Phase.FAILED if failed else Phase.FINISHED, output_tokens=output))

        self._after(ttft_s, first_token)
