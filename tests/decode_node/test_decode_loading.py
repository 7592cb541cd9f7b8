"""The decode core where a prompt that was handed over is loaded ahead of the steps that it joins: single stories."""

from __future__ import annotations

from decode_node.core import events as ev
from decode_node.core.actions import Action, LoadAhead, RunStep
from node_runtime import events
from springtide.clock import Tick
from springtide.protocol.outputs import AttemptFailed, FailureCode
from springtide.protocol.starts import AbortAttempt
from springtide.protocol.storage import Ingested, Release
from tests.support.decode_core import NUM_SLOTS, Node, failures, only, outputs, rows_of, start
from tests.support.node_core import BLOCK_TOKENS, EOS, failure


def loading(actions: list[Action]) -> list[str]:
    return [load.attempt_id for load in only(actions, LoadAhead)]


def joined(node: Node, begin: events.Start) -> RunStep:
    """It is handed over, loaded, and in a step."""
    node.join(begin)
    (run, *_) = only(node.tell(ev.Loaded(begin.start.request.attempt_id)), RunStep)
    return run


def test_a_prompt_that_was_handed_over_is_loaded_before_it_is_in_a_step() -> None:
    node = Node(loads_ahead=True)
    actions = node.join(start("a", 10))
    (load,) = only(actions, LoadAhead)
    assert only(actions, RunStep) == [] and list(load.slots) == node.store.held["a"][:2], "the slot of its next tokens holds nothing yet"
    (run,) = only(node.tell(ev.Loaded("a")), RunStep)
    assert run.rows[0].start == 10 and run.rows[0].output_ids == [100]
    assert [output.position for output in outputs(node.step(run))] == [1]


def test_steps_of_the_others_go_on_meanwhile() -> None:
    node = Node(30, loads_ahead=True)
    run = joined(node, start("a", 5))
    assert loading(node.join(start("b", 40))) == ["b"]
    for _ in range(5):
        (run,) = only(node.step(run), RunStep)
        assert rows_of(run) == ["a"]
    assert only(node.tell(ev.Loaded("b")), RunStep) == []
    (run,) = only(node.step(run), RunStep)
    assert rows_of(run) == ["a", "b"]


def test_in_the_arena_nothing_is_loaded() -> None:
    actions = Node().join(start("a", 10))
    assert loading(actions) == [] and len(only(actions, RunStep)) == 1


def test_a_prompt_that_was_computed_here_is_not_loaded() -> None:
    node = Node(loads_ahead=True)
    node.tell(start("a", 10, inlined=True))
    actions = node.prompt_computed("a")
    assert loading(actions) == [] and [rows_of(run) for run in only(actions, RunStep)] == [["a"]]


def test_a_request_that_its_first_token_ends_is_not_loaded() -> None:
    node = Node(loads_ahead=True)
    assert loading(node.join(start("a", 10), first_token=EOS)) == [] and len(node.store.free) == NUM_SLOTS


def test_slots_that_are_being_read_are_released_only_afterwards() -> None:
    node = Node(loads_ahead=True)
    node.join(start("a", 10))
    assert node.tell(AbortAttempt("a")) == []
    assert node.tell(start("a", 10)) == [], "the same attempt does not begin again meanwhile"
    assert node.tell(ev.Loaded("a")) == [Release("a")] and len(node.store.free) == NUM_SLOTS
    assert node.tell(ev.Loaded("a")) == []


def test_the_end_of_a_session_and_a_failure_at_the_store_hold_the_release_back_too() -> None:
    node = Node(30, loads_ahead=True)
    node.join(start("a", 10, session=1))
    node.join(start("b", 10, session=2))
    assert node.tell(events.SessionEnded(1)) == []
    failed = node.tell(AttemptFailed("b", failure(FailureCode.PEER_LOST)))
    assert failures(failed) == [("b", FailureCode.PEER_LOST)] and only(failed, Release) == []
    assert node.tell(ev.Loaded("b")) == [Release("b")] and node.tell(ev.Loaded("a")) == [Release("a")]


def test_a_lost_store_fails_who_is_loaded_and_the_late_end_of_that_changes_nothing() -> None:
    node = Node(loads_ahead=True)
    node.join(start("a", 10))
    node.join(start("b", 10))
    node.tell(AbortAttempt("b"))
    assert failures(node.core.handle(events.StoreLost("gone"), 0.0)) == [("a", FailureCode.PEER_LOST)]
    node.store.lost()
    node.tell(events.StoreConnected(NUM_SLOTS))
    assert node.tell(ev.Loaded("a")) == node.tell(ev.Loaded("b")) == []


