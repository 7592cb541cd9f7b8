"""Which chunks go into a pass, and which slabs go together in a unit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefill_node.core.attempt import PrefillAttempt
from prefill_node.core.layer_stream import LayerGroups
from prefill_node.core.scheduling import ChunkPolicy
from springtide.chunking import Chunking
from springtide.cost import PrefillCost
from springtide.protocol.starts import PrefillStart
from springtide.protocol.storage import Push
from tests.support.node_core import make_request

POLICY = ChunkPolicy(Chunking(PrefillCost(fixed_ms=1.0, per_token_ms=1.0, per_pair_ms=0.0), chunk_tokens=100))


def running(
    name: str,
    num_tokens: int,
    *,
    arrived_at: float = 0.0,
    computed: int = 0,
    fetching: bool = False,
    budget_ms: float = 0.0,
    idle: bool = False,
    age_s: float = 0.0,
    sent: int = 0,
) -> PrefillAttempt:
    request = replace(make_request(name, num_tokens), idle=idle, age_s=age_s, num_prompt_tokens=num_tokens - sent)
    attempt = PrefillAttempt(0, PrefillStart(request, "decode:1", "decode-0", budget_ms), arrived_at, phase="running")
    attempt.computed = attempt.launched = computed
    attempt.fetching = fetching
    attempt.work_ms = POLICY.work_ms(num_tokens, computed)
    attempt.due_at = POLICY.due_at(attempt)
    return attempt


def chosen(*attempts: PrefillAttempt, now: float = 0.0) -> list[tuple[str, int]]:
    return [(attempt.attempt_id, num_tokens) for attempt, num_tokens in POLICY.choose(attempts, now)]


def test_a_long_prompt_is_computed_chunk_by_chunk() -> None:
    assert chosen(running("long", 250)) == [("long", 100)]
    assert chosen(running("long", 250, computed=200)) == [("long", 50)]


def test_prompts_in_idle_capacity_have_passes_of_an_eighth() -> None:
    assert chosen(running("idle", 250, idle=True)) == [("idle", 12)]
    assert chosen(running("a", 5, idle=True), running("b", 6, idle=True), running("c", 90, idle=True)) == [("a", 5), ("b", 6)]


def test_prompts_in_idle_capacity_wait_for_all_others_however_late_they_are() -> None:
    idle, online = running("idle", 10, arrived_at=-60.0, idle=True), running("online", 250)
    assert chosen(idle, online) == [("online", 100)]
    online.launched = 250
    assert chosen(idle, online) == [("idle", 10)]


def test_nothing_of_them_begins_while_another_waits_for_its_slots_or_its_prefix() -> None:
    idle, waiting = running("idle", 10, idle=True), running("waiting", 10)
    waiting.phase = "acquiring"
    assert chosen(idle, waiting) == []
    assert chosen(idle, running("fetching", 90, computed=40, fetching=True)) == []


def test_short_prompts_share_a_pass_within_the_token_budget() -> None:
    assert chosen(running("a", 40), running("b", 50), running("c", 20)) == [("a", 40), ("b", 50)]


def test_of_prompts_that_came_together_who_has_begun_to_read_goes_on_first() -> None:
    flood = [running(f"new {number}", 90, age_s=20.0) for number in range(3)]
    continued = running("continued", 90, age_s=20.0, sent=1)
    assert chosen(*flood, continued) == [("continued", 90)]
    assert chosen(*flood, running("older", 90, age_s=30.0), continued) == [("older", 90)]


def test_what_does_not_fit_beside_the_first_waits_for_its_own_pass() -> None:
    tail, short, long = running("tail", 130, computed=100), running("short", 60), running("long", 500)
    assert sorted(chosen(tail, short, long, now=0.5)) == [("short", 60), ("tail", 30)]


def test_a_short_prompt_soon_overtakes_a_long_one() -> None:
    long, short = running("long", 3000), running("short", 50, arrived_at=1.0)
    assert chosen(long, short, now=1.0)[0][0] == "long"
    assert chosen(long, short, now=1.1)[0][0] == "short"


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    long = running("long", 3000)
    assert chosen(running("short", 50, arrived_at=9.0), long, now=9.0)[0][0] == "long"


def test_what_a_prompt_has_waited_for_room_elsewhere_counts() -> None:
    late = running("late", 500, arrived_at=9.0, age_s=9.0)
    assert chosen(running("new", 500, arrived_at=9.0), late, now=9.0)[0][0] == "late"
    assert chosen(running("shorter", 200, arrived_at=9.0), late, now=9.0)[0][0] == "late"


def test_a_tight_objective_makes_a_prompt_urgent() -> None:
    assert chosen(running("easy", 500), running("tight", 500, budget_ms=520.0))[0][0] == "tight"


def test_who_cannot_keep_an_objective_any_more_lets_those_go_first_that_can() -> None:
    hopeless, other = running("hopeless", 900, budget_ms=800.0), running("other", 500, arrived_at=0.5, budget_ms=800.0)
    assert chosen(hopeless, other, now=0.5)[0][0] == "other"
    assert chosen(running("possible", 900, budget_ms=1500.0), other, now=0.5)[0][0] == "possible"
    assert chosen(hopeless, running("much later", 500, arrived_at=2.6, budget_ms=800.0), now=2.6)[0][0] == "hopeless", "it is not starved"


def test_an_attempt_whose_prefix_arrives_runs_alone_and_only_when_nothing_else_can() -> None:
    arriving = running("arriving", 50, fetching=True)
    assert chosen(arriving) == []
    arriving.layers_arrived = 1
    assert chosen(arriving) == [("arriving", 50)]
    assert chosen(arriving, running("ready", 20)) == [("ready", 20)]


def test_predicted_work_counts_the_fixed_part_of_every_pass() -> None:
    assert POLICY.work_ms(250, 0) == pytest.approx(253.0)
    assert POLICY.work_ms(250, 250) == 0.0


@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        (1, [(0, 10)]),
        (4, [(0, 10)]),
        (10, [(0, 4), (4, 8), (8, 10)]),
        (40, [(layer, layer + 1) for layer in range(10)]),
        (1000, [(layer, layer + 1) for layer in range(10)]),
    ],
)
def test_units_have_fewer_layers_the_more_blocks_there_are(num_blocks: int, expected: list[tuple[int, int]]) -> None:
    groups = LayerGroups(layers=10, bytes_per_slab=100, unit_bytes=4000)
    assert [(push.layer_begin, push.layer_end) for push in groups.units("a", 0, num_blocks)] == expected
    assert groups.in_one_unit(num_blocks) == (len(expected) == 1)


def test_a_group_that_is_not_whole_is_left_for_later_except_at_the_last_layer() -> None:
    groups = LayerGroups(layers=10, bytes_per_slab=100, unit_bytes=4000)
    assert list(groups.units("a", 2, 12, 0, 6, whole=False)) == [Push("a", 0, 4, 2, 12)]
    assert list(groups.units("a", 2, 12, 8, 10, whole=False)) == [Push("a", 8, 10, 2, 12)]
    assert list(groups.units("a", 5, 5)) == []
