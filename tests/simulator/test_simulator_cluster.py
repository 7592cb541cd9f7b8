"""The cores that are shipped, played in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from conductor.core.admission.rules import ADMISSIONS
from conductor.core.placement.policy import POLICIES
from kvstore.core.eviction import EVICTION_POLICIES
from simulator.cluster import Cluster
from simulator.cluster.mixed import SimMixed
from simulator.coupled import CoupledOptions, run_coupled
from simulator.hardware import load
from simulator.run import Plan, options_of, simulate
from simulator.workload import SimRequest, Workload, generate
from simulator.workload.generate import GENERATORS
from springtide.choices import RoutingName

BLOCK = 512
HARDWARE = load("a100-llama2-70b")


def request(number: int, arrival_s: float, blocks: Sequence[int], output_tokens: int = 50, tail: int = 100) -> SimRequest:
    """Its prompt is `blocks` and `tail` tokens of its own."""
    return SimRequest(number, arrival_s, len(blocks) * BLOCK + tail, output_tokens, (*blocks, 10**6 + number))


def run(requests: Sequence[SimRequest], prefill: int = 2, decode: int = 2, instances: int = 0, **config: Any) -> Cluster:
    settings = {name.replace("__", "."): value for name, value in {"conductor__admission": "baseline", **config}.items()}
    workload = Workload("test", BLOCK, requests)
    cluster = Cluster(workload, options_of(Plan(workload, HARDWARE, prefill, decode, instances, config=settings)))
    cluster.run()
    cluster.validate()
    return cluster


def cached_tokens(requests: Sequence[SimRequest], instances: int = 1, routing: RoutingName = "cache-aware") -> list[int]:
    """Of each request, at coupled instances."""
    return list(run_coupled(Workload("test", BLOCK, requests), CoupledOptions(HARDWARE, instances, BLOCK, routing=routing)).cached_tokens)


def test_a_request_alone_takes_what_its_passes_and_steps_take() -> None:
    (one,) = requests = [request(0, 1.0, range(3))]
    records = run(requests).records
    rows, computed = [], 0
    while computed < one.input_tokens:
        rows.append((min(2048, one.input_tokens - computed), computed))
        computed += rows[-1][0]
    compute_ms = sum(HARDWARE.pass_ms([row]) for row in rows)
    assert compute_ms < records.ttft_ms[0] < compute_ms + 5
    assert HARDWARE.step_ms(1, one.input_tokens) <= records.tbt_ms[0] < 1.2 * HARDWARE.step_ms(1, one.input_tokens + 50)
    assert records.output_tokens[0] == 50


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    records = run([request(0, 0.0, range(8)), request(1, 100.0, range(8))]).records
    assert (records.cached_tokens[0], records.cached_tokens[1]) == (0, 8 * BLOCK)
    assert records.ttft_ms[1] < records.ttft_ms[0] / 4


@pytest.mark.parametrize("cluster", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "instances": 1}], ids=["split", "no split"])
def test_a_prompt_that_is_being_computed_is_waited_for_and_found(cluster: dict[str, int]) -> None:
    records = run([request(number, 0.1 * number, range(60)) for number in range(4)], **cluster).records  # type: ignore[arg-type]
    assert list(records.cached_tokens) == [0, 60 * BLOCK, 60 * BLOCK, 60 * BLOCK]
    assert max(records.ttft_ms) < 1.2 * records.ttft_ms[0]


def test_the_output_of_one_turn_is_found_by_the_next() -> None:
    first = SimRequest(0, 0.0, BLOCK, 2 * BLOCK + 1, (1,), output_blocks=(2, 3))
    second = SimRequest(1, 1000.0, 3 * BLOCK + 1, 4, (1, 2, 3, 4))
    records = run([first, second], prefill=1, decode=1).records
    assert records.cached_tokens[1] == 3 * BLOCK, "the decode node's store has it, and hands it to the prefill node"


def test_many_steps_at_a_time_come_to_the_same_as_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = generate("chat", 2.0, 60.0, seed=3, block_tokens=BLOCK)
    many = run(workload.requests).records

    original = SimMixed._run

    def one_at_a_time(self: SimMixed, run: Any) -> None:
        original(self, run)
        assert self._steps is not None and self._job is not None
        self._steps.count = 1
        self._job.resize(self._steps.seconds(1))

    monkeypatch.setattr(SimMixed, "_run", one_at_a_time)
    single = run(workload.requests).records
    for column in ("ttft_ms", "finished_s"):
        for ours, theirs in zip(getattr(many, column), getattr(single, column), strict=True):
            assert ours == pytest.approx(theirs, rel=0.01, abs=60 if column == "ttft_ms" else 0.06)
    assert sum(many.output_tokens) == sum(single.output_tokens)


@pytest.mark.parametrize(("prefill", "decode", "instances"), [(2, 2, 0), (0, 0, 4), (1, 1, 2)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_request_ends_exactly_once_and_nothing_leaks(name: str, policy: str, prefill: int, decode: int, instances: int) -> None:
    workload = generate(name, 4.0, 20.0, seed=1, block_tokens=BLOCK)
    cluster = run(workload.requests, prefill, decode, instances, conductor__policy=policy)
    records = cluster.records
    for index, asked in enumerate(workload.requests):
        rejected = records.rejected(index) is not None
        assert rejected != (not math.isnan(records.finished_s[index]))
        assert rejected or records.output_tokens[index] == asked.output_tokens
    cluster.loop.after(1000, cluster.loop.stop)  # Longer than any limit of time that a store or the Conductor has.
    cluster.loop.run()
    for store in cluster.stores.values():
        counts = store.pool.counts()
        assert (counts.in_use, counts.quarantined, counts.leases, counts.ingests) == (0, 0, 0, 0)


def test_without_a_split_a_prompt_is_decoded_where_it_is_computed_and_its_next_turn_finds_all_of_it() -> None:
    first = SimRequest(0, 0.0, BLOCK, 2 * BLOCK + 1, (1,), output_blocks=(2, 3))
    second = SimRequest(1, 1000.0, 3 * BLOCK + 1, 4, (1, 2, 3, 4))
    cluster = run([first, second], prefill=0, decode=0, instances=2)
    assert cluster.records.cached_tokens[1] == 3 * BLOCK
    assert sorted(len(store.pool.held_keys()) for store in cluster.stores.values()) == [0, 3]


@pytest.mark.parametrize("tbt_slo_ms", [60.0, 200.0])
def test_no_time_between_tokens_is_beyond_the_objective_however_many_prompts_come(tbt_slo_ms: float) -> None:
    workload = generate("poisson", 2.0, 60.0, seed=2, block_tokens=BLOCK)
    settings = {"conductor.admission": "baseline", "slo.tbt_ms": tbt_slo_ms}
    summary = simulate(Plan(workload, HARDWARE, 0, 0, 4, config=settings))["summary"]
    assert summary["completed"] == summary["requests"] and summary["gap_ms_p99"] <= tbt_slo_ms


def test_a_small_pool_makes_requests_wait_and_not_fail() -> None:
    requests = [request(number, 0.01 * number, range(100 * number, 100 * number + 10)) for number in range(12)]
    plan = Plan(Workload("test", BLOCK, requests), HARDWARE, 1, 1, config={"conductor.admission": "baseline"}, prefill_tokens=30 * BLOCK)
    cluster = Cluster(plan.workload, options_of(plan))
    cluster.run()
    assert cluster.records.completed == 12


def test_short_prompts_do_not_wait_until_all_long_ones_before_them_have_had_room() -> None:
    longs = [request(number, 0.1 * number, range(1000 * number, 1000 * number + 100), output_tokens=5) for number in range(6)]
    shorts = [request(number, 1.0 + 0.1 * number, range(1000 * number, 1000 * number + 2), output_tokens=5) for number in range(6, 26)]
    workload = Workload("test", BLOCK, [*longs, *shorts])
    plan = Plan(workload, HARDWARE, 1, 1, config={"conductor.admission": "baseline"}, decode_tokens=300 * BLOCK)
    cluster = Cluster(workload, options_of(plan))
    cluster.run()
    cluster.validate()
    ttft_ms = cluster.records.ttft_ms
    assert max(ttft_ms[6:]) < ttft_ms[3], "there was room for three of the long ones when the short ones came"


def test_overload_is_rejected_before_work_is_done_for_it() -> None:
    workload = generate("poisson", 3.0, 120.0, seed=1, block_tokens=BLOCK)
    results = {
        admission: simulate(Plan(workload, HARDWARE, 1, 1, config={"conductor.admission": admission, "slo.ttft_ms": 5000}))["summary"]
        for admission in ADMISSIONS
    }
    for admission, summary in results.items():
        assert summary["completed"] + summary["rejected"] == summary["requests"]
        assert summary["wasted_prefill_tokens"] == 0
        assert admission == "baseline" or summary["goodput_requests"] > 1.5 * results["baseline"]["goodput_requests"]


def test_a_run_repeats_itself() -> None:
    workload = generate("documents", 3.0, 60.0, seed=5, block_tokens=BLOCK)
    first, second = (simulate(Plan(workload, HARDWARE, 2, 2)) for _ in range(2))
    assert first["requests"] == second["requests"]
    assert first["series"] == second["series"]


def test_a_coupled_instance_computes_alone_what_a_cluster_does_and_disturbs_its_decoding() -> None:
    long = request(1, 2.0, range(1000, 1060), output_tokens=2)
    alone = [request(0, 0.0, range(3), output_tokens=400)]
    options = CoupledOptions(HARDWARE, 1, BLOCK)
    undisturbed = run_coupled(Workload("alone", BLOCK, alone), options)
    disturbed = run_coupled(Workload("both", BLOCK, [*alone, long]), options)
    apart = run([*alone, long], prefill=1, decode=1).records
    assert undisturbed.ttft_ms[0] == pytest.approx(apart.ttft_ms[0], rel=0.05)
    assert disturbed.tbt_ms[0] > 1.2 * undisturbed.tbt_ms[0]
    assert apart.tbt_ms[0] == pytest.approx(undisturbed.tbt_ms[0], rel=0.05)


def test_a_coupled_cluster_routes_by_prefix_and_by_work() -> None:
    first, second = range(100, 120), range(200, 220)
    # The second document comes while the first is computed, and goes to the other instance. Its question finds it there.
    apart = [request(0, 0.0, first), request(1, 0.01, second), request(2, 500.0, second)]
    assert cached_tokens(apart, instances=2) == [0, 0, len(second) * BLOCK]
    # A queue is not worth one short prefix.
    crowd = [request(0, 0.0, range(2)), *(request(number, 500.0, range(300 * number, 300 * number + 60)) for number in (1, 2, 3))]
    crowd.append(request(4, 500.1, range(2)))
    records = run_coupled(Workload("crowd", BLOCK, crowd), CoupledOptions(HARDWARE, 4, BLOCK))
    assert records.ttft_ms[4] < records.ttft_ms[3]


def test_least_loaded_routing_heeds_no_prefix() -> None:
    document = range(60)
    # When the question comes, the instance that has the document has something to do.
    asked = [request(0, 0.0, document), request(1, 500.0, range(100, 110)), request(2, 500.01, document)]
    assert cached_tokens(asked, instances=2) == [0, 0, len(document) * BLOCK]
    assert cached_tokens(asked, instances=2, routing="least-loaded") == [0, 0, 0]


def test_a_prefix_that_is_being_computed_is_waited_for_and_found() -> None:
    document = range(60)
    # The rest of the first one's prompt is less than all of the second one's.
    asked = [request(0, 0.0, document), request(1, 1.0, document)]
    assert cached_tokens(asked) == [0, len(document) * BLOCK]
    assert cached_tokens(asked, instances=2) == [0, len(document) * BLOCK]


def test_with_nothing_to_reuse_coupled_clusters_differ_in_their_chunks_alone() -> None:
    workload = generate("poisson", 2.0, 120.0, seed=3, block_tokens=BLOCK)
    plans = [
        Plan(workload, HARDWARE, coupled=2, routing=routing, config={"kv.eviction": eviction})
        for routing in get_args(RoutingName)
        for eviction in EVICTION_POLICIES
    ]
    first, *others = [simulate(plan)["requests"] for plan in plans]
    assert all(other == first for other in others)
    assert simulate(Plan(workload, HARDWARE, coupled=2, config={"prefill_node.chunk_tokens": 512}))["requests"] != first


def test_a_coupled_instance_keeps_what_fits_by_the_policy_of_eviction() -> None:
    often, others = range(8), [range(100 * number, 100 * number + 8) for number in range(1, 8)]
    uses = [often, often, often, often, *others, often]
    requests = [request(number, 100.0 * number, blocks) for number, blocks in enumerate(uses)]

    def cached_of_last(**config: Any) -> int:
        plan = Plan(Workload("one after the other", BLOCK, requests), HARDWARE, coupled=1, config=config, decode_tokens=48 * BLOCK)
        return int(simulate(plan)["requests"]["cached_tokens"][-1])

    assert cached_of_last() == 0, "the others were used after it"
    assert cached_of_last(**{"kv.eviction": "lfu"}) == len(often) * BLOCK
    assert cached_tokens(requests)[-1] == len(often) * BLOCK, "all fit"


def test_a_coupled_cluster_ends_every_request_and_keeps_prefixes() -> None:
    workload = generate("chat", 3.0, 120.0, seed=2, block_tokens=BLOCK)
    records = run_coupled(workload, CoupledOptions(HARDWARE, 2, BLOCK))
    assert records.completed == len(workload.requests)
    assert sum(records.cached_tokens) > 0
