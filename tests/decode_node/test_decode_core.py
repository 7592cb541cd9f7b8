"""The decode core: single stories, one step at a time."""

from __future__ import annotations

from decode_node.core import events as ev
from decode_node.core.actions import Action, RunStep
from node_runtime import events
from node_runtime.events import SendUpdate
from node_runtime.slot_claims import HEAD_PATIENCE_S, RETRY_S, within_pages
from springtide.blocks import block_keys
from springtide.clock import Tick
from springtide.protocol import storage
from springtide.protocol.outputs import AttemptFailed, FailureCode, Finish, SampledToken
from springtide.protocol.starts import AbortAttempt
from springtide.protocol.storage import Commit, Grow, Grown, Ingested, Release, Reserve, Reserved
from tests.support.decode_core import MAX_BATCH, NUM_SLOTS, POOL_FULL, Node, failed, failures, only, outputs, reserved, rows_of, start
from tests.support.node_core import BLOCK_TOKENS, EOS, NAMESPACE, failure


def steps(node: Node, actions: list[Action], count: int, token: int = 5) -> list[Action]:
    """Runs `count` steps from the one in `actions` on; returns what followed the first."""
    seen: list[Action] = []
    for _ in range(count):
        (run,) = only(actions, RunStep)
        actions = node.step(run, token)
        seen += actions
    return seen


def test_a_sequence_continues_after_the_first_token_until_its_limit() -> None:
    node = Node()
    actions = node.join(start("a", 10, max_tokens=4))
    (run,) = only(actions, RunStep)
    assert run.rows[0].start == 10 and run.rows[0].output_ids == [100] and run.rows[0].sampling.output_ids is run.rows[0].output_ids
    seen = steps(node, actions, 3)
    assert [(output.position, [token.token_id for token in output.tokens], output.finish) for output in outputs(seen)] == [
        (1, [5], None),
        (2, [5], None),
        (3, [5], Finish.LENGTH),
    ]
    assert only(seen, Release) == [Release("a")] and only(seen[-2:], RunStep) == []
    assert len(node.store.free) == NUM_SLOTS


def ticks(node: Node, seconds: float) -> list[Action]:
    """What is done while time goes by as it does for an engine that is not held up."""
    actions = list(node.tell(Tick()))
    for _ in range(round(4 * seconds)):
        node.now += 0.25
        actions += node.tell(Tick())
    return actions


class SilentStore(Node):
    """Its store does not answer orders of one kind."""

    def __init__(self, kind: type[storage.Order]) -> None:
        self._kind = kind
        super().__init__()

    def answers(self, order: storage.Order) -> list[ev.Event]:
        return [] if isinstance(order, self._kind) else super().answers(order)


def test_a_store_that_does_not_say_what_is_reserved_is_taken_for_hung() -> None:
    node = SilentStore(Reserve)
    assert only(node.tell(start("a", 10)), Reserve)
    assert ticks(node, 2.25) == []
    assert failures(ticks(node, 0.25)) == [("a", FailureCode.PEER_LOST)]


def test_a_store_that_does_not_let_a_sequence_grow_is_taken_for_hung() -> None:
    node = SilentStore(Grow)
    actions = node.join(start("a", 10))
    assert only(actions, Grow)
    assert failures(ticks(node, 2.5)) == [("a", FailureCode.PEER_LOST)]


def test_an_engine_that_was_held_up_itself_does_not_blame_its_store() -> None:
    node = SilentStore(Reserve)
    node.tell(start("a", 10))
    node.tell(Tick())
    node.now += 60
    assert node.tell(Tick()) == []


def test_an_end_token_ends_the_output_and_is_not_part_of_it() -> None:
    node = Node()
    (output,) = outputs(steps(node, node.join(start("a", 10)), 1, token=EOS))
    assert output.finish == Finish.STOP and [token.token_id for token in output.tokens] == []


