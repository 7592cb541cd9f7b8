"""The state of a cluster in parts: all instances, some attempts of everybody, and who holds what, at a thousand instances too."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from itertools import chain
from typing import TypeVar

import pytest

from conductor.core.observation import MOST_ATTEMPTS, MOST_ATTEMPTS_OF_A_TENANT, MOST_PREFIXES, observed_pool, observed_work
from conductor.server.observer import POOL_EVERY_S, WORK_EVERY_S
from springtide.protocol import wire
from springtide.protocol.attempts import Phase
from springtide.protocol.observation import (
    AttemptTable,
    DecisionTable,
    Explain,
    HistoryTable,
    InstanceTable,
    Observe,
    ObservedPart,
    Overview,
    PrefixTable,
    StoreTable,
)
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2 import ScheduleRequest
from springtide.rpc.observation_pb2_grpc import ObserverStub
from springtide.slices import at_once
from tests.support.played_cluster import MODEL, PlayedCluster
from tests.support.scheduling import SOON_S, asking

T = TypeVar("T")
MOST_BYTES = 64 << 10
"""Of a part: whoever writes or reads more than that holds up everybody for more than a millisecond."""


@pytest.fixture(scope="module")
def large() -> PlayedCluster:
    cluster = PlayedCluster(500, 500, rate=350.0)
    cluster.play(6.0)
    return cluster


@pytest.fixture
def small() -> PlayedCluster:
    cluster = PlayedCluster(3, 4, rate=6.0)
    cluster.play(40.0)
    return cluster


def of(kind: type[T], parts: list[ObservedPart]) -> list[T]:
    return [part for part in parts if isinstance(part, kind)]


def parts_of(cluster: PlayedCluster) -> list[ObservedPart]:
    core, now = cluster.core, cluster.clock.now()
    parts = chain(observed_work(core, at_once(core.pool_loads(now)), now), observed_pool(core, now))
    return [part for part in parts if part is not None]


def test_at_a_thousand_instances_all_are_told_and_no_part_is_large(large: PlayedCluster) -> None:
    parts = parts_of(large)
    names = [name for table in of(InstanceTable, parts) for name in table.instance_ids]
    assert sorted(names) == sorted(large.core.state.instances)
    assert sum(len(table.node_ids) for table in of(StoreTable, parts)) == 1000
    assert max(len(wire.OBSERVED_PART.encode(part).SerializeToString()) for part in parts) < MOST_BYTES
    assert len(of(PrefixTable, parts)) <= MOST_PREFIXES


def test_attempts_are_listed_in_turns_by_tenant_the_newest_first(large: PlayedCluster) -> None:
    attempts = [attempt for table in of(AttemptTable, parts_of(large)) for attempt in table.attempts]
    live = Counter(attempt.tenant for attempt in large.core.state.attempts.values())
    listed = Counter(attempt.tenant for attempt in attempts)
    assert len(attempts) <= MOST_ATTEMPTS and set(listed) == set(live)
    for tenant, number in listed.items():
        assert number == live[tenant] or number >= min(MOST_ATTEMPTS_OF_A_TENANT, MOST_ATTEMPTS // len(live))
        newest = [attempt.attempt_id for attempt in large.core.state.attempts.values() if attempt.tenant == tenant][::-1][:number]
        assert [attempt.attempt_id for attempt in attempts if attempt.tenant == tenant] == newest


def test_an_attempt_was_placed_when_its_decision_was_made(small: PlayedCluster) -> None:
    decisions = {decision.attempt_id: decision for decision in small.runner.history.changed_since(0, 10_000)}
    attempts = [attempt for table in of(AttemptTable, parts_of(small)) for attempt in table.attempts]
    assert attempts
    for attempt in attempts:
        decision = decisions[attempt.attempt_id]
        assert attempt.placed_at == pytest.approx(decision.decided_at)
        assert (attempt.phase is Phase.DECODE) == (attempt.first_token_at > 0)
        assert (attempt.prefill_id, attempt.decode_id, attempt.prediction) == (decision.prefill_id, decision.decode_id, decision.prediction)


def test_popular_prefixes_are_told_with_who_holds_them_in_which_tier(small: PlayedCluster) -> None:
    small.to_ssd("prefill-1", 0.5)
    index, now = small.core.index, small.clock.now()
    told = {prefix.key: prefix for table in of(PrefixTable, parts_of(small)) for prefix in table.prefixes}
    popular = at_once(small.core.replication.most_popular(MOST_PREFIXES, now))
    assert popular and list(told) == [prefix.keys[-1] for prefix in popular]
    for prefix in popular:
        row = told[prefix.keys[-1]]
        held = {node_id: sum(index.match([key]).get(node_id, 0) for key in prefix.keys) for node_id, _ in index.live_nodes()}
        in_dram = {node_id: sum(index.match_in_dram([key]).get(node_id, 0) for key in prefix.keys) for node_id in held}
        assert dict(zip(row.node_ids, row.held, strict=True)) == {node_id: blocks for node_id, blocks in held.items() if blocks}
        assert row.held_in_dram == tuple(in_dram[node_id] for node_id in row.node_ids)
        assert row.tenant in ("acme", "globex", "initech") and row.num_whole == sum(blocks == row.blocks for blocks in held.values())


@pytest.fixture
async def observer(small: PlayedCluster) -> AsyncIterator[ObserverStub]:
    async with small.serving() as address, connect(address) as channel:
        yield ObserverStub(channel)


async def observed(observer: ObserverStub, asked: Observe) -> list[ObservedPart]:
    return [wire.OBSERVED_PART.decode(part) async for part in observer.Observe(wire.OBSERVE.encode(asked))]


async def test_what_one_gateway_is_given_all_others_are_within_a_second(small: PlayedCluster, observer: ObserverStub) -> None:
    first = await observed(observer, Observe())
    small.silence("prefill-2")
    small.play(WORK_EVERY_S / 2)
    again = await observed(observer, Observe())
    assert of(InstanceTable, again) == of(InstanceTable, first) and of(AttemptTable, again) == of(AttemptTable, first)
    small.play(WORK_EVERY_S)
    later = await observed(observer, Observe())
    assert of(InstanceTable, later) != of(InstanceTable, first)
    assert of(StoreTable, later) == of(StoreTable, first), "what is held is looked up more seldom"
    small.play(POOL_EVERY_S)
    assert of(StoreTable, await observed(observer, Observe())) != of(StoreTable, first)


async def test_who_has_the_history_is_given_what_is_new_and_who_has_another_ones_all(small: PlayedCluster, observer: ObserverStub) -> None:
    parts = await observed(observer, Observe())
    (overview,) = of(Overview, parts)
    assert parts[0] is overview and overview.status.model == MODEL
    decisions = [decision for table in of(DecisionTable, parts) for decision in table.decisions]
    buckets = [bucket for table in of(HistoryTable, parts) for bucket in table.buckets]
    assert len(decisions) > 100 and len(buckets) > 3
    same = Observe(overview.history, overview.version, buckets[-1].number)
    news = await observed(observer, same)
    assert not of(DecisionTable, news)
    assert [bucket.number for table in of(HistoryTable, news) for bucket in table.buckets] == [buckets[-1].number]
    another = await observed(observer, Observe(overview.history + 1, overview.version, buckets[-1].number))
    assert sum(len(table.decisions) for table in of(DecisionTable, another)) == len(decisions)


async def test_a_decision_is_explained_by_its_requests_id(small: PlayedCluster, observer: ObserverStub) -> None:
    decision = small.runner.history.changed_since(0, 1)[0]
    told = wire.EXPLANATION.decode(await observer.Explain(wire.EXPLAIN.encode(Explain(decision.request_id))))
    assert [entry.decision for entry in told.decisions] == [decision]
    assert not wire.EXPLANATION.decode(await observer.Explain(wire.EXPLAIN.encode(Explain("chatcmpl-none")))).decisions


async def test_a_decision_can_be_explained_however_many_have_come_since(small: PlayedCluster) -> None:
    small.play(2.0)
    async with small.serving() as address, connect(address) as channel:
        async with asking(channel) as conductor:
            for number in range(60):
                asked = ScheduleRequest(attempt_id=f"a{number}", request_id=f"r{number}", num_tokens=5, max_new_tokens=5, gateway_id="g")
                assert (await conductor.ask(asked, SOON_S)).HasField("assignment")
        observer = ObserverStub(channel)
        explained = [wire.EXPLANATION.decode(await observer.Explain(wire.EXPLAIN.encode(Explain(f"r{number}")))) for number in range(60)]
    assert all(told.decisions[0].prefills and told.decisions[0].decodes for told in explained)
