"""Algorithm 1 by hand. 400 prompt tokens are 100 blocks; a token takes 1 ms to compute and 0.1 ms to fetch."""

from __future__ import annotations

import pytest
from conductor_support import ask, assigned, hold, keys_of, make_core, report, request

from conductor.core.conductor import ConductorCore
from conductor.core.placement.policy import POLICIES
from conductor.core.placement.scheduler import decide
from conductor.core.types.decision import Alternatives, Placement, PrefillEstimate
from conductor.core.types.events import StoreDown
from springtide.cost import PrefillCost
from springtide.ids import AttemptId, InstanceId, NodeId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import PrefixSource


def estimates(core: ConductorCore, attempt: str = "probe", **fields: object) -> dict[str, PrefillEstimate]:
    return {estimate.instance_id: estimate for estimate in ask(core, request(attempt, **fields)).alternatives.prefills}


def test_an_idle_cluster_sends_a_prompt_to_where_its_prefix_is() -> None:
    core = make_core()
    hold(core, "p1", keys_of(50))
    assignment = assigned(core, request("a"))
    assert (assignment.prefill.instance_id, assignment.local_blocks, assignment.sources) == ("p1", 50, ())
    assert assignment.predicted_ttft_ms == pytest.approx(401 - 200)


def test_a_queue_at_the_holder_sends_it_elsewhere_with_the_prefix_fetched() -> None:
    core = make_core()
    hold(core, "p0", keys_of(50))
    report(core, "p0", Role.PREFILL, queue_ms=100)
    assignment = assigned(core, request("a"))
    assert assignment.prefill.instance_id == "p1"
    assert assignment.sources == (PrefixSource(NodeId("p0"), "p0:2", 50),)
    assert assignment.predicted_ttft_ms == pytest.approx(20 + 201)


def test_a_prefix_that_is_not_much_longer_elsewhere_is_not_fetched() -> None:
    core = make_core(kvcache_balancing_threshold=1.5)
    hold(core, "p0", keys_of(59))
    hold(core, "p1", keys_of(40))
    assert estimates(core)["p1"].branch == "cache-aware"
    hold(core, "p0", keys_of(60), sequence=1)
    assert estimates(core)["p1"].branch == "fetch"


def test_what_is_computed_sooner_than_fetched_is_computed() -> None:
    core = make_core(transfer_bytes_per_s=50_000)
    hold(core, "p0", keys_of(50))
    estimate = estimates(core)["p1"]
    assert (estimate.branch, estimate.source_id, estimate.transfer_ms, estimate.prefill_ms) == ("recompute", None, 0.0, 401.0)


def test_a_prefix_may_come_from_a_decode_nodes_store() -> None:
    core = make_core(prefills=["p0"])
    hold(core, "d0", keys_of(80))
    assignment = assigned(core, request("a"))
    assert assignment.sources == (PrefixSource(NodeId("d0"), "d0:2", 80),)


def test_of_several_holders_the_least_busy_one_is_the_source() -> None:
    core = make_core(prefills=["p0"], decodes=["d0", "d1"])
    hold(core, "d0", keys_of(50))
    hold(core, "d1", keys_of(50))
    sources = [assigned(core, request(name)).sources for name in "ab"]
    assert sorted(best.node_id for best, _ in sources) == ["d0", "d1"]


def test_other_holders_stand_by_in_case_the_chosen_source_fails() -> None:
    core = make_core(prefills=["p0"], decodes=["d0", "d1", "d2", "d3"])
    hold(core, "p0", keys_of(10))
    for node_id, blocks in (("d0", 50), ("d1", 40), ("d2", 10), ("d3", 30)):
        hold(core, node_id, keys_of(blocks))
    sources = assigned(core, request("a")).sources
    assert [(source.node_id, source.num_blocks) for source in sources] == [("d0", 50), ("d1", 40), ("d3", 30)], "not d2: p0 has as much"