def test_a_continued_request_counts_positions_from_its_original_prompt() -> None:
    node = Node()
    actions = node.join(start("a", 14, sent=4))
    (run,) = only(actions, RunStep)
    (row,) = run.rows
    assert len(row.sampling.prompt_ids) == 10 and len(row.output_ids) == row.position == 5 and row.start == 14
    assert outputs(steps(node, actions, 1))[0].position == 5


def test_blocks_are_committed_as_the_output_fills_them_under_chained_keys() -> None:
    node = Node()
    begin = start("a", 11)
    seen = steps(node, node.join(begin), 14)
    tokens = [*begin.start.request.token_ids, 100, *[5] * 14]
    keys = block_keys(NAMESPACE, tokens[:24], BLOCK_TOKENS)
    assert only(seen, Commit) == [Commit("a", 1, (keys[1],)), Commit("a", 2, (keys[2],))]


def test_slots_are_asked_for_one_block_ahead_and_not_beyond_the_limit() -> None:
    node = Node()
    actions = node.join(start("a", 10, max_tokens=8))
    assert only(actions, Grow) == [Grow("a", 1)]
    assert only(steps(node, actions, 7), Grow) == []


def test_one_message_a_step_goes_to_each_session_and_the_next_step_is_launched_before() -> None:
    node = Node()
    first = node.join(start("a", 5, session=1))
    node.join(start("b", 5, session=1))
    node.join(start("c", 5, session=2))
    actions = steps(node, first, 1)
    (run,) = only(actions, RunStep)
    assert rows_of(run) == ["a", "b", "c"]
    actions = node.step(run)
    assert [(reply.session, len(reply.update.outputs)) for reply in only(actions, SendUpdate)] == [(1, 2), (2, 1)]
    assert actions.index(only(actions, RunStep)[0]) < actions.index(only(actions, SendUpdate)[0])


def test_a_batch_has_at_most_its_places_and_the_oldest_have_them() -> None:
    node = Node(100)
    first = node.join(start("a", 5))
    for name in "bc":
        node.join(start(name, 5))
    assert only(node.tell(start("young", 5, waits=True)), Reserve) == only(node.tell(start("old", 5, waits=True, age_s=9.0)), Reserve) == []
    seen = steps(node, first, 1)
    assert rows_of(only(seen, RunStep)[0]) == ["a", "b", "c"]
    assert [reserve.attempt_id for reserve in only(node.tell(AbortAttempt("c")), Reserve)] == ["old"]
    assert [reserve.attempt_id for reserve in only(node.tell(AbortAttempt("b")), Reserve)] == ["young"]


def test_nobody_is_admitted_when_the_step_would_miss_an_objective() -> None:
    node = Node(100)
    node.join(start("a", 50, tbt_slo_ms=4.0))
    refused = node.tell(start("b", 200, tbt_slo_ms=100.0))
    assert failures(refused) == [("b", FailureCode.OVERLOADED)] and only(refused, Reserve) == []
    assert failures(node.tell(start("c", 204, sent=4, tbt_slo_ms=4.0))) == []


def test_who_is_still_in_prefill_keeps_nobody_from_admission() -> None:
    """When such an attempt joins, who runs now may have left: the Conductor weighs that."""
    node = Node(100)
    node.tell(start("a", 200, tbt_slo_ms=4.0))
    assert failures(node.tell(start("b", 50, tbt_slo_ms=4.0))) == []


def test_however_many_wait_they_are_not_refused_for_it() -> None:
    node = Node(100)
    seen = [action for i in range(50) for action in node.tell(start(f"a{i}", 5, waits=True))]
    assert failures(seen) == [] and reserved(seen) == [f"a{i}" for i in range(MAX_BATCH)]
    assert node.load().waiting == 50


def test_who_has_begun_its_prefill_elsewhere_does_not_wait_for_room() -> None:
    node = Node(4)
    node.tell(start("a", 30, max_tokens=2))
    assert failures(node.tell(start("b", 30, max_tokens=2))) == [("b", FailureCode.POOL_FULL)]
    node.tell(start("c", 5, max_tokens=2, waits=True))
    assert failures(node.tell(start("d", 5, max_tokens=2))) == [("d", FailureCode.POOL_FULL)]


