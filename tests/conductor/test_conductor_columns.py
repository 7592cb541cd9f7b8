"""The columns that decisions are made from, against the instances they stand for; and what decisions cost at scale."""

from __future__ import annotations

import json
import random

import pytest
from conductor_support import ask, bring_up, hold, keys_of, make_core, report, request
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.conductor import ConductorCore
from conductor.core.placement.policy import POLICIES
from conductor.core.placement.scheduler import decide
from conductor.core.state import Instance
from conductor.core.types.decision import Alternatives, Placement
from conductor.core.types.events import InstanceDown, InstanceUp, StoreDown
from springtide.clock import Tick
from springtide.cost import DecodeCost, PrefillCost
from springtide.ids import InstanceId, NodeId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import InstanceRef, Role

PREFILLS, DECODES = ["p0", "p1", "p2"], ["d0", "d1"]


def anything(core: ConductorCore, chance: random.Random, step: int, now: float) -> None:
    """One event of those that change what is known of an instance."""
    name = chance.choice(PREFILLS + DECODES)
    role = Role.PREFILL if name in PREFILLS else Role.DECODE
    match chance.randrange(7):
        case 0 | 1:
            cost = (
                {"prefill_cost": PrefillCost(chance.random(), chance.random(), 1e-5 * chance.random())}
                if role is Role.PREFILL
                else {"decode_cost": DecodeCost(chance.random(), chance.random(), chance.random())}
            )
            load = {"queue_ms": 900 * chance.random(), "running": chance.randrange(9), "tokens": chance.randrange(9000), "max_batch": 4}
            report(core, name, role, now, **load, **cost, attempt_ids=frozenset(list(core.state.attempts)[:2]))
        case 2 | 3:
            ask(core, request(f"a{step}", num_tokens=chance.randrange(1, 900), text=step), now)
        case 4:
            for attempt_id in sorted(core.state.attempts)[:1]:
                core.handle(Progress(attempt_id, chance.choice([Phase.DECODE, Phase.FINISHED, Phase.FAILED])), now)
        case 5:
            if chance.random() < 0.3:
                core.handle(InstanceDown(InstanceId(name), 1), now)
            else:
                bring_up(core, name, role, now=now)
        case 6:
            core.handle(StoreDown(NodeId(name)) if chance.random() < 0.3 else Tick(), now)


def tbt_ms(instance: Instance, more_tokens: int) -> tuple[float, int]:
    """Predicted time between tokens, and the batch, once everything promised and one more attempt of `more_tokens` are in it.

    Attempts beyond the largest batch wait for a place in it.
    """
    cost = instance.load.decode_cost
    assert cost is not None, f"{instance.ref.instance_id} has reported no decode cost"
    batch = instance.load.running + 1 + len(instance.arriving)
    context = instance.load.tokens + more_tokens + sum(attempt.num_tokens for attempt in instance.arriving.values())
    largest = instance.load.max_batch or batch
    if batch <= largest:
        return cost.predict_ms(batch, context), batch
    turns = batch / largest
    return cost.predict_ms(largest, int(context / turns)), batch


