"""Puts a cluster together and runs a workload through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conductor.core import events as ev
from conductor.core.conductor import ConductorCore
from decode_node.core.core import Settings
from simulator.cluster.decode import SimDecode
from simulator.cluster.gateway import SimGateway
from simulator.cluster.keys import prompt_keys
from simulator.cluster.loop import Loop
from simulator.cluster.network import Network
from simulator.cluster.options import Options
from simulator.cluster.prefill import SimPrefill
from simulator.cluster.processor import Processor
from simulator.cluster.records import Records
from simulator.cluster.series import Series
from simulator.cluster.store import SimStore
from simulator.workload import Workload
from springtide.ids import AttemptId, BlockKey, InstanceId, NodeId

REPORT_EVERY_S = 0.05
"""As nodes look whether their load has changed (node_runtime.load)."""
TICK_S = 1.0
RENEW_S = 10.0
_INCARNATION = 1


class Cluster:
    def __init__(self, workload: Workload, options: Options) -> None:
        self.options = options
        self.workload = workload
        self.loop = Loop()
        self.conductor = ConductorCore(options.conductor)
        self.stores: dict[NodeId, SimStore] = {}
        self.prefills: dict[InstanceId, SimPrefill] = {}
        self.decodes: dict[InstanceId, SimDecode] = {}
        self.records = Records(workload.requests)
        self.processor = Processor(self.loop, options.cores, options.contention)
        self.network = Network(options.hardware.link_bytes_per_s)
        self.gateway = SimGateway(
            self.records,
            options.conductor.block_tokens,
            options.rpc_s,
            options.late_tbt_slo_ms is not None,
            self.loop,
            self._conduct,
            self.prefills,
            self.decodes,
        )
        self._to_report: set[InstanceId] = set()
        for number in range(options.prefill):
            self._add_prefill(InstanceId(f"prefill-{number}"))
        for number in range(options.decode):
            self._add_decode(InstanceId(f"decode-{number}"))
        self.series = Series(self)

    def run(self) -> None:
        """Until every request has ended."""
        arrivals = iter(range(len(self.records.requests)))

        def arrive(index: int) -> None:
            self._schedule_next(arrivals, arrive)
            self.gateway.arrive(index)

        self._schedule_next(arrivals, arrive)
        self._every(TICK_S, self._tick)
        self._every(RENEW_S, self.gateway.renew)
        self._every(self.options.sample_every_s, self.series.sample)
        self.loop.run(lambda: self.records.ended == len(self.records.requests))

    def validate(self) -> None:
        """Asserts the invariants of every core."""
        self.conductor.validate()
        for instance in self.instances():
            instance.validate()
            instance.store.pool.validate()

    def instances(self) -> Iterator[SimPrefill | SimDecode]:
        yield from self.prefills.values()
        yield from self.decodes.values()

    def _schedule_next(self, arrivals: Iterator[int], arrive: Callable[[int], None]) -> None:
        index = next(arrivals, None)
        if index is not None:
            self.loop.at(self.records.requests[index].arrival_s, lambda: arrive(index))

    def _every(self, seconds: float, do: Callable[[], None]) -> None:
        def again() -> None:
            do()
            self.loop.after(seconds, again)

        self.loop.after(seconds, again)

    # ---- parts ----

    def _add_prefill(self, instance_id: InstanceId) -> None:
        options = self.options
        store = self._add_store(instance_id, options.prefill_tokens or options.hardware.arena_tokens)
        self.prefills[instance_id] = SimPrefill(
            instance_id,
            store,
            options.hardware,
            options.conductor.chunk_tokens,
            options.conductor.block_tokens,
            self.loop,
            self.processor,
            self.gateway.on_prefill,
            lambda: self._report(instance_id),
        )
        self._announce(instance_id, ev.Role.PREFILL, store)

    def _add_decode(self, instance_id: InstanceId) -> None:
        options = self.options
        store = self._add_store(instance_id, options.decode_tokens or options.hardware.device_tokens)
        settings = Settings(
            cost=options.hardware.decode_cost,
            block_tokens=options.conductor.block_tokens,
            max_batch=options.hardware.max_batch,
            eos_token_ids=(),
            ingest_lease_s=options.ingest_lease_s,
            slot_wait_s=options.slot_wait_s,
        )
        self.decodes[instance_id] = SimDecode(
            instance_id,
            store,
            options.hardware,
            settings,
            options.late_tbt_slo_ms,
            self.loop,
            self.processor,
            self.gateway,
            lambda: self._report(instance_id),
        )
        self._announce(instance_id, ev.Role.DECODE, store)

    def _add_store(self, instance_id: InstanceId, num_tokens: int) -> SimStore:
        options, node_id = self.options, NodeId(instance_id)
        block_tokens = options.conductor.block_tokens
        store = self.stores[node_id] = SimStore(
            node_id,
            max(1, num_tokens // block_tokens),
            options.hardware.kv_bytes_per_token * block_tokens,
            options.hardware.num_layers,
            options.eviction,
            self.loop,
            self.network,
            self.stores,
            self._conduct,
            self._keys_of,
        )
        return store

    def _announce(self, instance_id: InstanceId, role: ev.Role, store: SimStore) -> None:
        address = str(store.node_id)
        self._conduct(ev.StoreUp(store.node_id, address))
        self._conduct(ev.StoreSnapshot(store.node_id, _INCARNATION, store.pool.sequence, store.pool.held_keys(), ev.Tier.DRAM, True))
        self._conduct(ev.InstanceUp(ev.InstanceRef(instance_id, role, address, store.node_id, address), _INCARNATION))
        self._say(instance_id)

    def _keys_of(self, attempt_id: AttemptId) -> Callable[[int, int], tuple[BlockKey, ...]]:
        request = self.gateway.request_of(attempt_id)
        return lambda begin, end: prompt_keys(request, begin, end, self.options.conductor.block_tokens)

    # ---- the Conductor ----

    def _conduct(self, event: ev.Event) -> list[ev.Action]:
        return self.conductor.handle(event, self.loop.now)

    def _report(self, instance_id: InstanceId) -> None:
        """Something changed: the next report tells of it."""
        if instance_id not in self._to_report:
            self._to_report.add(instance_id)
            self.loop.at((self.loop.now // REPORT_EVERY_S + 1) * REPORT_EVERY_S, lambda: self._say(instance_id))

    def _say(self, instance_id: InstanceId) -> None:
        self._to_report.discard(instance_id)
        instance = self.prefills.get(instance_id) or self.decodes[instance_id]
        self._conduct(ev.LoadReported(instance_id, _INCARNATION, instance.load()))

    def _tick(self) -> None:
        self._conduct(ev.Tick())
        self.gateway.tick()
        for instance in self.instances():
            instance.tick()