def test_a_full_pool_at_the_reservation_is_waited_for_by_turns_and_not_for_ever() -> None:
    node = Node(4)
    node.tell(start("a", 30, max_tokens=2))
    node.tell(start("b", 30, max_tokens=2, waits=True))
    node.tell(start("large", 30, max_tokens=2, waits=True, age_s=1.5))
    node.tell(start("small", 5, max_tokens=2, waits=True, age_s=1.0))
    assert only(node.tell(AbortAttempt("a")), Reserve) == []
    seen = node.tell(storage.StoreLoad(4, 4))
    assert [reserve.attempt_id for reserve in only(seen, Reserve)] == ["b", "small"] and reserved(seen) == ["b"], "`b` has asked before"
    node.now = 31.0
    assert failures(node.tell(Tick())) == [("large", FailureCode.POOL_FULL)]
    node.now += HEAD_PATIENCE_S
    assert failures(node.tell(Tick())) == [("small", FailureCode.POOL_FULL)]


def test_who_was_preempted_has_room_again_before_those_that_begin() -> None:
    node = Node(4)
    node.tell(start("a", 30, max_tokens=2))
    node.tell(start("gone", 5, max_tokens=2, waits=True))
    node.tell(start("begins", 5, max_tokens=2, waits=True, age_s=9.0))
    node.tell(start("preempted", 20, sent=4, max_tokens=6, waits=True, age_s=5.0))
    node.tell(AbortAttempt("gone"))
    node.tell(AbortAttempt("a"))
    assert [reserve.attempt_id for reserve in only(node.tell(storage.StoreLoad(4, 4)), Reserve)][-2:] == ["preempted", "begins"]


def test_who_waits_for_its_tenants_quota_is_in_nobodys_way() -> None:
    node = Node(100)
    node.core.handle(start("a", 30, waits=True, tenant="small"), 0.0)
    node.core.handle(AttemptFailed("a", failure(FailureCode.QUOTA_USED)), 0.0)
    assert [order.attempt_id for order in only(node.core.handle(start("b", 30, waits=True), 0.0), Reserve)] == ["b"]
    assert [order.attempt_id for order in only(node.core.handle(Tick(), RETRY_S), Reserve)] == ["a"]


def test_room_is_kept_for_what_runs_to_grow_into() -> None:
    node = Node(10)
    node.join(start("a", 2 * BLOCK_TOKENS, max_tokens=64, expected_tokens=5 * BLOCK_TOKENS))
    (kept,) = only(node.tell(start("b", BLOCK_TOKENS, max_tokens=8, waits=True, expected_tokens=8)), Reserve)
    assert kept.leave_available == (7 - 4) + 1, "`a` has slots ahead; `b` will have another for its output"
    assert node.load().slots_promised == 3, "`b` has that one by now"


def test_of_a_quota_room_is_kept_for_what_runs_of_its_tenant() -> None:
    node = Node(20)
    node.join(start("a", 2 * BLOCK_TOKENS, max_tokens=64, expected_tokens=5 * BLOCK_TOKENS, tenant="small"))
    (others,) = only(node.tell(start("b", BLOCK_TOKENS, max_tokens=8, waits=True, expected_tokens=8)), Reserve)
    assert others.leave_in_quota == 0, "it is the first of its tenant"
    (same,) = only(node.tell(start("c", BLOCK_TOKENS, max_tokens=8, waits=True, expected_tokens=8, tenant="small")), Reserve)
    assert same.leave_in_quota == (7 - 4) + 1, "`a` grows on, and it grows itself"


def test_what_could_outgrow_the_arena_is_refused_before_it_begins_with_both_numbers() -> None:
    (refused,) = failed(Node().tell(start("a", 8 * NUM_SLOTS - 3, max_tokens=5)))
    assert refused.failure.code is FailureCode.INVALID and "13 blocks" in refused.failure.message and "12 slots" in refused.failure.message
    assert failed(Node().tell(start("a", 8 * NUM_SLOTS - 3, max_tokens=4))) == []