def test_transfers_in_flight_make_a_link_slower_until_they_end() -> None:
    core = make_core(prefills=["p0"])
    hold(core, "d0", keys_of(50))
    assert estimates(core, "a")["p0"].transfer_ms == pytest.approx(20)
    assert estimates(core, "b")["p0"].transfer_ms == pytest.approx(40)
    for name in "ab":
        core.handle(Progress(AttemptId(name), Phase.DECODE), 0.1)
    assert estimates(core, "c")["p0"].transfer_ms == pytest.approx(20)


def test_a_measured_link_is_believed_more_than_the_assumption() -> None:
    core = make_core(prefills=["p0"])
    hold(core, "d0", keys_of(50))
    assigned(core, request("a"))
    core.handle(Progress(AttemptId("a"), Phase.DECODE, cached_tokens=200, remote_tokens=200, fetch_ms=5.0), 0.1)
    assert estimates(core, "b")["p0"].transfer_ms == pytest.approx(5.0)


def test_the_last_token_is_always_computed() -> None:
    core = make_core(prefills=["p0"])
    hold(core, "p0", keys_of(100))
    estimate = estimates(core, num_tokens=400)["p0"]
    assert (estimate.local_blocks, estimate.prefill_ms) == (99, 4.0)


def test_every_chunk_pays_the_fixed_cost() -> None:
    core = make_core(prefills=["p0"], chunk_tokens=100)
    report(core, "p0", Role.PREFILL, prefill_cost=PrefillCost(7.0, 1.0, 0.0))
    assert estimates(core, num_tokens=401)["p0"].prefill_ms == pytest.approx(401 + 5 * 7)


def test_a_hot_prefix_spreads_once_its_holder_queues() -> None:
    """The second prefill node takes the prompt as soon as waiting for the first costs more than the fetch."""
    core = make_core(ttft_slo_ms=100_000)
    hold(core, "p0", keys_of(90))
    assignments = [assigned(core, request(f"a{number}")) for number in range(8)]
    spread = [assignment.prefill.instance_id for assignment in assignments]
    assert spread[0] == "p0"
    assert 3 <= spread.count("p1") <= 5
    assert all(assignment.sources for assignment in assignments if assignment.prefill.instance_id == "p1")


# ---- queues ----


def test_work_placed_since_the_last_report_is_counted_until_the_instance_reports_it() -> None:
    core = make_core(prefills=["p0"])
    assigned(core, request("a"))
    assert estimates(core, "b")["p0"].queue_ms == pytest.approx(401)
    core.handle(Progress(AttemptId("b"), Phase.FAILED), 0.0)
    report(core, "p0", Role.PREFILL, queue_ms=300, attempt_ids=frozenset({AttemptId("a")}))
    assert estimates(core, "c")["p0"].queue_ms == pytest.approx(300)


def test_a_report_made_before_the_attempt_arrived_does_not_hide_it() -> None:
    core = make_core(prefills=["p0"])
    assigned(core, request("a"))
    report(core, "p0", Role.PREFILL, queue_ms=0)
    assert estimates(core, "b")["p0"].queue_ms == pytest.approx(401)


def test_a_reported_queue_drains_with_time() -> None:
    core = make_core(prefills=["p0"])
    report(core, "p0", Role.PREFILL, queue_ms=300, now=10.0)
    assert ask(core, request("a"), now=10.1).alternatives.prefills[0].queue_ms == pytest.approx(200)
    core.handle(Progress(AttemptId("a"), Phase.FAILED), 10.2)
    assert ask(core, request("b"), now=12.0).alternatives.prefills[0].queue_ms == 0


def test_a_finished_prefill_leaves_the_queue() -> None:
    core = make_core(prefills=["p0"])
    assigned(core, request("a"))
    core.handle(Progress(AttemptId("a"), Phase.DECODE, ttft_ms=400), 0.4)
    assert estimates(core, "b")["p0"].queue_ms == 0


# ---- decode ----


def test_the_decode_node_with_the_least_predicted_tbt_is_chosen() -> None:
    core = make_core(decodes=["d0", "d1"])
    report(core, "d0", Role.DECODE, running=20, tokens=4000)
    assert assigned(core, request("a")).decode.instance_id == "d1"


