"""Puts a cluster together and runs a workload through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from conductor.core.conductor import ConductorCore
from conductor.core.types import events as ev
from decode_node.core.settings import DecodeSettings
from prefill_node.core.settings import PrefillSettings
from simulator.cluster.gateway import SimGateway
from simulator.cluster.keys import prompt_keys
from simulator.cluster.loop import Loop
from simulator.cluster.mixed import SimMixed
from simulator.cluster.network import Network
from simulator.cluster.options import ClusterOptions
from simulator.cluster.orders import SimOrders, SimRoleSwitch
from simulator.cluster.prefill import SimPrefill, layer_groups
from simulator.cluster.processor import Processor
from simulator.cluster.records import Records
from simulator.cluster.series import Series
from simulator.cluster.store import SimStore
from simulator.workload import Workload
from springtide.chunking import Chunking
from springtide.clock import Tick
from springtide.ids import AttemptId, BlockKey, InstanceId, NodeId, prefill_side
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.storage import SnapshotPart, Tier

REPORT_EVERY_S = 0.05
"""Nodes report as often where much happens, and at once after a while of nothing (node_runtime.servicer)."""
TICK_S = 1.0
RENEW_S = 10.0


class Cluster:
    def __init__(self, workload: Workload, options: ClusterOptions) -> None:
        self.options = options
        self.workload = workload
        self.loop = Loop()
        self.conductor = ConductorCore(options.conductor)
        self.stores: dict[NodeId, SimStore] = {}
        self.prefills: dict[InstanceId, SimPrefill | SimMixed] = {}
        self.decodes: dict[InstanceId, SimMixed] = {}
        self.records = Records(workload.requests, self.loop.stop)
        self.processor = Processor(self.loop, options.cores)
        self.network = Network(options.hardware.link_bytes_per_s)
        self.gateway = SimGateway(
            self.records,
            options.conductor.block_tokens,
            options.rpc_s,
            options.late_tbt_slo_ms is not None,
            self._num_slots(Role.DECODE) * options.conductor.block_tokens,
            self.loop,
            self._conduct,
            self.prefills,
            self.decodes,
        )
        self.orders = SimOrders(options, self.loop, self.network, self.stores, self._conduct, self._switch)
        self._to_report: set[InstanceId] = set()
        self._names: dict[InstanceId, tuple[InstanceId, ...]] = {}
        """By which the Conductor knows an engine of both roles."""
        self._incarnations: Counter[InstanceId] = Counter()
        for role, count in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
            for number in range(count):
                instance_id = InstanceId(f"{role.value}-{number}")
                self._add_store(instance_id, role)
                self._begin(instance_id, role)
        for number in range(options.instances):
            instance_id = InstanceId(f"instance-{number}")
            self._add_store(instance_id, Role.PREFILL)
            self._begin_mixed(instance_id)
        self.series = Series(self.conductor, self.records, options.sample_every_s)

    def run(self) -> None:
        """Runs until every request has ended."""
        arrivals = iter(range(len(self.records.requests)))

        def arrive(index: int) -> None:
            self._schedule_next(arrivals, arrive)
            self.gateway.arrive(index)

        self._schedule_next(arrivals, arrive)
        self._every(TICK_S, self._tick)
        self._every(RENEW_S, self.gateway.renew)
        self._every(self.options.sample_every_s, lambda: self.series.sample(self.loop.now))
        if self.records.requests:
            self.loop.run()

    def validate(self) -> None:
        """Asserts the invariants of every core."""
        self.conductor.validate()
        for instance in self.instances():
            instance.validate()
            instance.store.pool.validate()

    def instances(self) -> Iterator[SimPrefill | SimMixed]:
        yield from dict.fromkeys((*self.prefills.values(), *self.decodes.values()))

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

    def _begin(self, instance_id: InstanceId, role: Role) -> None:
        """An engine of this role, in the store of its node."""
        store = self.stores[NodeId(instance_id)]
        if role is Role.PREFILL:
            self._add_prefill(instance_id, store)
        else:
            self._add_decode(instance_id, store)
        self._announce_engine(instance_id, role, store)

    def _begin_mixed(self, instance_id: InstanceId) -> None:
        """An engine of both roles: whoever orders prompts of it knows it by a name of its own."""
        store, prefill_id = self.stores[NodeId(instance_id)], prefill_side(instance_id)
        self._add_decode(instance_id, store, pages=self._num_slots(Role.DECODE))
        self.prefills[prefill_id] = self.decodes[instance_id]
        self._names[instance_id] = (prefill_id, instance_id)
        self._announce_engine(instance_id, Role.DECODE, store)
        self._announce_engine(prefill_id, Role.PREFILL, store)

    def _announce_engine(self, instance_id: InstanceId, role: Role, store: SimStore) -> None:
        self._incarnations[instance_id] += 1
        address = str(store.node_id)
        self._conduct(ev.InstanceUp(InstanceRef(instance_id, role, address, store.node_id, address), self._incarnations[instance_id]))
        self._say(instance_id)

    def _add_prefill(self, instance_id: InstanceId, store: SimStore) -> None:
        options = self.options
        self.prefills[instance_id] = SimPrefill(
            instance_id,
            store,
            options.hardware,
            options.stage_shares,
            options.conductor.chunk_tokens,
            options.conductor.chunk_ms,
            options.conductor.block_tokens,
            self.loop,
            partial(self.processor.start, options.pass_contention),
            self.gateway.on_prefill,
            lambda: self._report(instance_id),
        )

    def _add_decode(self, instance_id: InstanceId, store: SimStore, pages: int | None = None) -> None:
        """`pages`: of the accelerators, where the store's slots are the host's memory."""
        options = self.options
        settings = DecodeSettings(
            cost=options.hardware.decode_cost,
            block_tokens=options.conductor.block_tokens,
            max_batch=options.hardware.max_batch,
            eos_token_ids=(),
            ingest_lease_s=options.ingest_lease_s,
            slot_wait_s=options.slot_wait_s,
            overlap=False,
        )
        chunking = Chunking(options.hardware.prefill_cost, options.conductor.chunk_tokens, options.conductor.chunk_ms)
        groups = layer_groups(options.hardware, options.conductor.block_tokens)
        self.decodes[instance_id] = SimMixed(
            instance_id,
            store,
            options.hardware,
            PrefillSettings(chunking, groups, options.conductor.block_tokens, eos_token_ids=()),
            settings,
            options.late_tbt_slo_ms,
            self.loop,
            partial(self.processor.start, options.step_contention),
            self.gateway,
            lambda: self._report(instance_id),
            pages,
        )

    def _num_slots(self, role: Role) -> int:
        options = self.options
        if role is Role.PREFILL:
            num_tokens = options.prefill_tokens or options.hardware.arena_tokens
        else:
            num_tokens = options.decode_tokens or options.hardware.device_tokens
        return max(1, num_tokens // options.conductor.block_tokens)

    def _add_store(self, instance_id: InstanceId, role: Role) -> None:
        options, node_id = self.options, NodeId(instance_id)
        block_tokens = options.conductor.block_tokens
        store = self.stores[node_id] = SimStore(
            node_id,
            self._num_slots(role),
            options.hardware.kv_bytes_per_token * block_tokens,
            options.hardware.num_layers,
            options.eviction,
            self.loop,
            self.network,
            self.stores,
            self._conduct,
            self._keys_of,
        )
        self._announce(store)

    def _announce(self, store: SimStore) -> None:
        self._conduct(ev.StoreWatched(store.node_id, str(store.node_id)))
        pool = store.pool
        self._conduct(SnapshotPart(pool.node_id, pool.incarnation, pool.sequence, tuple(pool.held_keys()), Tier.DRAM, complete=True))

    def _keys_of(self, attempt_id: AttemptId) -> Callable[[int, int], tuple[BlockKey, ...]]:
        request = self.gateway.request_of(attempt_id)
        return lambda begin, end: prompt_keys(request, begin, end, self.options.conductor.block_tokens)

    # ---- roles ----

    def _switch(self, action: ev.SwitchRole) -> None:
        """The instance takes nothing more, ends what it has, and comes up in the other role."""
        instance_id, to = action.instance.instance_id, action.order.to
        self._conduct(ev.InstanceDown(instance_id, self._incarnations[instance_id], leaving=True))
        instance = self.prefills.get(instance_id) or self.decodes[instance_id]
        SimRoleSwitch(instance, action.order.drain_s, self.loop, lambda: self._leave(instance_id, to))

    def _leave(self, instance_id: InstanceId, to: Role) -> None:
        """A store that has the same memory in both roles keeps what it holds."""
        if to is Role.PREFILL:
            self.gateway.on_session_lost(Role.DECODE, instance_id, self.decodes.pop(instance_id).leave())
        else:
            self.gateway.on_session_lost(Role.PREFILL, instance_id, self.prefills.pop(instance_id).leave())
        store = self.stores[NodeId(instance_id)]
        if store.pool.num_slots != self._num_slots(to):
            self._conduct(ev.StoreDown(store.node_id))
            store.renew(self._num_slots(to))
            self.loop.after(self.options.restart_s, lambda: self._announce(store))
        self.loop.after(self.options.restart_s, lambda: self._begin(instance_id, to))

    # ---- the Conductor ----

    def _conduct(self, event: ev.Event) -> list[ev.Action]:
        actions = self.conductor.handle(event, self.loop.now)
        for action in actions:
            if isinstance(action, ev.MoveAttempts):
                self.loop.after(self.options.rpc_s, partial(self.gateway.move, action.attempt_ids))
        return actions

    def _report(self, instance_id: InstanceId) -> None:
        """Something changed: the next report tells of it."""
        if instance_id not in self._to_report:
            self._to_report.add(instance_id)
            self.loop.at((self.loop.now // REPORT_EVERY_S + 1) * REPORT_EVERY_S, lambda: self._say(instance_id))

    def _say(self, instance_id: InstanceId) -> None:
        self._to_report.discard(instance_id)
        for name in self._names.get(instance_id, (instance_id,)):
            if (prefill := self.prefills.get(name)) is not None:
                self._conduct(ev.LoadReported(name, self._incarnations[name], prefill.load(Role.PREFILL)))
            elif (decode := self.decodes.get(name)) is not None:
                self._conduct(ev.LoadReported(name, self._incarnations[name], decode.load(Role.DECODE)))

    def _tick(self) -> None:
        self.orders.give(self._conduct(Tick()))
        self.gateway.tick()
        for instance in self.instances():
            instance.tick()