def test_the_youngest_gives_its_slots_to_an_older_one_when_the_pool_is_truly_full() -> None:
    node = Node(5)
    actions = node.join(start("old", 14, max_tokens=26))
    node.join(start("young", 1, max_tokens=16))
    seen = steps(node, actions, 12)
    assert failures(seen) == [("young", FailureCode.PREEMPTED)]
    assert [output.position for output in outputs(seen) if output.attempt_id == "old"] == list(range(1, 13))


def test_who_came_to_its_gateway_first_is_the_older_whatever_came_here_first() -> None:
    node = Node(5)
    actions = node.join(start("resumed-later", 14, max_tokens=26))
    node.join(start("older", 1, max_tokens=16, age_s=60.0))
    assert failures(steps(node, actions, 12)) == [("resumed-later", FailureCode.PREEMPTED)]


class Full(Node):
    """Its pool has slots for prompts, but none to grow by while `full`: a peer may still write those that were given back."""

    full = True

    def answers(self, order: storage.Order) -> list[ev.Event]:
        if not (self.full and isinstance(order, Grow)):
            return super().answers(order)
        self.store.growing.remove(order)
        return [AttemptFailed(order.attempt_id, POOL_FULL)]


def test_prompts_that_are_still_being_written_give_way_too_one_at_a_time() -> None:
    node = Full(6)
    for begin in (start("ingesting-1", 6, max_tokens=2), start("ingesting-2", 6, max_tokens=2), start("old", 15, max_tokens=26, age_s=9.0)):
        node.tell(begin)
    seen = steps(node, node.tell(Ingested("old", 100)), 1)
    assert failures(seen) == [("ingesting-2", FailureCode.PREEMPTED)]
    assert failures(node.tell(Tick())) == [], "the slots of the first are awaited before the next gives way"
    node.full = False
    assert [rows_of(run) for run in only(node.tell(storage.StoreLoad(1, 1)), RunStep)] == [["old"]]


class QuotaUsed(Full):
    """As Full, but what `small` lacks is room in its quota."""

    def answers(self, order: storage.Order) -> list[ev.Event]:
        answers = super().answers(order)
        if isinstance(order, Grow) and order.attempt_id == "small":
            return [AttemptFailed("small", failure(FailureCode.QUOTA_USED))]
        return answers


def test_a_tenant_of_which_one_cannot_go_on_takes_in_nobody_else() -> None:
    node = QuotaUsed(12)
    launched = node.join(start("small", 15, max_tokens=26, tenant="small"))
    steps(node, launched, 1)
    waiting = node.tell(start("next", 6, max_tokens=2, waits=True, tenant="small"))
    assert only(waiting, Reserve) == [] and node.load().waiting == 1
    assert [order.attempt_id for order in only(node.tell(start("other", 6, max_tokens=2, waits=True)), Reserve)] == ["other"]


def test_who_is_alone_at_its_quota_does_not_keep_others_from_making_room() -> None:
    node = QuotaUsed(12)
    small = start("small", 15, max_tokens=26, age_s=9.0, tenant="small")
    for begin in (start("young", 6, max_tokens=2), small, start("old", 15, max_tokens=26, age_s=5.0)):
        node.tell(begin)
    launched = node.tell(Ingested("small", 100))
    node.tell(Ingested("old", 100))
    assert failures(steps(node, launched, 2)) == [("young", FailureCode.PREEMPTED)]


def test_who_is_alone_and_lacks_a_slot_waits_and_is_then_scheduled_elsewhere() -> None:
    node = Node(4)
    actions = node.join(start("a", 14, max_tokens=18))
    node.store.free.clear()
    assert failures(steps(node, actions, 10)) == []
    node.now += 29.9
    assert failures(node.tell(Tick())) == []
    node.now += 0.2
    assert failures(node.tell(Tick())) == [("a", FailureCode.POOL_FULL)]