def test_an_instance_that_comes_back_at_another_node_is_matched_with_that_nodes_store() -> None:
    core = make_core(["p0", "p1"], ["d0"])
    keys = keys_of(4)
    hold(core, "p1", keys)
    asked = request("a", num_tokens=4 * core.settings.block_tokens + 1)
    assert [e.local_blocks for e in core.scheduler.estimate(asked, core.state.output_tokens(asked), 0, 0.0, 1.0).prefills] == [0, 4]
    core.handle(InstanceDown(InstanceId("p0"), 1), 1.0)
    core.handle(InstanceUp(InstanceRef(InstanceId("p0"), Role.PREFILL, "p0:1", NodeId("p1"), "p1:2"), 2), 1.0)
    report(core, "p0", Role.PREFILL, now=1.0, incarnation=2)
    assert [e.local_blocks for e in core.scheduler.estimate(asked, core.state.output_tokens(asked), 1, 0.0, 1.0).prefills] == [4, 4]


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_estimate_is_that_of_its_instance(seed: int) -> None:
    chance = random.Random(seed)
    core = make_core(PREFILLS, DECODES, admission="baseline")
    now = 0.0
    for step in range(40):
        now += chance.random()
        for event in range(chance.randrange(1, 5)):
            anything(core, chance, 5 * step + event, now)
        probe = request(f"probe{step}", num_tokens=chance.randrange(1, 900), text=-1)
        alternatives = core.scheduler.estimate(probe, core.state.output_tokens(probe), step, 0.0, now)
        ready = {
            role: [instance for instance in core.state.of_role(role) if core.scheduler.ready(instance)]
            for role in (Role.PREFILL, Role.DECODE)
        }
        assert [e.instance_id for e in alternatives.prefills] == [i.ref.instance_id for i in ready[Role.PREFILL]]
        queues_ms = [instance.queue_ms(now) for instance in ready[Role.PREFILL]]
        assert core.scheduler.ready_prefills().instances.queue_ms_at(now).tolist() == pytest.approx(queues_ms)
        assert [e.instance_id for e in alternatives.decodes] == [i.ref.instance_id for i in ready[Role.DECODE]]
        for instance, prefill in zip(ready[Role.PREFILL], alternatives.prefills, strict=True):
            cost = instance.load.prefill_cost
            assert cost is not None
            assert prefill.queue_ms == pytest.approx(instance.queue_ms(now))
            assert prefill.prefill_ms == pytest.approx(core.state.prefill_ms(cost, probe.num_tokens, 0))
        for instance, decode in zip(ready[Role.DECODE], alternatives.decodes, strict=True):
            assert (decode.tbt_ms, decode.batch) == pytest.approx(tbt_ms(instance, probe.num_tokens))
            assert (decode.slots_free, decode.slots_total) == (instance.slots_free(), instance.load.slots_total)


def busy_core(num_instances: int, policy: str, seed: int) -> ConductorCore:
    chance = random.Random(seed)
    prefills, decodes = ([f"{role}{number}" for number in range(num_instances // 2)] for role in "pd")
    core = make_core(prefills, decodes, policy=policy, admission="baseline")
    for name in prefills:
        report(core, name, Role.PREFILL, queue_ms=chance.choice([0.0, 100.0, 300.0]))
        hold(core, name, keys_of(chance.choice([0, 0, 5, 50, 90])), sequence=1)
    for name in decodes:
        report(core, name, Role.DECODE, running=chance.randrange(3), tokens=chance.randrange(3) * 100)
    return core


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_instances", [4, 200])
def test_any_policys_decision_among_many_is_replayed_from_its_log_line(policy: str, num_instances: int) -> None:
    core = busy_core(num_instances, policy, seed=num_instances)
    for number in range(30):
        decided = ask(core, request(f"a{number}", avoid=frozenset({InstanceId("d0"), InstanceId("p1")})))
        line = decided.alternatives.to_json()
        assert isinstance(decided.decision, Placement)
        assert decide(Alternatives.from_json(line)) == decided.decision
        assert Alternatives.from_json(line).to_json() == line


def test_what_a_decision_rested_on_stays_as_it_was() -> None:
    core = busy_core(4, "kvcache-centric", seed=1)
    decided = ask(core, request("a"))
    before = decided.alternatives.to_json()
    for number in range(10):
        ask(core, request(f"b{number}"))
    report(core, "p0", Role.PREFILL, queue_ms=5000.0, slots_total=77)
    ask(core, request("c"))
    assert decided.alternatives.to_json() == before


def test_random_spreads_over_all_and_depends_on_the_attempt_alone() -> None:
    core = busy_core(20, "random", seed=2)
    replies = {name: ask(core, request(name)) for name in (f"a{number}" for number in range(200))}
    places = {name: (decided.decision.prefill.instance_id, decided.decision.decode.instance_id) for name, decided in replies.items()}
    assert len(set(places.values())) > 60
    again = busy_core(20, "random", seed=3)
    assert all(ask(again, request(name)).decision.prefill.instance_id == prefill for name, (prefill, _) in places.items())


def test_a_log_line_has_every_instance_in_columns() -> None:
    line = json.loads(ask(busy_core(200, "kvcache-centric", seed=4), request("a")).alternatives.to_json())
    assert len(line["prefills"]["ttft_ms"]) == len(line["decodes"]["tbt_ms"]) == 100


def test_a_million_tokens_are_scheduled_like_any_other_prompt() -> None:
    core = make_core(["p0", "p1"], ["d0"], admission="baseline")
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        report(core, name, role, slots_total=300_000, slots_available=300_000)
    hold(core, "p1", keys_of(200_000), sequence=1)
    decided = ask(core, request("a", num_tokens=1_000_001))
    assert isinstance(decided.decision, Placement)
    assert (decided.decision.prefill.instance_id, decided.decision.prefill.local_blocks) == ("p1", 200_000)
