"""Prefixes that are asked for again and again, and held by congested nodes only, are copied ahead."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from conductor_support import SETTINGS, ask, assigned, bring_up, hold, keys_of, make_core, report, request

from conductor.core.conductor import ConductorCore
from conductor.core.recording import Recorder, replay
from conductor.core.replication.planner import ASKS_A_COPY, CopyBudget
from conductor.core.replication.popularity import TIME_CONSTANT_S, Popularity
from conductor.core.types.events import Action, Event, InstanceDown, Replicate, ReplicationEnded, StoreDown, TickPart
from springtide.clock import Tick
from springtide.ids import InstanceId, NodeId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.slices import at_once

DOCUMENT = keys_of(100)
BLOCK_BYTES = 400
MANY = int(3 * ASKS_A_COPY)
RATES = {"replication_bytes_per_s": 1e6, "replication_node_bytes_per_s": 1e6, "transfer_bytes_per_s": 1e5}


def popular_core(prefills: tuple[str, ...] = ("p0", "p1", "p2"), queue_ms: float = 5_000.0, **changes: Any) -> ConductorCore:
    """The document is at p0, whose queue is long; fetching it takes 400 ms, computing it as well."""
    core = make_core(prefills, **{**RATES, **changes})
    hold(core, "p0", DOCUMENT)
    report(core, "p0", Role.PREFILL, queue_ms=queue_ms)
    return core


def ask_often(core: ConductorCore, count: int = MANY, now: float = 0.0, **fields: Any) -> None:
    """Asks for the document, each time with another question behind it; then all is done, save at p0."""
    for turn in range(count):
        asked = request(f"{now}-{turn}", 405, **fields)
        ask(core, asked, now)
        core.handle(Progress(asked.attempt_id, Phase.FAILED), now)
    report(core, "p0", Role.PREFILL, now=now, queue_ms=5_000.0)


def tick(core: ConductorCore, now: float) -> list[Replicate]:
    orders = [action for action in core.handle(Tick(), now) if isinstance(action, Replicate)]
    core.validate()
    return orders


def test_a_popular_prefix_of_a_congested_holder_is_copied_to_the_least_loaded_node_that_lacks_it() -> None:
    core = popular_core()
    ask_often(core)
    report(core, "p1", Role.PREFILL, queue_ms=2_000.0)
    report(core, "p2", Role.PREFILL, queue_ms=1_000.0)
    (order,) = tick(core, 0.1)
    assert (order.node_id, order.store_address) == ("p2", "p2:2")
    assert list(order.keys) == DOCUMENT
    assert [(source.node_id, source.store_address, source.num_blocks) for source in order.sources] == [("p0", "p0:2", 100)]
    assert order.num_bytes == 100 * BLOCK_BYTES


def in_parts(core: ConductorCore, now: float) -> Iterator[list[Replicate]]:
    """What is ordered in each part of a tick."""
    while True:
        yield [action for action in core.handle(TickPart(), now) if isinstance(action, Replicate)]
        core.validate()
        if not core.ticks:
            return


def test_between_two_parts_of_a_tick_anybody_may_go_and_is_ordered_nothing_then() -> None:
    def made() -> ConductorCore:
        core = popular_core()
        hold(core, "s0", [])
        ask_often(core)
        return core

    parts = list(in_parts(made(), 0.1))
    ordered_in = next(part for part, orders in enumerate(parts) if orders)
    assert {order.node_id for order in parts[ordered_in]} == {"p1", "s0"}
    for name, when in itertools.product(("p0", "p1", "p2", "s0"), range(len(parts))):
        core, orders = made(), list[Replicate]()
        for part, found in enumerate(in_parts(core, 0.1)):
            orders += found
            if part == when:
                core.handle(StoreDown(NodeId(name)), 0.1)
                core.handle(InstanceDown(InstanceId(name), 1), 0.1)
        taking_part = {order.node_id for order in orders} | {source.node_id for order in orders for source in order.sources}
        assert taking_part if when >= ordered_in else name not in taking_part


def test_a_copy_is_given_its_time_from_when_it_is_ordered() -> None:
    core = popular_core(("p0", "p1"))
    ask_often(core)
    core.handle(TickPart(), 0.1)
    orders = list[Action]()
    while core.ticks:
        orders += core.handle(TickPart(), 1.1)
    (order,) = orders
    assert isinstance(order, Replicate)
    for now, in_flight in ((1.0 + order.within_s, 1), (1.2 + order.within_s, 0)):
        tick(core, now)
        assert core.replication.in_flight == in_flight


def test_only_the_missing_part_is_counted() -> None:
    core = popular_core(("p0", "p1"))
    hold(core, "p1", DOCUMENT[:20])
    ask_often(core)
    (order,) = tick(core, 0.1)
    assert (len(order.keys), order.num_bytes) == (100, 80 * BLOCK_BYTES)


@pytest.mark.parametrize(
    "changes",
    [
        {"replication_bytes_per_s": 0.0},
        {"policy": "cache-aware"},
        {"replication_gain_ms": 500.0},
        {"transfer_bytes_per_s": 1e9},
    ],
    ids=["switched off", "the policy does not fetch", "computing is not much slower", "fetching is quick"],
)
def test_no_copy_is_made_where_it_is_not_wanted_or_spares_nothing(changes: dict[str, Any]) -> None:
    core = popular_core(**changes)
    ask_often(core)
    assert tick(core, 0.1) == []


def test_a_holder_that_is_not_congested_keeps_its_prefix_to_itself() -> None:
    core = popular_core()
    ask_often(core)
    for name in ("p0", "p1", "p2"):
        report(core, name, Role.PREFILL, queue_ms=50.0)
    assert tick(core, 0.1) == []


def test_a_holder_that_short_prompts_hardly_wait_at_is_not_congested_for_them() -> None:
    """With the document cached, a question of some tokens overtakes the long prompts of which the queue is made."""
    core = popular_core()
    for _ in range(200):
        core.state.queue_bias.observe(5.0, ahead_ms=5_000.0, waited_ms=100.0)
    ask_often(core)
    assert tick(core, 0.1) == []
    for _ in range(400):
        core.state.queue_bias.observe(5.0, ahead_ms=5_000.0, waited_ms=5_000.0)
    assert len(tick(core, 0.2)) == 1


def test_what_is_asked_for_once_in_a_while_is_not_copied() -> None:
    core = popular_core()
    for turn in range(MANY):
        ask_often(core, 1, now=turn * TIME_CONSTANT_S / 2)
        assert tick(core, turn * TIME_CONSTANT_S / 2) == []


def test_a_request_that_is_scheduled_anew_asks_for_nothing_new() -> None:
    core = popular_core()
    ask_often(core, accepted=True)
    assert tick(core, 0.1) == []


def test_there_are_never_more_copies_than_are_asked_for() -> None:
    names = tuple(f"p{number}" for number in range(12))
    core = popular_core(names, replication_bytes_per_s=1e9)
    ask_often(core, int(4 * ASKS_A_COPY) + 1)
    holders, now = {"p0"}, 0.0
    for _ in range(20):
        now += 0.05
        for name in names:
            report(core, name, Role.PREFILL, now=now, queue_ms=5_000.0 if name in holders else 0.0)
        orders = tick(core, now)
        assert len(orders) <= len(holders), "each order has a source of its own"
        for order in orders:
            holders.add(order.node_id)
            hold(core, order.node_id, DOCUMENT)
            core.handle(ReplicationEnded(order.node_id, order.keys[-1], 100), now)
    assert len(holders) == 4


def test_an_order_is_not_repeated_while_it_is_in_flight_nor_soon_after_it_was_refused() -> None:
    core = popular_core(("p0", "p1"))
    ask_often(core, 100)
    (order,) = tick(core, 0.1)
    assert core.replication.in_flight == 1
    ask_often(core, 100, now=5.0)
    assert tick(core, 5.0) == []
    core.handle(ReplicationEnded(order.node_id, order.keys[-1], failed=True), 6.0)
    assert core.replication.in_flight == 0
    ask_often(core, 100, now=30.0)
    assert tick(core, 30.0) == []
    ask_often(core, 100, now=70.0)
    assert [again.node_id for again in tick(core, 70.0)] == ["p1"]


def test_an_order_of_which_nothing_is_heard_is_given_up() -> None:
    core = popular_core(("p0", "p1"))
    ask_often(core, 100)
    assert tick(core, 0.1)
    tick(core, 40.0)
    assert core.replication.in_flight == 0
    core.handle(ReplicationEnded(NodeId("p1"), DOCUMENT[-1], 100), 41.0)
    core.validate()


def test_a_node_without_room_is_left_alone() -> None:
    core = popular_core(("p0", "p1"))
    ask_often(core)
    report(core, "p1", Role.PREFILL, slots_total=399)
    assert tick(core, 0.1) == []
    report(core, "p1", Role.PREFILL, slots_total=1_000, slots_available=99)
    assert tick(core, 0.2) == []
    report(core, "p1", Role.PREFILL, slots_total=1_000, slots_available=100)
    assert len(tick(core, 0.3)) == 1


def test_several_prefixes_are_copied_at_a_time_each_to_a_node_of_its_own() -> None:
    core = popular_core(("p0", "p1", "p2"), replication_bytes_per_s=1e9)
    other = keys_of(100, text=1)
    hold(core, "p0", [*DOCUMENT, *other])
    ask_often(core)
    ask_often(core, text=1, now=0.1)
    orders = tick(core, 0.2)
    assert {order.node_id for order in orders} == {"p1", "p2"}
    assert {order.keys[-1] for order in orders} == {DOCUMENT[-1], other[-1]}


def test_a_store_without_an_engine_has_a_copy_of_what_is_popular_whether_holders_are_congested_or_not() -> None:
    core = popular_core(("p0", "p1"))
    hold(core, "s0", [])
    ask_often(core)
    report(core, "p0", Role.PREFILL)
    (order,) = tick(core, 0.1)
    assert (order.node_id, order.store_address) == ("s0", "s0:2")
    assert list(order.keys) == DOCUMENT and [source.node_id for source in order.sources] == ["p0"]
    assert tick(core, 0.2) == []
    hold(core, "s0", DOCUMENT)
    core.handle(ReplicationEnded(order.node_id, order.keys[-1], 100), 0.3)
    ask_often(core, now=70.0)
    report(core, "p0", Role.PREFILL, now=70.0)
    assert tick(core, 70.0) == []


def test_one_store_without_an_engine_has_a_copy_and_another_when_that_is_gone() -> None:
    core = popular_core(("p0",))
    hold(core, "s0", [])
    hold(core, "s1", [])
    ask_often(core)
    (first,) = tick(core, 0.1)
    hold(core, first.node_id, DOCUMENT)
    core.handle(ReplicationEnded(first.node_id, first.keys[-1], 100), 0.2)
    assert tick(core, 0.3) == []
    core.handle(StoreDown(first.node_id), 1.0)
    ask_often(core, now=1.0)
    (second,) = tick(core, 2.0)
    assert {first.node_id, second.node_id} == {"s0", "s1"}


def test_what_a_store_without_an_engine_has_no_room_for_is_not_sent_there_again_soon() -> None:
    core = popular_core(("p0",))
    hold(core, "s0", [])
    ask_often(core)
    (order,) = tick(core, 0.1)
    core.handle(ReplicationEnded(order.node_id, order.keys[-1], failed=True), 0.2)
    ask_often(core, now=30.0)
    assert tick(core, 30.0) == []
    ask_often(core, now=61.0)
    assert len(tick(core, 61.0)) == 1


def test_what_a_store_without_an_engine_holds_is_fetched_when_everybody_else_has_lost_it() -> None:
    core = popular_core(("p0", "p1"), transfer_bytes_per_s=1e6)
    hold(core, "s0", DOCUMENT)
    core.handle(StoreDown(NodeId("p0")), 0.1)
    core.handle(InstanceDown(InstanceId("p0"), 1), 0.1)
    placed = assigned(core, request("after", 405), 0.2)
    assert placed.prefill.instance_id == "p1"
    assert [source.node_id for source in placed.sources] == ["s0"]


def test_the_store_of_an_engine_that_is_away_for_a_moment_is_not_without_one() -> None:
    core = popular_core(("p0", "p1"))
    core.handle(InstanceDown(InstanceId("p1"), 1), 0.0)
    ask_often(core)
    assert tick(core, 0.1) == []


def test_a_record_replays_to_the_same_orders() -> None:
    lines: list[str] = []

    class RecordedCore(ConductorCore):
        def handle(self, event: Event, now: float) -> list[Action]:
            recorder.event(event, now)
            return super().handle(event, now)

    core = RecordedCore(replace(SETTINGS, **RATES))
    recorder = Recorder(core.settings, lines.append)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        bring_up(core, name, role)
    hold(core, "p0", DOCUMENT)
    ask_often(core)
    (order,) = tick(core, 0.1)
    core.handle(ReplicationEnded(order.node_id, order.keys[-1], 100), 0.2)
    replayed = [action for _, _, actions in replay(lines) for action in actions]
    assert [action for action in replayed if isinstance(action, Replicate)] == [order]


def test_in_the_long_run_no_more_is_copied_than_the_rates_allow() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    budget, nodes = CopyBudget(1000.0, 300.0), [NodeId(f"n{number}") for number in range(6)]
    sent, given = 0, dict.fromkeys(nodes, 0)
    for second in range(200):
        for _ in range(20):
            ends, size = rng.sample(nodes, 2), rng.randrange(1, 900)
            if budget.allows(ends, float(second)):
                budget.spend(ends, size, float(second))
                sent += size
                for node in ends:
                    given[node] += size
        budget.forget_past(float(second))
        assert sent <= 1000 * (second + 1) + 900
        assert max(given.values()) <= 300 * (second + 1) + 900
    assert sent > 0.8 * min(1000, 300 * len(nodes) / 2) * 200


def test_a_popular_prefix_outlives_a_flood_of_others_in_bounded_memory() -> None:
    popularity = Popularity(keep_from=8.0, generation=100, most_blocks=500)
    popular = keys_of(50)
    for turn in range(2_000):
        popularity.ask(keys_of(2, text=1 + turn), [1, 2], turn / 100)
        if turn % 40 == 0:
            popularity.ask(popular, [50], turn / 100)
        popularity.validate()
    (found,) = at_once(popularity.most_popular(10, 20.0))
    assert list(found.keys) == popular
    assert 40 < found.asks < 50


def test_the_most_popular_of_thousands_are_found_in_parts_between_which_some_are_forgotten() -> None:
    popularity, chance = Popularity(keep_from=2.0, generation=2000), random.Random(5)
    prefixes = [keys_of(1, text=number) for number in range(1000)]
    asks = {keys[0]: 2 + chance.randrange(1000) for keys in prefixes}
    for keys in prefixes:
        for _ in range(asks[keys[0]]):
            popularity.ask(keys, [1], 0.0)
    most = sorted(asks, key=lambda end: (asks[end], end), reverse=True)[:20]
    assert [found.keys[0] for found in at_once(popularity.most_popular(20, 0.0))] == most
    looking = popularity.most_popular(20, 0.0)
    next(looking)
    for number in range(5000):
        popularity.ask(keys_of(1, text=2000 + number), [1], 0.0)
    assert at_once(looking) == [], "they were asked for before two generations of others"
    popularity.validate()


def test_a_popular_prefix_tells_how_much_of_their_prompts_its_askers_have_left() -> None:
    popularity = Popularity(keep_from=2.0)
    for blocks in (30, 20, 40):
        popularity.ask(keys_of(blocks), [20], 0.0)
    (found,) = at_once(popularity.most_popular(10, 5.0))
    assert found.rest_blocks == pytest.approx(10)


def test_prefixes_that_are_asked_for_no_more_make_room_for_others() -> None:
    popularity = Popularity(keep_from=2.0, most_blocks=10)
    for turn in range(4):
        popularity.ask(keys_of(8, text=turn), [8], 0.0)
        popularity.ask(keys_of(8, text=turn), [8], 0.0)
    assert len(at_once(popularity.most_popular(10, 0.0))) == 1
    at_once(popularity.forget_unpopular(1_000.0))
    assert at_once(popularity.most_popular(10, 1_000.0)) == []
    popularity.ask(keys_of(8, text=9), [8], 1_000.0)
    popularity.ask(keys_of(8, text=9), [8], 1_000.0)
    assert [list(found.keys) for found in at_once(popularity.most_popular(10, 1_000.0))] == [keys_of(8, text=9)]
    popularity.validate()
