"""Prompts that begin alike: what they share is computed once."""

from __future__ import annotations

import pytest

from node_runtime import events
from prefill_node.core.actions import Action, RunPass
from springtide.ids import AttemptId
from springtide.protocol.outputs import AttemptFailed, FailureCode, SampledToken
from springtide.protocol.starts import AbortAttempt
from springtide.protocol.storage import Acquire, Acquired, FetchProgress, FetchTruncated, StoreLoad
from tests.prefill_node.test_prefill_core import NUM_SLOTS, Node, ev, only, slots, start
from tests.support.node_core import BLOCK_TOKENS, INFO, failure

BOOK = 1
FIRST = AttemptId("first")


def asked(actions: list[Action]) -> list[str]:
    """Who asks the store for slots."""
    return [order.attempt_id for order in only(actions, Acquire)]


def rows(run: RunPass) -> list[tuple[str, int, int]]:
    """Attempts with the first token of their chunks, and how many these have."""
    return [(row.attempt_id, row.chunk.start, len(row.chunk.token_ids)) for row in run.rows]


def end(node: Node, run: RunPass) -> list[Action]:
    return node.tell(ev.PassDone(run.pass_id, [SampledToken(7) if row.sampling else None for row in run.rows], 5.0))


def leading(node: Node, num_tokens: int = 60, *, local_blocks: int = 0, idle: bool = False) -> RunPass:
    """The first pass of `first`, which reads the book."""
    node.tell(start("first", num_tokens, text=BOOK, idle=idle))
    (run,) = only(node.tell(Acquired("first", slots(-(-num_tokens // BLOCK_TOKENS)), local_blocks, 0)), RunPass)
    return run


def behind_another(node: Node, *, source_blocks: int = 0) -> RunPass:
    """The first pass of one that is more urgent than `first`, a long prompt, which has its slots; the source has sent nothing yet."""
    node.tell(start("other", 90, budget_ms=30.0))
    (run,) = only(node.tell(Acquired(AttemptId("other"), slots(12), 0, 0)), RunPass)
    node.tell(start("first", 95, text=BOOK, source_blocks=source_blocks))
    node.tell(Acquired(FIRST, slots(12), 0, source_blocks))
    return run


def test_who_begins_alike_waits_until_that_is_computed_and_then_finds_it() -> None:
    node = Node()
    run = leading(node)
    assert asked(node.tell(start("second", 45, text=BOOK))) == []
    assert [(sign.attempt_id, sign.waiting) for _, sign in node.core.signs()] == [("first", False), ("second", True)]
    seen: list[str] = []
    while not seen:
        actions = end(node, run)
        seen = asked(actions)
        (run,) = only(actions, RunPass)
    assert (run.rows[0].attempt_id, run.rows[0].chunk.start) == ("first", 5 * BLOCK_TOKENS), "no longer than for the blocks that it can use"
    (joint,) = only([*node.tell(Acquired("second", slots(6), 5, 0)), *end(node, run)], RunPass)
    assert ("second", 40, 5) in rows(joint)


def test_whoever_comes_when_all_that_is_shared_is_there_waits_for_nobody() -> None:
    node = Node()
    leading(node, local_blocks=5)
    assert asked(node.tell(start("second", 45, text=BOOK))) == ["second"]


def test_of_several_that_waited_none_waits_for_another_one_of_them() -> None:
    node = Node()
    run = leading(node, 33)
    for name in "abc":
        node.tell(start(name, 35, text=BOOK))
    assert asked(node.run_passes([run])) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "ends",
    [AbortAttempt(FIRST), events.SessionEnded(1), AttemptFailed(FIRST, failure(FailureCode.INTERNAL))],
    ids=lambda event: type(event).__name__,
)
def test_when_it_is_not_computed_after_all_the_next_one_computes_it(ends: ev.Event) -> None:
    node = Node()
    node.tell(start("first", 60, text=BOOK, session=1))
    assert asked(node.tell(start("second", 45, text=BOOK, session=2)) + node.tell(start("third", 45, text=BOOK, session=2))) == []
    assert asked(node.tell(ends)) == ["second"], "and the third waits for the second"
    node.tell(Acquired(AttemptId("second"), slots(6), 0, 0))
    assert [sign.waiting for _, sign in node.core.signs()] == [False, True]


def test_who_finds_no_room_is_waited_for_by_nobody_until_it_has_some() -> None:
    node = Node()
    node.tell(start("first", 60, text=BOOK))
    node.tell(start("second", 45, text=BOOK))
    assert asked(node.tell(AttemptFailed(FIRST, failure(FailureCode.POOL_FULL)))) == [], "the second has a place behind it"
    assert asked(node.tell(StoreLoad(NUM_SLOTS, NUM_SLOTS))) == ["first"]
    node.tell(Acquired(FIRST, slots(8), 0, 0))
    assert asked(node.tell(StoreLoad(NUM_SLOTS, NUM_SLOTS - 8))) == [], "now the second waits for the first"
    assert asked(node.tell(AbortAttempt(FIRST))) == ["second"]


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [(13, {}), (45, {"source_blocks": 5}), (45, {"text": BOOK + 1})],
    ids=["too little", "a source has it", "another text"],
)
def test_nobody_waits_for_what_spares_nothing(num_tokens: int, options: dict[str, int]) -> None:
    node = Node()
    leading(node)
    assert asked(node.tell(start("second", num_tokens, **{"text": BOOK, **options}))) == ["second"]  # type: ignore[arg-type]


def test_who_is_in_idle_capacity_is_waited_for_by_its_like_alone() -> None:
    node = Node()
    leading(node, idle=True)
    assert asked(node.tell(start("idle", 45, text=BOOK, idle=True))) == []
    assert asked(node.tell(start("online", 45, text=BOOK))) == ["online"]


def test_what_others_wait_for_is_computed_as_soon_as_they_would_have_done_it() -> None:
    """A long prompt waits behind a shorter one; then a short one comes that begins as the long one."""
    node = Node()
    run = behind_another(node)
    (run,) = only(end(node, run), RunPass)
    assert rows(run)[0][0] == "other"
    assert asked(node.tell(start("second", 26, text=BOOK, budget_ms=5.0))) == []
    (run,) = only(end(node, run), RunPass)
    assert rows(run)[0] == ("first", 0, 16)
    (run,) = only(end(node, run), RunPass)
    assert rows(run)[0] == ("first", 16, 8), "no more than the second waits for"
    actions = end(node, run)
    assert asked(actions) == ["second"]
    assert rows(only(actions, RunPass)[0])[0][0] == "other", "the long one has its own place again"


def test_what_the_one_before_fetches_is_waited_for_until_it_is_there_and_no_longer() -> None:
    node = Node()
    node.tell(start("first", 60, text=BOOK, source_blocks=6))
    node.tell(Acquired(FIRST, slots(8), 0, 6))
    assert asked(node.tell(start("second", 45, text=BOOK))) == []
    assert asked(node.tell(FetchProgress(FIRST, 2))) == []
    assert asked(node.tell(FetchProgress(FIRST, INFO.layers))) == ["second"]


def test_when_less_of_it_arrives_the_rest_is_computed_first() -> None:
    node = Node()
    run = behind_another(node, source_blocks=6)
    assert asked(node.tell(start("second", 45, text=BOOK, budget_ms=7.0))) == []
    assert asked(node.tell(FetchTruncated(FIRST, 3))) == []
    (run,) = only(end(node, run), RunPass)
    assert rows(run)[0] == ("first", 24, 16)
    assert asked(end(node, run)) == ["second"]


def test_nobody_waits_for_one_that_is_far_behind_what_a_source_has() -> None:
    node = Node()
    leading(node)
    assert asked(node.tell(start("second", 58, text=BOOK, source_blocks=4))) == ["second"], "three blocks are sooner computed than seven"
    assert asked(node.tell(start("third", 58, text=BOOK, source_blocks=1))) == []


def test_a_follower_that_has_left_makes_nobody_urgent() -> None:
    node = Node()
    run = behind_another(node)
    node.tell(start("second", 26, text=BOOK, budget_ms=5.0))
    node.tell(AbortAttempt(AttemptId("second")))
    (run,) = only(end(node, run), RunPass)
    assert rows(run)[0][0] == "other"


def test_who_waits_counts_with_what_is_left_to_it() -> None:
    node = Node()
    leading(node)
    before = node.load()
    node.tell(start("second", 45, text=BOOK))
    after, alone = node.load(), Node()
    alone.tell(start("second", 5))
    assert after.queue_ms - before.queue_ms < 2 * alone.load().queue_ms and after.tokens - before.tokens == 5
    assert after.waiting == before.waiting + 1 and after.attempt_ids == {"first", "second"}


def test_with_the_store_everybody_ends() -> None:
    node = Node()
    leading(node)
    node.tell(start("second", 45, text=BOOK))
    node.tell(events.StoreLost("lost"))
    assert not node.core.has_work
    node.tell(events.StoreConnected(NUM_SLOTS))
    assert asked(node.tell(start("third", 45, text=BOOK))) == ["third"]