def test_as_much_is_loaded_as_there_are_pages_for_beside_who_runs_and_the_oldest_first() -> None:
    """What were loaded beyond that would take pages that the next step needs."""
    node = Node(40, loads_ahead=True)
    node.tell(events.StoreConnected(40, pages=10))
    run = joined(node, start("a", 4 * BLOCK_TOKENS, max_tokens=3))
    for name, blocks in (("b", 6), ("c", 1)):
        assert loading(node.join(start(name, blocks * BLOCK_TOKENS, max_tokens=2))) == []
    (run,) = only(node.step(run), RunStep)
    assert rows_of(run) == ["a"]
    assert loading(node.step(run)) == ["b", "c"], "who ends leaves pages"


def test_a_prompt_is_loaded_when_it_alone_has_more_slots_than_there_are_pages() -> None:
    """It is refused in its step, if at all."""
    node = Node(loads_ahead=True)
    node.tell(events.StoreConnected(NUM_SLOTS, pages=2))
    assert loading(node.join(start("a", 2 * BLOCK_TOKENS))) == ["a"]


def test_a_full_pool_preempts_who_is_still_loaded_and_only_it() -> None:
    node = Node(5, loads_ahead=True)
    runs = [joined(node, start("old", 14, max_tokens=26))]
    node.join(start("young", 8, max_tokens=26))
    assert node.store.free == []
    seen: list[Action] = []
    while runs:
        actions = node.step(runs.pop())
        runs += only(actions, RunStep)
        seen += actions
    assert failures(seen) == [("young", FailureCode.PREEMPTED)] and only(seen, Release) == []
    actions = node.tell(Tick())
    assert failures(actions) == only(actions, RunStep) == [], "it waits for the slots of that one"
    actions = node.tell(ev.Loaded("young"))
    assert only(actions, Release) == [Release("young")] and [rows_of(run) for run in only(actions, RunStep)] == [["old"]]


def test_who_is_loaded_counts_at_admission_and_in_the_load() -> None:
    node = Node(100, loads_ahead=True)
    node.join(start("a", 50, tbt_slo_ms=4.0))
    assert (node.load().running, node.load().waiting, node.load().tokens) == (1, 0, 51)
    assert failures(node.tell(start("b", 200, tbt_slo_ms=100.0))) == [("b", FailureCode.OVERLOADED)]


def test_late_and_unknown_ends_of_loads_change_nothing() -> None:
    node = Node(40, loads_ahead=True)
    node.tell(events.StoreConnected(40, pages=4))
    assert node.tell(ev.Loaded("nobody")) == []
    run = joined(node, start("a", 10))
    assert node.tell(ev.Loaded("a")) == []
    node.tell(start("b", 10))
    assert node.tell(ev.Loaded("b")) == [], "it is not handed over yet"
    assert loading(node.tell(Ingested("b", 100))) == []
    assert node.tell(ev.Loaded("b")) == [], "it waits for pages"
    (run,) = only(node.step(run), RunStep)
    assert rows_of(run) == ["a"]


def test_an_older_prompt_is_loaded_though_younger_ones_have_the_pages() -> None:
    """Its step comes before theirs."""
    node = Node(40, loads_ahead=True)
    node.tell(events.StoreConnected(40, pages=4))
    node.tell(start("old", 10))
    run = joined(node, start("young", 10))
    assert loading(node.tell(Ingested("old", 100))) == ["old"]
    node.tell(ev.Loaded("old"))
    (run,) = only(node.step(run), RunStep)
    assert rows_of(run) == ["old"]


def test_prompts_that_are_computed_here_and_keep_coming_keep_nobody_waiting_who_came_before() -> None:
    node = Node(40, loads_ahead=True)
    node.tell(events.StoreConnected(40, pages=10))
    node.tell(start("old", 9 * BLOCK_TOKENS - 1))
    node.tell(start("young-0", 6, inlined=True, max_tokens=20))
    (run,) = only(node.prompt_computed("young-0"), RunStep)
    actions = node.tell(Ingested("old", 100))
    for i in range(1, 12):
        actions += node.tell(start(f"young-{i}", 6, inlined=True, max_tokens=20))
        if f"young-{i}" in node.core.inlined("prefilling"):
            actions += node.prompt_computed(f"young-{i}")
        if "old" in loading(actions):
            actions = node.tell(ev.Loaded("old"))
        actions += node.step(run)
        (run,) = only(actions, RunStep)
        if "old" in rows_of(run):
            return
        actions = []
    raise AssertionError("it waits for those who came later")
