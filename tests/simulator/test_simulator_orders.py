"""The Conductor's orders beyond replies, done in virtual time: copies of popular prefixes, and instances that switch their role."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from conductor.core.types.events import Event, Replicate, SwitchRole
from simulator.cluster import Cluster
from simulator.cluster.loop import Loop
from simulator.cluster.network import Network
from simulator.cluster.replication import SimReplication
from simulator.cluster.store import SimStore
from simulator.hardware import load
from simulator.run import Plan, options_of, simulate
from simulator.workload import SimRequest, Workload
from springtide.ids import AttemptId, BlockKey, InstanceId, NodeId
from springtide.protocol.instances import InstanceRef, Role, RoleSwitch
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.storage import BlocksStored

BLOCK = 512
DOCUMENT = 64
"""Blocks: 4.3 GB of KV."""
SLOW = replace(load("a100-llama3-8b"), link_bytes_per_s=1e9)
"""Its links take longer for a document than it takes to compute it."""
SMALL = replace(load("a100-llama2-70b"), max_batch=32)


def request(number: int, arrival_s: float, shared_blocks: int, own_tokens: int, output_tokens: int) -> SimRequest:
    """About the one document, if any."""
    own = range(10**6 + 1000 * number, 10**6 + 1000 * number - (-own_tokens // BLOCK))
    return SimRequest(number, arrival_s, shared_blocks * BLOCK + own_tokens, output_tokens, (*range(shared_blocks), *own))


def poisson(phases: Sequence[tuple[float, float, int, int, int]], first: Sequence[SimRequest] = (), begin_s: float = 0.0) -> Workload:
    """Phases of (requests a second, seconds, shared blocks, own tokens, output tokens in the mean)."""
    rng, requests, now = random.Random(1), list(first), begin_s
    for rate, seconds, shared_blocks, own_tokens, output_tokens in phases:
        end = now + seconds
        while (now := now + rng.expovariate(rate)) < end:
            requests.append(request(len(requests), now, shared_blocks, own_tokens, int(output_tokens * rng.uniform(0.5, 1.5))))
        now = end
    return Workload("test", BLOCK, requests)


def growing_crowd() -> Workload:
    """Some ask about a document that one node has computed; after a minute, many do."""
    return poisson([(4.0, 60.0, DOCUMENT, 1500, 50), (30.0, 30.0, DOCUMENT, 1500, 50)], [request(0, 0.0, DOCUMENT, 1500, 50)], 10.0)


def summary_of(workload: Workload, prefill: int, decode: int, **config: Any) -> dict[str, Any]:
    settings = {"conductor.admission": "baseline", **{name.replace("__", "."): value for name, value in config.items()}}
    return dict(simulate(Plan(workload, SLOW, prefill, decode, config=settings))["summary"])


def cluster_of(workload: Workload, prefill: int, decode: int, plan: dict[str, Any], **config: Any) -> Cluster:
    settings = {name.replace("__", "."): value for name, value in config.items()}
    options = options_of(Plan(workload, SMALL, prefill, decode, config=settings, **plan))
    return Cluster(workload, replace(options, restart_s=20.0))


def assert_one_reply_each(cluster: Cluster) -> None:
    """And that nothing is left behind."""
    cluster.validate()
    records, requests = cluster.records, cluster.workload.requests
    assert records.ended == len(requests)
    for index, asked in enumerate(requests):
        finished = not math.isnan(records.finished_s[index])
        assert finished != (records.rejected(index) is not None)
        assert not finished or records.output_tokens[index] == asked.output_tokens
    cluster.loop.after(1000, cluster.loop.stop)
    cluster.loop.run()
    for store in cluster.stores.values():
        counts = store.pool.counts()
        assert (counts.in_use, counts.quarantined, counts.leases, counts.ingests) == (0, 0, 0, 0)


# ---- copies ----


def test_copies_are_there_before_the_crowd_is() -> None:
    without, copied = (summary_of(growing_crowd(), 8, 4, conductor__replication_rate=rate) for rate in (0, 1 << 30))
    assert without["replicated_bytes"] == 0
    assert copied["replicated_bytes"] > 0
    assert copied["ttft_ms_p50"] < 0.8 * without["ttft_ms_p50"] and copied["ttft_ms_mean"] < without["ttft_ms_mean"]
    assert copied["hit_rate"] > without["hit_rate"]


def test_nothing_is_copied_ahead_where_fetching_is_quick() -> None:
    quick = replace(SLOW, link_bytes_per_s=60e9)
    summary = simulate(Plan(growing_crowd(), quick, 8, 4, config={"conductor.admission": "baseline"}))["summary"]
    assert summary["replicated_bytes"] == 0


class TwoStores:
    """Of 100 slots each, blocks of 1 MB, links of 100 MB/s; the second takes copies at 10 MB/s. The first holds `keys`."""

    def __init__(self, num_blocks: int = 20) -> None:
        self.loop, network = Loop(), Network(100e6)
        self.told: list[Event] = []
        stores: dict[NodeId, SimStore] = {}
        self.first, self.second = (
            SimStore(NodeId(name), 100, 10**6, 4, "lru", self.loop, network, stores, self.told.append, lambda attempt: None)
            for name in ("first", "second")
        )
        stores |= {store.node_id: store for store in (self.first, self.second)}
        self.replication = SimReplication(self.second, stores, 10**6, 10e6, self.loop, network)
        self.keys = tuple(BlockKey(number.to_bytes(16, "big")) for number in range(num_blocks))
        self.ended: list[tuple[float, int, int]] = []
        pool = self.first.pool
        pool.admit_replica(AttemptId("computed"), self.keys, "")
        pool.begin_fetch(AttemptId("computed"), range(num_blocks))
        pool.end_fetch(AttemptId("computed"), num_blocks)
        pool.end_replica(AttemptId("computed"))

    def order(self, num_blocks: int, sources: Sequence[SimStore]) -> None:
        keys = self.keys[:num_blocks]
        named = tuple(PrefixSource(store.node_id, store.node_id, num_blocks) for store in sources)
        order = Replicate(self.second.node_id, self.second.node_id, keys, named, num_blocks * 10**6, 60.0)
        self.replication.take(order, lambda held, fetched: self.ended.append((self.loop.now, held, fetched)))

    def run(self) -> None:
        self.loop.run()
        for store in (self.first, self.second):
            store.pool.validate()
            counts = store.pool.counts()
            assert (counts.in_use, counts.quarantined, counts.leases) == (0, 0, 0)


def test_a_store_takes_copies_at_its_rate_and_tells_of_them_when_they_are_there() -> None:
    stores = TwoStores()
    stores.order(20, [stores.first])
    stores.run()
    ((at, held, fetched),) = stores.ended
    assert (held, fetched) == (20, 20)
    assert at == pytest.approx(1.9 + 0.01), "each block leaves a tenth of a second after the one before, and takes a hundredth"
    (stored,) = (event for event in stores.told if isinstance(event, BlocksStored) and event.node_id == "second")
    assert stored.keys == stores.keys


def test_several_copies_share_the_rate() -> None:
    stores = TwoStores()
    stores.order(20, [stores.first])
    stores.order(10, [stores.first])
    stores.run()
    assert [fetched for _, _, fetched in stores.ended] == [10, 20]
    assert stores.ended[-1][0] == pytest.approx(2.9 + 0.01), "thirty blocks at ten a second"


def test_what_is_here_already_is_not_copied_again() -> None:
    stores = TwoStores()
    stores.order(15, [stores.first])
    stores.run()
    stores.order(20, [stores.first])
    stores.run()
    assert [(held, fetched) for _, held, fetched in stores.ended] == [(15, 15), (20, 5)]


def test_a_copy_fails_when_no_source_has_the_blocks_any_more() -> None:
    stores = TwoStores()
    stores.first.pool.evict(None)
    stores.order(20, [stores.first])
    stores.run()
    assert stores.ended == [(0.0, 0, 0)]


def test_another_source_takes_the_place_of_one_that_has_them_no_more() -> None:
    stores = TwoStores()
    stores.order(20, [stores.second, stores.first])
    stores.run()
    assert [(held, fetched) for _, held, fetched in stores.ended] == [(20, 20)]


def test_a_copy_ends_with_what_has_come_when_the_memory_of_its_source_is_gone() -> None:
    stores = TwoStores()
    stores.order(20, [stores.first])
    stores.loop.at(0.55, lambda: stores.first.renew(100))
    stores.run()
    ((_, held, fetched),) = stores.ended
    assert held == fetched == 7
    assert stores.first.pool.num_held(stores.keys) == 0


# ---- roles ----

BALANCED = {"conductor__pool_balance_after_s": 10.0, "slo__tbt_ms": 30.0, "slo__ttft_ms": 10_000.0}


def to_output_heavy() -> Workload:
    """From long prompts and short answers to the opposite."""
    return poisson([(1.0, 30.0, 0, 8192, 20), (6.0, 90.0, 0, 400, 300)])


def goodput(cluster: Cluster) -> int:
    records, conductor = cluster.records, cluster.options.conductor
    met = (
        ttft_ms <= conductor.ttft_slo_ms and tbt_ms <= conductor.tbt_slo_ms
        for ttft_ms, tbt_ms in zip(records.ttft_ms, records.tbt_ms, strict=True)
    )
    return sum(met)


def test_an_idle_prefill_instance_becomes_a_decode_node_when_outputs_get_long() -> None:
    fixed, balanced = (cluster_of(to_output_heavy(), 3, 1, {}, conductor__pool_balance=on, **BALANCED) for on in (False, True))
    for cluster in (fixed, balanced):
        cluster.run()
        assert_one_reply_each(cluster)
    assert fixed.orders.role_switches == 0
    assert balanced.orders.role_switches == 1
    assert (len(balanced.prefills), len(balanced.decodes)) == (2, 2)
    assert goodput(balanced) > 1.1 * goodput(fixed)


def test_what_is_not_ended_in_time_goes_on_elsewhere() -> None:
    """Two of three decode nodes leave, one after the other, in the middle of what they do."""
    workload = poisson([(2.0, 60.0, 0, 1000, 400)])
    cluster = cluster_of(workload, 1, 3, {}, conductor__admission="baseline")
    in_the_middle: list[int] = []

    def switch(number: int) -> None:
        instance_id = InstanceId(f"decode-{number}")
        in_the_middle.append(cluster.decodes[instance_id].load().running)
        ref = InstanceRef(instance_id, Role.DECODE, instance_id, NodeId(instance_id), instance_id)
        cluster.orders.give([SwitchRole(ref, RoleSwitch(Role.PREFILL, 0.0))])

    cluster.loop.at(20.0, lambda: switch(0))
    cluster.loop.at(35.0, lambda: switch(2))
    cluster.run()
    assert_one_reply_each(cluster)
    assert min(in_the_middle) > 0
    assert cluster.records.completed == len(workload.requests)
    assert sorted(cluster.prefills) == ["decode-0", "decode-2", "prefill-0"]
    assert cluster.prefills[InstanceId("decode-0")].busy_s > 0


@pytest.mark.parametrize("same_memory", [True, False])
def test_a_store_that_has_the_same_memory_in_both_roles_keeps_what_it_holds(same_memory: bool) -> None:
    tokens = {"prefill_tokens": 100 * BLOCK, "decode_tokens": 100 * BLOCK if same_memory else 50 * BLOCK}
    seen = [request(0, 0.0, 20, 100, 5), request(1, 100.0, 20, 100, 5)]
    cluster = cluster_of(Workload("test", BLOCK, seen), 2, 1, tokens)

    def switch() -> None:
        (holder,) = (node_id for node_id in cluster.prefills if cluster.prefills[node_id].store.pool.num_blocks)
        ref = InstanceRef(holder, Role.PREFILL, holder, NodeId(holder), holder)
        cluster.orders.give([SwitchRole(ref, RoleSwitch(Role.DECODE, 30.0))])
        cluster.loop.at(60.0, lambda: holders.append(cluster.stores[NodeId(holder)].pool.num_blocks))

    holders: list[int] = []
    cluster.loop.at(30.0, switch)
    cluster.run()
    assert_one_reply_each(cluster)
    assert holders == [20 if same_memory else 0]
    assert len(cluster.decodes) == 2


def test_a_run_with_orders_repeats_itself() -> None:
    settings = {name.replace("__", "."): value for name, value in BALANCED.items()} | {"conductor.pool_balance": True}
    for plan in (Plan(growing_crowd(), SLOW, 8, 4), Plan(to_output_heavy(), SMALL, 3, 1, config=settings)):
        first, second = (simulate(plan) for _ in range(2))
        assert first["summary"]["replicated_bytes"] + first["summary"]["role_switches"] > 0
        assert first["requests"] == second["requests"]
        assert first["series"] == second["series"]
