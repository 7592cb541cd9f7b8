"""What prompts that are being computed will leave where they are counts for those that begin alike."""

from __future__ import annotations

import random

import pytest
from conductor_support import BLOCK_TOKENS, ask, hold, keys_of, make_core, report, request
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.coming_prefixes import MARK_TOKENS, ComingPrefixes
from conductor.core.types.decision import Placement
from springtide.ids import AttemptId, BlockKey, InstanceId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Terms

BOOK = 1
LONG = 4 * MARK_TOKENS
EVERY = MARK_TOKENS // BLOCK_TOKENS


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_longest_of_each_instance_is_found_whoever_has_ended(seed: int) -> None:
    chance = random.Random(seed)
    coming = ComingPrefixes(BLOCK_TOKENS)
    live: dict[AttemptId, tuple[InstanceId, list[BlockKey]]] = {}
    tree = [keys_of(6 * EVERY, text) for text in range(2)]
    for number in range(60):
        if live and chance.random() < 0.45:
            attempt_id = chance.choice(list(live))
            del live[attempt_id]
            coming.end(attempt_id)
        else:
            attempt_id, instance_id = AttemptId(str(number)), InstanceId(f"p{chance.randrange(3)}")
            live[attempt_id] = instance_id, tree[chance.randrange(2)][: chance.randrange(6 * EVERY)]
            coming.begin(attempt_id, *live[attempt_id], begins=float(number), ends=number + 1.0)
        coming.validate()
        keys = tree[chance.randrange(2)][: chance.randrange(6 * EVERY)]
        expected: dict[InstanceId, int] = {}
        for instance_id, others in live.values():
            common = sum(one == other for one, other in zip(keys, others, strict=False)) // EVERY * EVERY
            if common:
                expected[instance_id] = max(expected.get(instance_id, 0), common)
        assert {instance_id: one.blocks for instance_id, one in coming.match(keys).items()} == expected


def test_who_begins_like_a_prompt_that_is_computed_waits_for_it_there() -> None:
    core = make_core(["p0", "p1"], ["d0"], admission="baseline")
    report(core, "p1", Role.PREFILL, queue_ms=5_000.0)
    first = ask(core, request("first", LONG + 1, text=BOOK)).decision
    assert isinstance(first, Placement) and (first.prefill.instance_id, first.prefill.branch) == ("p0", "cache-aware")
    decided = ask(core, request("second", LONG + 9, text=BOOK), now=1.0)
    second = decided.decision
    assert isinstance(second, Placement) and decided.assignment is not None
    assert (second.prefill.instance_id, second.prefill.branch, second.prefill.local_blocks) == ("p0", "await", 4 * EVERY)
    assert second.prefill.queue_ms == pytest.approx(LONG + 1) and second.prefill.prefill_ms == pytest.approx(9.0)
    prediction = decided.assignment.prediction
    assert prediction is not None and prediction.ahead_ms == 0.0, "it says nothing of the queue"
    core.validate()


def test_what_has_been_waited_for_in_vain_counts_no_more() -> None:
    core = make_core(["p0"], ["d0"], admission="baseline")
    ask(core, request("first", LONG + 1, text=BOOK))
    core.handle(Progress(AttemptId("first"), Phase.FAILED), 1.0)
    decision = ask(core, request("second", LONG + 9, text=BOOK), now=1.0).decision
    assert isinstance(decision, Placement) and decision.prefill.prefill_ms == pytest.approx(LONG + 9)
    core.validate()


def test_the_beginning_of_a_long_prompt_is_waited_for_not_its_end() -> None:
    core = make_core(["p0"], ["d0"], admission="baseline")
    ask(core, request("first", LONG + 1, text=BOOK))
    report(core, "p0", Role.PREFILL, queue_ms=LONG + 1.0, attempt_ids=frozenset({AttemptId("first")}))
    core.state.queue_bias.table[:] = 0.01
    decision = ask(core, request("second", LONG // 4 + 2, text=BOOK)).decision
    assert isinstance(decision, Placement) and decision.prefill.branch == "await"
    assert decision.prefill.queue_ms == pytest.approx(LONG / 4, rel=0.01)


def test_what_another_prompt_has_spared_says_nothing_of_the_queue() -> None:
    core = make_core(["p0"], ["d0"], admission="baseline")
    report(core, "p0", Role.PREFILL, queue_ms=4_000.0)
    for number, compute_ms in enumerate((10.0, 400.0)):
        before = core.state.queue_bias.table.copy()
        name = AttemptId(f"a{number}")
        ask(core, request(name, 401, text=number))
        core.handle(Progress(name, Phase.DECODE, ttft_ms=500.0, compute_ms=compute_ms), 1.0)
        assert (core.state.queue_bias.table == before).all() == (compute_ms < 400.0)


def test_what_is_there_is_not_waited_for() -> None:
    core = make_core(["p0", "p1"], ["d0"], admission="baseline")
    ask(core, request("first", LONG + 1, text=BOOK))
    hold(core, "p1", keys_of(LONG // BLOCK_TOKENS, BOOK), sequence=1)
    decision = ask(core, request("second", LONG + 9, text=BOOK), now=1.0).decision
    assert isinstance(decision, Placement)
    assert (decision.prefill.instance_id, decision.prefill.branch, decision.prefill.prefill_ms) == ("p1", "cache-aware", pytest.approx(9.0))


def test_a_queue_that_is_longer_than_the_work_is_not_waited_in() -> None:
    core = make_core(["p0", "p1"], ["d0"], admission="baseline")
    ask(core, request("first", LONG + 1, text=BOOK))
    report(core, "p0", Role.PREFILL, queue_ms=9_000.0)
    decision = ask(core, request("second", LONG + 9, text=BOOK), now=1.0).decision
    assert isinstance(decision, Placement) and (decision.prefill.instance_id, decision.prefill.branch) == ("p1", "cache-aware")


def test_who_only_looks_at_queues_waits_for_nobody() -> None:
    core = make_core(["p0", "p1"], ["d0"], admission="baseline", policy="load-balance")
    ask(core, request("first", LONG + 1, text=BOOK))
    decision = ask(core, request("second", LONG + 9, text=BOOK), now=1.0).decision
    assert isinstance(decision, Placement) and (decision.prefill.instance_id, decision.prefill.branch) == ("p1", "cache-aware")


def test_those_in_idle_capacity_are_waited_for_by_nobody() -> None:
    core = make_core(["p0"], ["d0"], admission="baseline")
    ask(core, request("first", LONG + 1, text=BOOK, terms=Terms(idle=True)))
    decision = ask(core, request("second", LONG + 9, text=BOOK), now=1.0).decision
    assert isinstance(decision, Placement) and decision.prefill.branch != "await"