def test_attempts_still_in_prefill_count_at_their_decode_node() -> None:
    core = make_core(prefills=["p0"], decodes=["d0"])
    assigned(core, request("a"))
    (estimate,) = ask(core, request("b")).alternatives.decodes
    assert (estimate.batch, estimate.tbt_ms) == (2, pytest.approx(10 + 2 + 8.02))


def test_an_attempt_is_counted_once_when_its_decode_node_reports_it_running() -> None:
    core = make_core(prefills=["p0"], decodes=["d0"])
    assigned(core, request("a"))
    core.handle(Progress(AttemptId("a"), Phase.DECODE), 0.5)
    assert ask(core, request("b")).alternatives.decodes[0].batch == 2
    core.handle(Progress(AttemptId("b"), Phase.FAILED), 0.5)
    report(core, "d0", Role.DECODE, now=0.6, running=1, tokens=402, attempt_ids=frozenset({AttemptId("a")}))
    assert ask(core, request("c"), now=0.6).alternatives.decodes[0].batch == 2


def test_slots_promised_since_the_report_are_not_promised_again() -> None:
    core = make_core(decodes=["d0", "d1"])
    report(core, "d0", Role.DECODE, slots_available=150)
    report(core, "d1", Role.DECODE, slots_available=120, running=10)
    assert [assigned(core, request(name)).decode.instance_id for name in "ab"] == ["d0", "d1"]


def test_who_is_beyond_the_limit_of_a_batch_waits_and_makes_no_step_longer() -> None:
    core = make_core(prefills=["p0"], decodes=["d0"])
    report(core, "d0", Role.DECODE, running=4, tokens=400, max_batch=4)
    (estimate,) = ask(core, request("a", num_tokens=100)).alternatives.decodes
    assert (estimate.tbt_ms, estimate.batch) == (pytest.approx(10 + 4 + 0.01 * 400), 5)


def test_among_equal_decode_nodes_the_one_that_holds_the_prompt_is_chosen() -> None:
    core = make_core(decodes=["d0", "d1"])
    hold(core, "d1", keys_of(20))
    assert assigned(core, request("a")).decode.instance_id == "d1"


# ---- policies ----


def test_cache_aware_never_fetches() -> None:
    core = make_core(policy="cache-aware")
    hold(core, "p0", keys_of(50))
    report(core, "p0", Role.PREFILL, queue_ms=150)
    assignment = assigned(core, request("a"))
    assert (assignment.prefill.instance_id, assignment.sources) == ("p0", ())


def test_load_balance_looks_at_queues_only() -> None:
    core = make_core(policy="load-balance")
    hold(core, "p0", keys_of(99))
    report(core, "p0", Role.PREFILL, queue_ms=1)
    assert assigned(core, request("a")).prefill.instance_id == "p1"


def test_round_robin_takes_one_after_the_other() -> None:
    core = make_core(policy="round-robin", decodes=["d0", "d1"])
    assignments = [assigned(core, request(name)) for name in "abc"]
    assert [a.prefill.instance_id for a in assignments] == ["p0", "p1", "p0"]
    assert [a.decode.instance_id for a in assignments] == ["d0", "d1", "d0"]


# ---- explanation ----


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_is_replayed_from_its_log_line(policy: str) -> None:
    core = make_core(policy=policy, decodes=["d0", "d1"])
    hold(core, "p0", keys_of(50))
    for number in range(40):
        decided = ask(core, request(f"a{number}", avoid=frozenset({InstanceId("d0")})))
        assert decide(Alternatives.from_json(decided.alternatives.to_json())) == decided.decision


def test_every_alternative_is_estimated() -> None:
    decided = ask(make_core(prefills=["p0", "p1", "p2"], decodes=["d0", "d1"]), request("a"))
    assert isinstance(decided.decision, Placement)
    assert [len(decided.alternatives.prefills), len(decided.alternatives.decodes)] == [3, 2]


def test_a_store_that_is_lost_is_no_source_any_more() -> None:
    core = make_core(prefills=["p0"])
    hold(core, "d1", keys_of(50))
    assert estimates(core, "a")["p0"].source_id == "d1"
    core.handle(StoreDown(NodeId("d1")), 0.0)
    assert estimates(core, "b")["p0"].source_id is None