def test_a_sequence_without_a_slot_sits_out_and_stalls_nobody() -> None:
    node = Node(100)
    actions = node.join(start("a", 5))
    node.core.handle(start("b", 8, max_tokens=20), 0.0)
    node.core.handle(Reserved("b", (90,), 0), 0.0)
    node.core.handle(Ingested("b", 9), 0.0)
    (run,) = only(actions, RunStep)
    (run,) = only(node.step(run), RunStep)
    assert rows_of(run) == ["a"]
    node.core.handle(Grown("b", (91,)), 0.0)
    (run,) = only(node.core.handle(ev.StepDone(run.step_id, [(SampledToken(5),)], 1.0), 0.0), RunStep)
    assert rows_of(run) == ["a", "b"]


def test_a_request_that_its_first_token_ends_is_released_silently() -> None:
    node = Node()
    assert only(node.join(start("a", 10, max_tokens=1)), SendUpdate) == [] and len(node.store.free) == NUM_SLOTS
    assert only(node.join(start("b", 10), first_token=EOS), SendUpdate) == [] and len(node.store.free) == NUM_SLOTS


def test_slots_of_a_running_step_are_released_only_after_it() -> None:
    node = Node()
    (run,) = only(node.join(start("a", 10)), RunStep)
    assert node.tell(AbortAttempt("a")) == []
    assert node.step(run) == [Release("a")]


def test_a_prompt_that_is_never_handed_over_is_given_up() -> None:
    node = Node()
    node.tell(start("a", 10))
    node.now = 300.0
    assert failures(node.tell(Tick())) == [("a", FailureCode.POOL_FULL)] and len(node.store.free) == NUM_SLOTS


def test_a_lost_store_fails_everything_and_a_new_one_starts_afresh() -> None:
    node = Node()
    (run,) = only(node.join(start("a", 10)), RunStep)
    assert failures(node.core.handle(events.StoreLost("gone"), 0.0)) == [("a", FailureCode.PEER_LOST)]
    assert failures(node.core.handle(start("b", 10), 0.0)) == [("b", FailureCode.PEER_LOST)]
    node.store.lost()
    node.tell(events.StoreConnected(NUM_SLOTS))
    assert only(node.join(start("c", 10)), RunStep) == []
    assert [rows_of(run) for run in only(node.step(run), RunStep)] == [["c"]]


def test_a_step_has_no_more_blocks_than_the_device_has_pages_and_the_youngest_wait() -> None:
    node = Node()
    node.tell(events.StoreConnected(NUM_SLOTS, pages=5))
    (run,) = only(node.join(start("a", 2 * BLOCK_TOKENS, max_tokens=3)), RunStep)
    node.join(start("b", 2 * BLOCK_TOKENS, max_tokens=2))
    assert rows_of(run) == ["a"]
    (run,) = only(node.step(run), RunStep)
    assert rows_of(run) == ["a"], "three blocks each, with those of their next tokens"
    (run,) = only(node.step(run), RunStep)
    assert rows_of(run) == ["b"]


def test_only_the_slots_are_told_that_the_device_can_compute_with() -> None:
    """Sequences beyond them would wait until others end, and whoever places them would not know."""

    def told(node: Node) -> tuple[int, int]:
        load = node.core.load(NUM_SLOTS, NUM_SLOTS - 2)
        return load.slots_total, load.slots_available

    node = Node()
    assert told(node) == (NUM_SLOTS, NUM_SLOTS - 2)
    node.tell(events.StoreConnected(NUM_SLOTS, pages=5))
    node.tell(start("a", 2 * BLOCK_TOKENS, max_tokens=3))
    assert told(node) == (5, 5), "its prompt is still computed elsewhere"
    node.join(start("b", 2 * BLOCK_TOKENS, max_tokens=3))
    assert told(node) == (5, 2)


def test_blocks_that_sequences_share_are_counted_once() -> None:
    assert within_pages([(1, 2, 3), (1, 2, 4), (1, 2, 5)], lambda slots: slots, 4) == [(1, 2, 3), (1, 2, 4)]
    assert within_pages([(1, 2, 3), (1, 2, 4)], lambda slots: slots, 2) == [(1, 2, 3)]
    assert within_pages([(1, 2, 3), (4, 5, 6)], lambda slots: slots, None) == [(1, 2, 3), (4, 5, 6)]
